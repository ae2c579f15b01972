"""Staging: a few buffers in host memory for blocks that the link cannot copy directly.

These blocks are on a disk, or in memory that is not page-locked. Threads fill the buffers in the order of the pass,
ahead of the ring and independently of it. So a disk is read while attention uses blocks in memory. The ring then copies
the blocks to the device. If the device computes on host memory directly, attention uses the blocks in these buffers.
In the opposite direction, the link fills the buffers, and threads write them to the places of the blocks.
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
"""Threads that fill and empty buffers, each one buffer at a time. A disk reaches its full speed with about four large
reads at once."""


def make_pool() -> Any:
    """Makes the executor for these threads. In each of them, PyTorch copies with a single thread."""
    return ThreadPoolExecutor(THREADS, "staging", partial(torch.set_num_threads, 1))


def start_pool(pool: Any) -> None:
    """Starts all threads of an idle pool that `make_pool` made."""
    together = threading.Barrier(THREADS)  # without it, one thread could take the task with which another should start
    for started in [pool.submit(together.wait) for _ in range(THREADS)]:
        started.result()


class IndirectSource(Protocol):
    """A place of a block, or of its slot, from which the link cannot copy. Two objects for the same place are equal,
    and have the same hash."""

    def place(self, memory: Tensor) -> Tensor:
        """A view of a buffer `[num_bytes]` uint8, with the shape and dtype of the block or its slot."""
        ...

    def read(self, memory: Tensor) -> None:
        """Reads the block, or its slot, into a buffer. Any thread may call it.

        Raises:
            LinkError: reading failed.
        """
        ...

    def write(self, memory: Tensor) -> None:
        """Writes the block, or its slot, from a buffer to its place. Any thread may call it.

        Raises:
            LinkError: writing failed.
        """
        ...


Source = Tensor | IndirectSource
"""A block for the ring, or its slot: host memory from which the link copies, or a place that needs staging."""


class _Use(Protocol):
    """An operation that uses a buffer."""

    def wait_on_host(self) -> None:
        """Returns when the operation is done. Any thread may call it."""
        ...


class Staging(Iterator["Tensor | Staged"]):
    """The buffers, and an iterator over the sources of a pass. It reads indirect sources ahead into the buffers."""

    def __init__(
        self, link: Link, num_bytes: int, buffers: int, pool: Any, note_wait: Callable[[float], None] | None = None
    ) -> None:
        """Args:
        num_bytes: size of a buffer.
        buffers: number of buffers: at least two more than the ring has. With fewer, they would wait for each other.
        pool: an executor, whose threads fill and empty buffers; see `make_pool`.
        note_wait: called with the seconds of each wait for a buffer to be filled.

        Raises:
            CapacityError: the system does not page-lock this amount of host memory.
        """
        self.memory = link.host_memory((buffers, num_bytes), torch.uint8)
        self.pool, self.note_wait = pool, note_wait
        self._link = link
        self._free: deque[tuple[Tensor, _Use | None]] = deque((buffer, None) for buffer in self.memory)
        self._lent: dict[Staged, None] = {}  # blocks whose buffers are in use, in the order of the pass
        self._writes: dict[IndirectSource, _Write] = {}
        self._coming: Iterator[Source] = iter(())
        self._waiting: Source | None = None  # the next source, which waits for a buffer
        self._ahead: deque[Tensor | Staged] = deque()

    def begin(self, sources: Iterator[Source]) -> Staging:
        """Starts to read the indirect ones of `sources`. No earlier sources may be left: see `stop`."""
        self._coming = sources
        self._look_ahead()
        return self

    def __next__(self) -> Tensor | Staged:
        self._look_ahead()
        if not self._ahead:
            raise StopIteration
        return self._ahead.popleft()

    def _look_ahead(self) -> None:
        """Starts as many reads as there are free buffers."""
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
        """Returns the buffer of a block. It can be filled again as soon as `copied` is done."""
        del self._lent[staged]
        self._free.append((staged.memory, copied))
        self._look_ahead()

    def store(self, source: Tensor, target: IndirectSource) -> Arrival:
        """Like `Link.store`, but to a place to which the link cannot copy. Only between passes. The block is at its
        place after `wait_for_writes`.

        Raises:
            LinkError: an earlier write from the buffer failed.
        """
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
        finally:  # in any case, or a buffer would be lost
            self._free.append((memory, use))
        return copied

    def wait_for_writes(self) -> None:
        """Returns when all stored blocks are at their places.

        Raises:
            LinkError: a block could not be written.
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
            failure = None  # otherwise the error and this frame would keep each other alive

    def stop(self) -> None:
        """Drops the remaining sources of the last `begin`."""
        self._coming, self._waiting = iter(()), None
        self._ahead.clear()
        while self._lent:
            staged = next(iter(self._lent))
            use = staged.drop()
            del self._lent[staged]
            self._free.append((staged.memory, use))


class Staged:
    """A block that is being read into a buffer. It is an `Arrival`, for devices that compute on host memory."""

    def __init__(
        self, staging: Staging, source: IndirectSource, memory: Tensor, use: _Use | None, write: _Write | None
    ) -> None:
        """Args:
        use: the last use of the buffer, which may not be finished.
        write: the last write to the source, if it may still be in progress.
        """
        self.memory, self.place = memory, source.place(memory)
        self._source, self._use, self._write = source, use, write
        self._note_wait = staging.note_wait
        self._read: Future[None] = staging.pool.submit(self._fill)

    @torch.inference_mode()  # the mode is set for each thread separately
    def _fill(self) -> None:
        if self._use:
            self._use.wait_on_host()
        if self._write:  # it has begun, because the pool starts its tasks in order
            self._write.finish()
        self._source.read(self.memory)

    @property
    def is_there(self) -> bool:
        """Whether the block has been read."""
        return self._read.done() and self._read.exception() is None

    def wait(self) -> None:
        """Returns when the block has been read.

        Raises:
            LinkError: reading failed.
        """
        began = None if self._read.done() else time.perf_counter()
        try:
            self._read.result()
        finally:
            if began is not None and self._note_wait:
                self._note_wait(time.perf_counter() - began)

    def drop(self) -> _Use | None:
        """Cancels the read, or waits for its end. Returns the last use of the buffer, if it may not be finished."""
        if self._read.cancel():
            return self._use
        self._read.exception()
        return None


class _Write:
    """A buffer that is being written to the place of its block."""

    def __init__(self, pool: Any, target: IndirectSource, memory: Tensor, copied: Copy, before: _Write | None) -> None:
        """Args:
        copied: the copy that fills the buffer.
        before: the last write to the target, if it may still be in progress.
        """
        self._target, self._memory, self._copied, self._before = target, memory, copied, before
        self._done: Future[None] = pool.submit(self._empty)

    @torch.inference_mode()  # the mode is set for each thread separately
    def _empty(self) -> None:
        self._copied.wait_on_host()
        if self._before:
            self._before.wait_on_host()
            self._before = None  # frees the chain of earlier writes
        self._target.write(self._memory)

    def wait_on_host(self) -> None:
        self._done.exception()

    def finish(self) -> None:
        """Returns when the block is written.

        Raises:
            LinkError: writing failed.
        """
        self._done.result()


class StagedCopy:
    """A block on its way through staging and over the link. It is an `Arrival`.

    Its copy over the link is requested immediately, if the block has already been read into its staging buffer;
    otherwise in `wait`.
    """

    def __init__(self, link: Link, staging: Staging, staged: Staged, buffer: Tensor) -> None:
        """Args: `buffer` is the target on the device, for the block or its slot."""
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
