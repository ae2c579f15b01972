"""The link between host memory, which holds streamed blocks, and the compute device. Copies run during computation.

There are two implementations of one interface. `ThreadLink` copies in a thread, with limited bandwidth if a limit is
given. It imitates a PCIe link on a machine without one, and every rule of the scheduler is tested with it. `CudaLink`
(in `cuda_link`) is the real link. Neither depends on what is copied, nor on the order in which it will be needed.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ...tp.errors import TriforceError
from ...tp.pages import aligned_memory

MEASURED_BYTES = 2**26
"""Bytes that must have crossed a link before its speed counts as known: four blocks or more, each copied in one piece.
"""


class LinkError(TriforceError):
    """A copy between host and device failed."""


@dataclass(frozen=True)
class Traffic:
    """What crossed a link so far, and what was read from a disk and written to it."""

    bytes_in: int = 0
    """Bytes to the device."""
    bytes_out: int = 0
    """Bytes to the host."""
    busy_s: float = 0.0
    """Seconds in which data crossed the link towards the device."""
    waited_s: float = 0.0
    """Seconds in which computation waited for the link."""
    disk_bytes_in: int = 0
    """Bytes read from the disk."""
    disk_bytes_out: int = 0
    """Bytes written to the disk."""
    disk_busy_s: float = 0.0
    """Seconds in which the disk was read."""
    disk_waited_s: float = 0.0
    """Seconds in which computation waited for reads from the disk."""

    @property
    def bytes_per_s(self) -> float | None:
        """The speed of the link towards the device, in bytes/s; `None` if too few bytes have crossed it."""
        return self.bytes_in / self.busy_s if self.bytes_in >= MEASURED_BYTES and self.busy_s > 0 else None

    def since(self, earlier: Traffic) -> Traffic:
        """The traffic after `earlier`."""
        if self is earlier:
            return Traffic()
        return Traffic(*(now - then for now, then in zip(vars(self).values(), vars(earlier).values(), strict=True)))

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(one + more for one, more in zip(vars(self).values(), vars(other).values(), strict=True)))


class Arrival(Protocol):
    """A copy in progress."""

    def wait(self) -> None:
        """Makes all later computation wait for the copy.

        Raises:
            LinkError: the copy failed.
        """
        ...


class Copy(Arrival, Protocol):
    """A copy in progress for which the host can wait."""

    def wait_on_host(self) -> None:
        """Returns when the copy is done. Any thread may call it.

        Raises:
            LinkError: the copy failed.
        """
        ...


class Link(Protocol):
    """A link. Copies in one direction run in the order in which they are requested. A fetch runs after all earlier
    stores."""

    direct: bool
    """Whether the device computes on host memory directly, so that blocks there need not be copied."""

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialised host memory, from which and to which the link copies at its full speed. It begins at the border
        of a page.

        Args: `shape[0]` is the number of blocks. Each block is copied whole or in part.
        """
        ...

    def fetch(self, source: Tensor, buffer: Tensor) -> Copy:
        """Starts to copy `source`, in host memory, to `buffer`, on the device. The copy waits for earlier
        computation."""
        ...

    def store(self, source: Tensor, target: Tensor) -> Copy:
        """Starts to copy `source`, on the device, to `target`, in host memory. The copy waits for earlier computation.

        Both must be contiguous. `source` must not be overwritten or freed before the copy's `wait` or before
        `wait_for_stores`.
        """
        ...

    def wait_for_stores(self) -> None:
        """Returns when all stores are done, even if some failed.

        Raises:
            LinkError: a store failed.
        """
        ...

    def traffic(self) -> Traffic:
        """What crossed the link so far."""
        ...

    def close(self) -> None:
        """Ends everything that the link runs during computation. No copy may be requested afterwards."""
        ...


class ThreadLink:
    """A link within host memory: a thread that copies."""

    def __init__(self, bytes_per_s: float | None = None) -> None:
        """Args: `bytes_per_s` is the maximum speed; `None`: no limit. Then blocks need not be copied (`direct`)."""
        self.direct = bytes_per_s is None
        self._bytes_per_s = bytes_per_s
        self._queue: queue.SimpleQueue[_Copy | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._traffic = Traffic()
        self._free_at = 0.0  # the time at which the modelled link has carried all copies so far
        self._stores: list[_Copy] = []
        self._thread = threading.Thread(target=self._work, name="link", daemon=True)
        self._thread.start()
        atexit.register(self._leave)

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return aligned_memory(shape, dtype)

    def fetch(self, source: Tensor, buffer: Tensor) -> Copy:
        copy = _Copy(self, source, buffer, inwards=True)
        self._queue.put(copy)
        return copy

    def store(self, source: Tensor, target: Tensor) -> Copy:
        copy = _Copy(self, source, target, inwards=False)
        self._stores.append(copy)
        self._queue.put(copy)
        return copy

    def wait_for_stores(self) -> None:
        failed = [copy for copy in self._stores if not copy.succeeds()]
        self._stores = []  # not earlier: if the wait is interrupted, some stores are still in progress
        if failed:
            failed[0].wait()

    def traffic(self) -> Traffic:
        with self._lock:
            return self._traffic

    def close(self) -> None:
        atexit.unregister(self._leave)
        self._queue.put(None)
        self._thread.join()

    def _leave(self) -> None:
        """Ends the thread before Python ends. A thread that still copies at that time can abort the process. Copies
        that have not begun are dropped."""
        with suppress(queue.Empty):
            while True:
                self._queue.get_nowait()
        self.close()

    @torch.inference_mode()
    def _work(self) -> None:
        torch.set_num_threads(1)
        while (copy := self._queue.get()) is not None:
            try:
                self._carry(copy)
            except Exception as error:  # raised in the thread that waits for the copy
                copy.error = error.with_traceback(None)  # the frames of the traceback would keep the copy alive
            copy.done.set()
            del copy  # otherwise it would keep its memory until the next copy

    def _carry(self, copy: _Copy) -> None:
        began = time.perf_counter()
        copy.target.copy_(copy.source)
        num_bytes = copy.source.numel() * copy.source.element_size()
        if self._bytes_per_s:
            # Copies that are requested while the link is busy follow each other without a gap, even if a sleep ends
            # late.
            self._free_at = max(self._free_at, copy.asked_at) + num_bytes / self._bytes_per_s
            time.sleep(max(0.0, self._free_at - time.perf_counter()))
        seconds = time.perf_counter() - began
        with self._lock:
            old = self._traffic
            if copy.inwards:
                self._traffic = replace(old, bytes_in=old.bytes_in + num_bytes, busy_s=old.busy_s + seconds)
            else:
                self._traffic = replace(old, bytes_out=old.bytes_out + num_bytes)

    def note_wait(self, seconds: float) -> None:
        """Adds to the time that computation waited."""
        with self._lock:
            self._traffic = replace(self._traffic, waited_s=self._traffic.waited_s + seconds)


def make_link(device: torch.device, gbps: float | None = None) -> Link:
    """The link between host memory and `device`.

    Args:
        gbps: on a CPU, the maximum speed in GB/s; `None`: the speed of the memory. Without effect on a GPU.
    """
    if device.type == "cuda":
        from .cuda_link import CudaLink  # only for a GPU: a CPU has no streams

        return CudaLink(device)
    return ThreadLink(gbps * 1e9 if gbps else None)


class _Copy:
    """One copy of a `ThreadLink`, requested or done."""

    def __init__(self, link: ThreadLink, source: Tensor, target: Tensor, *, inwards: bool) -> None:
        self.source, self.target, self.inwards = source, target, inwards
        self.asked_at = time.perf_counter()
        self.done = threading.Event()
        self.error: Exception | None = None
        self._link = link

    def wait(self) -> None:
        if not self.done.is_set():
            began = time.perf_counter()
            self.done.wait()
            self._link.note_wait(time.perf_counter() - began)
        self.wait_on_host()

    def succeeds(self) -> bool:
        """Waits for the copy. Returns whether it succeeded."""
        with suppress(LinkError):
            self.wait()
        return self.error is None

    def wait_on_host(self) -> None:
        self.done.wait()
        if self.error:
            raise LinkError(f"copying a block of the KV cache failed: {self.error}") from self.error
