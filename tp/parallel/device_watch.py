"""The time limit for collectives of ranks on GPUs.

NCCL's collectives wait for the other ranks on the device, and the host waits for the device, where no error can be
raised. Without a time limit, the others would wait forever for a rank that hangs. PyTorch's own watchdog does not see
the collectives of a captured pass, and aborts the process without a message about what it waited for.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from ..errors import HangError
from .launch import record

_CHECK_S = 1.0
"""Seconds between two checks of the operations that are running."""


class Event(Protocol):
    """A mark behind the work that was submitted to a device, as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the device has reached the mark."""
        ...


class DeviceWatch:
    """A thread that ends this process if its GPU does not finish an operation within the time limit."""

    def __init__(self, rank: int, limit_s: float, end: Callable[[HangError], None] | None = None) -> None:
        """Starts the thread.

        Args:
            rank: the number of this rank, for messages.
            limit_s: the time limit in seconds.
            end: called once, with the error. By default, the error is recorded for the launcher, or printed if there is
                no launcher, and the process ends with the exit code of the error.
        """
        self._rank, self._limit_s, self._end = rank, limit_s, end or _end_process
        self._called: tuple[str, float] | None = None
        self._under_way: deque[tuple[str, float, Event]] = deque()
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, name="device watch", daemon=True).start()

    @contextmanager
    def call(self, kind: str) -> Iterator[None]:
        """A context in which an operation is called. The host may wait in it too: at the first call, NCCL connects the
        ranks."""
        self._called = kind, time.monotonic()
        try:
            yield
        finally:
            self._called = None

    def note(self, kind: str, event: Event) -> None:
        """Notes that an operation was just submitted to the device, and `event` behind it."""
        self._under_way.append((kind, time.monotonic(), event))

    def stop(self) -> None:
        """Ends the watch."""
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(min(_CHECK_S, self._limit_s / 10)):
            while self._under_way and _is_done(self._under_way[0][2]):
                self._under_way.popleft()
            oldest = self._under_way[0][:2] if self._under_way else self._called
            if oldest and (waited := time.monotonic() - oldest[1]) > self._limit_s:
                self._end(HangError(hang_message(self._rank, waited, oldest[0])))
                return


def hang_message(rank: int, seconds: float, kind: str) -> str:
    """The message of a rank that has reached the time limit while it waited in an operation of this kind."""
    return (
        f"rank {rank} waited {seconds:.0f} s for the other ranks in {kind}, which is the limit: one of them hangs, or "
        "what rank 0 writes is not read; if it happens again on GPUs, try NCCL_P2P_DISABLE=1"
    )


def _is_done(event: Event) -> bool:
    with suppress(RuntimeError):  # an error of the device is raised in the run itself
        return event.query()
    return True


def _end_process(error: HangError) -> None:
    if not record(error):
        print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(error.exit_code)
