"""What the engine's thread tells of a piece of work, until the thread that serves HTTP takes it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

from ...session.wire import BodyError
from ..answering.jobs import Complete, Event, Failed, Piece, Progress


class Events:
    """Of one piece of work. What waits is joined: of an answer there is one piece, and of how a prompt is read the
    newest word. So whoever takes slowly gets fewer and longer pieces. Made in the loop that takes them."""

    def __init__(self, most_bytes: int) -> None:
        """Args: `most_bytes` of pieces wait; beyond that they are dropped for an error, and nothing follows."""
        self._most_bytes = most_bytes
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._waiting: dict[object, Event] = {}
        self._num_bytes = 0  # of pieces that wait
        self._came = asyncio.Event()
        self._too_many = self._told = False
        self.on_too_many: Callable[[], None] = lambda: None
        """Called in the loop, once, when more than `most_bytes` waited."""

    def send(self, event: Event) -> None:
        """From any thread; once the loop has ended, nobody listens."""
        with self._lock:
            if self._too_many:
                return
            self._add(event)
            self._too_many = self._num_bytes > self._most_bytes
            if self._too_many:
                error = BodyError(f"more than {self._most_bytes:,} bytes wait to be read", code="not_read", status=500)
                self._waiting = {Failed: Failed(error)}
            wake = self._wake if self._too_many or len(self._waiting) == 1 else None
        if wake:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(wake)

    def _add(self, event: Event) -> None:
        key = type(event), event.number if isinstance(event, Piece | Complete | Progress) else 0
        if isinstance(event, Piece):
            self._num_bytes += event.num_bytes
            before = self._waiting.get(key)
            if isinstance(before, Piece):
                event = before.joined(event)
        self._waiting[key] = event

    def _wake(self) -> None:
        self._came.set()
        if self._too_many and not self._told:
            self._told = True
            self.on_too_many()

    async def next(self, timeout_s: float | None = None) -> Event | None:
        """The next one; `None` where there was none for so long."""
        try:
            async with asyncio.timeout(timeout_s):
                while (event := self._take()) is None:
                    await self._came.wait()
                return event
        except TimeoutError:
            return None

    def _take(self) -> Event | None:
        with self._lock:
            self._came.clear()
            key = next(iter(self._waiting), None)
            if key is None:
                return None
            event = self._waiting.pop(key)
            if isinstance(event, Piece):
                self._num_bytes -= event.num_bytes
            return event
