"""What has memory that a server needs no more go back to the system."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8

_MAPPED_BYTES = 2**20
"""Pieces of so many bytes go back to the system as soon as they are free."""

_KEPT_BYTES = 2**26
"""Of smaller ones the C library keeps so many until `give_back`. By itself it would keep some hundred MiB of what
requests took for a moment."""


def keep_little() -> None:
    """Has the C library keep less memory than it would; before anything begins a thread."""
    library = ctypes.CDLL(None)
    with suppress(AttributeError):  # only glibc has it
        # One arena for all threads: in arenas of their own more pages stay taken for the sake of one small piece.
        library.mallopt(_M_ARENA_MAX, 1)
        library.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def give_back(*, freeze: bool) -> None:
    """Frees what nobody refers to any more, and gives the system what is free.

    Args: `freeze`: what lives now stays and need not be looked at any more.
    """
    # What refers to itself, as an error and the frames it came through may, holds a request's body until Python looks
    # for it: by itself when a quarter as much is new as there is, which is all that was imported. Without that looking
    # takes milliseconds.
    gc.collect()
    if freeze:
        gc.freeze()
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
