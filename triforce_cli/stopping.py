"""Ctrl-C, SIGTERM and a reader that goes away: all of them stop a run where it is safe, and none loses its text."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop(BaseException):
    """A request to stop, from outside. Not an `Exception`, so that no handler for errors swallows it, nor a
    `KeyboardInterrupt`, which the option parser would turn into something else."""

    def __init__(self, exit_code: int, message: str) -> None:
        """Args:
        exit_code: what the process exits with.
        message: one line for stderr, or nothing.
        """
        super().__init__(message)
        self.exit_code = exit_code
        self.message = message

    @classmethod
    def by_signal(cls, number: int) -> Stop:
        return cls(128 + number, "interrupted" if number == signal.SIGINT else "terminated")


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """SIGINT and SIGTERM raise `Stop` wherever the main thread is."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise Stop.by_signal(number)

    previous = _install(handle)
    try:
        yield
    finally:
        _restore(previous)


class HeldSignals:
    """Within this block a signal raises `Stop` only between `allow` and `hold`; elsewhere it waits for `allow`.

    So a signal interrupts the engine, however long a step takes, but never the writing of text and statistics. A second
    one while the first waits is raised at once: a blocked pipe must not hold the process.
    """

    def __init__(self) -> None:
        self._allowed = False
        self._pending: Stop | None = None

    def __enter__(self) -> Self:
        self._previous = _install(self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        _restore(self._previous)

    def allow(self) -> None:
        """Raises:
        Stop: a signal came since `hold`.
        """
        self._allowed = True
        if self._pending:
            raise self._pending

    def hold(self) -> None:
        self._allowed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        stop = Stop.by_signal(number)
        if self._allowed or self._pending:
            raise stop
        self._pending = stop


def _install(handler: object) -> dict[int, object]:
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.signal(number, handler) for number in _SIGNALS}  # pyright: ignore[reportArgumentType]


def _restore(previous: dict[int, object]) -> None:
    for number, handler in previous.items():
        signal.signal(number, handler)  # pyright: ignore[reportArgumentType]
