"""Requests that have arrived and are not in the queue yet: an idle engine waits a moment for them.

Clients that ask at the same time are answered much sooner if their prompts are read in one pass. But the first of their
requests is in the queue several milliseconds before the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_NEW_S = 0.03
"""For so many seconds an arrived request is waited for. It also limits how long the first one in the queue waits."""

_LOOKS_S = 0.0002
"""Seconds between two looks, see `Arrivals.wait_until`."""


class Arrivals:
    """The requests that have arrived and are not in the queue yet. One thread changes them, another one waits."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], object] = time.sleep
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._since: dict[object, float] = {}  # when each arrived

    def __len__(self) -> int:
        return len(self._since)

    def add(self, request: object) -> None:
        """Notes that a request arrives."""
        self._since[request] = self._clock()

    def drop(self, request: object) -> None:
        """Notes that a request is in the queue, or will not be."""
        self._since.pop(request, None)

    def wait(self) -> None:
        """Waits until all requests that have arrived just now are in the queue."""
        self.wait_until(
            lambda: all(self._clock() - since >= _NEW_S for since in list(self._since.values())), most_s=_NEW_S
        )

    def wait_until(self, done: Callable[[], bool], *, most_s: float) -> None:
        """Looks now and then whether something is done, for at most so many seconds."""
        ends = self._clock() + most_s
        while self._clock() < ends and not done():
            self._sleep(_LOOKS_S)
