"""A client's connection: it is closed where the client does not take what waits for it, or asks nothing; and it knows
whose it is."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import sys
import termios
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..access import client_at
from ..http_limits import ServerLimits
from ..owner import Owners

_CUT, _OWNER = "cut", "owner"
"""Under these names a request's scope has what its connection can do: `Connection.cut` and `Connection.owner`."""

_LOOKS = 4
"""How many times it is checked, in the time that a client has, whether it takes or asks anything."""

_PROGRESS = 2**14
"""Bytes that a client must take at least in the time it has, where so many wait."""

_RESET = struct.pack("ii", 1, 0)
"""Of `SO_LINGER`: what was not delivered is dropped when a socket is closed."""


class _Counted:
    """A transport that counts what it is given and what the client has not taken of that, in bytes."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.written = 0

    @property
    def waiting(self) -> int:
        """Here, and where the system tells it (Linux) also there."""
        try:
            found = fcntl.ioctl(self._transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        except (OSError, ValueError):  # another system, or closed
            return self._transport.get_write_buffer_size()
        return self._transport.get_write_buffer_size() + int.from_bytes(found, sys.byteorder)

    def write(self, data: bytes) -> None:
        self.written += len(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Connections:
    """Those that are open; about as many as there may be."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: dict[Connection, str] = {}  # and their clients, in the order in which they were opened

    def add(self, connection: Connection, client: str) -> None:
        """Takes up a new one. Where there are too many, an idle one is closed: the oldest of the client that has most
        of them."""
        self._open[connection] = client
        if len(self._open) > self._most:
            idle = [one for one in self._open if one.asks_nothing]
            count = Counter(self._open[one] for one in idle)
            if idle:  # the new one may be closing already
                max(idle, key=lambda one: count[self._open[one]]).cut()

    def drop(self, connection: Connection) -> None:
        """One is closed."""
        self._open.pop(connection, None)


class Connection(H11Protocol):
    """As uvicorn has it, but for clients who do not read, or ask nothing."""

    def __init__(
        self,
        limits: ServerLimits,
        all_open: Connections,
        on_unread: Callable[[], None],
        owners: Owners,
        **others: Any,
    ) -> None:
        """Args:
        all_open: to which this one is added.
        on_unread: called where it is closed as the client takes nothing of what waits for it.
        owners: looks up whose it is.
        others: uvicorn's own.
        """
        super().__init__(**others)
        self._limits, self._all_open, self._on_unread, self._owners = limits, all_open, on_unread, owners
        # When the client last took all that waited before, or enough of it: bytes taken and waiting, the loop's time.
        self._taken = self._waited = 0
        self._took_at = 0.0
        self._idle_since = self.loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._owner: asyncio.Future[int | None] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered, or has come with its whole head."""
        return self.cycle is None or self.cycle.response_complete  # pyright: ignore[reportUnnecessaryComparison]

    @property
    def asks_nothing(self) -> bool:
        """Whether no whole request has come that is not answered, and it is not being closed."""
        return not self.transport.is_closing() and (self.is_idle or self.cycle.more_body)

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._counted = _Counted(transport)
        super().connection_made(self._counted)  # pyright: ignore[reportArgumentType]
        self.app_state = {**self.app_state, _CUT: partial(self.cut, unread=True), _OWNER: self.owner}
        self._all_open.add(self, client_at(self.client))
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer:
            self._timer.cancel()
        self._all_open.drop(self)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._idle_since = self.loop.time()
        super().on_response_complete()

    def cut(self, unread: bool = False) -> None:
        """Closes it at once; what waits for the client is dropped.

        Args: `unread` is whether that is because the client takes nothing.
        """
        if unread:
            if self.cycle and not self.cycle.response_complete:
                self.cycle.scope.get("triforce", {})["unread"] = True  # for the log
            self._on_unread()
        with suppress(OSError):  # the client may have gone just now
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.transport.abort()

    async def owner(self) -> int | None:
        """The user id that holds its other end; `None` where that cannot be told. Looked up once."""
        if self.server is None or self.client is None or self.server[1] is None:
            return None
        if self._owner is None:
            ends = (self.server[0], self.server[1]), self.client
            self._owner = asyncio.ensure_future(self._owners.owner_of(ends))
        found = await self._owner
        return None if self.transport.is_closing() else found

    def _look(self) -> None:
        """Closes it where the client has taken nothing, or as good as nothing, or asked nothing for too long."""
        now, waiting = self.loop.time(), self._counted.waiting
        taken = self._counted.written - waiting
        if waiting == 0 or taken - self._taken >= min(self._waited, _PROGRESS):
            self._taken, self._waited, self._took_at = taken, waiting, now
        elif now - self._took_at >= self._limits.unread_s:
            self.cut(unread=True)
            return
        if waiting == 0 and self.is_idle and now - self._idle_since >= self._limits.idle_s:
            self.transport.close()
            return
        self._timer = self.loop.call_later(min(self._limits.unread_s, self._limits.idle_s) / _LOOKS, self._look)


def cut(scope: Scope) -> None:
    """Closes the connection that a request came by, as nobody reads what is sent."""
    scope["state"][_CUT]()


async def owner(scope: Scope) -> int | None:
    """The user id that holds the other end of the connection that a request came by; `None` where that cannot be
    told."""
    return await scope["state"][_OWNER]()
