"""The time limit for what ranks do together on GPUs.

NCCL's collectives wait for the other ranks on the device, and the host waits for the device, where no error can be
raised: a rank that hangs would have the others wait for ever. PyTorch's own watch sees no collective of a captured
pass, and aborts the process without saying in words what it waited for.
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
"""Seconds between two looks at what is under way."""


class Event(Protocol):
    """A mark behind what a device was given, as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the device has come to it."""
        ...


class DeviceWatch:
    """Ends this process when something that its GPU was given is not done within the time limit, from a thread."""

    def __init__(self, rank: int, limit_s: float, end: Callable[[HangError], None] | None = None) -> None:
        """Args:
        limit_s: seconds.
        end: called with the error, once; by default the error is recorded for the launcher, or printed, and the process
            ends with its exit code.
        """
        self._rank, self._limit_s, self._end = rank, limit_s, end or _end_process
        self._called: tuple[str, float] | None = None
        self._under_way: deque[tuple[str, float, Event]] = deque()
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, name="device watch", daemon=True).start()

    @contextmanager
    def call(self, kind: str) -> Iterator[None]:
        """A block that calls an operation, in which the host may wait too: at the first NCCL connects the ranks."""
        self._called = kind, time.monotonic()
        try:
            yield
        finally:
            self._called = None

    def note(self, kind: str, event: Event) -> None:
        """Is told that the device was just given an operation, and `event` behind it."""
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
    """What is said where a rank has waited for the others as long as it may, in an operation of this kind."""
    return (
        f"rank {rank} waited {seconds:.0f} s for the other ranks in {kind}, which is the limit: one of them hangs, or "
        "what rank 0 writes is not read; if it happens again on GPUs, try NCCL_P2P_DISABLE=1"
    )


def _is_done(event: Event) -> bool:
    with suppress(RuntimeError):  # an error of the device belongs to the run, which will see it
        return event.query()
    return True


def _end_process(error: HangError) -> None:
    if not record(error):
        print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(error.exit_code)
