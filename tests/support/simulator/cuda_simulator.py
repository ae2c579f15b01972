"""CUDA's rules of ordering on a CPU: what runs on streams is ordered by streams, events and waits, and by nothing else.

Every tensor is a CPU tensor. Within a `Simulator`, memory that was page-locked through its runtime is the host's; so is
what is computed from it and what is brought from the device; all else is on the device. An operation on the device
belongs to the stream that is current, and the host runs ahead of it.

*Detection.* Each stream and the host has a vector clock (Lamport's happens-before, as in race detectors). Each piece
of memory knows who read and wrote it last. An access that no chain of stream order, events, waits and synchronisation
puts behind an earlier conflicting one raises `Race`: in some order that CUDA allows it goes wrong, whether or not it
did this time. So does memory that is freed while another stream may still use it.

*Execution.* Without a seed copies run at once. With one, those on streams of their own run at a random time between
the earliest and the latest that CUDA allows; their targets hold NaN meanwhile. Computation runs in step.
"""

from __future__ import annotations

import math
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

HOST = -1
"""The host's own place in a clock; streams have numbers from 0, which is the default stream."""

Clock = dict[int, int]


class Race(Exception):
    """Two accesses to the same memory, one of them a write, that CUDA does not order."""


@dataclass(slots=True)
class Access:
    """The last access of one kind by one stream to a range of bytes."""

    start: int
    stop: int
    stream: int
    time: int
    writes: bool
    what: str


@dataclass(slots=True, eq=False)
class Memory:
    """One tensor's storage."""

    allocated_on: int
    address: int
    size: int
    host: bool | None = False
    """`None` of what was made of nothing: it is where the first operation wants it that takes something else too."""
    pinned: bool = False
    pooled: bool = False
    """See `Simulator.in_pool`."""
    accesses: list[Access] = field(default_factory=list)
    watched: Any = None
    """A weak reference to the storage, which says when it is freed."""


class SimulatedStream:
    """`torch.cuda.Stream`, as far as a link uses it."""

    def __init__(self, simulator: Simulator, number: int) -> None:
        self.simulator, self.number = simulator, number
        self.clock: Clock = {}
        self.queue: list[Callable[[], None]] = []
        self.done = 0
        """How much of the queue has run."""

    def wait_stream(self, other: SimulatedStream) -> None:
        self._wait(other, len(other.queue), other.clock)

    def wait_event(self, event: SimulatedEvent) -> None:
        self._wait(event.stream, event.place, event.clock)

    def synchronize(self) -> None:
        self.run(len(self.queue))
        _join(self.simulator.host, self.clock)

    def _wait(self, other: SimulatedStream, place: int, clock: Clock) -> None:
        _join(self.clock, clock)
        _join(self.clock, self.simulator.host)
        self.ask(lambda: other.run(place))

    def ask(self, job: Callable[[], None]) -> None:
        """Puts a job behind all that the stream was given; the default stream's run at once, and so do all without a
        seed."""
        self.queue.append(job)
        if self.number == 0 or self.simulator.random is None:
            self.run(len(self.queue))

    def run(self, place: int) -> None:
        """Runs the first `place` jobs of the queue, as far as that is not done."""
        while self.done < place:
            job = self.queue[self.done]
            self.done += 1
            job()
            self.queue[self.done - 1] = _nothing


def _nothing() -> None:
    pass


class SimulatedEvent:
    """`torch.cuda.Event`, recorded."""

    def __init__(self, stream: SimulatedStream) -> None:
        self.stream, self.place = stream, len(stream.queue)
        self.clock: Clock = _join(dict(stream.clock), stream.simulator.host)

    def query(self) -> bool:
        """Whether the device has come here: it may have, and is said to by chance."""
        chance = self.stream.simulator.random
        if chance is not None and chance.random() < 0.5:
            return self.stream.done >= self.place
        return self.stream.done >= self.place and chance is None

    def synchronize(self) -> None:
        self.stream.run(self.place)
        _join(self.stream.simulator.host, self.clock)

    def elapsed_time(self, other: SimulatedEvent) -> float:
        return 1.0


class SimulatedRuntime:
    """`cuda_runtime.CudaRuntime` of a simulator."""

    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator
        self.device = torch.device("cpu")

    def new_stream(self) -> SimulatedStream:
        return self.simulator.new_stream()

    def current_stream(self) -> SimulatedStream:
        return self.simulator.current

    @contextmanager
    def use(self, stream: SimulatedStream) -> Iterator[None]:
        before, self.simulator.current = self.simulator.current, stream
        try:
            yield
        finally:
            self.simulator.current = before

    def record_event(self, stream: SimulatedStream) -> SimulatedEvent:
        return SimulatedEvent(stream)

    def synchronize(self) -> None:
        self.simulator.synchronize()

    def lock_pages(self, address: int, size: int) -> int:
        if sum(self.simulator.locked.values()) + size > self.simulator.most_locked:
            return 2
        self.simulator.locked[address] = size
        self.simulator.forget(address)
        return 0

    def unlock_pages(self, address: int) -> None:
        self.simulator.locked.pop(address, None)

    def clear_error(self) -> None:
        pass


class Simulator:
    """A device and its host. A context manager: within, operations are simulated.

    Attributes:
        operations: accesses that were checked so far.
    """

    def __init__(self, seed: int | None = None) -> None:
        """Args: `seed` of the times at which copies run; `None` is at once."""
        self.random = None if seed is None else random.Random(seed)
        self.host: Clock = {HOST: 0}
        self.streams: list[SimulatedStream] = []
        self.current = self.new_stream()
        self.locked: dict[int, int] = {}
        self.most_locked = math.inf  # bytes; more is refused
        self.operations = 0
        self.races: list[str] = []
        """Of memory that was freed too early: said at the next operation, as an exception where it is freed is lost."""
        self.live = self.peak = 0
        """Bytes of the device's memory that are taken now, and that were taken at most since `peak` was set."""
        self.limit = math.inf
        """Bytes beyond which the device refuses, as CUDA's allocator does."""
        self.pooled = 0
        """Of those that are taken, what is not held against the limit."""
        self.others = 0
        """Bytes that other processes have of them."""
        self.workspaces = 0
        """Bytes that libraries have PyTorch's allocator give them to compute in, as cuBLAS does."""
        self.outside = 0
        """Bytes that this process has beside its allocator, as CUDA's context."""
        self.refused: list[str] = []
        """What was refused so far."""
        self._memories: dict[int, Memory] = {}
        self._modes: list[Any] = []
        self._open = self._in_pool = False

    def runtime(self) -> Any:
        return SimulatedRuntime(self)

    def new_stream(self) -> SimulatedStream:
        self.streams.append(SimulatedStream(self, len(self.streams)))
        return self.streams[-1]

    def synchronize(self, *_: object) -> None:
        for stream in self.streams:
            stream.synchronize()

    def __enter__(self) -> Simulator:
        from simulated_operations import HostReads, Operations  # which know this module

        self._open = True
        operations = Operations(self)
        self._modes = [HostReads(self, operations), operations]
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)
        self._open = False
        if error[0] is None:
            self.check_freed()

    def check_freed(self) -> None:
        if self.races:
            raise Race(self.races[0])

    def memory(self, tensor: Tensor) -> Memory:
        storage = tensor.untyped_storage()
        key = storage._cdata
        found = self._memories.get(key)
        if found is None:
            pinned = self._is_locked(storage.data_ptr())
            found = Memory(self.current.number, storage.data_ptr(), storage.nbytes(), host=pinned, pinned=pinned)
            found.pooled = self._in_pool and not pinned
            if not pinned:
                self._take(found.size, found.pooled)  # what is refused is not there, whoever may have the tensor
            self._memories[key] = found
            found.watched = weakref.ref(storage, lambda _: self._freed(key))
        return found

    def forget(self, address: int) -> None:
        """Forgets who used memory that turns out to be the host's."""
        for memory in self._memories.values():
            if memory.address <= address < memory.address + memory.size:
                self._take(0 if memory.host else -memory.size, memory.pooled)
                memory.host = memory.pinned = True
                memory.accesses.clear()

    def place(self, memories: list[Memory]) -> list[bool | None]:
        """Which of them are the host's; those that may be anywhere are where the others are."""
        hosts = [memory.host for memory in memories]
        if None in hosts and (True in hosts) != (False in hosts):
            for memory in memories:
                if memory.host is None:
                    self.put(memory, True in hosts)
            return [memory.host for memory in memories]
        return hosts

    def put(self, memory: Memory, host: bool) -> None:
        if host and not memory.host:
            self._take(-memory.size, memory.pooled)
        memory.host = host
        if host:
            memory.accesses.clear()

    def device_memories(self) -> Iterator[tuple[int, Memory]]:
        """What lives on the device, each with its storage's address; so does what was made of nothing and is not used
        yet."""
        yield from ((key, memory) for key, memory in list(self._memories.items()) if not memory.host)

    @property
    def taken(self) -> int:
        """Bytes of the device's memory that are held against the limit."""
        return self.live - self.pooled

    @contextmanager
    def in_pool(self) -> Iterator[None]:
        """Within, what is taken is not held against the limit: it stands for a captured pass's own memory."""
        before, self._in_pool = self._in_pool, True
        try:
            yield
        finally:
            self._in_pool = before

    def out_of_pool(self, tensor: Tensor) -> None:
        """Holds a tensor's memory against the limit, whatever it was taken for.

        Raises:
            torch.OutOfMemoryError: there is not so much; it stays in the pool.
        """
        memory = self.memory(tensor)
        if memory.pooled:
            self._check_limit(memory.size)
            self.pooled -= memory.size
            memory.pooled = False

    def _take(self, size: int, pooled: bool = False) -> None:
        """Counts memory of the device that is taken or, below 0, given back.

        Args: `pooled` says whether it is not held against the limit.

        Raises:
            torch.OutOfMemoryError: there is not so much.
        """
        if size > 0 and not pooled:
            self._check_limit(size)
        self.live += size
        if pooled:
            self.pooled += size
        if self.live > self.peak:
            self.peak = self.live

    def _check_limit(self, size: int) -> None:
        """Raises:
        torch.OutOfMemoryError: there is not so much.
        """
        others = self.others + self.workspaces + self.outside
        if self.taken + size + others > self.limit:
            self.refused.append(f"{size} bytes beside {self.taken} and others' {others} of {self.limit}")
            raise torch.OutOfMemoryError(f"out of memory: {self.refused[-1]}")

    def borrow(self, size: int) -> None:
        """Counts memory of the device that an operation takes besides its result, and gives back when it ends."""
        self._take(size, self._in_pool)
        self._take(-size, self._in_pool)

    def _is_locked(self, address: int) -> bool:
        for start, size in self.locked.items():  # noqa: SIM110 - `any` takes three times as long
            if start <= address < start + size:
                return True
        return False

    def _freed(self, key: int) -> None:
        memory = self._memories.pop(key, None)
        if memory is not None and not memory.host:
            self._take(-memory.size, memory.pooled)
        if memory is None or not self._open or (memory.host and not memory.pinned):
            return
        others = [one for one in memory.accesses if memory.pinned or one.stream not in (HOST, memory.allocated_on)]
        if not others:
            return
        owner = self.host if memory.pinned else _join(dict(self.streams[memory.allocated_on].clock), self.host)
        for access in others:
            if owner.get(access.stream, 0) < access.time:
                self.races.append(f"memory is freed while stream {access.stream} may still run {access.what}")

    def access(
        self, tensor: Tensor, stream: int, clock: Clock, writes: bool, what: str, memory: Memory | None = None
    ) -> None:
        """Notes an access at `clock[stream]` and checks it against those before.

        Args: `memory` is the tensor's, where it has been looked up.
        """
        extent = tensor.numel()
        if not extent:
            return
        self.operations += 1
        if memory is None:
            memory = self.memory(tensor)
        size = tensor.element_size()
        start = int(tensor.storage_offset()) * size
        if not tensor.is_contiguous():
            extent = 1
            for n, step in zip(tensor.shape, tensor.stride(), strict=True):
                extent += (n - 1) * step
        stop = start + int(extent) * size
        kept = []
        for old in memory.accesses:
            if old.stream == stream:  # in order; what the new access covers need not be known any longer
                if start <= old.start and old.stop <= stop and (writes or not old.writes):
                    continue
            elif (
                (writes or old.writes) and old.start < stop and start < old.stop and clock.get(old.stream, 0) < old.time
            ):
                raise Race(
                    f"{_name(stream)} {'writes' if writes else 'reads'} ({what}) what {_name(old.stream)} "
                    f"{'writes' if old.writes else 'reads'} ({old.what}), and nothing puts one behind the other"
                )
            kept.append(old)
        kept.append(Access(start, stop, stream, clock[stream], writes, what))
        memory.accesses = kept

    def tick(self, stream: SimulatedStream) -> Clock:
        """The clock of the next operation that the host gives to `stream`."""
        _join(stream.clock, self.host)
        stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1
        return stream.clock

    def tick_host(self) -> Clock:
        self.host[HOST] += 1
        return self.host

    def wander(self) -> None:
        """Lets some stream run one more job, by chance."""
        if self.random is not None and self.random.random() < 0.1:
            stream = self.random.choice(self.streams)
            if stream.done < len(stream.queue):
                stream.run(stream.done + 1)


def _join(clock: Clock, other: Clock) -> Clock:
    """Makes `clock` as late as both are."""
    for stream, time in other.items():
        if clock.get(stream, 0) < time:
            clock[stream] = time
    return clock


def _name(stream: int) -> str:
    return "the host" if stream == HOST else f"stream {stream}"
