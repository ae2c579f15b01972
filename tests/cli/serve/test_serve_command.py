"""The process: what it refuses before anything is loaded, and how it stops."""

import json
import signal
import socket
import sys
import threading
import time

import pytest
from command import TEXT, check_refusal, run_here, without_weights

COMPLETION = "/v1/completions"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--host", "0.0.0.0"), ("--host 0.0.0.0", "--api-key", "--no-auth")),
        (("--api-key", "a", "--no-auth"), ("both given",)),
        (("--port", 65536), ("--port", "65535")),
        (("--grace", -1), ("--grace", "seconds")),
        (("--context", "../etc"), ("cannot be the name",)),
        (("--max-queue", 0), ("--max-queue",)),
    ],
)
def test_impossible_options_are_refused(capfd, options, words):
    check_refusal(run_here(capfd, "serve", *options), 2, *words)


def test_what_cannot_be_begun_is_said(capfd, pair, monkeypatch, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        check_refusal(run_here(capfd, "serve", "--port", port), 1, f"--port {port}", "in use")
    check_refusal(run_here(capfd, "serve", "--api-key", f"@{tmp_path}/key"), 1, "--api-key", "does not exist")
    check_refusal(run_here(capfd, "serve", "--port", 0, "--model", tmp_path), 1, "config.json")
    model = ("--model", pair[0], "--draft", "none")
    check_refusal(run_here(capfd, "serve", "--port", 0, *model, "--context", "nothing"), 1, "no context 'nothing'")
    monkeypatch.setitem(sys.modules, "uvicorn", None)  # as where it is not installed
    check_refusal(run_here(capfd, "serve"), 1, "uvicorn", "pip install 'triforce-cli[serve]'")


def test_a_model_that_cannot_be_loaded_ends_the_server(capfd, pair, tmp_path):
    model = without_weights(pair[0], tmp_path)
    outcome = run_here(capfd, "serve", "--port", 0, "--model", model, "--draft", "none")
    assert outcome.code == 1 and "has no weights" in outcome.err and "Traceback" not in outcome.err
    assert outcome.err.count("error: ") == 1


def test_options_are_those_of_requests_that_do_not_say(serving, pair, capfd):
    options = {"draft": pair[1], "budget": 64, "chunk_size": 4, "draft_length": 2, "block_length": 5, "resident": 0}
    options |= {"refresh": 3, "early_end": 0.4, "exact": "on", "pack": "on", "dtype": "bfloat16", "host_memory": 1}
    options |= {"threads": 1, "tiers": 3, "temperature": 1.5, "top_p": 0.8, "top_k": 7, "min_p": 0.6, "seed": 3}
    options |= {"max_new_tokens": 30, "rope_scaling": "yarn:2"}
    arguments = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    fixed = ("generate", "--model", pair[0], "--device", "cpu", "--prompt", TEXT * 3, "--json", "-")
    alone = json.loads(run_here(capfd, *fixed, *arguments).out)
    with serving(**options, max_queue=3, max_sequences=2, grace=2) as server:
        reply = server.ask("POST", COMPLETION, {"prompt": TEXT * 3})
        assert reply.json["choices"][0]["text"] == alone["text"]
        assert reply.json["usage"]["completion_tokens"] == 30 and reply.json["timings"]["draft_n"] > 0
        assert server.metric("link_stored_bytes_total") > 0, "nothing is resident"


def test_a_context_is_that_of_requests_that_name_none(serving, pair, capfd, tmp_path, monkeypatch):
    monkeypatch.setenv("TRIFORCE_HOME", str(tmp_path / "home"))
    (tmp_path / "book.txt").write_text(TEXT)
    read = ("read", tmp_path / "book.txt", "--model", pair[0], "--device", "cpu", "--dtype", "float32")
    assert run_here(capfd, *read).code == 0
    with serving(context="book") as server:
        usage = server.chat().json["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 100
        assert server.chat(context=None).json["usage"]["prompt_tokens"] == usage["prompt_tokens"]


@pytest.mark.slow
def test_sigterm_lets_answers_end_and_refuses_new_ones(process, lasting):
    server = process(models=lasting)
    lines, thread = server.stream(400)
    server.signal(signal.SIGTERM)
    server.wait_for_words("stopping: 1 answers")
    import urllib.error
    import urllib.request

    with pytest.raises(urllib.error.HTTPError, match="503"):
        urllib.request.urlopen(f"http://127.0.0.1:{server.port}{COMPLETION}", b'{"prompt": "a"}')
    thread.join(60)
    assert lines[-1] == b"data: [DONE]\n" and b'"finish_reason":"length"' in lines[-2]
    assert server.fork.wait(60) == 143
    assert server.log.endswith("terminated\n")


@pytest.mark.slow
def test_sigterm_lets_whole_answers_end_too(process, lasting):
    server = process(models=lasting)
    body = {"prompt": "It was", "max_tokens": 1500, "logprobs": 20}
    thread = threading.Thread(target=lambda: answers.append(server.complete(**body)))
    answers = []
    thread.start()
    server.wait_for(lambda: server.metric("running_answers") == 1)
    server.signal(signal.SIGTERM)
    thread.join(60)
    assert answers[0].status == 200 and answers[0].json["usage"]["completion_tokens"] == 1500
    assert server.fork.wait(60) == 143


@pytest.mark.slow
@pytest.mark.parametrize("cut", ["second signal", "grace"])
def test_answers_that_take_too_long_are_cut_with_an_event(process, lasting, cut):
    server = process("--grace", 0.5 if cut == "grace" else 60, models=lasting)
    lines, thread = server.stream(60_000)
    server.signal(signal.SIGINT)
    server.wait_for_words("stopping: 1 answers")
    if cut == "second signal":
        time.sleep(1.1)  # within a second it would be a repetition
        server.signal(signal.SIGINT)
    assert server.fork.wait(30) == 130
    thread.join(10)
    assert json.loads(lines[-1].removeprefix(b"data: "))["error"]["code"] == "stopping"
    assert "Traceback" not in server.log
