"""What memory, link and disk carry, measured here and now: the floors of a pass are bytes over these."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil
import torch
from torch import Tensor

from ...tp.devices import synchronize
from ...tp.pages import aligned_memory
from ..limits import LIMITS
from .link import Link
from .staged.block_file import BlockFile, DiskSpace

READ_BYTES = 2**30
"""Memory that a reading test goes through: many times what any processor's caches hold."""

COPY_BYTES = 2**28
"""Memory that one copy over the link moves: blocks of the cache are 16 MiB and more."""

REPEATS = 5

DISK_READ = 2**22
"""Bytes of one of the reads that a disk is tested with, about as large as blocks are."""


def timed(step: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> list[float]:
    """Seconds of each run of `step`, after one that warms up."""
    times: list[float] = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        step()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return times[1:]


@torch.inference_mode()
def memory_bandwidth(device: torch.device, repeats: int = REPEATS, num_bytes: int | None = None) -> float:
    """Bytes a second that PyTorch reads from the device's own memory, with the threads it has: the best of several
    passes over `num_bytes` (default `READ_BYTES`), or a quarter of what is free, if that is less. A sum of whole
    numbers is what it does with what it reads: of PyTorch's reductions the one that waits for nothing but memory."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    words = max(1, min(num_bytes or READ_BYTES, free // 4) // 8)
    buffer: Tensor = torch.ones(words, dtype=torch.int64, device=device)
    return 8 * words / min(timed(buffer.sum, device, repeats))


@torch.inference_mode()
def link_bandwidth(
    link: Link, device: torch.device, repeats: int = REPEATS, num_bytes: int | None = None
) -> dict[str, float]:
    """Bytes a second of copies of `num_bytes` (default `COPY_BYTES`), `in` to the device and `out` to the host: the
    best of several."""
    size = num_bytes or COPY_BYTES
    host = link.host_memory((size,), torch.uint8).fill_(1)  # untouched pages would all be one page of zeros
    buffer = torch.empty(size, dtype=torch.uint8, device=device)

    def fetch() -> None:
        link.fetch(host, buffer).wait()

    def store() -> None:
        link.store(buffer, host)
        link.wait_for_stores()

    return {way: size / min(timed(step, device, repeats)) for way, step in (("in", fetch), ("out", store))}


def disk_bandwidth(space: DiskSpace, num_bytes: int = DISK_READ, total: int | None = None) -> float:
    """Bytes a second of direct reads of `num_bytes` each, in order, as many under way as when blocks are read ahead: of
    a file of `total` bytes (default `READ_BYTES`) that was just written.

    Raises:
        CapacityError: the disk has no room for it.
        DiskError: it failed.
    """
    slots = max(1, (total or READ_BYTES) // num_bytes)
    file = BlockFile(space, slots, num_bytes)
    memory = aligned_memory((min(slots, LIMITS.disk_buffers), file.slot_bytes), torch.uint8).random_()
    # What is in them is of no interest.
    buffers = [memory[slot % len(memory)] for slot in range(slots)]
    list(space.pool.map(file.write, range(slots), buffers))
    file.flush()
    began = time.perf_counter()
    list(space.pool.map(file.read, range(slots), buffers))
    return slots * file.slot_bytes / (time.perf_counter() - began)
