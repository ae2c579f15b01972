"""Page-locked host memory in any amount. A GPU copies from and to it at the link's full speed, during computation.

`torch.empty(pin_memory=True)` rounds sizes up to a power of two, which wastes too much for tens of GiB. So ordinary
memory is registered. This is done in pieces, because a driver may refuse very large ones. A copy that touches two
pieces fails, so pieces end where `MOST_TOGETHER` blocks end. If memory was never written, locking it makes the system
allocate its pages one by one, at about 2 GB/s. So several threads write to the pages first.
"""

from __future__ import annotations

import math
import mmap
import time
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ...tp.errors import CapacityError
from ...tp.pages import PAGES_A_THREAD, new_pages, touch_pages
from ...tp.units import gib
from ..limits import MOST_TOGETHER

LARGEST_PIECE = 4 * 2**30
"""Maximum number of bytes that are registered in one call, if a block is not larger."""

LEAST_TRIED = 2**26
"""Minimum number of bytes that `lockable` tries. Blocks cannot stream with less."""


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
    """Page-locked memory for `shape[0]` blocks of shape `shape[1:]`, filled with zeros. It is unlocked when it is
    freed.

    Args:
        largest_piece: see `pieces`.
        pages_a_thread: see `PAGES_A_THREAD`.

    Raises:
        CapacityError: the system refuses to allocate or to page-lock this amount of memory.
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
        touch_pages(memory[first:stop], pages_a_thread)
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
    """Tests how much host memory the system page-locks. Tries `most` bytes, then half of it after each refusal, down to
    `least`.

    Returns:
        The bytes that were locked, 0 if none, and the seconds that locking them took. They are unlocked again.
    """
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
    """The first byte of each piece of `size` bytes of memory, and the last plus 1. Pieces end where both a block and a
    page end, so that no block and no page is in two pieces.

    Args:
        block: bytes of a block.
        largest: maximum bytes of a piece, if a block is not larger.
    """
    step = math.lcm(block, mmap.PAGESIZE)
    step *= max(1, largest // step)
    return [(first, min(first + step, size)) for first in range(0, size, step)]


def _unlock(runtime: PageLocking, addresses: list[int]) -> None:
    for address in addresses:
        runtime.unlock_pages(address)
