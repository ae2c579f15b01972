"""The events that the engine's thread sends about a piece of work, until the thread that serves HTTP takes them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

from ...session.wire import BodyError
from ..answering.jobs import Complete, Event, Failed, Piece, Progress

_HELD_FROM = 2**16
"""Bytes of pieces that wait without being counted for their client. Of most streams that are read, fewer wait."""


class Events:
    """The events of one piece of work. Waiting events are joined: an answer has at most one piece, and only the newest
    progress is kept. So a slow reader gets fewer and longer pieces. Must be made in the event loop that takes the
    events."""

    def __init__(self, most_bytes: int, hold: Callable[[int], None] = lambda num_bytes: None) -> None:
        """Args:
        most_bytes: maximum bytes of waiting pieces. If there are more, an error replaces them, and nothing follows.
        hold: called in the loop with the number of bytes above `_HELD_FROM` of all pieces that wait, and of the event
            that was taken last, if this number has changed much.
        """
        self._most_bytes, self._hold = most_bytes, hold
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._waiting: dict[object, Event] = {}
        self._num_bytes = 0  # of pieces that wait
        self._taken = 0  # of the event that was taken last, which is being sent
        self._held = 0  # what `hold` was called with
        self._asked = False  # whether an event was asked for when none waited
        self._came = asyncio.Event()
        self._too_many = self._told = False
        self.on_too_many: Callable[[], None] = lambda: None
        """Called in the loop, once, when more than `most_bytes` waited."""

    def send(self, event: Event) -> None:
        """Sends an event, from any thread. After the end of the event loop, it is dropped."""
        with self._lock:
            if self._too_many:
                return
            wakes = not self._waiting
            self._add(event)
            self._too_many = self._num_bytes > self._most_bytes
            if self._too_many:
                error = BodyError(f"more than {self._most_bytes:,} bytes wait to be read", code="not_read", status=500)
                self._waiting = {Failed: Failed(error)}
                self._num_bytes = 0
            wakes |= self._too_many or self._num_bytes + self._taken > self._held + 2 * _HELD_FROM
        if wakes:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._wake)

    def are_taken(self) -> bool:
        """Whether no event waits, and none is being sent: the next one was asked for. May be called from any thread."""
        return self._asked and not self._waiting

    def _add(self, event: Event) -> None:
        key = type(event), event.number if isinstance(event, Piece | Complete | Progress) else 0
        if isinstance(event, Piece):
            self._num_bytes += event.num_bytes
            before = self._waiting.get(key)
            if isinstance(before, Piece):
                event = before.joined(event)
        self._waiting[key] = event

    def _wake(self) -> None:
        self._count()
        self._came.set()
        if self._too_many and not self._told:
            self._told = True
            self.on_too_many()

    def _count(self) -> None:
        """Calls `hold`."""
        with self._lock:
            held = max(0, self._num_bytes + self._taken - _HELD_FROM)
            if held == self._held:
                return
            self._held = held
        self._hold(held)

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
            self._asked = key is None
            event = None if key is None else self._waiting.pop(key)
            self._taken = event.num_bytes if isinstance(event, Piece) else 0
            self._num_bytes -= self._taken
        self._count()
        return event
