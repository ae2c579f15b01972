"""The events that the engine's thread sends about a piece of work, until the thread that serves HTTP takes them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

from ...session.wire import BodyError
from ..answering.jobs import Complete, Event, Failed, Piece, Progress


class Events:
    """The events of one piece of work. Waiting events are joined: an answer has at most one piece, and only the newest
    progress is kept. So a slow reader gets fewer and longer pieces. Must be made in the event loop that takes the
    events."""

    def __init__(self, most_bytes: int) -> None:
        """Args:
        most_bytes: maximum bytes of waiting pieces. If there are more, an error replaces them, and nothing follows.
        """
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
        """Sends an event, from any thread. After the end of the event loop, it is dropped."""
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
        """The next event; `None` if there was none for `timeout_s` seconds."""
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
