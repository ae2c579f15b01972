"""Page-locked host memory in any amount: what a GPU copies from and to at the link's full speed, beside computation.

`torch.empty(pin_memory=True)` rounds up to a power of two, which tens of GiB cannot afford, so plain memory is
registered, in pieces, as a driver may refuse very large ones. A copy that touches two pieces fails: pieces end where
`MOST_TOGETHER` blocks end. To lock memory that was never written makes the system find its pages one by one, at about 2
GB/s: they are written from several threads first.
"""

from __future__ import annotations

import math
import mmap
import os
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from ...tp.errors import CapacityError
from ...tp.pages import new_pages
from ...tp.units import gib
from ..limits import MOST_TOGETHER

LARGEST_PIECE = 4 * 2**30
"""Bytes registered in one call, if a block is not larger."""

LEAST_TRIED = 2**26
"""Bytes; with less nothing streams."""

MOST_THREADS = 16
"""Threads that write to new pages; more would wait for the system's locks."""

PAGES_A_THREAD = 4096
"""New pages that another thread is worth."""


class PageLocking(Protocol):
    """The part of `cuda_runtime.CudaRuntime` that is needed here."""

    def lock_pages(self, address: int, size: int) -> int: ...

    def unlock_pages(self, address: int) -> None: ...

    def clear_error(self) -> None: ...


def locked_memory(
    shape: Sequence[int],
    dtype: torch.dtype,
    runtime: PageLocking,
    *,
    largest_piece: int = LARGEST_PIECE,
    pages_a_thread: int = PAGES_A_THREAD,
) -> Tensor:
    """Page-locked memory for blocks `shape[1:]`, `shape[0]` of them, all zeros; unlocked when it is freed.

    Args:
        largest_piece: see `pieces`.
        pages_a_thread: new pages that another thread is worth.

    Raises:
        CapacityError: the system refuses to give or to lock so much.
    """
    block = math.prod(shape[1:]) * dtype.itemsize
    size = shape[0] * block
    if not size:
        return torch.empty(*shape, dtype=dtype)
    memory = torch.frombuffer(new_pages(size), dtype=torch.uint8, count=size)
    start = memory.data_ptr()
    locked: list[int] = []
    weakref.finalize(memory.untyped_storage(), _unlock, runtime, locked)
    for first, stop in pieces(size, MOST_TOGETHER * block, largest_piece):
        _touch(memory[first:stop], pages_a_thread)
        status = runtime.lock_pages(start + first, stop - first)
        if status != 0:
            runtime.clear_error()
            raise CapacityError(
                f"the system locks no more than {gib(first)} of the {gib(size)} of host memory for the KV cache "
                f"(CUDA error {status}); raise the limit (ulimit -l), free memory, or shorten the prompt"
            )
        locked.append(start + first)
    return memory.view(dtype).view(*shape)


def lockable(runtime: PageLocking, most: int, least: int = LEAST_TRIED) -> tuple[int, float]:
    """Tries how much host memory the system page-locks: `most` bytes or, if that is refused, half of it, and so on down
    to `least`. What was locked, 0 if nothing, and the seconds that it took; it is unlocked again."""
    size = most
    while size >= least:
        began = time.perf_counter()
        try:
            memory = locked_memory((size,), torch.uint8, runtime)
        except CapacityError:
            size //= 2
            continue
        seconds = time.perf_counter() - began
        del memory
        return size, seconds
    return 0, 0.0


def pieces(size: int, block: int, largest: int = LARGEST_PIECE) -> list[tuple[int, int]]:
    """Where pieces of `size` bytes of memory begin and end: at the borders of blocks that are borders of pages too, so
    that neither a block nor a page is in two of them.

    Args: `largest`: bytes of a piece at most, if a block is not larger.
    """
    step = math.lcm(block, mmap.PAGESIZE)
    step *= max(1, largest // step)
    return [(first, min(first + step, size)) for first in range(0, size, step)]


def _touch(memory: Tensor, pages_a_thread: int) -> None:
    """Writes to every page, from several threads: the system makes it then."""
    pages = memory[:: mmap.PAGESIZE]
    threads = min(MOST_THREADS, os.cpu_count() or 1, -(-len(pages) // pages_a_thread))
    if threads == 1:
        pages.zero_()
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(_write, pages.chunk(4 * threads)))


@torch.inference_mode()  # which is a thread's own, and may be what the memory was made in
def _write(pages: Tensor) -> None:
    pages.zero_()


def _unlock(runtime: PageLocking, addresses: list[int]) -> None:
    for address in addresses:
        runtime.unlock_pages(address)
