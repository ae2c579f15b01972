"""A time limit for calls that may never end, such as those of a chat template, which is a program."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class TimeUp(BaseException):
    """The time for a call is over. Not an `Exception`, which the call might take for an error of its own."""


class TimeLimit:
    """Interrupts calls that take too long. One thread watches the calls of all other threads: a thread for each call
    would take longer than most calls."""

    def __init__(self, seconds: float) -> None:
        """Args: `seconds` is the maximum of each call."""
        self._seconds = seconds
        self._ends: dict[int, float] = {}  # when the time of each thread's call is over
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._sleeps = self._closed = False
        self._called = False  # since the thread last looked
        threading.Thread(target=self._watch, name="time limit", daemon=True).start()

    def run(self, call: Callable[[], T]) -> T:
        """Runs `call` in this thread.

        Raises:
            TimeUp: it took too long, or `close` was called before.
        """
        thread = threading.get_ident()
        with self._lock:
            if self._closed:
                raise TimeUp  # nobody would watch it
            self._ends[thread] = time.monotonic() + self._seconds
            self._called = True
            if self._sleeps:
                self._changed.notify()
        try:
            return call()
        finally:
            with self._lock:  # a lock of the interpreter's own: `TimeUp` cannot come between taking it and the block
                if self._ends.pop(thread, None) is None:
                    _interrupt(thread, None)  # `TimeUp` may not have come yet, and must not come later

    def close(self) -> None:
        """Ends the thread when the present calls have ended."""
        with self._lock:
            self._closed = True
            self._changed.notify()

    def _watch(self) -> None:
        with self._lock:
            while self._ends or not self._closed:
                now = time.monotonic()
                for thread in [one for one, end in self._ends.items() if end <= now]:
                    del self._ends[thread]
                    _interrupt(thread, TimeUp)
                # A call that begins from now on ends after this: so it is not waked for each of many short calls.
                last = now + self._seconds
                self._sleeps, self._called = not (self._ends or self._called or self._closed), False
                self._changed.wait(None if self._sleeps else min(self._ends.values(), default=last) - now)


def _interrupt(thread: int, error: type[BaseException] | None) -> None:
    """Raises an error in a thread soon; `None`: an error that was to be raised will not be."""
    what = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), what)
