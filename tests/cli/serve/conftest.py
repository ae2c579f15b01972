"""A server in the tests' process: real HTTP on a free port, with the tiny pair."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from command import Fork, triforce
from spmd import ENVIRONMENT

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Those of a stream, in its order; the last one of a whole stream is `[DONE]`."""
        found = [line.removeprefix(b"data: ") for line in self.body.split(b"\n\n") if line.startswith(b"data: ")]
        return [one.decode() if one == b"[DONE]" else json.loads(one) for one in found]


class Client:
    """Requests to a server."""

    port: int

    def connect(self, method: str, path: str, body: Any = None, **headers: str) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        raw = json.dumps(body).encode() if isinstance(body, dict) else body
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, raw, given)
        return connection

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        connection = self.connect(method, path, body, **headers)
        response = connection.getresponse()
        reply = Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        connection.close()
        return reply

    def chat(self, question: str = "Why?", **fields: Any) -> Reply:
        body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 10, **fields}
        return self.ask("POST", CHAT, body)

    def complete(self, prompt: str | list[int] = "It was", **fields: Any) -> Reply:
        return self.ask("POST", COMPLETION, {"prompt": prompt, "temperature": 0, "max_tokens": 10, **fields})

    def upload(self, name: str, text: str, **fields: str) -> Reply:
        parts = [f'name="{field}"\r\n\r\n{value}' for field, value in {"name": name, **fields}.items()]
        parts.append(f'name="file"; filename="a.txt"\r\nContent-Type: text/plain\r\n\r\n{text}')
        body = "".join(f"--edge\r\nContent-Disposition: form-data; {part}\r\n" for part in parts) + "--edge--\r\n"
        return self.ask("POST", "/v1/contexts", body.encode(), Content_Type="multipart/form-data; boundary=edge")


class TestServer(Client):
    """A server in this process."""

    __test__ = False

    def __init__(
        self, pair: tuple[Path, Path], *, load: bool = True, limits: dict[str, float] | None = None, **options: Any
    ) -> None:
        from triforce.cli.serve.access import Access, listener
        from triforce.cli.serve.limits import Limits
        from triforce.cli.serve.request import ServeRequest
        from triforce.cli.serve.run import Server

        fixed = {"model": str(pair[0]), "draft": "none", "device": "cpu", "dtype": "float32", "port": 0}
        request = ServeRequest(**(fixed | options))
        self.log: list[str] = []
        self.listening = listener(request)
        given = Limits(**(limits or {}))  # pyright: ignore[reportArgumentType]
        self.server = Server(request, Access.of(request), self.listening, (pair[0], None), self.log.append, given)
        self.worker, self.port = self.server.worker, self.server.port
        self.gate: Any = self.server.app
        self.server.start(load=load)
        self.wait_for(lambda: self.worker.state != "loading" or not load)

    def close(self) -> None:
        self.worker.stop()
        assert self.server.cut()

    @staticmethod
    def wait_for(holds, seconds=30.0) -> None:
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, "it never came"
            time.sleep(0.005)

    def at_once(self, *calls: Any) -> list[Any]:
        """What calls return that are made at the same time."""
        found: list[Any] = [None] * len(calls)

        def call(index: int) -> None:
            found[index] = calls[index]()

        threads = [threading.Thread(target=call, args=(index,)) for index in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return found


class Process(Client):
    """`triforce serve` in a process of its own, or in several that were started as torchrun starts them."""

    def __init__(self, pair: tuple[Path, Path], log: Path, forks: list[Fork], *options: object, ranks: int = 1) -> None:
        """Args: `forks` takes the processes."""
        fixed = ("--model", pair[0], "--draft", "none", "--device", "cpu", "--dtype", "float32", "--port", 0)
        self.log, self.forks = log, forks
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
        with open(log, "wb") as out, open(os.devnull, "rb") as nothing:
            streams = nothing.fileno(), out.fileno(), out.fileno()
            for rank in range(ranks):
                place = {"RANK": str(rank), "WORLD_SIZE": str(ranks), **shared, **ENVIRONMENT} if ranks > 1 else {}
                call = slowly(triforce("serve", *fixed, *options))
                self.forks.append(Fork(call, streams, {**os.environ, **place}))
        self.fork = self.forks[0]
        self.wait_for("ready\n")
        found = re.search(r"listening at http://127\.0\.0\.1:(\d+)", log.read_text())
        assert found
        self.port = int(found[1])

    def wait_for(self, words: str) -> None:
        end = time.monotonic() + 60
        while words not in self.log.read_text():
            assert self.fork.ended() is None and time.monotonic() < end, self.log.read_text()
            time.sleep(0.01)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.fork.pid, number)

    def post(self, body: dict[str, Any]) -> http.client.HTTPResponse:
        """What comes of a completion, to be read as it comes."""
        return self.connect("POST", COMPLETION, body).getresponse()

    def stream(self, tokens: int) -> tuple[list[bytes], threading.Thread]:
        """What comes of a stream, in a list that grows, and the thread that reads it."""
        lines: list[bytes] = []

        def read() -> None:
            response = self.post({"prompt": "It was", "max_tokens": tokens, "temperature": 0, "stream": True})
            lines.extend(line for line in response if line.startswith(b"data: "))

        thread = threading.Thread(target=read)
        thread.start()
        end = time.monotonic() + 30
        while len(lines) < 3:
            assert time.monotonic() < end
            time.sleep(0.005)
        return lines, thread


def slowly(call: Any) -> Any:
    """Rounds take 5 ms at least."""

    def patched() -> object:
        from triforce.offload import Batch

        whole = Batch.__next__

        def late(batch: Any) -> Any:
            time.sleep(0.005)
            return whole(batch)

        setattr(Batch, "__next__", late)  # noqa: B010 (in the fork alone)
        return call()

    return patched


@pytest.fixture
def process(pair: tuple[Path, Path], tmp_path: Path) -> Iterator[Any]:
    """Starts one: `process("--grace", 1, ranks=2)`."""
    forks: list[Fork] = []
    yield lambda *options, ranks=1, models=pair: Process(models, tmp_path / "log", forks, *options, ranks=ranks)
    for fork in forks:
        fork.kill()


@pytest.fixture(scope="module")
def server(pair) -> Iterator[TestServer]:
    """One for all tests of a file."""
    found = TestServer(pair)
    yield found
    found.close()


@pytest.fixture
def serving(pair):
    """Makes further ones: `with serving(max_queue=1) as server`."""

    @contextmanager
    def make(models: tuple[Path, Path] = pair, **options: Any) -> Iterator[TestServer]:
        found = TestServer(models, **options)
        try:
            yield found
        finally:
            found.close()

    return make


@pytest.fixture
def slow_rounds(monkeypatch):
    """A round of the engine takes at least 10 ms."""
    from triforce.offload import Batch

    next_round = Batch.__next__

    def slowly(batch):
        time.sleep(0.01)
        return next_round(batch)

    monkeypatch.setattr(Batch, "__next__", slowly)
