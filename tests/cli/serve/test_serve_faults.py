"""Faults of the engine end what they must and nothing else: one answer, a run, or the server."""

import json
import shutil
import signal
import tempfile
import threading
import time
from contextlib import suppress

import pytest
import torch
from command import VOCABULARY, save_tokenizer
from served import embedding_calls
from small_disk import NoDiskError, small_disk
from tiny import greedy_oracle, save_llama

BAD = 300
"""A token whose embedding is NaN, or at which a library fails."""

ILLEGAL_ACCESS = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported later."
SHORT = "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
TEXT = "It was the best of times, it was the worst of times. " * 40


def fails_while(flag, error, *, once=False):
    """Fails as long as a file is there, or once."""

    def act(_):
        if flag.exists():
            if once:
                flag.unlink()
            raise error

    return embedding_calls(act)


def save_damaged(directory, token, *, proposes=True):
    """A model that gives no probabilities after a token, if there is one: its embedding is NaN. Returns the model.

    Args: `proposes`: whether it may propose that token, in an answer or as a draft.
    """
    save_tokenizer(directory)
    model = save_llama(directory, vocab_size=VOCABULARY, max_position_embeddings=4096, eos_token_id=None)
    if token is not None:
        with torch.no_grad():
            model.model.embed_tokens.weight[token] = float("nan")
            if not proposes:
                model.lm_head.weight[token] = 0
        model.save_pretrained(directory)
    return model


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    directory = tmp_path_factory.mktemp("damaged") / "target"
    save_damaged(directory, BAD, proposes=False)  # as a draft it would end the answers that it is drafted for
    return directory, directory


def data(line):
    return json.loads(line.removeprefix(b"data: "))


def text_of(lines):
    """The whole text of a stream that has ended as it should."""
    assert lines[-1] == b"data: [DONE]\n", lines[-1]
    return "".join(data(line)["choices"][0]["text"] for line in lines[:-1])


def check_goes_on(server, want):
    reply = server.complete()
    assert (reply.status, reply.json["choices"][0]["text"]) == (200, want)
    assert server.ask("GET", "/health").json == {"status": "ready"}


def text(reply):
    assert reply.status == 200, reply.body
    return reply.json["choices"][0]["text"]


@pytest.mark.parametrize("error", [torch.AcceleratorError(ILLEGAL_ACCESS), ZeroDivisionError("a deliberate fault")])
@pytest.mark.parametrize("under_way", [True, False], ids=["in a round", "in a prompt"])
@pytest.mark.slow(keep=1)
def test_an_error_that_sticks_ends_the_server(process, lasting, tmp_path, error, under_way):
    flag = tmp_path / "broken"
    server = process("--max-sequences", 1, models=lasting, before=fails_while(flag, error))
    lines, thread = server.stream(60_000) if under_way else ([], threading.Thread())
    flag.touch()
    if under_way:
        thread.join(30)
        assert data(lines[-1])["error"]["code"] == "internal_error"
    else:
        assert server.complete().json["error"]["code"] == "internal_error"
    seen, end = set(), time.monotonic() + 30
    with suppress(OSError):  # once it listens no more
        while time.monotonic() < end:
            reply = server.ask("GET", "/health")
            seen.add((reply.status, reply.json["status"]))
    assert server.fork.wait(30) == 1, server.log
    assert seen <= {(200, "ready"), (503, "failed")}
    last = [line for line in server.log.splitlines() if line.startswith("error:")][-1]
    assert type(error).__name__ in last and "cannot go on" in last, server.log
    assert str(error).partition("\n")[0] in last and "Traceback" not in server.log


@pytest.mark.slow
def test_all_who_wait_are_told_of_an_error_that_sticks(process, lasting, tmp_path):
    flag = tmp_path / "broken"
    broken = fails_while(flag, torch.AcceleratorError(ILLEGAL_ACCESS))
    server = process("--max-sequences", 1, models=lasting, before=broken)
    lines, thread = server.stream(60_000)
    replies = []
    waiting = [threading.Thread(target=lambda: replies.append(server.complete())) for _ in range(3)]
    for one in waiting:
        one.start()
    server.wait_for(lambda: server.metric("queue_length") == 3)
    flag.touch()
    for one in (thread, *waiting):
        one.join(30)
    assert data(lines[-1])["error"]["code"] == "internal_error"
    assert [(reply.status, reply.json["error"]["code"]) for reply in replies] == [(500, "engine_failed")] * 3
    assert server.fork.wait(30) == 1, server.log


def test_after_an_error_that_does_not_stick_the_server_goes_on(process, lasting, tmp_path):
    flag = tmp_path / "broken"
    error = ZeroDivisionError("nobody may see this")
    server = process("--max-sequences", 1, models=lasting, before=fails_while(flag, error, once=True))
    want = text(server.complete())
    for _ in range(3):
        lines, thread = server.stream(60_000)
        flag.touch()
        thread.join(30)
        assert data(lines[-1])["error"]["code"] == "internal_error" and b"nobody" not in lines[-1]
        check_goes_on(server, want)
    assert server.log.count("error: the engine failed (ZeroDivisionError)") == 3


def test_memory_that_runs_out_does_not_end_the_server(process, lasting, tmp_path):
    flag = tmp_path / "short"
    server = process(models=lasting, before=fails_while(flag, RuntimeError(SHORT)))
    want = text(server.complete())
    lines, thread = server.stream(60_000)
    flag.touch()
    thread.join(30)
    assert data(lines[-1])["error"]["code"] == "out_of_memory"
    replies = [server.complete() for _ in range(3)]
    assert [(reply.status, reply.json["error"]["code"]) for reply in replies] == [(503, "out_of_memory")] * 3
    flag.unlink()
    check_goes_on(server, want)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_prompt_that_always_fails_ends_alone(process, lasting, ranks):
    def act(tokens):
        if BAD in tokens and len(tokens) > 1:
            raise ZeroDivisionError("a deliberate fault")

    server = process(models=lasting, before=embedding_calls(act), ranks=ranks)
    want = text(server.complete(max_tokens=200))
    lines, thread = server.stream(200)
    beside = [server.complete([5, BAD, 6]) for _ in range(2)]
    assert thread.is_alive(), "it is to be written meanwhile"
    thread.join(60)
    assert text_of(lines) == want
    alone = [server.complete([5, BAD, 6]) for _ in range(3)]
    errors = [reply.json["error"] for reply in beside + alone]
    assert [(error["code"], error["type"]) for error in errors] == [("internal_error", "server_error")] * 5
    check_goes_on(server, text(server.complete()))
    assert "the engine failed at a request (ZeroDivisionError)" in server.log


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_prompt_without_probabilities_ends_alone(process, damaged, ranks):
    server = process(models=damaged, ranks=ranks)
    want = text(server.complete(max_tokens=400))
    lines, thread = server.stream(400)
    beside = [server.complete([5, BAD, 6]) for _ in range(2)]
    assert thread.is_alive(), "it is to be written meanwhile"
    thread.join(60)
    assert text_of(lines) == want
    for reply in (*beside, server.complete([5, BAD, 6])):
        assert reply.status == 500 and "not finite numbers" in reply.json["error"]["message"]
    check_goes_on(server, text(server.complete()))


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["none", "itself"])
def test_an_answer_that_loses_its_probabilities_ends_alone(process, tmp_path, draft):
    """The model is damaged at a token that one answer has at some place, and another one has not."""
    directory = tmp_path / "target"
    whole = save_damaged(directory, None)
    fails, stays = [9, 8, 7], [40, 41, 42]
    answer, beside = greedy_oracle(whole, fails, 60), greedy_oracle(whole, stays, 200)
    place, token = next((i, one) for i, one in enumerate(answer) if i > 3 and one not in {*answer[:i], *beside, *stays})
    save_damaged(directory, token)
    drafts = "--draft", directory, "--block-length", 4, "--draft-length", 2
    server = process(*(drafts if draft == "itself" else ("--draft", draft)), models=(directory, directory))
    want = server.complete(stays, max_tokens=200, logprobs=0).json["choices"][0]
    lines, thread = server.stream(200, prompt=stays, logprobs=0)
    ends, other = server.stream(60, prompt=fails, logprobs=0)
    thread.join(60)
    other.join(60)
    assert text_of(lines) == want["text"] and len(want["logprobs"]["tokens"]) == 200
    given = [found for line in lines[:-1] if (found := data(line)["choices"][0]["logprobs"])]
    assert [token for one in given for token in one["tokens"]] == want["logprobs"]["tokens"]
    logprobs = [logprob for one in given for logprob in one["token_logprobs"]]
    assert logprobs == pytest.approx(want["logprobs"]["token_logprobs"], abs=1e-3)
    assert "not finite numbers" in data(ends[-1])["error"]["message"]
    told = sum(len(data(line)["choices"][0]["logprobs"]["tokens"]) for line in ends[:-1])
    assert told <= place + 1, f"{told} tokens came of an answer that has no more than {place + 1}"
    check_goes_on(server, text(server.complete()))


@pytest.mark.slow
def test_who_waits_is_told_though_the_engine_does_not_come_back(process, lasting, tmp_path):
    """A pass takes for ever. Of one request two answers are complete, the third has not begun."""
    flag = tmp_path / "stuck"

    def act(_):
        while flag.exists():
            time.sleep(0.01)

    server = process("--grace", 0.2, "--max-sequences", 1, models=lasting, before=embedding_calls(act))
    part, first = server.stream(300, n=3)
    lines, second = server.stream(60_000)
    assert [b'"finish_reason":"length"' in line for line in part].count(True) == 2 and part[-1] != b"data: [DONE]\n"
    flag.touch()
    server.signal(signal.SIGTERM)
    for one in (first, second):
        one.join(30)
    assert data(part[-1])["error"]["code"] == data(lines[-1])["error"]["code"] == "stopping"
    assert server.fork.wait(30) == 143, server.log
    assert "Traceback" not in server.log


@pytest.mark.slow
def test_signals_under_load_refuse_what_waits_and_let_the_rest_end(process, lasting):
    server = process("--max-sequences", 2, models=lasting)
    streams = [server.stream(400, seed=seed, temperature=1) for seed in (1, 2)]
    replies = []
    waiting = [threading.Thread(target=lambda: replies.append(server.complete())) for _ in range(5)]
    for one in waiting:
        one.start()
    server.wait_for(lambda: server.metric("queue_length") == 5)
    server.signal(signal.SIGTERM)
    for one in (*waiting, *(thread for _, thread in streams)):
        one.join(60)
    assert [(reply.status, reply.json["error"]["code"]) for reply in replies] == [(503, "stopping")] * 5
    assert all(text_of(lines) for lines, _ in streams)
    assert server.fork.wait(30) == 143, server.log
    assert "Traceback" not in server.log and "error:" not in server.log


@pytest.fixture
def full_disk(tmp_path, monkeypatch, request):
    """A place for saved contexts that has room for hardly anything, or for so many bytes."""
    try:
        with small_disk(tmp_path / "small", getattr(request, "param", 65_536)) as place:
            monkeypatch.setenv("TRIFORCE_HOME", str(place / "home"))
            yield place
    except NoDiskError as error:
        pytest.skip(f"no small file system can be mounted here: {error}")


def test_a_full_disk_fails_an_upload_and_nothing_else(process, lasting, full_disk):
    server = process(models=lasting)
    want = text(server.complete(max_tokens=200))
    lines, thread = server.stream(200)
    uploads = [server.upload(f"book-{number}", TEXT) for number in range(2)]
    thread.join(60)
    assert text_of(lines) == want
    for reply in uploads:
        message = reply.json["error"]["message"]
        assert (reply.status, reply.json["error"]["code"]) == (507, "context_not_saved")
        assert "space" in message or "free" in message, message
        assert str(full_disk) not in message
    assert server.ask("GET", "/v1/contexts").json["data"] == []
    check_goes_on(server, text(server.complete()))


@pytest.mark.parametrize("full_disk", [2**20], indirect=True)
def test_a_disk_that_fills_while_an_upload_is_written_fails_only_this(process, lasting, full_disk, monkeypatch):
    """Others fill it, too: it says that there is room until there is none."""
    plenty = type(shutil.disk_usage(full_disk))(2**40, 0, 2**40)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: plenty)
    server = process(models=lasting)
    want = text(server.complete(max_tokens=200))
    lines, thread = server.stream(200)
    reply = server.upload("book", TEXT * 3)
    thread.join(60)
    assert text_of(lines) == want
    assert (reply.status, reply.json["error"]["code"]) == (507, "context_not_saved")
    assert "No space left" in reply.json["error"]["message"], reply.body
    assert str(full_disk) not in reply.json["error"]["message"]
    check_goes_on(server, text(server.complete()))


@pytest.mark.slow
def test_a_long_body_that_finds_no_temporary_space_is_told(process, lasting, full_disk):
    server = process(models=lasting, before=lambda: setattr(tempfile, "tempdir", str(full_disk)))
    for reply in (server.upload("book", TEXT * 1000), server.complete(TEXT * 1000)):
        assert (reply.status, reply.json["error"]["code"]) == (507, "disk_full")
    check_goes_on(server, text(server.complete()))


@pytest.mark.slow
def test_a_full_disk_takes_no_answer_away_whose_prompt_was_to_be_saved(process, lasting, full_disk):
    saving = process("--save-prompts", models=lasting)
    asked = {"prompt": TEXT * 3, "max_tokens": 30}
    first, again = (saving.complete(**asked) for _ in range(2))
    assert first.json["usage"]["prompt_tokens"] > 1024 and len(text(first)) > 0
    assert text(first) == text(again)
    assert saving.ask("GET", "/v1/contexts").json["data"] == []
    check_goes_on(saving, text(saving.complete()))
