"""A client's connection. It is closed if the client does not read the waiting data, or sends no request. It also finds
the account of the client."""

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
"""The names under which a request's scope has the methods `Connection.cut` and `Connection.owner`."""

_LOOKS = 4
"""How often a connection is checked within the time that a client has to read data or to send a request."""

_PROGRESS = 2**14
"""Minimum number of bytes that a client must read within its time, if that many wait."""

_RESET = struct.pack("ii", 1, 0)
"""A value for `SO_LINGER`: when a socket is closed, data that were not delivered are dropped."""


class _Counted:
    """A transport that counts the bytes written to it, and the bytes that the client has not read yet."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.written = 0

    @property
    def waiting(self) -> int:
        """The number of bytes that wait in this process and, if the system reports it (Linux), in the system."""
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
    """The open connections, and their maximum number."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: dict[Connection, str] = {}  # and their clients, in the order in which they were opened

    def add(self, connection: Connection, client: str) -> None:
        """Adds a new connection. If there are too many, one is closed that is idle or whose data are not read: of the
        client that has the most of these, the one that has been so for the longest time."""
        self._open[connection] = client
        if len(self._open) > self._most:
            useless = [one for one in self._open if one.asks_nothing or one.is_unread]
            count = Counter(self._open[one] for one in useless)
            if useless:  # the new one may be closing already
                found = max(useless, key=lambda one: (count[self._open[one]], one.useless_s))
                found.cut(unread=not found.asks_nothing)

    def drop(self, connection: Connection) -> None:
        """Removes a connection that is closed."""
        self._open.pop(connection, None)


class Connection(H11Protocol):
    """uvicorn's connection, with limits for clients that do not read, or send no request."""

    def __init__(
        self,
        limits: ServerLimits,
        all_open: Connections,
        on_unread: Callable[[], None],
        owners: Owners,
        **others: Any,
    ) -> None:
        """Args:
        all_open: the connections to which this one is added.
        on_unread: called if the connection is closed because the client does not read the waiting data.
        owners: looks up the account of the client.
        others: uvicorn's arguments.
        """
        super().__init__(**others)
        self._limits, self._all_open, self._on_unread, self._owners = limits, all_open, on_unread, owners
        # When the client last took all that waited before, or enough of it: bytes taken and waiting, the loop's time.
        self._taken = self._waited = 0
        self._took_at = 0.0
        self._idle_since = self.loop.time()
        self._was_cut = False
        self._timer: asyncio.TimerHandle | None = None
        self._owner: asyncio.Future[int | None] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered, and none has arrived with its complete head."""
        return self.cycle is None or self.cycle.response_complete  # pyright: ignore[reportUnnecessaryComparison]

    @property
    def asks_nothing(self) -> bool:
        """Whether there is no complete request that is not answered yet, and the connection is not being closed."""
        return not self.transport.is_closing() and (self.is_idle or self.cycle.more_body)

    @property
    def is_unread(self) -> bool:
        """Whether so much waits for the client that nothing more is written, and the connection is not being closed."""
        return not self.transport.is_closing() and self.flow.write_paused

    @property
    def useless_s(self) -> float:
        """For how many seconds the connection has been idle, or nothing or almost nothing was read of its data."""
        return self.loop.time() - (self._idle_since if self.asks_nothing else self._took_at)

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
        """Closes the connection at once. Data that wait for the client are dropped.

        Args:
            unread: whether the reason is that the client does not read.
        """
        if unread and not self._was_cut:
            if self.cycle and not self.cycle.response_complete:
                self.cycle.scope.get("triforce", {})["unread"] = True  # for the log
            self._on_unread()
        self._was_cut = True
        with suppress(OSError):  # the client may have gone just now
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.transport.abort()

    async def owner(self) -> int | None:
        """The user id of the other end; `None` if it is not known. Looked up once."""
        if self.server is None or self.client is None or self.server[1] is None:
            return None
        if self._owner is None:
            ends = (self.server[0], self.server[1]), self.client
            self._owner = asyncio.ensure_future(self._owners.owner_of(ends))
        found = await self._owner
        return None if self.transport.is_closing() else found

    def _look(self) -> None:
        """Closes the connection if the client has read nothing or almost nothing, or sent no request, for too long."""
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
    """Closes the connection of a request, because nobody reads the response."""
    scope["state"][_CUT]()


async def owner(scope: Scope) -> int | None:
    """The user id of the other end of a request's connection; `None` if it is not known."""
    return await scope["state"][_OWNER]()
