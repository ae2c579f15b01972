"""Many clients at once for `serve_results.py`: each request is sent on a connection of its own and must get exactly one
answer, the one that it gets alone. Some clients go away, read slowly, upload texts, or send what is no request.

The clients know HTTP only as far as the server speaks it; they need nothing but a port.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import statistics
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from .bodies import CHAT, COMPLETION, BodyFuzzer

CONTEXTS = "/v1/contexts"
PROMPTS = ("It was", "She said that", "In the morning,", "Why?", "Once upon a time there was a king who", "No.")
PROBE = {"prompt": "The house stood", "temperature": 0, "max_tokens": 16}
_REFUSALS = (400, 404, 413, 429, 503)
_SMALL_BUFFER = 4096


@dataclass(frozen=True)
class Reply:
    """An answer over HTTP, read to the end of its connection."""

    status: int
    body: bytes
    rest: bytes
    """What came after the answer; nothing must."""
    headers: dict[str, str] = field(default_factory=dict)
    """Names are in lower case."""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Of a stream; a whole one ends with `[DONE]`."""
        lines = [one.removeprefix(b"data: ") for one in self.body.split(b"\n\n") if one.startswith(b"data: ")]
        return [one.decode() if one == b"[DONE]" else json.loads(one) for one in lines]

    @property
    def texts(self) -> dict[int, tuple[str, str | None]]:
        """Text and finish reason of each choice, of a stream or a whole answer."""
        found: dict[int, tuple[str, str | None]] = {}
        for one in self.events[:-1] if self.body.startswith((b"data:", b":")) else [self.json]:
            for choice in one["choices"]:
                said = choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content") or ""
                before = found.get(choice["index"], ("", None))[0]
                found[choice["index"]] = before + said, choice["finish_reason"]
        return found


def http_request(method: str, path: str, body: Any = b"", kind: str = "application/json") -> bytes:
    """The bytes of a request; a body that is not bytes is put as JSON."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: {kind}\r\n"
    return f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw


def upload_request(name: str, text: str) -> bytes:
    parts = f'name="name"\r\n\r\n{name}', f'name="file"; filename="a.txt"\r\nContent-Type: text/plain\r\n\r\n{text}'
    body = "".join(f"--edge\r\nContent-Disposition: form-data; {part}\r\n" for part in parts) + "--edge--\r\n"
    return http_request("POST", CONTEXTS, body.encode(), "multipart/form-data; boundary=edge")


@contextmanager
def connection(port: int, raw: bytes, patience_s: float, *, small: bool = False) -> Iterator[socket.socket]:
    """A connection on which a request was sent. Args: `small` has it take in little before it is read."""
    with closing(socket.socket()) as found:
        found.settimeout(patience_s)
        if small:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER)
        found.connect(("127.0.0.1", port))
        found.sendall(raw)
        yield found


def ask(port: int, raw: bytes, patience_s: float = 600.0, pause_s: float = 0.0) -> Reply:
    """Sends a request and reads its answer.

    Args: `pause_s` is between two small readings.

    Raises:
        TimeoutError: nothing came for so long.
        ValueError: what came is no whole answer.
    """
    pieces = []
    with connection(port, raw, patience_s, small=pause_s > 0) as found:
        while piece := found.recv(256 if pause_s else 65536):
            pieces.append(piece)
            time.sleep(pause_s)
    return reply_of(b"".join(pieces))


@asynccontextmanager
async def connected(port: int, source: str, *, small: bool = False) -> AsyncIterator[socket.socket]:
    """A connection for asyncio's `sock_sendall` and `sock_recv`.

    Args:
        source: the address that it comes from; on Linux all of 127.0.0.0/8 is this machine.
        small: it takes in little before it is read.
    """
    with closing(socket.socket()) as found:
        found.setblocking(False)
        if small:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER)
        found.bind((source, 0))
        await asyncio.get_running_loop().sock_connect(found, ("127.0.0.1", port))
        yield found


async def ask_from(source: str, port: int, raw: bytes, patience_s: float) -> Reply:
    """Sends a request from the address `source` and reads its answer.

    Raises:
        TimeoutError: the whole answer did not come within `patience_s`.
        OSError: the connection broke.
        ValueError: what came is no whole answer.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(patience_s), connected(port, source) as found:
        with suppress(ConnectionError):  # a request that is refused early is not read to its end
            await loop.sock_sendall(found, raw)
        pieces = []
        while piece := await loop.sock_recv(found, 65536):
            pieces.append(piece)
    return reply_of(b"".join(pieces))


def reply_of(raw: bytes) -> Reply:
    """Raises:
    ValueError: it is no whole answer.
    """
    head, found, rest = raw.partition(b"\r\n\r\n")
    if not found:
        raise ValueError(f"the connection ended after {len(raw)} bytes of an answer's head")
    status, lines = int(head.split(b" ", 2)[1]), head.decode("latin-1").split("\r\n")[1:]
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if "content-length" in headers:
        length = int(headers["content-length"])
        if len(rest) < length:
            raise ValueError(f"the connection ended after {len(rest)} of {length} bytes")
        return Reply(status, rest[:length], rest[length:], headers)
    body = b""
    while True:
        size, found, rest = rest.partition(b"\r\n")
        count = int(size, 16) if found else 0
        if not found or len(rest) < count + 2:
            raise ValueError("the connection ended in the middle of a stream")
        body, rest = body + rest[:count], rest[count + 2 :]
        if not count:
            return Reply(status, body, rest, headers)


def metrics(port: int) -> dict[str, float]:
    """Those without labels, and `requests`, of all endpoints but this one."""
    return figures_of(ask(port, http_request("GET", "/metrics")))


def figures_of(reply: Reply) -> dict[str, float]:
    """What `metrics` returns, of the reply of that endpoint."""
    lines = reply.body.decode().splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    found = {name: float(value) for name, value in pairs if "{" not in name}
    requests = [(name, float(value)) for name, value in pairs if name.startswith("triforce_requests_total{")]
    found["requests"] = sum(count for name, count in requests if '"/metrics"' not in name)
    return found


class Load:
    """One run of many clients."""

    def __init__(
        self, port: int, *, clients: int, seconds: float, bodies: int, seed: int = 0, patience_s: float = 600.0
    ) -> None:
        """Args:
        bodies: that are no requests, or hardly, spread over the time.
        patience_s: after so long without a byte a request counts as forgotten.
        """
        self._port, self._clients, self._seconds, self._patience_s = port, clients, seconds, patience_s
        self._bodies, self._seed = bodies, seed
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._longest_s = 0.0
        self._failures: list[str] = []
        self._wanted: dict[tuple[int, int], Any] = {}

    def run(self, tell: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
        """Returns what was counted; `failures` is empty where all promises hold."""
        self._fill_table()
        probe = ask(self._port, http_request("POST", COMPLETION, PROBE)).texts
        before = metrics(self._port)
        self._began = time.monotonic()
        workers = [threading.Thread(target=self._repeat, args=(number,)) for number in range(self._clients)]
        for worker in workers:
            worker.start()
        samples = self._sampled(workers, tell)
        if any(worker.is_alive() for worker in workers):
            self._fail("a client still waits")
        after = self._settled()
        if ask(self._port, http_request("POST", COMPLETION, PROBE)).texts != probe:
            self._fail("the answer to the same request is another one than before")
        after |= {name: value for name, value in metrics(self._port).items() if name == "triforce_kv_cache_bytes"}
        self._check_rest(before, after)
        growth = self._growth(samples)
        figures = {"seconds": time.monotonic() - self._began, "longest_wait_s": self._longest_s, "memory": growth}
        return figures | {"counts": dict(self._counts), "samples": samples, "failures": self._failures}

    def _fill_table(self) -> None:
        """What requests are answered alone."""
        for prompt in range(len(PROMPTS)):
            for seed in range(2):
                raw = http_request("POST", COMPLETION, self._fields(prompt, seed))
                self._wanted[prompt, seed] = ask(self._port, raw).texts

    @staticmethod
    def _fields(prompt: int, seed: int) -> dict[str, Any]:
        tokens = (3, 40, 9, 120, 24, 70)[prompt] + 5 * seed
        return {"prompt": PROMPTS[prompt], "seed": seed, "temperature": 1, "max_tokens": tokens, "n": 1 + (prompt == 4)}

    def _repeat(self, number: int) -> None:
        draw = random.Random(f"{self._seed} {number}")
        sends_bodies = number % 4 == 3
        work = self._send_body if sends_bodies else self._ask_something
        share = -(-self._bodies // max(1, len(range(3, self._clients, 4))))
        fuzzer, done = BodyFuzzer(draw), 0
        while True:
            spent = time.monotonic() - self._began
            if done >= share if sends_bodies else spent > self._seconds:
                return
            if sends_bodies and done / share > spent / self._seconds:
                time.sleep(self._seconds / share)
            began = time.monotonic()
            try:
                work(draw, fuzzer)
            except TimeoutError:
                self._fail(f"client {number}: nothing came for {self._patience_s:.0f} s")
            except Exception as error:
                self._fail(f"client {number}: {type(error).__name__}: {error}")
            done += 1
            with self._lock:
                self._longest_s = max(self._longest_s, time.monotonic() - began)

    def _send_body(self, _: random.Random, fuzzer: BodyFuzzer) -> None:
        """A body that is no request, or one that is just allowed."""
        path, raw = fuzzer.body()
        reply = self._answer_to(http_request("POST", path, raw))
        self._count(f"bodies_{reply.status}")
        if reply.status != 200 and (reply.status not in _REFUSALS or not reply.json["error"]["message"]):
            self._fail(f"status {reply.status} to {raw[:200]!r}: {reply.body[:200]!r}")

    def _ask_something(self, draw: random.Random, _: BodyFuzzer) -> None:
        prompt, seed, choice = draw.randrange(len(PROMPTS)), draw.randrange(2), draw.random()
        fields = self._fields(prompt, seed) | {"stream": draw.random() < 0.5}
        if choice < 0.2:
            return self._go_away(draw, fields)
        if choice < 0.25:
            return self._upload(draw)
        slowly = choice < 0.35
        raw = http_request("POST", COMPLETION, fields | ({"stream": True} if slowly else {}))
        reply = self._answer_to(raw, pause_s=draw.uniform(0.01, 0.2) if slowly else 0.0)
        if reply.status in (429, 503):
            self._count("busy")
            time.sleep(draw.uniform(0.2, 1))
        elif reply.status != 200 or reply.texts != self._wanted[prompt, seed]:
            self._fail(f"{fields} got {reply.status} {reply.texts if reply.status == 200 else reply.body[:200]!r}")
        else:
            self._count("read_slowly" if slowly else "answered")
        return None

    def _go_away(self, draw: random.Random, fields: dict[str, Any]) -> None:
        raw = http_request("POST", COMPLETION, fields | {"max_tokens": 400})
        if draw.random() < 0.2:
            raw = raw[: draw.randrange(1, len(raw))]
        with connection(self._port, raw, self._patience_s) as found:
            if fields["stream"] and draw.random() < 0.5 and raw.endswith(b"}"):
                found.recv(draw.randrange(1, 2000))
            else:
                time.sleep(draw.uniform(0, 1))
        self._count("gone")

    def _upload(self, draw: random.Random) -> None:
        """A text of this client's own: read, asked about, deleted."""
        name = f"text-{draw.randrange(10**9)}"
        reply = self._answer_to(upload_request(name, " ".join(draw.choices(PROMPTS, k=10))))
        if reply.status == 201:
            body = {"messages": [{"role": "user", "content": "Who?"}], "context": name, "max_tokens": 5}
            statuses = [self._answer_to(http_request("POST", CHAT, body)).status]
            statuses.append(self._answer_to(http_request("DELETE", f"{CONTEXTS}/{name}")).status)
            if statuses[0] not in (200, 429, 503) or statuses[1] not in (200, 409):
                self._fail(f"a context of its own: {statuses}")
        elif reply.status not in (429, 503):
            self._fail(f"an upload got {reply.status}: {reply.body[:200]!r}")
        self._count(f"uploads_{reply.status}")

    def _answer_to(self, raw: bytes, pause_s: float = 0.0) -> Reply:
        reply = ask(self._port, raw, self._patience_s, pause_s)
        self._count("replies")
        if reply.rest:
            self._fail(f"more than one answer: {reply.rest[:200]!r}")
        return reply

    def _sampled(self, workers: list[threading.Thread], tell: Callable[[str], None]) -> list[dict[str, float]]:
        """Waits for the clients; what the server said of itself meanwhile."""
        samples, every_s = [], min(10.0, self._seconds / 20)
        end = self._began + self._seconds + 2 * self._patience_s
        while any(worker.is_alive() for worker in workers) and time.monotonic() < end:
            time.sleep(every_s)
            now = metrics(self._port)
            second = time.monotonic() - self._began
            samples.append({"second": second, "resident_bytes": now["process_resident_memory_bytes"]})
            with self._lock:
                done = sum(count for name, count in self._counts.items() if name in ("replies", "gone"))
            mib, waiting = now["process_resident_memory_bytes"] / 2**20, now["triforce_queue_length"]
            tell(f"{second:6.0f} s: {done} requests, {waiting:.0f} wait, {mib:,.0f} MiB")
        return samples

    def _settled(self) -> dict[str, float]:
        """The server's figures once nothing runs and connections have ended."""
        end = time.monotonic() + self._patience_s
        while time.monotonic() < end:
            now = metrics(self._port)
            if now["triforce_queue_length"] == now["triforce_running_answers"] == 0:
                time.sleep(3.0)
                return metrics(self._port)
            time.sleep(0.5)
        self._fail("the server goes on although no client waits")
        return metrics(self._port)

    def _check_rest(self, before: dict[str, float], after: dict[str, float]) -> None:
        """That no descriptors are left behind, and that the server counts as many requests as clients sent. Memory may
        be held by keys and values that a next turn goes on from."""
        if after["process_open_fds"] > before["process_open_fds"] + 2:
            self._fail(f"descriptors: {before['process_open_fds']:.0f} before, {after['process_open_fds']:.0f} after")
        sent = self._counts["replies"]
        told = after["requests"] - before["requests"]
        if not sent <= told <= sent + self._counts["gone"]:
            self._fail(
                f"{sent} requests had a reply, {self._counts['gone']} did not wait; the server counts {told:.0f}"
            )

    def _growth(self, samples: list[dict[str, float]]) -> dict[str, float]:
        """Resident memory around minute 2 (of a shorter run, a fifth) and at its end, and their ratio."""
        start, width = min(120.0, self._seconds / 5), min(60.0, self._seconds / 10)
        early = [one["resident_bytes"] for one in samples if start <= one["second"] <= start + width]
        late = [one["resident_bytes"] for one in samples if self._seconds - width <= one["second"] <= self._seconds]
        if not early or not late:
            return {}
        first, last = statistics.median(early), statistics.median(late)
        if self._seconds >= 300 and last > 1.1 * first:
            self._fail(f"memory grew from {first / 2**20:.0f} to {last / 2**20:.0f} MiB")
        return {"early_bytes": first, "late_bytes": last, "ratio": last / first}

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    def _fail(self, what: str) -> None:
        with self._lock:
            if len(self._failures) < 100:
                self._failures.append(what)
