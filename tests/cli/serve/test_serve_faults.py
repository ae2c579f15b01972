"""Faults of the engine end what they must and nothing else: one answer, a run, or the server."""

import json
import signal
import threading
import time

import pytest
import torch
from command import VOCABULARY, save_tokenizer
from contexts.tiny_disk import NoDiskError, small_disk
from tiny import save_llama

BAD = 300
"""A token whose embedding is NaN, or at which a library fails."""

ILLEGAL_ACCESS = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported later."
SHORT = "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
TEXT = "It was the best of times, it was the worst of times. " * 40


def embedding_calls(act):
    """Has PyTorch, in the process that calls what this returns, call `act` first with the tokens that a model's
    embedding is asked for."""

    def begin():
        index_select = torch.Tensor.index_select

        def select(rows, dim, index):
            if rows.shape[0] == VOCABULARY:
                act(index.tolist())
            return index_select(rows, dim, index)

        torch.Tensor.index_select = select

    return begin


def fails_while(flag, error, *, once=False):
    """Fails as long as a file is there, or once."""

    def act(_):
        if flag.exists():
            if once:
                flag.unlink()
            raise error

    return embedding_calls(act)


def save_damaged(directory, token):
    """A model that gives no probabilities after a token: its embedding is NaN."""
    save_tokenizer(directory)
    model = save_llama(directory, vocab_size=VOCABULARY, max_position_embeddings=4096, eos_token_id=None)
    with torch.no_grad():
        model.model.embed_tokens.weight[token] = float("nan")
    model.save_pretrained(directory)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    directory = tmp_path_factory.mktemp("damaged") / "target"
    save_damaged(directory, BAD)
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
    seen = set()
    while server.fork.ended() is None:
        try:
            reply = server.ask("GET", "/health")
        except OSError:
            break
        seen.add((reply.status, reply.json["status"]))
        time.sleep(0.002)
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


def test_a_prompt_that_always_fails_ends_alone(process, lasting):
    def act(tokens):
        if BAD in tokens and len(tokens) > 1:
            raise ZeroDivisionError("a deliberate fault")

    server = process(models=lasting, before=embedding_calls(act))
    want = text(server.complete(max_tokens=400))
    lines, thread = server.stream(400)
    beside = [server.complete([5, BAD, 6]) for _ in range(2)]
    thread.join(60)
    assert text_of(lines) == want
    alone = [server.complete([5, BAD, 6]) for _ in range(3)]
    assert [reply.json["error"]["code"] for reply in beside + alone] == ["internal_error"] * 5
    check_goes_on(server, text(server.complete()))
    assert "the engine failed at a request (ZeroDivisionError)" in server.log


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_prompt_without_probabilities_ends_alone(process, damaged, ranks):
    server = process(models=damaged, ranks=ranks)
    want = text(server.complete(max_tokens=300))
    lines, thread = server.stream(300)
    beside = [server.complete([5, BAD, 6]) for _ in range(2)]
    thread.join(60)
    assert text_of(lines) == want
    for reply in (*beside, server.complete([5, BAD, 6])):
        assert reply.status == 500 and "not finite numbers" in reply.json["error"]["message"]
    check_goes_on(server, text(server.complete()))


@pytest.mark.parametrize("draft", ["none", "itself"])
@pytest.mark.slow(keep=1)
def test_an_answer_that_loses_its_probabilities_ends_alone(process, lasting, tmp_path, draft):
    """The model is damaged at a token that its answer has at some place, as the undamaged one says."""
    directory = tmp_path / "target"
    save_damaged(directory, BAD)
    undamaged = process(models=lasting)
    asked = {"prompt": [9, 8, 7], "max_tokens": 40, "temperature": 0, "logprobs": 1}
    tokens = undamaged.ask("POST", "/v1/completions", asked).json["choices"][0]["logprobs"]["tokens"]
    assert len(tokens) == 40
