"""Threads on which bodies become prompts: checked, put into the chat template, and encoded."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from ....tp.weights.tokenizer import Tokenizer
from ...session.wire import BodyError
from ..http_limits import ServerLimits
from .lane import Lane

T = TypeVar("T")


class Preparing:
    """Two threads, one for long texts, one for all others. So nobody waits for the long text of another one."""

    def __init__(self, load: Callable[[], Tokenizer], most: int, limits: ServerLimits) -> None:
        """Args:
        load: makes a tokenizer; each thread has its own, as some cannot be used by two.
        most: what waits for each thread.
        """
        self._load, self._limits = load, limits
        self._short, self._long = Lane("prompts", most), Lane("long prompts", most)
        self._tokenizers: dict[Lane, Tokenizer] = {}

    async def run(self, client: str, num_bytes: int, work: Callable[[Tokenizer], T]) -> T:
        """Has a thread do it. If this is cancelled, it is not begun any more.

        Args: `num_bytes` are those of the text that it is about.

        Raises:
            BodyError: too many wait, the server stops, or the chat template takes too long.
        """
        lane = self._long if num_bytes > self._limits.long_bytes else self._short
        return await lane.run(client, lambda: work(self._tokenizer_of(lane)))

    def close(self, why: BodyError) -> None:
        """Ends the threads, each with what it is doing; those who wait are told `why`."""
        self._short.close(why)
        self._long.close(why)

    def _tokenizer_of(self, lane: Lane) -> Tokenizer:
        """Called in that thread alone."""
        if lane not in self._tokenizers:
            found = self._load()
            render = _within(self._limits.render_s, found.render) if found.render else None
            self._tokenizers[lane] = replace(found, render=render)
        return self._tokenizers[lane]


class _TimeUp(BaseException):
    """No `Exception`, which those who render templates take for a fault of the template."""


def _within(seconds: float, render: Callable[..., str]) -> Callable[..., str]:
    """Gives a chat template, which is a program, so much time for a text."""

    def limited(*messages: Any, **arguments: Any) -> str:
        thread, lock, over = ctypes.c_ulong(threading.get_ident()), threading.Lock(), False

        def end() -> None:
            with lock:
                if not over:
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(_TimeUp))

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        try:
            timer.start()
            try:
                return render(*messages, **arguments)
            finally:
                timer.cancel()
                with lock:
                    over = True
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, None)  # one that has not come yet
        except _TimeUp:
            raise BodyError(
                f"the model's chat template takes more than {seconds:g} s for these messages; send fewer or shorter "
                "ones",
                "messages",
                code="template_too_slow",
            ) from None

    return limited
