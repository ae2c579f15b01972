"""A second judge of ordering: a simulator whose trace goes to the analysis of PyTorch's own sanitizer of CUDA streams
(`torch.cuda._sanitizer`), and which judges nothing itself.

The analysis is plain Python that somebody else wrote, so that a mistake in the simulator's clocks is not made twice. It
sees less: memory is known by the address that a tensor begins at, so that tensors which overlap and begin elsewhere do
not conflict; what the host reads and writes is not told to it, only what the host waits for; and what is freed is
forgotten.
"""

from __future__ import annotations

from traceback import StackSummary, walk_stack
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from cuda_simulator import HOST, Clock, Memory, SimulatedEvent, SimulatedRuntime, SimulatedStream, Simulator
from torch import Tensor
from torch.cuda import _sanitizer
from torch.cuda._sanitizer import EventHandler


class _NoStack(StackSummary):
    """Where an operation was called, which is not noted: the sanitizer notes it of each of them, in nine tenths of its
    time, for the words of its reports alone."""

    @classmethod
    def extract(cls, *_: Any, **__: Any) -> _NoStack:
        return cls()


class JudgedSimulator(Simulator):
    """Copies run at once. Page-locked memory is judged like the device's: two streams may use it, too.

    Attributes:
        reports: what the sanitizer found, in its words.
    """

    def __init__(self) -> None:
        self.handler, self.reports = EventHandler(), list[str]()
        self._begins: dict[int, set[int]] = {}  # addresses that the sanitizer knows, by that of the storage
        self._stacks = patch.object(
            _sanitizer, "traceback", SimpleNamespace(StackSummary=_NoStack, walk_stack=walk_stack)
        )
        super().__init__()

    def __enter__(self) -> JudgedSimulator:
        self._stacks.start()
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        try:
            super().__exit__(*error)
        finally:
            self._stacks.stop()

    def runtime(self) -> Any:
        return _Runtime(self)

    def new_stream(self) -> SimulatedStream:
        self.streams.append(stream := _Stream(self, len(self.streams)))
        self.handler._handle_stream_creation(stream.number)
        return stream

    def synchronize(self, *_: object) -> None:
        super().synchronize()
        self.handler._handle_device_synchronization()

    def access(
        self, tensor: Tensor, stream: int, clock: Clock, writes: bool, what: str, memory: Memory | None = None
    ) -> None:
        if stream == HOST or not tensor.numel():
            return
        self.operations += 1
        begin = tensor.data_ptr()
        self._begins.setdefault((memory or self.memory(tensor)).address, set()).add(begin)
        written = {begin} if writes else set[int]()
        found = self.handler._handle_kernel_launch(stream, {begin} - written, written, set(), what, {begin: []})
        self.reports += map(str, found)

    def forget(self, address: int) -> None:
        super().forget(address)
        for memory in self._memories.values():
            if memory.address <= address < memory.address + memory.size:
                self._forgotten(memory)

    def put(self, memory: Memory, host: bool) -> None:
        super().put(memory, host)
        if host:
            self._forgotten(memory)

    def _freed(self, key: int) -> None:
        memory = self._memories.pop(key, None)
        if memory:
            self._forgotten(memory)

    def _forgotten(self, memory: Memory) -> None:
        for begin in self._begins.pop(memory.address, ()):
            self.handler._handle_memory_deallocation(begin)


class _Stream(SimulatedStream):
    def wait_stream(self, other: SimulatedStream) -> None:
        self.wait_event(_Event(other))  # as PyTorch does

    def wait_event(self, event: SimulatedEvent) -> None:
        super().wait_event(event)
        _handler(self)._handle_event_wait(id(event), self.number)

    def synchronize(self) -> None:
        super().synchronize()
        _handler(self)._handle_stream_synchronization(self.number)


class _Event(SimulatedEvent):
    def __init__(self, stream: SimulatedStream) -> None:
        super().__init__(stream)
        _handler(stream)._handle_event_creation(id(self))
        _handler(stream)._handle_event_record(id(self), stream.number)

    def synchronize(self) -> None:
        super().synchronize()
        _handler(self.stream)._handle_event_synchronization(id(self))


class _Runtime(SimulatedRuntime):
    def record_event(self, stream: SimulatedStream) -> SimulatedEvent:
        return _Event(stream)


def _handler(stream: SimulatedStream) -> EventHandler:
    assert isinstance(stream.simulator, JudgedSimulator)
    return stream.simulator.handler
