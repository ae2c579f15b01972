"""A client's connection: it is closed where the client does not take what waits for it, and it knows whose it is."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import sys
import termios
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..owner import owner_of

_CUT, _OWNER = "cut", "owner"
"""Under these names a request's scope has what its connection can do: `Connection.cut` and `Connection.owner`."""

_LOOKS = 4
"""How many times it is checked, in the time that a client has, whether it takes anything."""

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


class Connection(H11Protocol):
    """As uvicorn has it, but for clients who do not read."""

    def __init__(self, unread_s: float, on_unread: Callable[[], None], lookups: Executor, **others: Any) -> None:
        """Args:
        unread_s: seconds in which the client may take nothing of what waits for it.
        on_unread: called where it is closed for that.
        lookups: where owners of connections are looked up.
        others: uvicorn's own.
        """
        super().__init__(**others)
        self._unread_s, self._on_unread, self._lookups = unread_s, on_unread, lookups
        self._taken = 0  # bytes, when it took some last
        self._took_at = 0.0  # by the loop's clock
        self._timer: asyncio.TimerHandle | None = None
        self._owner: asyncio.Future[int | None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._counted = _Counted(transport)
        super().connection_made(self._counted)  # pyright: ignore[reportArgumentType]
        self.app_state = {**self.app_state, _CUT: self.cut, _OWNER: self.owner}
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer:
            self._timer.cancel()
        super().connection_lost(exc)

    def cut(self) -> None:
        """Closes it at once; what waits for the client is dropped."""
        if self.cycle and not self.cycle.response_complete:
            self.cycle.scope.get("triforce", {})["unread"] = True  # for the log
        self._on_unread()
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.transport.abort()

    async def owner(self) -> int | None:
        """The user id that holds its other end; `None` where that cannot be told. Looked up once, beside the loop: it
        takes milliseconds."""
        if self.server is None or self.client is None or self.server[1] is None:
            return None
        found = self._owner
        if found is None:
            ours = self.server[0], self.server[1]
            found = self._owner = self.loop.run_in_executor(self._lookups, owner_of, ours, self.client)
        return await found

    def _look(self) -> None:
        """Closes it where the client has taken nothing for too long."""
        now, waiting = self.loop.time(), self._counted.waiting
        taken = self._counted.written - waiting
        if waiting == 0 or taken > self._taken:
            self._taken, self._took_at = taken, now
        elif now - self._took_at >= self._unread_s:
            self.cut()
            return
        self._timer = self.loop.call_later(self._unread_s / _LOOKS, self._look)


def cut(scope: Scope) -> None:
    """Closes the connection that a request came by, as nobody reads what is sent."""
    scope["state"][_CUT]()


async def owner(scope: Scope) -> int | None:
    """The user id that holds the other end of the connection that a request came by; `None` where that cannot be
    told."""
    return await scope["state"][_OWNER]()
