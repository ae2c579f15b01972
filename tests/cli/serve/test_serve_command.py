"""The process: what it refuses before anything is loaded, and how it stops."""

import json
import signal
import socket
import sys
import time

import pytest
from command import check_refusal, run_here, without_weights

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


@pytest.mark.slow
def test_sigterm_lets_answers_end_and_refuses_new_ones(process, lasting):
    server = process(models=lasting)
    lines, thread = server.stream(1500)
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
