"""Staging: a few buffers of host memory through which blocks pass that the link cannot copy from where they lie.

Such a block is on a disk, or in memory that the system does not page-lock. Threads fill the buffers in the order of the
pass, ahead of the ring and independently of it, so that a disk is read while blocks in memory are attended to; the ring
copies them on to the device. Where the device computes on host memory itself, blocks are attended to in these buffers.
On the way back threads empty them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from .link import Arrival, Copy, Link, LinkError

THREADS = 6
"""That fill and empty buffers, each one at a time; a disk is at its full speed with about four large reads."""


def make_pool() -> Any:
    """What runs them. PyTorch copies with one thread in each: they are several already."""
    return ThreadPoolExecutor(THREADS, "staging", partial(torch.set_num_threads, 1))


def start_pool(pool: Any) -> None:
    """Starts all threads of `make_pool`, where nothing is to do yet."""
    together = threading.Barrier(THREADS)  # or one that is there already would do what another was to begin with
    for started in [pool.submit(together.wait) for _ in range(THREADS)]:
        started.result()


class IndirectSource(Protocol):
    """A block, or its slot, where the link cannot copy it. Two are equal, and have one hash, if they are one place."""

    def place(self, memory: Tensor) -> Tensor:
        """The block, or its slot, in a buffer `[num_bytes]` uint8."""
        ...

    def read(self, memory: Tensor) -> None:
        """Fills a buffer. Any thread may call it.

        Raises:
            LinkError: that failed.
        """
        ...

    def write(self, memory: Tensor) -> None:
        """Takes over what is in a buffer. Any thread may call it.

        Raises:
            LinkError: that failed.
        """
        ...


Source = Tensor | IndirectSource
"""What the ring is given: host memory that the link copies from, or what has to be staged."""


class _Use(Protocol):
    """What is done with a buffer."""

    def wait_on_host(self) -> None:
        """Returns when it is done. Any thread may call it."""
        ...


class Staging(Iterator["Tensor | Staged"]):
    """Buffers of host memory. An iterator over the sources of a pass, of which the indirect ones are being read."""

    def __init__(
        self, link: Link, num_bytes: int, buffers: int, pool: Any, note_wait: Callable[[float], None] | None = None
    ) -> None:
        """Args:
        num_bytes: of a buffer.
        buffers: at least two more than the ring has, or those would wait for one another.
        pool: an executor, whose threads fill and empty buffers; see `make_pool`.
        note_wait: is told the seconds that somebody waited for a buffer to be filled.

        Raises:
            CapacityError: the system does not page-lock so much host memory.
        """
        self.memory = link.host_memory((buffers, num_bytes), torch.uint8)
        self.pool, self.note_wait = pool, note_wait
        self._link = link
        self._free: deque[tuple[Tensor, _Use | None]] = deque((buffer, None) for buffer in self.memory)
        self._lent: dict[Staged, None] = {}  # in the order of the pass
        self._writes: dict[IndirectSource, _Write] = {}
        self._coming: Iterator[Source] = iter(())
        self._waiting: Source | None = None  # for a buffer
        self._ahead: deque[Tensor | Staged] = deque()

    def begin(self, sources: Iterator[Source]) -> Staging:
        """Starts to read those of `sources` that are indirect. Of earlier ones nothing is left: see `stop`."""
        self._coming = sources
        self._look_ahead()
        return self

    def __next__(self) -> Tensor | Staged:
        self._look_ahead()
        if not self._ahead:
            raise StopIteration
        return self._ahead.popleft()

    def _look_ahead(self) -> None:
        """Begins as many reads as there are buffers for."""
        while True:
            if self._waiting is None:
                self._waiting = next(self._coming, None)
            source = self._waiting
            if source is None:
                return
            if isinstance(source, Tensor):
                self._ahead.append(source)
            elif self._free:
                memory, use = self._free[0]
                staged = Staged(self, source, memory, use, self._writes.get(source))
                self._lent[staged] = None
                self._free.popleft()
                self._ahead.append(staged)
            else:
                return
            self._waiting = None

    def give_back(self, staged: Staged, copied: Copy | None = None) -> None:
        """Says that a buffer can be filled anew, as soon as `copied` is done."""
        del self._lent[staged]
        self._free.append((staged.memory, copied))
        self._look_ahead()

    def store(self, source: Tensor, target: IndirectSource) -> Arrival:
        """As `Link.store`, to where the link cannot copy, between passes; `wait_for_writes` says when it is there."""
        memory, use = self._free[0]
        try:
            if use:
                use.wait_on_host()
        except LinkError:
            self._free[0] = memory, None
            raise
        self._free.popleft()
        use = None
        try:
            use = copied = self._link.store(source, target.place(memory))
            use = self._writes[target] = _Write(self.pool, target, memory, copied, self._writes.get(target))
        finally:  # however it ends, or there would be a buffer less
            self._free.append((memory, use))
        return copied

    def wait_for_writes(self) -> None:
        """Returns when all that was stored is where it belongs.

        Raises:
            LinkError: it could not be written.
        """
        failure: LinkError | None = None
        while self._writes:
            target, write = next(iter(self._writes.items()))
            try:
                write.finish()
            except LinkError as error:
                failure = failure or error
            del self._writes[target]
        try:
            if failure:
                raise failure
        finally:
            failure = None  # or the error and this frame would hold each other

    def stop(self) -> None:
        """Drops what is left of the sources that were begun."""
        self._coming, self._waiting = iter(()), None
        self._ahead.clear()
        while self._lent:
            staged = next(iter(self._lent))
            use = staged.drop()
            del self._lent[staged]
            self._free.append((staged.memory, use))


class Staged:
    """A block that is being read into a buffer. An `Arrival`, for who computes on host memory."""

    def __init__(
        self, staging: Staging, source: IndirectSource, memory: Tensor, use: _Use | None, write: _Write | None
    ) -> None:
        """Args:
        use: of the buffer, which may not be over.
        write: the last one to the source, if that may be under way.
        """
        self.memory, self.place = memory, source.place(memory)
        self._source, self._use, self._write = source, use, write
        self._note_wait = staging.note_wait
        self._read: Future[None] = staging.pool.submit(self._fill)

    @torch.inference_mode()  # which is a thread's own
    def _fill(self) -> None:
        if self._use:
            self._use.wait_on_host()
        if self._write:  # it has begun, as the pool starts what it is given in order
            self._write.finish()
        self._source.read(self.memory)

    @property
    def is_there(self) -> bool:
        """Whether it has been read."""
        return self._read.done() and self._read.exception() is None

    def wait(self) -> None:
        """Returns when it has been read.

        Raises:
            LinkError: that failed.
        """
        began = None if self._read.done() else time.perf_counter()
        try:
            self._read.result()
        finally:
            if began is not None and self._note_wait:
                self._note_wait(time.perf_counter() - began)

    def drop(self) -> _Use | None:
        """Sees to it that nothing is read into the buffer any more; its use that may not be over."""
        if self._read.cancel():
            return self._use
        self._read.exception()
        return None


class _Write:
    """A buffer that is being emptied."""

    def __init__(self, pool: Any, target: IndirectSource, memory: Tensor, copied: Copy, before: _Write | None) -> None:
        """Args:
        copied: what comes into the buffer.
        before: the last write to the target, if that may be under way.
        """
        self._target, self._memory, self._copied, self._before = target, memory, copied, before
        self._done: Future[None] = pool.submit(self._empty)

    @torch.inference_mode()  # which is a thread's own
    def _empty(self) -> None:
        self._copied.wait_on_host()
        if self._before:
            self._before.wait_on_host()
            self._before = None  # which has one before it
        self._target.write(self._memory)

    def wait_on_host(self) -> None:
        self._done.exception()

    def finish(self) -> None:
        """Returns when it is written.

        Raises:
            LinkError: that failed.
        """
        self._done.result()


class StagedCopy:
    """A block on its way through staging and over the link: an `Arrival`.

    Its copy over the link is asked for as soon as somebody looks who finds it read: here, or in `wait`.
    """

    def __init__(self, link: Link, staging: Staging, staged: Staged, buffer: Tensor) -> None:
        """Args: `buffer` on the device, of what crosses."""
        self._link, self._staging, self._staged, self._buffer = link, staging, staged, buffer
        self._copied = self._begin() if staged.is_there else None

    def _begin(self) -> Copy:
        copied = self._link.fetch(self._staged.place, self._buffer)
        self._staging.give_back(self._staged, copied)
        return copied

    def wait(self) -> None:
        """See `Arrival`."""
        if self._copied is None:
            self._staged.wait()
            self._copied = self._begin()
        self._copied.wait()
