"""The free memory of a server: how much of it is kept, and when it is returned to the system."""

from __future__ import annotations

import ctypes
import gc
import mmap
from contextlib import suppress

from ...tp.pages import free_reserve

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8

_MAPPED_BYTES = 2**25
"""Pieces of at least this number of bytes are returned to the system as soon as they are free. Each pass of the model
takes and frees pieces of some MiB. With 2**20, the system had to clear new pages for them in every pass, and answers
took 8 % more time (AMD EPYC, Zen 4, two cores)."""

_KEPT_BYTES = 2**28
"""The maximum of free memory that is kept while something runs, approximately."""

RESERVED_BYTES = 2**30
"""The free memory that `FreeMemory.reserve` takes. With 2**29, a load of 20 minutes (`hostile_load.py`) took 130 MiB
more, because free memory was in too many small pieces."""

_TRIES = 3
"""Another thread may return memory to the system while it is looked at."""

_SURPLUS_BYTES = 2**26
"""If so much more than `RESERVED_BYTES` is free, free memory is returned, and taken anew."""


class _Allocated(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "used", "free", "top")
    )


def limit_free_memory() -> None:
    """Limits the free memory that the C library keeps. Must be called before any thread is started."""
    library = ctypes.CDLL(None)
    with suppress(AttributeError):  # only glibc has it
        # One arena for all threads: in arenas of their own more pages stay taken for the sake of one small piece.
        library.mallopt(_M_ARENA_MAX, 1)
        library.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


class FreeMemory:
    """The free memory of this process."""

    def __init__(self) -> None:
        self._reserved = False
        self._least = 0  # free bytes after they were returned last, and `RESERVED_BYTES` were taken anew

    @property
    def num_bytes(self) -> int:
        """Bytes that this process keeps and does not use: those of the C library, and those of `reserve_memory`."""
        return (_free_bytes() or 0) + free_reserve()

    def reserve(self) -> None:
        """Returns all free memory and takes `RESERVED_BYTES` anew, which stay with this process from here on. Later
        allocations of any size come from it, as long as it suffices. Only with glibc."""
        library = ctypes.CDLL(None)
        if not hasattr(library, "mallinfo2"):
            return
        library.mallopt(_M_MMAP_MAX, 0)
        library.mallopt(_M_TRIM_THRESHOLD, -1)  # never by itself
        library.malloc_trim(ctypes.c_size_t(0))
        library.malloc.restype = ctypes.c_void_p
        block = library.malloc(ctypes.c_size_t(RESERVED_BYTES))
        if block:
            ctypes.memset(block, 1, RESERVED_BYTES)
            library.free(ctypes.c_void_p(block))
        self._reserved, self._least = True, max(RESERVED_BYTES, _free_bytes() or 0)

    def give_back(self, *, freeze: bool, runs: bool) -> None:
        """Frees unreferenced objects, and returns free memory to the system.

        Args:
            freeze: whether Python's garbage collector ignores all objects that exist now from here on.
            runs: whether anything is being answered or read. Its next passes take the free memory again, so up to
                `_KEPT_BYTES` of it are kept. After `reserve`, what was reserved is always kept, and hardly more.
        """
        # What refers to itself, as an error and the frames it came through may, holds a request's body until Python
        # looks for it: by itself when a quarter as much is new as there is, which includes much of what was imported.
        # Without that looking takes milliseconds.
        gc.collect()
        if freeze:
            gc.freeze()
        free = _free_bytes()
        if self._reserved:
            if free is not None and free > self._least + _SURPLUS_BYTES:
                self.reserve()
        elif not runs or free is None or free > _KEPT_BYTES:
            with suppress(AttributeError):
                ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


def _free_bytes() -> int | None:
    """The bytes of free memory that the C library keeps, without pages that were returned to the system; `None` if it
    cannot say. Fewer if memory that is used was never written, or is swapped out. With 1 GiB, this takes 0.6 ms (AMD
    EPYC, Zen 4)."""
    library = ctypes.CDLL(None)
    try:
        allocated = library.mallinfo2
    except AttributeError:
        return None
    allocated.restype = _Allocated
    for _ in range(_TRIES):
        start, stop = _heap()
        pages = bytearray((stop - start) // mmap.PAGESIZE)
        states = (ctypes.c_char * len(pages)).from_buffer(pages)
        if library.mincore(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), states) == 0:
            found = allocated()
            return min(found.free, max(0, pages.count(1) * mmap.PAGESIZE - found.used))
    return None


def _heap() -> tuple[int, int]:
    """The addresses between which the C library allocates; 0 and 0 if they are not known."""
    parts = []
    with suppress(OSError), open("/proc/self/maps", "rb") as maps:
        parts = [line.split(b" ", 1)[0].split(b"-") for line in maps if line.endswith(b"[heap]\n")]
    return (int(parts[0][0], 16), int(parts[-1][1], 16)) if parts else (0, 0)
