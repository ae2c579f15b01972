"""Returns memory that a server no longer needs to the system."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8

_MAPPED_BYTES = 2**20
"""Pieces of at least this number of bytes are returned to the system as soon as they are free."""

_KEPT_BYTES = 2**26
"""The C library keeps this number of bytes of smaller pieces until `give_back`. By default, it would keep some hundred
MiB that requests took for a moment."""


def keep_little() -> None:
    """Makes the C library keep less free memory than by default. Must be called before any thread is started."""
    library = ctypes.CDLL(None)
    with suppress(AttributeError):  # only glibc has it
        # One arena for all threads: in arenas of their own more pages stay taken for the sake of one small piece.
        library.mallopt(_M_ARENA_MAX, 1)
        library.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def give_back(*, freeze: bool) -> None:
    """Frees unreferenced objects, and returns free memory to the system.

    Args:
        freeze: whether Python's garbage collector ignores all objects that exist now from here on.
    """
    # What refers to itself, as an error and the frames it came through may, holds a request's body until Python looks
    # for it: by itself when a quarter as much is new as there is, which is all that was imported. Without that looking
    # takes milliseconds.
    gc.collect()
    if freeze:
        gc.freeze()
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
