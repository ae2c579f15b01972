"""Host memory that is aligned to pages. Large memory is in huge pages if the system has them.

A system looks up the pages of a direct read, or of memory that it locks, one by one. With pages of 2 MiB instead of
4 KiB, a disk was read into buffers of that size 1.5 times as fast (1.7 against 1.1 GB/s). A processor looks up pages
one by one too: attention of 1 to 16 rows to 32,768 keys took 5 to 11 % less time (AMD EPYC, Zen 4).
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
from functools import cache
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..kernels.selection import on_cpu
from .errors import CapacityError
from .units import gib

HUGE_PAGE = 2**21

_SMALL = 2**16
"""From this number of bytes on, memory that lasts has pages of its own."""


def aligned_memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Uninitialised host memory that is aligned to pages.

    Raises:
        CapacityError: the system refuses this much memory.
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
    """New memory that is aligned to pages; in huge pages if `huge` and if the system has them.

    Raises:
        CapacityError: the system refuses this much memory.
    """
    kind = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    try:
        memory = mmap.mmap(-1, size, **kind)
    except OSError as error:
        raise CapacityError(
            f"the system refuses {gib(size)} of host memory ({error.strerror}); free some, or shorten the prompt "
            "(--truncate)"
        ) from error
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        _ask_for_huge_pages(memory, 0, size)
    return memory


def _ask_for_huge_pages(memory: mmap.mmap, start: int, size: int) -> None:
    with suppress(OSError):  # the system may have been built without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE, start, size)


def lasting_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised memory for data that are kept for long.

    On a CPU, it has pages of its own unless it is small, so that it does not fragment the memory for temporary data.
    Large memory is in huge pages and begins at the start of a huge page. If it began elsewhere, a write would take
    a huge page with twice as much memory behind it that is not written to.

    Raises:
        CapacityError: the system refuses this much memory.
    """
    size = prod(shape) * dtype.itemsize
    if not on_cpu(device) or size < _SMALL:
        return torch.empty(shape, dtype=dtype, device=device)
    return _part(*_lasting_pages(size), size).view(dtype).view(*shape)


def begins_as_zeros(size: int, device: torch.device) -> bool:
    """Whether `lasting_memory` of this number of bytes consists of zeros, because it is in new pages of the system."""
    return on_cpu(device) and size >= _SMALL


@cache
def has_huge_pages() -> bool:
    """Whether the system puts large memory into huge pages if it is asked to."""
    try:
        return "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="ascii")
    except OSError:
        return False


def _lasting_pages(size: int) -> tuple[mmap.mmap, int]:
    """Pages for `lasting_memory`, and the offset in them at which the memory begins."""
    huge = size >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE")
    pages = new_pages(size + HUGE_PAGE if huge else size, huge=False)
    first = -torch.frombuffer(pages, dtype=torch.uint8).data_ptr() % HUGE_PAGE if huge else 0
    if huge:
        _ask_for_huge_pages(pages, first, size // HUGE_PAGE * HUGE_PAGE)  # not for a last page that is not full
    return pages, first


def _part(pages: mmap.mmap, first: int, size: int) -> Tensor:
    """A tensor uint8 `[size]` in `pages`, with a storage of its own. It keeps the pages alive."""
    return torch.frombuffer(pages, dtype=torch.uint8, count=size, offset=first)


_PIECE = 2**25
"""Bytes of a piece. Weights are put into a piece one after another."""

_MOST_ROOMS = 64
"""Maximum number of free ranges that are remembered; the largest are kept. A large model has thousands of pieces, and
few of its weights fit into the rest of a piece."""


@dataclass(frozen=True)
class _Room:
    """A free range of pages in a piece, from `first` to `stop`."""

    piece: weakref.ref[mmap.mmap]
    first: int
    stop: int

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.stop - self.first


class _Pieces:
    """Memory for weights, in large pieces that many small matrices share.

    So a processor finds the weights in few pages, and the system manages few mappings (Linux allows at most 65,530 in a
    process). The space of a deleted weight is used again, for example that of matrices that were joined into one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rooms: list[_Room] = []  # by size
        self._left: deque[_Room] = (
            deque()
        )  # ranges of weights that were deleted since the last `take`; a finalizer cannot wait for the lock

    def take(self, size: int) -> Tensor:
        """A tensor uint8 `[size]` that is aligned to pages."""
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
        """Removes and returns the smallest room that is large enough; otherwise the room of a new piece."""
        for place, room in enumerate(self._rooms):
            if room.size >= wanted and (piece := room.piece()):
                del self._rooms[place]
                return room, piece
        piece, first = _lasting_pages(_PIECE)
        return _Room(weakref.ref(piece), first, first + _PIECE), piece


def _joined(rooms: list[_Room]) -> list[_Room]:
    """The rooms sorted by size, with adjacent rooms joined, and without those of deleted pieces."""
    found: list[_Room] = []
    for room in sorted(rooms, key=lambda room: (id(room.piece), room.first)):
        if found and found[-1].piece is room.piece and found[-1].stop == room.first:
            found[-1] = replace(found[-1], stop=room.stop)
        elif room.piece() is not None:
            found.append(room)
    return sorted(found, key=lambda room: room.size)


_pieces = _Pieces()


def weight_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`lasting_memory` for the many weights of a model. On a CPU, several weights share a piece of memory. A piece is
    freed when all its weights are deleted.

    Raises:
        CapacityError: see `lasting_memory`.
    """
    size = prod(shape) * dtype.itemsize
    if not on_cpu(device) or size < _SMALL or size > _PIECE // 2:
        return lasting_memory(shape, dtype, device)
    return _pieces.take(size).view(dtype).view(*shape)


def lasting(tensor: Tensor, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """A contiguous copy of `tensor` in `weight_memory`, on `device` and in `dtype` if these are given."""
    device, dtype = device or tensor.device, dtype or tensor.dtype
    if on_cpu(device):
        return weight_memory(tensor.shape, dtype, device).copy_(tensor)
    return tensor.to(device, dtype, copy=True, memory_format=torch.contiguous_format)
