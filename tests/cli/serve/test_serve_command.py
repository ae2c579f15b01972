"""The process: what it refuses before anything is loaded, and how it stops."""

import json
import os
import re
import signal
import socket
import threading
import time

import pytest
from command import Fork, check_refusal, run_here, triforce
from triforce.offload import Engine
from triforce.tp.errors import CapacityError

COMPLETION = "/v1/completions"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--host", "0.0.0.0"), ("--host 0.0.0.0", "--api-key", "--no-auth")),
        (("--api-key", "a", "--no-auth"), ("both given",)),
        (("--gpus", 2), ("one rank", "--gpus")),
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
    from triforce.cli.serve import command

    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "uvicorn" else object())
    check_refusal(run_here(capfd, "serve"), 1, "uvicorn", "pip install 'triforce-cli[serve]'")


def test_a_model_that_cannot_be_loaded_ends_the_server(capfd, pair, monkeypatch):
    def load(*_, **__):
        raise CapacityError("the weights take 140 GiB")

    monkeypatch.setattr(Engine, "load", load)
    outcome = run_here(capfd, "serve", "--port", 0, "--model", pair[0], "--draft", "none")
    assert outcome.code == 1 and "error: the weights take 140 GiB" in outcome.err and "Traceback" not in outcome.err


class Process:
    """`triforce serve` in a process of its own."""

    def __init__(self, pair, log, *options):
        fixed = ("--model", pair[0], "--draft", "none", "--device", "cpu", "--dtype", "float32", "--port", 0)
        self.log = log
        with open(log, "wb") as out, open(os.devnull, "rb") as nothing:
            streams = nothing.fileno(), out.fileno(), out.fileno()
            self.fork = Fork(slowly(triforce("serve", *fixed, *options)), streams, dict(os.environ))
        self.wait_for("ready\n")
        found = re.search(r"listening at http://127\.0\.0\.1:(\d+)", log.read_text())
        assert found
        self.port = int(found[1])

    def wait_for(self, words):
        end = time.monotonic() + 60
        while words not in self.log.read_text():
            assert self.fork.ended() is None and time.monotonic() < end, self.log.read_text()
            time.sleep(0.01)

    def signal(self, number):
        os.kill(self.fork.pid, number)


def slowly(call):
    """Rounds take 5 ms at least."""

    def patched():
        from triforce.offload import Batch

        whole = Batch.__next__

        def late(batch):
            time.sleep(0.005)
            return whole(batch)

        setattr(Batch, "__next__", late)  # noqa: B010 (in the fork alone)
        return call()

    return patched


@pytest.fixture
def process(pair, tmp_path):
    found = []

    def start(*options):
        found.append(Process(pair, tmp_path / "log", *options))
        return found[-1]

    yield start
    for one in found:
        one.fork.kill()


def stream(process, tokens):
    """What comes of a stream, in a list that grows, and the thread that reads it."""
    import http.client

    lines = []

    def read():
        connection = http.client.HTTPConnection("127.0.0.1", process.port, timeout=60)
        body = {"prompt": "It was", "max_tokens": tokens, "temperature": 0, "stream": True}
        connection.request("POST", COMPLETION, json.dumps(body))
        for line in connection.getresponse():
            if line.startswith(b"data: "):
                lines.append(line)

    thread = threading.Thread(target=read)
    thread.start()
    end = time.monotonic() + 30
    while len(lines) < 3:
        assert time.monotonic() < end
        time.sleep(0.005)
    return lines, thread


@pytest.mark.slow
def test_sigterm_lets_answers_end_and_refuses_new_ones(process):
    server = process()
    lines, thread = stream(server, 200)
    server.signal(signal.SIGTERM)
    server.wait_for("stopping: 1 answers")
    import urllib.error
    import urllib.request

    with pytest.raises(urllib.error.HTTPError, match="503"):
        urllib.request.urlopen(f"http://127.0.0.1:{server.port}{COMPLETION}", b'{"prompt": "a"}')
    thread.join(60)
    assert lines[-1] == b"data: [DONE]\n" and b'"finish_reason":"length"' in lines[-2]
    assert server.fork.wait(60) == 143
    assert server.log.read_text().endswith("terminated\n")


@pytest.mark.slow
@pytest.mark.parametrize("cut", ["second signal", "grace"])
def test_answers_that_take_too_long_are_cut_with_an_event(process, cut):
    server = process("--grace", 0.5 if cut == "grace" else 60)
    lines, thread = stream(server, 900)
    server.signal(signal.SIGINT)
    server.wait_for("stopping: 1 answers")
    if cut == "second signal":
        time.sleep(1.1)  # within a second it would be a repetition
        server.signal(signal.SIGINT)
    assert server.fork.wait(30) == 130
    thread.join(10)
    assert json.loads(lines[-1].removeprefix(b"data: "))["error"]["code"] == "stopping"
    assert "Traceback" not in server.log.read_text()
