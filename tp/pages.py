"""Host memory from the border of a page on, in huge pages where it is large and the system has them.

A system finds the pages of a direct read, or of memory that it locks, one by one: with pages of 2 MiB instead of 4 KiB
a disk was read into buffers of that size 1.5 times as fast (1.7 against 1.1 GB/s). A processor finds them one by one
too: attention of 1 to 16 rows to 32,768 keys took 5 to 11 % less time (AMD EPYC, Zen 4).
"""

from __future__ import annotations

import bisect
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch
from torch import Tensor

from ..kernels.selection import on_cpu
from .errors import CapacityError
from .units import gib

HUGE_PAGE = 2**21

_SMALL = 2**16
"""Bytes from which on memory that lasts has pages of its own."""


def aligned_memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Uninitialised memory from the border of a page on.

    Raises:
        CapacityError: the system does not give so much.
    """
    size = prod(shape) * dtype.itemsize
    if size >= HUGE_PAGE:
        memory = torch.frombuffer(new_pages(size), dtype=torch.uint8, count=size)
    else:
        memory = torch.empty(size + mmap.PAGESIZE, dtype=torch.uint8)
        first = -memory.data_ptr() % mmap.PAGESIZE
        memory = memory[first : first + size]
    return memory.view(dtype).view(*shape)


def new_pages(size: int, *, huge: bool = True) -> mmap.mmap:
    """New memory from the border of a page on, in huge pages where the system has them and they are wanted.

    Raises:
        CapacityError: the system does not give so much.
    """
    kind = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    try:
        memory = mmap.mmap(-1, size, **kind)
    except OSError as error:
        raise CapacityError(
            f"the system gives no {gib(size)} of host memory ({error.strerror}); free some, or shorten the prompt "
            "(--truncate)"
        ) from error
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        _ask_for_huge_pages(memory, 0, size)
    return memory


def _ask_for_huge_pages(memory: mmap.mmap, start: int, size: int) -> None:
    with suppress(OSError):  # of a system built without them
        memory.madvise(mmap.MADV_HUGEPAGE, start, size)


def lasting_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised memory for what lasts: a CPU's has pages of its own where it is not small, so that it parts nothing
    that comes and goes, and huge ones where it is large. The first of these begins with it: elsewhere a page that
    something is written to would be taken with twice as much behind it that nothing was.

    Raises:
        CapacityError: the system does not give so much.
    """
    size = prod(shape) * dtype.itemsize
    if not on_cpu(device) or size < _SMALL:
        return torch.empty(shape, dtype=dtype, device=device)
    return _part(*_lasting_pages(size), size).view(dtype).view(*shape)


def _lasting_pages(size: int) -> tuple[mmap.mmap, int]:
    """See `lasting_memory`: pages, and where in them it begins."""
    huge = size >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE")
    pages = new_pages(size + HUGE_PAGE if huge else size, huge=False)
    first = -torch.frombuffer(pages, dtype=torch.uint8).data_ptr() % HUGE_PAGE if huge else 0
    if huge:
        _ask_for_huge_pages(pages, first, size // HUGE_PAGE * HUGE_PAGE)  # not for one that would end behind it
    return pages, first


def _part(pages: mmap.mmap, first: int, size: int) -> Tensor:
    """uint8 `[size]` in pages, which it keeps; a storage of its own."""
    return torch.frombuffer(pages, dtype=torch.uint8, count=size, offset=first)


_PIECE = 2**25
"""Bytes of a piece that weights are put into, one after another."""

_MOST_ROOMS = 64
"""Free ranges that are remembered, the largest ones: a large model has thousands of pieces, and few weights that fit
into what is left of one."""


@dataclass(frozen=True)
class _Room:
    """Pages of a piece that nothing is in."""

    piece: weakref.ref[mmap.mmap]
    first: int
    stop: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.stop - self.first


class _Pieces:
    """Memory for weights: a processor finds them in few pages, and a system has few pieces to keep account of (Linux
    has 65,530 at most in a process), where a model has many small matrices. Where some have gone, as those have that a
    larger one was put together from, others come."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rooms: list[_Room] = []  # by size
        self._left: deque[_Room] = (
            deque()
        )  # where weights have gone since the last `take`: they cannot wait for the lock

    def take(self, size: int) -> Tensor:
        """uint8 `[size]`, from the border of a page on."""
        wanted = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            if self._left:
                while self._left:
                    self._rooms.append(self._left.popleft())
                self._rooms = _joined(self._rooms)
            room, piece = self._found(wanted)
            bisect.insort(self._rooms, replace(room, first=room.first + wanted), key=lambda room: room.size)
            del self._rooms[:-_MOST_ROOMS]
        held = np.frombuffer(piece, np.uint8, size, room.first)  # which the tensor keeps
        weakref.finalize(held, self._left.append, replace(room, stop=room.first + wanted)).atexit = False
        return torch.from_numpy(held)

    def _found(self, wanted: int) -> tuple[_Room, mmap.mmap]:
        """The smallest room that fits, or that of a new piece."""
        for place, room in enumerate(self._rooms):
            if room.size >= wanted and (piece := room.piece()):
                del self._rooms[place]
                return room, piece
        piece, first = _lasting_pages(_PIECE)
        return _Room(weakref.ref(piece), first, first + _PIECE), piece


def _joined(rooms: list[_Room]) -> list[_Room]:
    """By size, neighbours as one; without those of pieces that have gone."""
    found: list[_Room] = []
    for room in sorted(rooms, key=lambda room: (id(room.piece), room.first)):
        if found and found[-1].piece is room.piece and found[-1].stop == room.first:
            found[-1] = replace(found[-1], stop=room.stop)
        elif room.piece() is not None:
            found.append(room)
    return sorted(found, key=lambda room: room.size)


_pieces = _Pieces()


def weight_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`lasting_memory` for weights, which a model has many of; on a CPU neighbours share pieces, which go when all in
    them have.

    Raises:
        CapacityError: see `lasting_memory`.
    """
    size = prod(shape) * dtype.itemsize
    if not on_cpu(device) or size < _SMALL or size > _PIECE // 2:
        return lasting_memory(shape, dtype, device)
    return _pieces.take(size).view(dtype).view(*shape)


def lasting(tensor: Tensor, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """A contiguous copy in `weight_memory`, on another device or in another `dtype` if these are given."""
    device, dtype = device or tensor.device, dtype or tensor.dtype
    if on_cpu(device):
        return weight_memory(tensor.shape, dtype, device).copy_(tensor)
    return tensor.to(device, dtype, copy=True, memory_format=torch.contiguous_format)
