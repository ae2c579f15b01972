"""Measures the bandwidth of memory, link and disk on this machine. The floors of a pass are computed from it."""

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
"""Bytes of memory that the test reads: many times the size of any processor's caches."""

COPY_BYTES = 2**28
"""Bytes that one copy over the link moves in the test. Blocks of the cache have 16 MiB and more."""

REPEATS = 5

DISK_READ = 2**22
"""Bytes of one read in the test of a disk: about the size of a block."""


def timed(step: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> list[float]:
    """Seconds of each of `repeats` runs of `step`, after a first run for warming up."""
    times: list[float] = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        step()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return times[1:]


@torch.inference_mode()
def memory_bandwidth(device: torch.device, repeats: int = REPEATS, num_bytes: int | None = None) -> float:
    """The bytes/s with which PyTorch reads from the device's own memory, with its current number of threads.

    It is the best of `repeats` runs that read `num_bytes` (default `READ_BYTES`), or a quarter of the free memory, if
    that is less. Each run sums integers: of PyTorch's reductions, only this one is limited by nothing but memory.
    """
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    words = max(1, min(num_bytes or READ_BYTES, free // 4) // 8)
    buffer: Tensor = torch.ones(words, dtype=torch.int64, device=device)
    return 8 * words / min(timed(buffer.sum, device, repeats))


@torch.inference_mode()
def link_bandwidth(
    link: Link, device: torch.device, repeats: int = REPEATS, num_bytes: int | None = None
) -> dict[str, float]:
    """The bytes/s of copies of `num_bytes` (default `COPY_BYTES`): `in` to the device and `out` to the host. The best
    of `repeats` copies.

    Raises:
        CapacityError: the system does not page-lock this amount of host memory.
    """
    size = num_bytes or COPY_BYTES
    host = link.host_memory((size,), torch.uint8).fill_(1)  # otherwise all pages could be the same page of zeros
    buffer = torch.empty(size, dtype=torch.uint8, device=device)

    def fetch() -> None:
        link.fetch(host, buffer).wait()

    def store() -> None:
        link.store(buffer, host)
        link.wait_for_stores()

    return {way: size / min(timed(step, device, repeats)) for way, step in (("in", fetch), ("out", store))}


def disk_bandwidth(space: DiskSpace, num_bytes: int = DISK_READ, total: int | None = None) -> float:
    """The bytes/s of direct sequential reads of `num_bytes` each, with as many reads at once as for blocks in a pass.

    They read a file of `total` bytes (default `READ_BYTES`) that is written first.

    Raises:
        CapacityError: the disk has no room for the file.
        DiskError: reading or writing failed.
    """
    slots = max(1, (total or READ_BYTES) // num_bytes)
    file = BlockFile(space, slots, num_bytes)
    memory = aligned_memory((min(slots, LIMITS.disk_buffers), file.slot_bytes), torch.uint8).random_()
    # The contents of the buffers do not matter.
    buffers = [memory[slot % len(memory)] for slot in range(slots)]
    list(space.pool.map(file.write, range(slots), buffers))
    file.flush()
    began = time.perf_counter()
    list(space.pool.map(file.read, range(slots), buffers))
    return slots * file.slot_bytes / (time.perf_counter() - began)
