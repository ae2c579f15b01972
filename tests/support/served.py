"""`triforce serve` in a process of its own, and what its clients say to it over HTTP."""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from command import VOCABULARY, triforce
from forks import Fork, meeting

_PR_SET_KEEPCAPS, _MAY_READ = 8, 1 << 2
"""Of Linux: capabilities outlive a change of user; CAP_DAC_READ_SEARCH."""

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
    address = "127.0.0.1"
    """From where they come."""
    unix: Path | None = None
    """The Unix socket that it listens at instead, if it does."""

    def at(self, address: str) -> Client:
        """Another client of the same server, at another of this machine's addresses."""
        other = Client()
        other.port, other.address = self.port, address
        return other

    def connect(self, method: str, path: str, body: Any = None, **headers: str) -> http.client.HTTPConnection:
        source = (self.address, 0)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60, source_address=source)
        if self.unix is not None:
            connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.sock.settimeout(60)
            connection.sock.connect(str(self.unix))
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

    def complete(self, prompt: Any = "It was", **fields: Any) -> Reply:
        return self.ask("POST", COMPLETION, {"prompt": prompt, "temperature": 0, "max_tokens": 10, **fields})

    def upload(self, name: str, text: str, **fields: str) -> Reply:
        body, kind = _form(name, text, **fields)
        return self.ask("POST", "/v1/contexts", body, Content_Type=kind)

    def connect_to_upload(self, name: str, text: str) -> http.client.HTTPConnection:
        """As `upload`, without reading the answer."""
        body, kind = _form(name, text)
        return self.connect("POST", "/v1/contexts", body, Content_Type=kind)

    def ask_unread(self, **fields: Any) -> socket.socket:
        """A connection that has asked for an answer, and is not read. Little of the answer fits on its way."""
        raw = json.dumps({"prompt": "It was", "temperature": 0, "max_tokens": 900, **fields}).encode()
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.bind((self.address, 0))
        connection.connect(("127.0.0.1", self.port))
        head = f"POST {COMPLETION} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nContent-Length: {len(raw)}\r\n\r\n"
        connection.sendall(head.encode() + raw)
        return connection

    def metrics(self) -> dict[str, float]:
        """Those without labels, by name."""
        lines = self.ask("GET", "/metrics").body.decode().splitlines()
        values = (line.rsplit(" ", 1) for line in lines if line.startswith("triforce_") and "{" not in line)
        return {name.removeprefix("triforce_"): float(value) for name, value in values}

    def metric(self, name: str) -> float:
        return self.metrics()[name]

    @staticmethod
    def wait_for(holds: Callable[[], object], seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, "it never came"
            time.sleep(0.02)  # not more often, as each look takes processor time of the server, too

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

    def __init__(
        self,
        pair: tuple[Path, Path],
        log: Path,
        forks: list[Fork],
        *options: object,
        ranks: int = 1,
        account: int | None = None,
        before: Callable[[], object] = lambda: None,
    ) -> None:
        """Args:
        log: where its stderr goes.
        forks: takes the processes.
        account: the user that it runs as, if that is another one, which only root can have.
        before: called in each of them first; what it changes there, a library for instance, nobody else sees.
        """
        fixed = ("--model", pair[0], "--draft", "none", "--device", "cpu", "--dtype", "float32")
        fixed += () if "--uds" in options else ("--port", 0)
        self.forks, self._log = forks, log
        self._store, shared = meeting(ranks) if ranks > 1 else (None, {})
        with open(log, "wb") as out, open(os.devnull, "rb") as nothing:
            streams = nothing.fileno(), out.fileno(), out.fileno()
            for rank in range(ranks):
                place = {"RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo", **shared} if shared else {}
                call = triforce("serve", *fixed, *options)
                call = call if account is None else as_account(account, call)
                self.forks.append(Fork(lambda call=call: (before(), call()), streams, {**os.environ, **place}))
        self.fork = self.forks[0]
        self.wait_for_words("ready\n")
        found = re.search(r"listening at (?:http://.+:(\d+)|unix:(.+))\n", self.log)
        assert found
        self.port, self.unix = int(found[1] or 0), Path(found[2]) if found[2] else None

    @property
    def log(self) -> str:
        """What it has written to stderr so far."""
        return self._log.read_text()

    def wait_for_words(self, words: str) -> None:
        end = time.monotonic() + 60
        while words not in self.log:
            assert self.fork.ended() is None and time.monotonic() < end, self.log
            time.sleep(0.01)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.fork.pid, number)

    def post(self, body: dict[str, Any]) -> http.client.HTTPResponse:
        """What comes of a completion, to be read as it comes."""
        return self.connect("POST", COMPLETION, body).getresponse()

    def stream(self, tokens: int, **fields: Any) -> tuple[list[bytes], threading.Thread]:
        """What comes of a stream, in a list that grows, and the thread that reads it."""
        lines: list[bytes] = []

        def read() -> None:
            body = {"prompt": "It was", "max_tokens": tokens, "temperature": 0, "stream": True, **fields}
            response = self.post(body)
            lines.extend(line for line in response if line.startswith(b"data: "))

        thread = threading.Thread(target=read)
        thread.start()
        end = time.monotonic() + 30
        while len(lines) < 3 and thread.is_alive() and time.monotonic() < end:
            time.sleep(0.005)
        assert lines and (len(lines) >= 3 or not thread.is_alive()), "no stream came"
        return lines, thread


def embedding_calls(act: Callable[[list[int]], object]) -> Callable[[], None]:
    """Has PyTorch, in the process that calls what this returns, call `act` first with the tokens that a model's
    embedding is asked for: it may fail there, or take its time, as `before` of a `Process`."""

    def begin() -> None:
        index_select = torch.Tensor.index_select

        def select(rows: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
            if rows.shape[0] == VOCABULARY:
                act(index.tolist())
            return index_select(rows, dim, index)

        torch.Tensor.index_select = select  # pyright: ignore[reportAttributeAccessIssue]

    return begin


def as_account(account: int, call: Callable[[], object]) -> Callable[[], object]:
    """What a process of root's calls to go on as another user, for good. It may still read every file, as those of the
    interpreter may be root's alone; what it may write, open a socket or send a signal to is as that user's."""

    def change_and_call() -> object:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0)
        os.setgroups([])
        os.setgid(account)
        os.setuid(account)
        # Version 3 of the interface, this process; effective, permitted and inheritable, the low words first.
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)
        libc.capset(header, (ctypes.c_uint32 * 6)(_MAY_READ, _MAY_READ, 0, 0, 0, 0))
        return call()

    return change_and_call


def flags(options: dict[str, Any]) -> list[object]:
    """Options of the command: `max_queue=1` is `--max-queue 1`, and `no_auth=True` is `--no-auth`."""
    found: list[object] = []
    for name, value in options.items():
        found += [f"--{name.replace('_', '-')}", *([] if value is True else [value])]
    return found


def _form(name: str, text: str, **fields: str) -> tuple[bytes, str]:
    """The form by which a text is uploaded, and its type."""
    parts = [f'name="{field}"\r\n\r\n{value}' for field, value in {"name": name, **fields}.items()]
    parts.append(f'name="file"; filename="a.txt"\r\nContent-Type: text/plain\r\n\r\n{text}')
    body = "".join(f"--edge\r\nContent-Disposition: form-data; {part}\r\n" for part in parts) + "--edge--\r\n"
    return body.encode(), "multipart/form-data; boundary=edge"
