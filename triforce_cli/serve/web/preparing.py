"""Threads on which bodies become prompts: checked, put into the chat template, and encoded."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from ....tp.weights.tokenizer import Tokenizer
from ...session.wire import BodyError
from ..answering.fair_queue import FairQueue
from ..answering.jobs import queue_full, stopping
from ..http_limits import ServerLimits

T = TypeVar("T")


class Preparing:
    """Two threads, one for long texts, one for all others; each takes what waits round-robin over clients. So nobody
    waits for the long text of another one."""

    def __init__(self, load: Callable[[], Tokenizer], most: int, limits: ServerLimits) -> None:
        """Args:
        load: makes a tokenizer; each thread has its own, as some cannot be used by two.
        most: what waits for each thread.
        """
        self._long_bytes = limits.long_bytes
        self._short = _Lane("prompts", load, most, limits.render_s)
        self._long = _Lane("long prompts", load, most, limits.render_s, gives_back=True)

    async def run(self, client: str, num_bytes: int, work: Callable[[Tokenizer], T]) -> T:
        """Has a thread do it. If this is cancelled, it is not begun any more.

        Args: `num_bytes` are those of the text that it is about.

        Raises:
            BodyError: too many wait, the server stops, or the chat template takes too long.
        """
        return await (self._long if num_bytes > self._long_bytes else self._short).run(client, work)

    def close(self) -> None:
        """Ends the threads, each with what it is doing; those who wait are told."""
        self._short.close()
        self._long.close()


@dataclass(eq=False)
class _Preparation:
    client: str
    work: Callable[[Tokenizer], Any]
    done: Future[Any] = field(default_factory=Future, init=False)
    begun: int = field(default=0, init=False)

    def refuse(self, error: BodyError) -> None:
        if self.done.set_running_or_notify_cancel():
            self.done.set_exception(error)


class _Lane:
    """A thread, and what waits for it."""

    def __init__(
        self, name: str, load: Callable[[], Tokenizer], most: int, render_s: float, gives_back: bool = False
    ) -> None:
        self._queue = FairQueue[_Preparation](most, refuse=lambda one: one.refuse(queue_full()))
        self._load, self._render_s, self._gives_back = load, render_s, gives_back
        threading.Thread(target=self._run, name=name, daemon=True).start()

    async def run(self, client: str, work: Callable[[Tokenizer], T]) -> T:
        preparation = _Preparation(client, work)
        if not self._queue.put(preparation):
            raise queue_full()
        try:
            return await asyncio.wrap_future(preparation.done)
        finally:
            self._queue.remove(preparation)

    def close(self) -> None:
        for one in self._queue.close():
            one.refuse(stopping())

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        tokenizer = self._load()
        if tokenizer.render is None:
            return tokenizer
        return replace(tokenizer, render=_within(self._render_s, tokenizer.render))

    def _run(self) -> None:
        while one := self._queue.next():
            if one.done.set_running_or_notify_cancel():
                try:
                    one.done.set_result(one.work(self._tokenizer))
                except BaseException as error:
                    one.done.set_exception(error)
            del one  # what it holds may be large
            if self._gives_back:
                give_back_memory()


def give_back_memory() -> None:
    """Has the C library give memory that is free back to the system (glibc; elsewhere nothing): between what is held
    it would keep hundreds of MiB of what long texts took for a moment."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


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
