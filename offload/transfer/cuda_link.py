"""The link on CUDA: copies on streams of their own, one a direction, ordered against computation by events.

Host memory must be page-locked, or a copy neither runs beside computation nor reaches the link's speed: `pin` registers
memory that exists (`torch.empty(pin_memory=True)` rounds up to a power of two, which tens of GiB cannot afford).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...tp.errors import CapacityError
from ...tp.units import gib
from .link import Traffic

_REGISTER_BYTES = 4 * 2**30
"""Memory registered in one call; a driver may refuse very large pieces."""


class CudaLink:
    """Copies between page-locked host memory and one GPU. See `link.Link` for the interface."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._inwards, self._outwards = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._scattered: list[tuple[Tensor, Tensor]] = []  # pinned copies on their way, and where they belong
        self._copies: deque[tuple[torch.cuda.Event, torch.cuda.Event, int]] = deque()
        self._waits: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._traffic = Traffic()

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Raises:
        CapacityError: the system does not page-lock so much.
        """
        memory = torch.empty(*shape, dtype=dtype)
        pin(memory)
        return memory

    def fetch(self, source: Tensor, buffer: Tensor) -> _Arrival:
        if self._scattered:
            self.wait_for_stores()
        self._inwards.wait_stream(torch.cuda.current_stream(self._device))  # whose work may still read the buffer
        self._inwards.wait_stream(self._outwards)
        with torch.cuda.stream(self._inwards):
            began = self._event()
            buffer.copy_(source, non_blocking=True)
            done = self._event()
        self._copies.append((began, done, source.numel() * source.element_size()))
        return _Arrival(self, done)

    def store(self, source: Tensor, target: Tensor) -> None:
        self._outwards.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._outwards):
            dense = source.contiguous()
            if target.is_contiguous():
                target.copy_(dense, non_blocking=True)
            else:  # a copy of few tokens' worth to many places: as one to a place of its own, spread by the CPU later
                staged = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
                staged.copy_(dense, non_blocking=True)
                self._scattered.append((staged, target))
        source.record_stream(self._outwards)
        self._traffic = replace(
            self._traffic, bytes_out=self._traffic.bytes_out + source.numel() * source.element_size()
        )

    def wait_for_stores(self) -> None:
        self._outwards.synchronize()
        for staged, target in self._scattered:
            target.copy_(staged)
        self._scattered.clear()

    def traffic(self) -> Traffic:
        """What crossed the link so far; copies still under way are not counted yet."""
        bytes_in, busy_ms, waited_ms = 0, 0.0, 0.0
        while self._copies and self._copies[0][1].query():
            began, done, num_bytes = self._copies.popleft()
            bytes_in += num_bytes
            busy_ms += began.elapsed_time(done)
        while self._waits and self._waits[0][1].query():
            began, done = self._waits.popleft()
            waited_ms += began.elapsed_time(done)
        old = self._traffic
        self._traffic = replace(
            old,
            bytes_in=old.bytes_in + bytes_in,
            busy_s=old.busy_s + busy_ms / 1e3,
            waited_s=old.waited_s + waited_ms / 1e3,
        )
        return self._traffic

    def close(self) -> None:
        torch.cuda.synchronize(self._device)

    def wait(self, done: torch.cuda.Event) -> None:
        """Makes the current stream wait for `done`, and counts how long it does."""
        stream = torch.cuda.current_stream(self._device)
        began = self._event()
        stream.wait_event(done)
        self._waits.append((began, self._event()))

    @staticmethod
    def _event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class _Arrival:
    """A fetch under way."""

    def __init__(self, link: CudaLink, done: torch.cuda.Event) -> None:
        self._link, self._done = link, done

    def wait(self) -> None:
        self._link.wait(self._done)


def pin(tensor: Tensor) -> None:
    """Page-locks the memory of a contiguous CPU tensor until it is freed.

    Raises:
        CapacityError: the system refuses to lock so much.
    """
    runtime: Any = torch.cuda.cudart()
    start, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    locked: list[int] = []
    weakref.finalize(tensor.untyped_storage(), _unpin, locked)
    for offset in range(0, size, _REGISTER_BYTES):
        length = min(_REGISTER_BYTES, size - offset)
        status = runtime.cudaHostRegister(start + offset, length, 0)
        if int(status) != 0:
            raise CapacityError(
                f"the system locks no more than {gib(offset)} of the {gib(size)} of host memory for the KV cache "
                f"(CUDA error {int(status)}); raise the limit (ulimit -l), free memory, or shorten the prompt"
            )
        locked.append(start + offset)


def _unpin(addresses: list[int]) -> None:
    for address in addresses:
        runtime: Any = torch.cuda.cudart()
        runtime.cudaHostUnregister(address)
