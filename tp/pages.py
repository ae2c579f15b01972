"""Host memory that is aligned to pages. Large memory is in huge pages if the system has them.

A system looks up the pages of a direct read, or of memory that it locks, one by one. With pages of 2 MiB instead of
4 KiB, a disk was read into buffers of that size 1.5 times as fast (1.7 against 1.1 GB/s). A processor looks up pages
one by one too: attention of 1 to 16 rows to 32,768 keys took 5 to 11 % less time (AMD EPYC, Zen 4).
"""

from __future__ import annotations

import bisect
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path

import numpy as np
import psutil
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
    if (reserved := _reserved(size)) is not None:
        memory = reserved
    elif size >= HUGE_PAGE:
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
            "(triforce generate: --truncate)"
        ) from error
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        _ask_for_huge_pages(memory, 0, size)
    return memory


MOST_THREADS = 16
"""Maximum number of threads that write to new pages. More would wait for the system's locks."""

PAGES_A_THREAD = 4096
"""New pages for which one more thread is started."""


def touch_pages(memory: Tensor, pages_a_thread: int = PAGES_A_THREAD) -> None:
    """Writes to every page of `memory`, uint8 `[bytes]`, from several threads, so that the system allocates them."""
    pages = memory.numpy()[:: mmap.PAGESIZE]
    threads = min(MOST_THREADS, os.cpu_count() or 1, -(-len(pages) // pages_a_thread))
    if threads > 1:
        with suppress(RuntimeError), ThreadPoolExecutor(threads) as pool:  # the system may refuse threads
            list(pool.map(lambda some: some.fill(0), np.array_split(pages, 4 * threads)))
            return
    pages.fill(0)


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
    if (reserved := _reserved(size)) is not None:
        return reserved.view(dtype).view(*shape)
    return _part(*_lasting_pages(size), size).view(dtype).view(*shape)


def in_new_pages(memory: Tensor) -> bool:
    """Whether `lasting_memory` took this memory from the system just now. Then it consists of zeros, and the system
    allocates its pages when they are first written to."""
    return on_cpu(memory.device) and memory.nbytes >= _SMALL and not (_reserve and _reserve.has(memory))


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


@dataclass(frozen=True)
class _Room:
    """A free range of pages, from `first` to `stop`."""

    pages: weakref.ref[mmap.mmap]
    address: int
    """That of the pages."""
    first: int
    stop: int

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.stop - self.first


class _Rooms:
    """Free ranges of pages. Memory is taken from them, and returns to them when its tensor is deleted."""

    def __init__(self, most: int | None = None) -> None:
        """Args: `most` is the maximum number of free ranges that are remembered; the largest are kept."""
        self._most = most
        self._lock = threading.Lock()
        self._rooms: list[_Room] = []  # by size
        self._left: deque[_Room] = (
            deque()
        )  # ranges whose tensors were deleted since the last call; a finalizer cannot wait for the lock

    def add(self, pages: mmap.mmap, first: int, stop: int) -> None:
        """Adds a range. It is forgotten when `pages` are freed: a tensor keeps them alive, a room does not."""
        address = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
        self._left.append(_Room(weakref.ref(pages), address, first, stop))

    def take(self, size: int, alignment: int = mmap.PAGESIZE) -> Tensor | None:
        """A tensor uint8 `[size]` in the smallest range that has room for it; `None` if none has.

        Args: `alignment` is that of the tensor's address, a multiple of the size of a page.
        """
        wanted = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            self._join()
            for place in range(bisect.bisect_left(self._rooms, wanted, key=lambda room: room.size), len(self._rooms)):
                room = self._rooms[place]
                first = room.first + -(room.address + room.first) % alignment
                if first + wanted <= room.stop and (pages := room.pages()):
                    break
            else:
                return None
            del self._rooms[place]
            taken = replace(room, first=first, stop=first + wanted)
            for rest in replace(room, stop=first), replace(room, first=taken.stop):
                if rest.size:
                    bisect.insort(self._rooms, rest, key=lambda room: room.size)
        held = np.frombuffer(pages, np.uint8, size, first)  # which the tensor keeps
        weakref.finalize(held, self._left.append, taken).atexit = False
        return torch.from_numpy(held)

    @property
    def free_bytes(self) -> int:
        """The size of all ranges, in bytes."""
        with self._lock:
            self._join()
            return sum(room.size for room in self._rooms)

    @property
    def largest_bytes(self) -> int:
        """The size of the largest range, in bytes."""
        with self._lock:
            self._join()
            return self._rooms[-1].size if self._rooms else 0

    def _join(self) -> None:
        """Adds the ranges that became free, joins adjacent ranges, and removes those of freed pages."""
        if not self._left:
            return
        while self._left:
            self._rooms.append(self._left.popleft())
        found: list[_Room] = []
        for room in sorted(self._rooms, key=lambda room: (id(room.pages), room.first)):
            if found and found[-1].pages is room.pages and found[-1].stop == room.first:
                found[-1] = replace(found[-1], stop=room.stop)
            elif room.pages() is not None:
                found.append(room)
        self._rooms = sorted(found, key=lambda room: room.size)
        if self._most:
            del self._rooms[: -self._most]


@dataclass(frozen=True)
class _Exchange:
    """New pages of the system, and the free pages of a reserve that the system got for them."""

    pages: mmap.mmap
    address: int
    size: int
    given: tuple[Tensor, ...]


class _Reserve(_Rooms):
    """Host memory that was taken in advance; see `reserve_memory`."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._pages, first = _lasting_pages(size)
        self._memory = _part(self._pages, first, size)
        touch_pages(self._memory)
        self.add(self._pages, first, first + size // mmap.PAGESIZE * mmap.PAGESIZE)
        self._exchanged: set[int] = set()  # addresses
        self._ended = deque[_Exchange]()  # whose tensors were deleted; a finalizer must not take time

    def has(self, memory: Tensor) -> bool:
        """Whether `memory` is in pages of this, or in pages that it exchanged."""
        address = memory.data_ptr()
        return 0 <= address - self._memory.data_ptr() < self._memory.nbytes or address in self._exchanged

    def exchange(self, size: int) -> Tensor | None:
        """A tensor uint8 `[size]` in new pages of the system. In exchange, the system gets free pages of several
        ranges, until the tensor is deleted. So this process does not grow. `None` if too few pages are free.

        Raises:
            CapacityError: the system refuses this much memory.
        """
        left, given = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE, list[Tensor]()
        while left:
            # Huge pages first: of a part of one, the system gets nothing as long as the rest is taken.
            most = min(left, self.largest_bytes)
            huge = most // HUGE_PAGE * HUGE_PAGE
            tried = (huge, HUGE_PAGE), (huge - HUGE_PAGE, HUGE_PAGE), (most, mmap.PAGESIZE)
            parts = (self.take(n, alignment) for n, alignment in tried if n > 0)
            part = next((one for one in parts if one is not None), None)
            if part is None:
                return None
            given.append(part)
            left -= len(part)
        pages, first = _lasting_pages(size)
        held = np.frombuffer(pages, np.uint8, size, first)
        made = _Exchange(pages, held.ctypes.data, size, tuple(given))
        for part in given:
            _release(self._pages, part.data_ptr(), len(part))
        touch_pages(torch.from_numpy(held))
        self._exchanged.add(made.address)
        weakref.finalize(held, self._ended.append, made).atexit = False
        return torch.from_numpy(held)

    def _join(self) -> None:
        while self._ended:
            with suppress(IndexError):  # another thread was first
                self._exchange_back(self._ended.popleft())
        super()._join()

    def _exchange_back(self, ended: _Exchange) -> None:
        self._exchanged.discard(ended.address)
        _release(ended.pages, ended.address, -(-ended.size // mmap.PAGESIZE) * mmap.PAGESIZE)
        for part in ended.given:
            touch_pages(part)


def _release(pages: mmap.mmap, address: int, size: int) -> None:
    """Returns a part of `pages` to the system. The addresses stay valid, and consist of zeros."""
    if hasattr(mmap, "MADV_DONTNEED"):
        pages.madvise(mmap.MADV_DONTNEED, address - torch.frombuffer(pages, dtype=torch.uint8).data_ptr(), size)


_reserve: _Reserve | None = None


def reserve_memory(size: int) -> None:
    """Takes `size` bytes of host memory from the system now. `lasting_memory` on a CPU, and large `aligned_memory`, are
    taken from them as long as this process runs.

    Raises:
        CapacityError: the system refuses this much memory.
        RuntimeError: this process has reserved memory before.
    """
    global _reserve
    if _reserve:
        raise RuntimeError("a process can reserve memory once")
    _reserve = _Reserve(size)


def _reserved(size: int) -> Tensor | None:
    """A tensor uint8 `[size]` in the reserve; `None` if there is no reserve, if it has too little room, or if `size` is
    small."""
    if _reserve is None or size < _SMALL:
        return None
    if size < HUGE_PAGE:
        return _reserve.take(size)
    found = _reserve.take(size, HUGE_PAGE)
    return _reserve.exchange(size) if found is None else found


def free_reserve() -> int:
    """The bytes of `reserve_memory` that nothing takes at present."""
    return _reserve.free_bytes if _reserve else 0


def available_memory(processes: int = 1) -> int:
    """The bytes of host memory that this process can take: those that are free in `reserve_memory`, and the system's,
    divided by the number of `processes` that share them."""
    return psutil.virtual_memory().available // processes + free_reserve()


_PIECE = 2**25
"""Bytes of a piece. Weights are put into a piece one after another."""


class _Pieces(_Rooms):
    """Memory for weights, in large pieces that many small matrices share.

    So a processor finds the weights in few pages, and the system manages few mappings (Linux allows at most 65,530 in a
    process). The space of a deleted weight is used again, for example that of matrices that were joined into one. A
    large model has thousands of pieces, and few of its weights fit into the rest of a piece.
    """

    def __init__(self) -> None:
        super().__init__(most=64)

    def take(self, size: int, alignment: int = mmap.PAGESIZE) -> Tensor:
        """See `_Rooms.take`. If no range has room, it is taken from a new piece."""
        while (found := super().take(size, alignment)) is None:
            pages, first = _lasting_pages(_PIECE)
            self.add(pages, first, first + _PIECE)
        return found


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
