"""The link between host memory, where the full cache lives, and the compute device: copies that run beside computation.

Two engines with one interface. `ThreadLink` copies in a thread, at a given bandwidth if one is given, and stands for a
PCIe link where there is none: every rule of the scheduler is tested on it. `CudaLink` (in `cuda_link`) is the real one.
Neither knows what is copied, nor in which order it will be wanted.
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
"""What a link must have carried for its speed to be known: four blocks and more, each copied in one piece."""


class LinkError(TriforceError):
    """A copy between host and device failed."""


@dataclass(frozen=True)
class Traffic:
    """What crossed a link so far, and what was read from a disk before."""

    bytes_in: int = 0
    """To the device."""
    bytes_out: int = 0
    """To the host."""
    busy_s: float = 0.0
    """Seconds in which something crossed it towards the device."""
    waited_s: float = 0.0
    """Seconds in which computation waited for it."""
    disk_bytes_in: int = 0
    """Read from a disk."""
    disk_bytes_out: int = 0
    """Written to it."""
    disk_busy_s: float = 0.0
    """Seconds in which it was read."""
    disk_waited_s: float = 0.0
    """Seconds in which computation waited for that."""

    @property
    def bytes_per_s(self) -> float | None:
        """What the link carries towards the device; `None` where too little has crossed it to tell."""
        return self.bytes_in / self.busy_s if self.bytes_in >= MEASURED_BYTES and self.busy_s > 0 else None

    def since(self, earlier: Traffic) -> Traffic:
        """What crossed it after `earlier`."""
        return Traffic(*(now - then for now, then in zip(vars(self).values(), vars(earlier).values(), strict=True)))

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(one + more for one, more in zip(vars(self).values(), vars(other).values(), strict=True)))


class Arrival(Protocol):
    """A copy under way."""

    def wait(self) -> None:
        """Makes what is computed from here on come after the copy.

        Raises:
            LinkError: it failed.
        """
        ...


class Copy(Arrival, Protocol):
    """A copy under way, which the host can wait for."""

    def wait_on_host(self) -> None:
        """Returns when the copy is done. Any thread may call it.

        Raises:
            LinkError: it failed.
        """
        ...


class Link(Protocol):
    """Copies of one direction run in the order they are asked for. A fetch comes after all earlier stores."""

    direct: bool
    """Whether the device computes on host memory itself, so that what is there need not be copied."""

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialised host memory that the link copies from and to at its full speed: `shape[0]` blocks, each of
        which is copied whole or in part. It begins at the border of a page."""
        ...

    def fetch(self, source: Tensor, buffer: Tensor) -> Copy:
        """Begins to copy `source`, in host memory, over `buffer`, on the device, after what was computed before."""
        ...

    def store(self, source: Tensor, target: Tensor) -> Copy:
        """Begins to copy `source`, on the device, to `target`, in host memory, both contiguous, after what was computed
        before. `source` must not be overwritten or freed before the arrival's `wait` or `wait_for_stores`."""
        ...

    def wait_for_stores(self) -> None:
        """Returns when all stores are done, also where some failed.

        Raises:
            LinkError: one of them failed.
        """
        ...

    def traffic(self) -> Traffic:
        """What crossed the link so far."""
        ...

    def close(self) -> None:
        """Ends what runs beside computation; no copy may be asked for afterwards."""
        ...


class ThreadLink:
    """A link within host memory: a thread that copies, no faster than `bytes_per_s` where that is given."""

    def __init__(self, bytes_per_s: float | None = None) -> None:
        self.direct = bytes_per_s is None
        self._bytes_per_s = bytes_per_s
        self._queue: queue.SimpleQueue[_Copy | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._traffic = Traffic()
        self._free_at = 0.0  # when the modelled link has carried all that was asked for so far
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
        self._stores = []  # only now: a wait that was interrupted has left some under way
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
        """Ends the thread before Python ends: one that copies then would abort the process now and then. What has not
        begun is not copied."""
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
            except Exception as error:  # it belongs to whoever waits for the copy
                copy.error = error.with_traceback(None)  # whose frames hold the copy
            copy.done.set()
            del copy  # or it keeps the memory until there is another

    def _carry(self, copy: _Copy) -> None:
        began = time.perf_counter()
        copy.target.copy_(copy.source)
        num_bytes = copy.source.numel() * copy.source.element_size()
        if self._bytes_per_s:
            # Copies asked for while the link was busy follow one another without a gap, however late a sleep ends.
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
        gbps: on a CPU, what it may carry in gigabytes a second; `None` is as much as memory does.
    """
    if device.type == "cuda":
        from .cuda_link import CudaLink  # only where it is used: a CPU has no streams

        return CudaLink(device)
    return ThreadLink(gbps * 1e9 if gbps else None)


class _Copy:
    """One copy of a `ThreadLink`, asked for or done."""

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
        """Waits for the copy; whether it did not fail."""
        with suppress(LinkError):
            self.wait()
        return self.error is None

    def wait_on_host(self) -> None:
        self.done.wait()
        if self.error:
            raise LinkError(f"copying a block of the KV cache failed: {self.error}") from self.error
