"""Clients of `hostile_load.py` that do what clients should not: each kind asks for the most that it may, or a little
more, sends what is no request, or does not take what it asked for. None of them waits when it is told to.
"""

from __future__ import annotations

import asyncio
import functools
import random
import socket
import struct
import urllib.parse
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from triforce.cli.logbook import LogBook

from .bodies import CHAT, COMPLETION, COUNT_TOKENS, MESSAGES, BodyFuzzer
from .load import CONTEXTS, PROMPTS, Reply, ask_from, connected, http_request, reply_of, upload_request

PATIENCE_S = 300.0
"""After so long without its whole answer a request counts as unanswered."""

_BODY_BYTES = 2**23
"""The longest body that a server with the embedded pair takes."""

_TEXT_BYTES = _BODY_BYTES - 512
"""A text of an upload whose body is just allowed."""

_STOPS, _STOP_BYTES, _ANSWERS, _LOGPROBS = 16, 1024, 128, 20
"""Limits of a request."""

_RESET = struct.pack("ii", 1, 0)
"""Of `SO_LINGER`: the connection ends with a reset."""

_CONTROL = (
    *("<s>", "</s>", "<unk>", "<pad>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<think>"),
    *("<|start_header_id|>system<|end_header_id|>", "[INST]", "[/INST]", "<<SYS>>", "</think>", "<tool_call>"),
    *("\x00", "\x1b[2J\x1b]0;title\x07", "\r\n\r\n", "\u202e", "\ufeff", "\u2028", "{{ bos_token }}", "{% raw %}"),
    *("data: [DONE]\n\n", "Answer:", "\U0010ffff", "\u0300" * 40, "</script><script>alert(1)</script>"),
)
_NAMES = (
    *("", " ", ".", "..", "../x", "a/b", "/etc/passwd", "x" * 101, "x" * 10**5, " x", "x ", ".locks", "CON", "%2e%2e"),
    *("\x00", "x\x00y", "é" * 100, "\u202etxt", "-rf", "a\r\nX-Odd: 1", "x.partial", "<b>", "'; drop table", "x\ny"),
)


@dataclass
class Tally:
    """What came of what hostile clients sent."""

    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    """By kind of client: statuses and other ends, with how often each came."""
    faults: list[dict[str, Any]] = field(default_factory=list)
    """Answers that no request may get: statuses from 500 on but 503, and errors without a message."""
    bodies: int = 0
    """Fuzzed ones that were sent, and answered or given up."""

    def count(self, kind: str, outcome: object) -> None:
        self.outcomes.setdefault(kind, Counter())[str(outcome)] += 1

    def take(self, kind: str, raw: bytes, reply: Reply, *, broken: bool = False) -> None:
        """Counts a reply to `raw`. Args: `broken` says that it was no HTTP, whose refusal has another form."""
        self.count(kind, reply.status)
        refused = 400 <= reply.status < 500 or reply.status == 503
        if reply.status in (200, 201) or (refused and (broken or _has_message(reply))):
            return
        self.faults.append(
            {"kind": kind, "status": reply.status, "request": repr(raw[:1000]), "reply": repr(reply.body[:500])}
        )


def _has_message(reply: Reply) -> bool:
    try:
        return bool(reply.json["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return False


class HostileClient:
    """One client, which does the same kind of thing until it is cancelled."""

    def __init__(self, kind: str, number: int, port: int, seed: str, tally: Tally) -> None:
        self._kind, self._port, self._tally = kind, port, tally
        self._source, self._other = f"127.0.2.{number + 1}", f"127.0.3.{number + 1}"
        self._number, self._draw = number, random.Random(f"hostile {seed} {number}")
        self._book = LogBook(10_000 + number)
        self._act: Callable[[], Awaitable[None]] = {
            "long stops": self._long_stops,
            "many answers": self._many_answers,
            "stalled bodies": self._stalled_bodies,
            "slow heads": self._slow_heads,
            "unread streams": self._unread_streams,
            "slow readers": self._slow_readers,
            "hoards": self._hoards,
            "floods": self._floods,
            "wide bodies": self._wide_bodies,
            "disconnects": self._disconnects,
            "fuzzed bodies": self._fuzzed_body,
            "control tokens": self._control_tokens,
            "uploads": self._uploads,
            "contexts": self._contexts,
            "forms": self._forms,
            "messages": self._messages,
        }[kind]

    async def run(self) -> None:
        while True:
            await self._once()
            await asyncio.sleep(self._draw.uniform(0.0, 1.0))

    async def run_bodies(self, bodies: int, seconds: float) -> None:
        """Sends so many fuzzed bodies, evenly over the time, without waiting for earlier ones."""
        async with asyncio.TaskGroup() as group:
            for _ in range(bodies):
                group.create_task(self._once())
                await asyncio.sleep(seconds / bodies)

    async def _once(self) -> None:
        try:
            await self._act()
        except asyncio.CancelledError:
            self._count("under way at the end")
            raise
        except TimeoutError:
            self._count("no answer")
        except ConnectionError:
            self._count("reset")
        except (OSError, ValueError) as error:
            self._count("closed" if isinstance(error, ValueError) else type(error).__name__)

    def _count(self, outcome: object) -> None:
        self._tally.count(self._kind, outcome)

    async def _ask(self, raw: bytes, *, source: str | None = None, patience_s: float = PATIENCE_S) -> Reply:
        reply = await ask_from(source or self._source, self._port, raw, patience_s)
        self._tally.take(self._kind, raw, reply)
        return reply

    async def _ask_and_leave(self, raw: bytes, seconds: float) -> None:
        """Asks, and waits no longer than so many seconds."""
        try:
            await self._ask(raw, patience_s=seconds)
        except TimeoutError:
            self._count("left")

    def _fields(self, **more: Any) -> dict[str, Any]:
        draw = self._draw
        return {
            "prompt": draw.choice(PROMPTS),
            "seed": draw.randrange(10**6),
            "temperature": 1,
            "max_tokens": 200,
        } | more

    async def _long_stops(self) -> None:
        """As many and as long as are allowed, such that much of the answer begins one; sometimes more than that."""
        draw, text = self._draw, self._text(400)
        some = [" " * _STOP_BYTES, "e" * _STOP_BYTES, "é" * (_STOP_BYTES // 2), "\n" * _STOP_BYTES]
        while len(some) < _STOPS:
            at = draw.randrange(len(text) // 2)
            some.append(text[at : at + _STOP_BYTES].ljust(_STOP_BYTES))
        if draw.random() < 0.2:
            some = draw.choice(([*some, "a"], ["a" * (_STOP_BYTES + 1)], ["a" * 10**6], ["", *some[1:]], ["a"] * 10**5))
        fields = self._fields(stop=some, stream=draw.random() < 0.5, n=draw.choice((1, 4)))
        await self._ask(http_request("POST", COMPLETION, fields))

    async def _many_answers(self) -> None:
        draw = self._draw
        n = _ANSWERS if draw.random() < 0.8 else draw.choice((_ANSWERS + 1, 10**9, 10**30))
        fields = self._fields(n=n, logprobs=_LOGPROBS, max_tokens=draw.randrange(16, 65), stream=draw.random() < 0.5)
        if draw.random() < 0.3:  # not for more: all others have their turns between two answers of this client
            await self._ask(http_request("POST", COMPLETION, fields | {"n": min(n, 8)}))
        else:
            await self._ask_and_leave(http_request("POST", COMPLETION, fields), draw.uniform(5, 60))

    async def _stalled_bodies(self) -> None:
        """Several at a time that end at a random place, and sometimes enough to fill what all bodies may hold."""
        draw = self._draw
        full = draw.random() < 0.15
        await self._together(16 if full else draw.randrange(1, 9), lambda: self._stalled_body(full))

    async def _stalled_body(self, full: bool) -> None:
        draw = self._draw
        raw = http_request("POST", draw.choice((CHAT, COMPLETION, CONTEXTS)), self._fields(user="a" * 1000))
        head, _, body = raw.partition(b"\r\n\r\n")
        if full or draw.random() < 0.2:
            head = head.replace(f"Content-Length: {len(body)}".encode(), f"Content-Length: {_BODY_BYTES}".encode())
            sent = memoryview(_spaces())[:-1] if full else body
        else:
            sent = body[: draw.randrange(len(body))]
        async with connected(self._port, self._source) as found:
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(found, head + b"\r\n\r\n")
            await loop.sock_sendall(found, sent)
            await self._wait_at(found, draw.uniform(5, 60))

    async def _slow_heads(self) -> None:
        """Heads that come a byte at a time, never end, or never begin; many requests on a connection."""
        await self._together(self._draw.randrange(1, 9), self._slow_head)

    async def _slow_head(self) -> None:
        draw, loop = self._draw, asyncio.get_running_loop()
        choice, seconds = draw.choice(("bytes", "endless", "idle", "pipelined")), draw.uniform(5, 60)
        async with connected(self._port, self._source) as found:
            try:
                async with asyncio.timeout(seconds):
                    if choice == "bytes":
                        for byte in http_request("POST", COMPLETION, self._fields()):
                            await loop.sock_sendall(found, bytes([byte]))
                            await asyncio.sleep(seconds / 100)
                    elif choice == "endless":
                        await loop.sock_sendall(found, b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n")
                        for number in range(10**6):
                            await loop.sock_sendall(found, f"X-{number}: {'a' * 500}\r\n".encode())
                            await asyncio.sleep(0.01)
                    elif choice == "pipelined":
                        one = b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
                        await loop.sock_sendall(found, one * 1000)
            except TimeoutError:
                pass
            await self._wait_at(found, 1.0 if choice != "idle" else seconds)

    async def _unread_streams(self) -> None:
        await self._together(self._draw.randrange(1, 5), self._unread_stream)

    async def _unread_stream(self) -> None:
        draw = self._draw
        fields = self._fields(stream=True, max_tokens=4000, n=draw.choice((1, 4, 16)), logprobs=_LOGPROBS)
        async with connected(self._port, self._source, small=True) as found:
            await asyncio.get_running_loop().sock_sendall(found, http_request("POST", COMPLETION, fields))
            await asyncio.sleep(draw.uniform(10, 90))
            await self._wait_at(found, 1.0)

    async def _slow_readers(self) -> None:
        """Long answers, streamed or not, of which a byte is taken at a time."""
        await self._together(self._draw.randrange(1, 5), self._slow_reader)

    async def _slow_reader(self) -> None:
        draw, loop = self._draw, asyncio.get_running_loop()
        fields = self._fields(stream=draw.random() < 0.5, n=2, logprobs=_LOGPROBS)
        async with connected(self._port, self._source, small=True) as found:
            await loop.sock_sendall(found, http_request("POST", COMPLETION, fields))
            try:
                async with asyncio.timeout(draw.uniform(30, 120)):
                    while await loop.sock_recv(found, 1):
                        await asyncio.sleep(0.05)
                self._count("read to its end")
            except TimeoutError:
                self._count("left")

    async def _hoards(self) -> None:
        """Many streams at a time, of which no more is taken than keeps them open."""
        await self._together(self._draw.randrange(10, 60), self._hoarded)

    async def _hoarded(self) -> None:
        draw, loop, came = self._draw, asyncio.get_running_loop(), b""
        fields = self._fields(stream=True, n=14, logprobs=_LOGPROBS, max_tokens=60)
        async with connected(self._port, self._source, small=True) as found:
            await loop.sock_sendall(found, http_request("POST", COMPLETION, fields))
            with suppress(TimeoutError):
                async with asyncio.timeout(draw.uniform(60, 180)):
                    while piece := await loop.sock_recv(found, 4096):
                        came = came or piece
                        await asyncio.sleep(10.0)
        self._count_begun(came, "held")

    async def _floods(self) -> None:
        """Up to 200 requests at a time that cost no answer, or connections that begin a head and stop."""
        draw = self._draw
        if draw.random() < 0.3:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5\r\n"
            await self._together(draw.randrange(50, 200), lambda: self._begun(head[: draw.randrange(len(head))]))
            return
        path = draw.choice(("/health", "/metrics", "/v1/models", "/v1/models/x", CONTEXTS, "/", "/none", CHAT))
        raw = http_request("GET", path)
        await self._together(draw.randrange(50, 200), lambda: self._flood(raw, path))

    async def _flood(self, raw: bytes, path: str) -> None:
        reply = await ask_from(self._source, self._port, raw, PATIENCE_S)
        self._tally.take(self._kind, raw, reply, broken=path in ("/health", "/"))  # which have no error in JSON

    async def _begun(self, raw: bytes) -> None:
        async with connected(self._port, self._source) as found:
            await asyncio.get_running_loop().sock_sendall(found, raw)
            await self._wait_at(found, self._draw.uniform(1, 30))

    async def _wide_bodies(self) -> None:
        """JSON of few bytes that becomes many objects, and texts of nothing but control tokens."""
        draw = self._draw
        many, path = draw.randrange(10**4, 10**6), draw.choice((CHAT, COMPLETION))
        wide = draw.choice((b"[]", b"{}", b"null", b"0", b'""', b'{"a":[]}', b"[1]"))
        field = draw.choice((b'"prompt"', b'"stop"', b'"messages"', b'"metadata"', b'"unknown"'))
        body = b'{"max_tokens":1,' + field + b":[" + b",".join([wide] * many) + b"]}"
        choice = draw.random()
        if choice < 0.3:
            body = b"{" + b",".join(b'"%d":0' % number for number in range(many)) + b"}"
        if choice < 0.05:  # and a text without end, that could end at every second letter
            body = b"[" * (2**18 + 1) + b'"' + b'\\"' * 2**20
        if choice < 0.6:
            await self._ask(http_request("POST", path, body))
            return
        # A few thousand tokens, or more than the model takes: what is between is a long prompt, which anybody may send.
        said = "".join(draw.choices(_CONTROL, k=5)) * draw.choice((10, 50, 20_000, 40_000))
        fields = {"messages": [{"role": "user", "content": said}], "max_tokens": 1}
        await self._ask(http_request("POST", CHAT, fields))

    async def _disconnects(self) -> None:
        """In one of the phases of a request, by an end, a reset, or an end of sending only."""
        draw, loop = self._draw, asyncio.get_running_loop()
        phase = draw.choice(
            ("in the body", "in the queue", "while reading", "while writing", "at the end", "unstreamed")
        )
        fields = self._fields(stream=phase != "unstreamed", max_tokens=draw.randrange(1, 60))
        if phase == "while reading":
            fields |= {"prompt": self._text(draw.randrange(500, 4000)), "return_progress": True}
        raw = http_request("POST", COMPLETION, fields)
        wanted = {"while reading": b"prompt_progress", "while writing": b'"text":', "at the end": b"[DONE]"}.get(phase)
        async with connected(self._port, self._source) as found:
            await loop.sock_sendall(found, raw[: draw.randrange(1, len(raw))] if phase == "in the body" else raw)
            if wanted:
                came = b""
                async with asyncio.timeout(PATIENCE_S):
                    while wanted not in came and (piece := await loop.sock_recv(found, 4096)):
                        came = came[-100:] + piece
            else:
                await asyncio.sleep(draw.uniform(0, 0.05) if phase == "in the queue" else draw.uniform(0, 2))
            way = draw.choice(("end", "reset", "end of sending"))
            if way == "reset":
                found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            elif way == "end of sending":
                found.shutdown(socket.SHUT_WR)
                await asyncio.sleep(draw.uniform(0, 5))
            self._count(phase)

    async def _fuzzed_body(self) -> None:
        raw, broken = RequestFuzzer(self._draw).request()
        try:
            reply = await ask_from(self._source, self._port, raw, 5.0 if broken else PATIENCE_S)
            self._tally.take(self._kind, raw, reply, broken=broken)
        except (TimeoutError, OSError, ValueError) as error:
            # A client that sends more than its turns leaves some of it waiting: what never ends is still there when the
            # load has ended.
            if not broken and not isinstance(error, TimeoutError):
                self._tally.faults.append({"kind": self._kind, "error": repr(error), "request": repr(raw[:1000])})
            self._tally.bodies += 1
            raise
        self._tally.bodies += 1

    async def _control_tokens(self) -> None:
        draw = self._draw
        words = [*PROMPTS, *_CONTROL, *_CONTROL]
        said = ["".join(draw.choices(words, k=draw.randrange(1, 30))) for _ in range(draw.randrange(1, 6))]
        roles = [draw.choice(("system", "user", "assistant")) for _ in said[1:]]
        fields = self._fields(max_tokens=draw.randrange(1, 40), stream=draw.random() < 0.5)
        prompt: object = fields.pop("prompt")
        if draw.random() < 0.5:
            roles.append(draw.choice(("user", "user", "assistant", "<s>", "tool")))
            fields["messages"] = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
            await self._ask(http_request("POST", CHAT, fields))
            return
        prompt = draw.choice((said[0], [0, 1, 2] * 9, [1] * 50, [-1], [10**9], [2**63], [0.5], [True]))
        await self._ask(http_request("POST", COMPLETION, fields | {"prompt": prompt, "stop": draw.choice(_CONTROL)}))

    async def _uploads(self) -> None:
        """The largest bodies, and beyond that; two of the same at once; long texts, for which somebody waits or not."""
        draw, name = self._draw, f"hostile-{self._number}-{self._draw.randrange(4)}"
        choice = draw.choice(("largest", "largest text", "too long", "said to be too long", "twice", "long", "left"))
        if choice == "largest":
            await self._ask(upload_request(name, "a" * _TEXT_BYTES))
        elif choice == "largest text":
            text = self._text(2000)
            await self._ask(upload_request(name, (text * (_TEXT_BYTES // len(text) + 1))[:_TEXT_BYTES]))
        elif choice == "too long":
            await self._ask(http_request("POST", CHAT, _spaces() + b"{}"))
        elif choice == "said to be too long":
            raw = http_request("POST", CONTEXTS, b"").replace(b"Content-Length: 0", b"Content-Length: 10000000000")
            await self._ask(raw)
        elif choice == "long":
            await self._ask(upload_request(name, self._text(20_000)))
        elif choice == "twice":
            raw = upload_request(name, self._text(1500))
            await asyncio.gather(self._ask(raw), self._ask(raw, source=self._other))
            await self._ask(http_request("DELETE", f"{CONTEXTS}/{name}"))
        else:
            await self._ask_and_leave(upload_request(name, self._text(20_000)), draw.uniform(1, 20))

    async def _contexts(self) -> None:
        """Contexts that are removed while they are asked about, and names that are none."""
        draw, name = self._draw, f"hostile-{self._number}"
        if draw.random() < 0.6:
            odd = draw.choice(_NAMES)
            await self._ask(upload_request(odd, "A text."))
            await self._ask(http_request("DELETE", f"{CONTEXTS}/{urllib.parse.quote(odd[:2000], safe='')}"))
            await self._ask(http_request("GET", CONTEXTS))
            await self._ask(
                http_request("POST", CHAT, {"messages": [{"role": "user", "content": "?"}], "context": odd})
            )
            return
        await self._ask(upload_request(name, self._text(draw.randrange(100, 1000))))
        question = {
            "messages": [{"role": "user", "content": "Who?"}],
            "context": name,
            "max_tokens": 100,
            "stream": True,
        }
        asked = http_request("POST", CHAT, question)
        remove = http_request("DELETE", f"{CONTEXTS}/{name}")

        async def soon() -> None:
            await asyncio.sleep(draw.uniform(0, 1))
            await self._ask(remove)

        await asyncio.gather(self._ask(asked), self._ask(asked, source=self._other), soon(), soon())

    async def _forms(self) -> None:
        """Answers in a form that takes long to compile, has much to remember, or is none; each another one."""
        draw = self._draw
        fields = self._fields(stream=draw.random() < 0.5, max_tokens=draw.randrange(1, 60))
        kind, source = draw.choice(_FORMS)(draw.randrange(10**9))
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": source}}
        path = draw.choice((CHAT, COMPLETION, MESSAGES)) if kind == "schema" else COMPLETION
        if path != COMPLETION:
            fields["messages"] = [{"role": "user", "content": fields.pop("prompt")}]
        if path == MESSAGES:
            fields["output_config"] = {"format": {"type": "json_schema", "schema": source}}
        else:
            fields |= {"n": draw.choice((1, 8)), **({"response_format": form} if kind == "schema" else {kind: source})}
        await self._ask(http_request("POST", path, fields))

    async def _messages(self) -> None:
        """Anthropic's form: many blocks, many and large tools, variables for the template that fill a body."""
        draw, many = self._draw, self._draw.choice((1, 100, 3000))
        said: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "Why?"}] * many}]
        fields: dict[str, Any] = {"max_tokens": draw.randrange(1, 40), "messages": said}
        choice = draw.choice(("blocks", "calls", "tools", "variables", "system"))
        if choice == "calls":
            calls = [{"type": "tool_use", "id": f"{at}", "name": "f", "input": {"a": [at]}} for at in range(many)]
            results = [{"type": "tool_result", "tool_use_id": f"{at}", "content": "b"} for at in range(many)]
            said += [{"role": "assistant", "content": calls}, {"role": "user", "content": results}]
        elif choice == "tools":
            schema = _wide_schema(draw.randrange(10**6))[1]
            fields |= {"tool_choice": {"type": draw.choice(("auto", "any", "none"))}}
            fields["tools"] = [
                {"name": f"f{at}", "input_schema": schema, "strict": True} for at in range(many // 10 + 1)
            ]
        elif choice == "variables":
            fields["chat_template_kwargs"] = {"a": {f"{at}": {} for at in range(120_000)}}
        elif choice == "system":
            fields["system"] = [{"type": "text", "text": "Be brief. " * 20}] * many
        path = draw.choice((MESSAGES, MESSAGES, COUNT_TOKENS))
        raw = http_request("POST", path, fields)
        await self._together(draw.randrange(1, 5), lambda: self._ask_and_leave(raw, draw.uniform(5, 120)))

    async def _together(self, count: int, act: Callable[[], Awaitable[None]]) -> None:
        """Does something several times at once; one that fails ends no other."""

        async def one() -> None:
            try:
                await act()
            except (OSError, ValueError) as error:
                self._count("reset" if isinstance(error, ConnectionError) else type(error).__name__)

        await asyncio.gather(*(one() for _ in range(count)))

    async def _wait_at(self, found: socket.socket, seconds: float) -> None:
        """Sends nothing more for so long, and takes what comes: counts how it ends."""
        loop, came = asyncio.get_running_loop(), b""
        try:
            async with asyncio.timeout(seconds):
                while len(came) < 2**20 and (piece := await loop.sock_recv(found, 65536)):
                    came += piece
            ended = True
        except TimeoutError:
            ended = False
        self._count_begun(came, "closed by the server" if ended else "held", "" if ended else ", held")

    def _count_begun(self, came: bytes, otherwise: str, more: str = "") -> None:
        """Counts the status of a reply that has begun, with what else is said of it; or `otherwise`, if none has."""
        if not came:
            self._count(otherwise)
            return
        self._count(f"{came.split(b' ', 2)[1].decode('latin-1')}{more}")
        if came.startswith(b"HTTP/1.1 5") and not came.startswith(b"HTTP/1.1 503"):
            self._tally.take(self._kind, b"(a connection that sends nothing more)", reply_of(came))

    def _text(self, words: int) -> str:
        """A text of about so many words, which begins at a random day of this client's log."""
        book = self._book
        book.write(words + 2000)
        days = book.written
        first = self._draw.randrange(len(days) // 2) if words < 5000 else 0
        text, have = [], 0
        for day in days[first:]:
            if have >= words:
                break
            text.append(day.text)
            have += len(day.text.split())
        return "\n\n".join(text)


KINDS = (
    *("long stops", "many answers", "stalled bodies", "slow heads", "unread streams", "disconnects", "fuzzed bodies"),
    *("control tokens", "uploads", "contexts", "slow readers", "floods", "wide bodies", "forms", "messages", "hoards"),
)


def _wide_schema(seed: int) -> tuple[str, Any]:
    return "schema", {"type": "object", "properties": {f"p{seed}_{at}": {"type": "string"} for at in range(1000)}}


def _alternatives(seed: int) -> tuple[str, Any]:
    return "schema", {"anyOf": [{"const": f"{seed} {at} {'a' * (at % 50)}"} for at in range(1000)]}


def _nested_schema(seed: int) -> tuple[str, Any]:
    found: dict[str, Any] = {"const": seed}
    for _ in range(seed % 70):
        found = {"type": "array", "items": found}
    return "schema", found


def _many_states(seed: int) -> tuple[str, Any]:
    return "regex", f"([a-z ,.])*a[a-z ,.]{{{400 + seed % 100}}}"


def _many_terminals(seed: int) -> tuple[str, Any]:
    each = (f"T{at}: /[a-z ]*{chr(97 + at % 26)}[a-z ]{{{at % 20}}}{seed % 10}/" for at in range(300))
    return "grammar", "\n".join((f"start: ({' | '.join(f'T{at}' for at in range(300))})+", *each))


def _no_form(seed: int) -> tuple[str, Any]:
    return random.Random(seed).choice(
        (
            *(
                ("regex", "("),
                ("regex", "a{1000000}"),
                ("regex", "a" * 2**15),
                ("grammar", "start: start"),
                ("grammar", ""),
            ),
            *(
                ("schema", {"$ref": "#/nowhere"}),
                ("schema", {"$ref": "#"}),
                ("schema", {"type": "integer", "minimum": 1e308}),
            ),
            *(
                ("schema", {"enum": []}),
                ("schema", {"pattern": "(?=a)", "type": "string"}),
                ("grammar", "root ::= root"),
            ),
        )
    )


_FORMS: tuple[Callable[[int], tuple[str, Any]], ...] = (
    *(_wide_schema, _alternatives, _nested_schema, _many_states, _many_terminals, _no_form),
)
"""The field, or `schema`, and what it has; another one for each number."""


@functools.cache
def _spaces() -> bytes:
    return b" " * _BODY_BYTES


class RequestFuzzer:
    """Draws requests whose body, type, method, path or HTTP is not what it should be."""

    def __init__(self, draw: random.Random) -> None:
        self._draw, self._bodies = draw, BodyFuzzer(draw)

    def request(self) -> tuple[bytes, bool]:
        """A request, and whether its HTTP is broken, so that a server may close the connection without an answer."""
        draw = self._draw
        path, body = self._bodies.body()
        raw, choice = http_request("POST", path, body), draw.random()
        if choice < 0.7:
            return raw, False
        if choice < 0.75:
            kind = draw.choice(
                ("text/plain", "multipart/form-data", "multipart/form-data; boundary=edge", "", "a" * 300)
            )
            return http_request("POST", draw.choice((path, CONTEXTS)), body, kind), False
        if choice < 0.85:
            method = draw.choice(("GET", "PUT", "PATCH", "DELETE", "OPTIONS", "POST", "TRACE", "post", "A" * 50))
            where = draw.choice(
                (path, "/", "/v1", f"{path}/", f"{path}/%00", f"{path}?a=b", "/v1//models", "/" + "a" * 5000)
            )
            return http_request(method, where, body), False
        return self._broken(raw), True

    def _broken(self, raw: bytes) -> bytes:
        draw = self._draw
        head, _, body = raw.partition(b"\r\n\r\n")
        length = f"Content-Length: {len(body)}".encode()
        at = draw.randrange(len(head))
        return draw.choice(
            (
                head[:at] + bytes([draw.randrange(256)]) + head[at + 1 :] + b"\r\n\r\n" + body,
                raw.replace(length, f"Content-Length: {len(body) + draw.randrange(-5, 50)}".encode()),
                raw.replace(
                    length, draw.choice((b"Content-Length: -1", b"Content-Length: a", b"Content-Length: " + b"9" * 40))
                ),
                raw.replace(length, b"Transfer-Encoding: chunked"),
                raw.replace(length, b"Transfer-Encoding: chunked\r\n" + length),
                raw.replace(b"HTTP/1.1", draw.choice((b"HTTP/9.9", b"HTTP/1.0", b"HTTP/2", b""))),
                raw.replace(
                    b"Host: 127.0.0.1\r\n", draw.choice((b"", b"Host: example.org\r\n", b"Host: a\r\nHost: b\r\n"))
                ),
                raw.replace(b"Connection: close", b"X-Long: " + b"a" * draw.randrange(2**17)),
                raw.replace(b"Connection: close", b"Expect: 100-continue\r\nUpgrade: websocket\r\nConnection: upgrade"),
                draw.randbytes(draw.randrange(1, 500)) + b"\r\n\r\n",
                b"\x16\x03\x01\x02\x00" + draw.randbytes(200),
                raw + raw,
            )
        )


def hostile_clients(
    kinds: Sequence[str], count: int, port: int, seed: str, tally: Tally
) -> dict[str, list[HostileClient]]:
    """So many clients in all, by kind."""
    found: dict[str, list[HostileClient]] = {}
    for number in range(count):
        kind = kinds[number % len(kinds)]
        found.setdefault(kind, []).append(HostileClient(kind, number, port, seed, tally))
    return found
