"""A thread for work that takes time, besides the thread that serves HTTP."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ....tp.errors import without_frames
from ...session.wire import BodyError
from ..answering.fair_queue import FairQueue
from ..answering.jobs import queue_full

T = TypeVar("T")


class Lane:
    """Does one piece of work at a time. Waiting work is taken round-robin over clients."""

    def __init__(self, name: str, most: int) -> None:
        """Args:
        name: that of the thread.
        most: maximum number of pieces of work that wait.
        """
        self._why: BodyError | None = None
        self._queue = FairQueue[_Piece](most, refuse=lambda one: one.refuse(queue_full()))
        threading.Thread(target=self._run, name=name, daemon=True).start()

    async def run(self, client: str, work: Callable[[], T]) -> T:
        """Runs `work` in the thread. If this call is cancelled before the work has begun, the work is not done.

        Raises:
            BodyError: too many pieces of work wait, or the server stops.
        """
        piece = _Piece(client, work)
        if not self._queue.put(piece):
            raise self._why or queue_full()
        try:
            return await asyncio.wrap_future(piece.done)
        finally:
            self._queue.remove(piece)
            del piece  # or an error and the frames it came through would hold each other, and these a body

    def close(self, why: BodyError) -> None:
        """Ends the thread after its present work. All calls that wait, even for this work, get the error `why`."""
        self._why = why
        for one in self._queue.clear():
            one.refuse(why)

    def _run(self) -> None:
        while one := self._queue.next():
            one.do()
            del one  # what it holds may be large


@dataclass(eq=False)
class _Piece:
    client: str
    work: Callable[[], Any]
    done: Future[Any] = field(default_factory=Future, init=False)
    _telling: threading.Lock = field(default_factory=threading.Lock, init=False)

    def do(self) -> None:
        """Does the work, and passes the result to the waiting call, if it still waits."""
        with self._telling:
            if self.done.done() or not self.done.set_running_or_notify_cancel():
                return
        try:
            result, error = self.work(), None
        except BaseException as raised:
            result, error = None, without_frames(raised)
        with self._telling:
            if self.done.done():
                return
            if error is None:
                self.done.set_result(result)
            else:
                self.done.set_exception(error)

    def refuse(self, error: BodyError) -> None:
        """Raises an error in the waiting call, even if the work is being done."""
        with self._telling, suppress(InvalidStateError):  # done, or nobody waits
            self.done.set_exception(error)
