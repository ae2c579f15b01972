"""Ctrl-C, SIGTERM, a closed terminal and a reader that ends stop a run at a safe point, and no text is lost."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Self, TypeVar

T = TypeVar("T")

_MESSAGES = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}

REPEAT_S = 1.0
"""A signal that comes within this number of seconds after another is a repetition: a key was held down, or a shell and
a terminal have both sent it."""


class Stop(BaseException):
    """A request from outside to stop. It is not an `Exception`, so that no handler for errors catches it. It is not a
    `KeyboardInterrupt` either, which the option parser would convert."""

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
        return cls(128 + number, _MESSAGES[signal.Signals(number)])


def step(rounds: Iterator[T], signals: Signals) -> T | None:
    """The next item of a run that ends itself if `signals.pending`; `None` at its end.

    Raises:
        Stop: the run has ended, and a signal came.
    """
    event = next(rounds, None)
    if event is None:
        signals.raise_pending()
    return event


class Signals:
    """Within this context, SIGINT, SIGTERM and SIGHUP raise `Stop` in the main thread: at once or, inside
    `with signals.delayed()`, as soon as that ends.

    So loading a model is interrupted at once, and a run after its round, which leaves the caches complete. Writing text
    and statistics is never interrupted. Once a signal was raised, all further signals are delayed, so that repeating
    the signal does not interrupt the shutdown. A new signal, `REPEAT_S` after the last, is raised at once, because
    neither a long round nor a blocked pipe must keep the process from ending.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Args:
        clock: returns seconds, by which a repetition is distinguished from a new signal.
        """
        self._clock = clock
        self._delayed = False
        self._stop: Stop | None = None
        """The interrupt that waits for `release`, or that was raised already."""
        self._last_at = float("-inf")
        self.taken = 0
        """How often an interrupt was handled so that the process continued."""
        self.on_ctrl_c: Callable[[], object] | None = None
        """Called as soon as SIGINT comes, even if it is delayed."""
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Self:
        self.install()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def install(self) -> None:
        """Enters the context. Does nothing outside the main thread. SIGHUP stays ignored if it is (`nohup`)."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _MESSAGES:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            self._previous[number] = signal.signal(number, self._handle)

    def ignore(self) -> None:
        """Ignores signals from here to the end of the process, because they would only disturb its exit."""
        for number in self._previous:
            signal.signal(number, signal.SIG_IGN)
        self._previous = {}

    def leave_to_rank_0(self) -> None:
        """From here on, signals do nothing in this process, because rank 0 handles them."""
        for number in self._previous:
            signal.signal(number, lambda *_: None)

    @contextmanager
    def delayed(self, *, release: bool = True) -> Iterator[None]:
        """Signals wait within this context. If an error leaves the context, they remain delayed.

        Args:
            release: whether a signal may interrupt again after the context. False for the last context of a command,
                whose results are written by then.

        Raises:
            Stop: after the context, if a signal came in it.
        """
        before, self._delayed = self._delayed, True
        yield
        if release and not before:
            self.release()

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """A context inside `delayed` code in which a signal may interrupt.

        Raises:
            Stop: before the context, if a signal waits, or in it.
        """
        self.release()
        try:
            yield
        finally:
            self._delayed = True

    def release(self) -> None:
        """From here on, a signal interrupts.

        Raises:
            Stop: a signal came while signals were delayed, or its `Stop` was raised before and something caught it.
        """
        self._delayed = False
        if self._stop:
            self._delayed = True
            raise self._stop

    def forget_stop(self, *, repeats: bool = False) -> Stop | None:
        """Returns the interrupt that waits or was raised last, and forgets it: the next signal is raised again.

        Args:
            repeats: whether a signal within `REPEAT_S` after it still counts as its repetition.
        """
        stop, self._stop = self._stop, None
        self.taken += stop is not None
        if not repeats:
            self._last_at = float("-inf")
        return stop

    def pending(self) -> bool:
        """Whether a signal was received while signals were delayed, and waits to be raised."""
        return self._stop is not None

    def raise_pending(self) -> None:
        """Raises the signal that waits, if there is one.

        Raises:
            Stop: a signal waits, for example the signal that has ended a run.
        """
        with self.interruptible():
            pass

    def delay(self) -> None:
        self._delayed = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.on_ctrl_c:
            self.on_ctrl_c()
        before, self._last_at = self._last_at, self._clock()
        if self._last_at - before < REPEAT_S:
            return
        waits = self._delayed and self._stop is None
        self._delayed, self._stop = True, self._stop or Stop.by_signal(number)
        if not waits:
            raise self._stop
