"""The link on CUDA. Each direction has its own stream. Events order the copies relative to computation.

Host memory must be page-locked (`page_locking`). Otherwise copies would neither run during computation nor reach the
link's speed. Every wait below is necessary for correct results: a test removes them one at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .cuda_runtime import CudaRuntime
from .link import Traffic
from .page_locking import LARGEST_PIECE, locked_memory


class CudaLink:
    """Copies between page-locked host memory and one GPU. See `link.Link` for the interface."""

    direct = False

    def __init__(
        self, device: torch.device, *, runtime: CudaRuntime | None = None, largest_piece: int = LARGEST_PIECE
    ) -> None:
        """Args:
        device: the GPU.
        runtime: CUDA, or a simulator in tests.
        largest_piece: see `page_locking.pieces`.
        """
        self._largest_piece = largest_piece
        self._runtime: Any = runtime or CudaRuntime(device)
        self._inwards, self._outwards = self._runtime.new_stream(), self._runtime.new_stream()
        self._copies: deque[tuple[Any, Any, int]] = deque()  # events before and after, bytes
        self._waits: deque[tuple[Any, Any]] = deque()
        self._traffic = Traffic()
        self._stored = False  # whether a store was requested after the last fetch

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `Link`. The memory is page-locked.

        Raises:
            CapacityError: the system does not page-lock this amount of memory.
        """
        return locked_memory(shape, dtype, self._runtime, largest_piece=self._largest_piece)

    def fetch(self, source: Tensor, buffer: Tensor) -> _Arrival:
        self._inwards.wait_stream(self._runtime.current_stream())  # computation may still read the buffer
        if self._stored:
            self._inwards.wait_stream(self._outwards)  # a store may still write the source
            self._stored = False
        with self._runtime.use(self._inwards):
            began = self._runtime.record_event(self._inwards)
            buffer.copy_(source, non_blocking=True)
            done = self._runtime.record_event(self._inwards)
        self._copies.append((began, done, source.numel() * source.element_size()))
        return _Arrival(self, done)

    def store(self, source: Tensor, target: Tensor) -> _Arrival:
        self._outwards.wait_stream(self._runtime.current_stream())  # computation may still write the source
        with self._runtime.use(self._outwards):
            target.copy_(source, non_blocking=True)
            done = self._runtime.record_event(self._outwards)
        self._stored = True
        num_bytes = source.numel() * source.element_size()
        self._traffic = replace(self._traffic, bytes_out=self._traffic.bytes_out + num_bytes)
        return _Arrival(self, done)

    def wait_for_stores(self) -> None:
        self._outwards.synchronize()

    def traffic(self) -> Traffic:
        """What crossed the link so far. Copies in progress are not counted yet."""
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
        self._runtime.synchronize()

    def wait(self, done: Any) -> None:
        """Makes the current stream wait for the event `done`, and records how long it waits."""
        stream = self._runtime.current_stream()  # called once, because PyTorch takes eight microseconds for it
        began = self._runtime.record_event(stream)
        stream.wait_event(done)
        self._waits.append((began, self._runtime.record_event(stream)))


class _Arrival:
    """A copy in progress."""

    def __init__(self, link: CudaLink, done: Any) -> None:
        self._link, self._done = link, done

    def wait(self) -> None:
        self._link.wait(self._done)

    def wait_on_host(self) -> None:
        self._done.synchronize()
