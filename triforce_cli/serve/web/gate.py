"""The layer around the routes: access control, limits for bodies, errors in the format of their endpoint, and a line in
the log for each request, without its contents."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...session.anthropic import ENDPOINTS, message_error
from ...session.response import error_body
from ...session.wire import CHAT, COMPLETION, MESSAGES, BodyError
from ..access import Access
from ..answering.arrivals import Arrivals
from ..answering.jobs import as_body_error
from ..answering.metrics import Metrics
from ..http_limits import ServerLimits
from .connection import owner

_ANSWERED = (CHAT, COMPLETION, MESSAGES)
"""The endpoints whose requests an idle engine waits for, see `Arrivals`."""

_UNFINISHED = ("body_too_long", "body_too_slow", "too_much_held", "disk_full")
"""Codes of errors after which the rest of a body may still arrive. Nobody reads it, so the connection is closed."""

_DRAIN_S, _DRAIN_PAUSE_S = 10.0, 1.0
"""Maximum seconds for which the rest of such a body is read and dropped, in total and between two pieces of it. Most
clients send their whole body before they read. If the connection were closed before, they would never see the
error."""

_RETRY_AFTER_S = {"queue_full": 5, "too_much_held": 5, "loading": 5, "stopping": 30}
"""The number of seconds after which a client should try again, by the code of the error."""

_PIECE_BYTES = 2**16
"""How many bytes of a response are passed to its connection at a time. The rest waits here, where it is counted, until
these are read."""

GONE = 499
"""The status in the log if nobody waited for the response."""

_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


class Held:
    """The number of bytes of the bodies of all clients together, and of the bodies and unread answers of each client.
    If a client holds too much, its streams give way: first the one of which the most is unread."""

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits
        self._bodies = 0
        self._by_client = Counter[str]()
        self.streams: dict[Body, Callable[[], None]] = {}
        """The requests whose answers are streamed, each with what cuts the stream."""

    def add(self, client: str, num_bytes: int, *, answer: bool = False) -> None:
        """Adds bytes of a client.

        Args:
            answer: whether they belong to an answer. An answer is only refused if its client holds too much, because it
                is written already.

        Raises:
            BodyError: the limit is exceeded.
        """
        self._by_client[client] += num_bytes
        self._bodies += 0 if answer else num_bytes
        if self._bodies > self._limits.held_bytes and not answer:
            raise BodyError("too many long requests at a time; ask again later", code="too_much_held", status=503)
        most = self._limits.client_held_bytes
        if self._by_client[client] <= most:
            return
        unread = sorted(
            (one for one in self.streams if one.client == client and one.unread), key=lambda one: one.unread
        )
        if self._by_client[client] - sum(one.unread for one in unread) > most:  # it would not help to cut them
            what = (
                "too many of your long answers wait to be read; stream them"
                if answer
                else "you send too many long requests at a time, or leave too many long answers unread"
            )
            raise BodyError(what, code="too_much_held", status=429)
        while self._by_client[client] > most:
            self.cut(unread.pop())

    def cut(self, body: Body) -> None:
        """Cuts the stream of a request, if it has begun. Nothing is held for the request any more."""
        cut = self.streams.get(body, lambda: None)
        body.end()
        cut()

    def drop(self, client: str, num_bytes: int, *, answer: bool = False) -> None:
        """Removes bytes of a client."""
        self._bodies -= 0 if answer else num_bytes
        self._by_client[client] -= num_bytes
        if not self._by_client[client]:
            del self._by_client[client]


class Body:
    """The memory of one request: its body while it arrives, and until its prompt is made. Then its answer, until all
    except the last piece of it was read; if the answer is streamed, the part of it that waits to be read."""

    def __init__(self, receive: Receive, held: Held, client: str, limits: ServerLimits, arrivals: Arrivals) -> None:
        self.client = client
        """The client of the request, see `Access.client`."""
        self._receive, self._held, self._limits, self._arrivals = receive, held, limits, arrivals
        self._began = time.monotonic()
        self._come = self._counted = 0  # bytes that have arrived, and those of them that are held
        self._is_whole = self._has_ended = False
        self.unread = 0
        """The number of bytes of the answer that are held until the client has read them."""

    async def receive(self) -> Message:
        """The next message of the request.

        Raises:
            BodyError: the body is too long or arrives too slowly, or too much is held.
        """
        if self._is_whole:  # what follows is that the client goes away
            return await self._receive()
        ends = self._began + self._limits.body_s + self._come / self._limits.body_rate
        try:
            async with asyncio.timeout(ends - time.monotonic()):
                message = await self._receive()
        except TimeoutError:
            raise BodyError(
                f"the body arrives too slowly: it may take {self._limits.body_s:g} s, and another second for every "
                f"{self._limits.body_rate:,.0f} bytes that have arrived",
                code="body_too_slow",
                status=408,
            ) from None
        self._is_whole = not message.get("more_body", False)
        num_bytes = len(message.get("body", b""))
        self._come += num_bytes
        if self._come > self._limits.body_bytes:
            raise self.too_long(self._limits)
        self._counted += num_bytes
        self._held.add(self.client, num_bytes)
        return message

    async def drop_rest(self, headers: Headers) -> None:
        """Reads and drops what still arrives of a body that is refused, and releases what came of it. Nothing arrives
        from a client that waits to be asked for it (`Expect` in its headers)."""
        self.release()
        if "expect" in headers and not self._come:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_S):
                while not self._is_whole:
                    async with asyncio.timeout(_DRAIN_PAUSE_S):
                        message = await self._receive()
                    self._is_whole = not message.get("more_body", False)

    def hold_answer(self, num_bytes: int) -> None:
        """Notes how many bytes of the answer are held now.

        Raises:
            BodyError: they are more than before, and the client's requests hold too much.
        """
        more = 0 if self._has_ended else num_bytes - self.unread
        self.unread += more
        if more > 0:
            self._held.add(self.client, more, answer=True)
        else:
            self._held.drop(self.client, -more, answer=True)

    def hold_unread(self, num_bytes: int) -> None:
        """`hold_answer` of an answer that is streamed. Its stream, or others of the client, may be cut."""
        try:
            self.hold_answer(num_bytes)
        except BodyError:  # there would be too much without streams, too
            self._held.cut(self)

    def begin_stream(self, cut: Callable[[], None]) -> None:
        """Notes that the answer is streamed. `cut` cuts the stream; it may be called until `end`."""
        self._held.streams[self] = cut

    def release(self) -> None:
        """Notes that the body is not held any more: the prompt is made, or will not be."""
        self._arrivals.drop(self)
        self._held.drop(self.client, self._counted)
        self._counted = 0

    def end(self) -> None:
        """Notes that nothing is held any more, and nothing will be."""
        self._held.streams.pop(self, None)
        self.release()
        self.hold_answer(0)
        self._has_ended = True

    @staticmethod
    def too_long(limits: ServerLimits) -> BodyError:
        return BodyError(f"the body is longer than {limits.body_bytes:,} bytes", code="body_too_long", status=413)


class Gate:
    """An ASGI application around another one. A request's scope has its `Body`, to be released early, as
    `triforce_body`, and the data for its line in the log as `triforce`."""

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        metrics: Metrics,
        routes: Callable[[str], str],
        log: Callable[[str], None],
        hidden: Mapping[str, str],
        limits: ServerLimits,
        arrivals: Arrivals,
    ) -> None:
        """Args:
        routes: returns the route of a path, for logs, because a path may contain anything.
        log: writes a line.
        hidden: the words that replace paths of this machine in messages, because clients must not see these paths.
        arrivals: are told of requests.
        """
        self._app, self._access, self._metrics, self._routes, self._log = app, access, metrics, routes, log
        self._hidden, self._limits, self._arrivals = hidden, limits, arrivals
        self._held = Held(limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        began, status, noted = time.perf_counter(), GONE, dict[str, Any]()
        client = scope.get("client")
        whose = self._access.client(Headers(scope=scope), client)
        body = Body(receive, self._held, whose, self._limits, self._arrivals)
        if scope["method"] == "POST" and scope["path"] in _ANSWERED:
            self._arrivals.add(body)
        scope["triforce"], scope["triforce_body"] = noted, body

        async def noting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            raw = memoryview(message.get("body", b""))
            last = max(0, len(raw) - 1) // _PIECE_BYTES * _PIECE_BYTES
            for at in range(0, last, _PIECE_BYTES):
                await send({**message, "body": bytes(raw[at : at + _PIECE_BYTES]), "more_body": True})
            await send({**message, "body": bytes(raw[last:])} if last else message)

        try:
            error = await self._answer(scope, body.receive, noting_send)
            if error is not None and status == GONE:
                response = await error_response(error, self._hidden, scope)
                await response(scope, receive, noting_send)
        finally:
            body.end()
            route = self._routes(scope["path"])
            line = {
                "time": round(time.time(), 3),
                "client": client[0] if client else None,
                "method": scope["method"],
                "route": route,
                "status": status,
                "ms": round((time.perf_counter() - began) * 1e3, 1),
                **noted,
            }
            self._log(json.dumps(line))
            self._metrics.requests.labels(route, status).inc()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> BodyError | None:
        """Lets the routes answer. Returns the error if they did not answer."""
        headers = Headers(scope=scope)
        peer = await owner(scope) if self._access.asks_owner(scope["path"]) else None
        refused = self._access.refusal(scope["path"], headers, peer)
        length = headers.get("content-length", "")
        if refused is None and length.isdecimal() and int(length[:20]) > self._limits.body_bytes:
            refused = Body.too_long(self._limits)
        if refused is not None:
            return refused
        try:
            await self._app(scope, receive, send)
        except Exception as error:  # where it was not answered already
            return as_body_error(error)
        return None


async def error_response(error: BodyError, hidden: Mapping[str, str], scope: Scope) -> JSONResponse:
    """The response for an error, in the format of the request's endpoint. It can be sent now: what may still arrive of
    a refused body was dropped."""
    headers = dict(_HEADERS)
    if error.code in _RETRY_AFTER_S:
        headers["Retry-After"] = str(_RETRY_AFTER_S[error.code])
    if error.code in _UNFINISHED:
        await scope["triforce_body"].drop_rest(Headers(scope=scope))
        headers["Connection"] = "close"
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(public_error(error, hidden, scope["path"]), error.status, headers)


def public_error(error: BodyError, hidden: Mapping[str, str], path: str) -> dict[str, Any]:
    """The body for an error, in the format of the endpoint at `path`, without paths of this machine."""
    body = message_error(error) if path in ENDPOINTS else error_body(error)
    body["error"]["message"] = without_paths(body["error"]["message"], hidden)
    return body


_NAMED = (CHAT, COMPLETION)
"""Endpoints that messages name."""

_QUOTED_PATH = re.compile(r"""(?<=(['"`]))/(?!/)[^'"`\n]+(?=\1)""")
_PATH = re.compile(r"""(?<![\w./~-])/(?!/)[^\s'"`]*[^\s'"`.,;:!?)\]}>]""")


def without_paths(text: str, hidden: Mapping[str, str]) -> str:
    """Replaces absolute paths of files in a text by their last name.

    Args:
        hidden: words for known paths, which may contain spaces.
    """
    for place, word in sorted(hidden.items(), key=lambda item: -len(item[0])):
        if place.strip("./"):
            text = text.replace(f"{place}/", "/")
            text = re.sub(rf"{re.escape(place)}(?![\w-])", lambda _, word=word: word, text)
    for pattern in (_QUOTED_PATH, _PATH):
        text = pattern.sub(lambda found: found[0] if found[0] in _NAMED else PurePosixPath(found[0]).name, text)
    return text
