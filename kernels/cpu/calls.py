"""Calls of compiled kernels, which who captures a pass wants to know of: PyTorch does not see them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

Note = Callable[[Callable[[], Any]], None]
"""Is handed what repeats a call, on the same memory."""

_note: ContextVar[Note | None] = ContextVar("note", default=None)


def call(kernel: Callable[..., Any], *args: Any) -> Any:
    """`kernel(*args)`, noted where that is wanted."""
    note = _note.get()
    if note is not None:
        note(functools.partial(kernel, *args))
    return kernel(*args)


def threads() -> int:
    """The threads to ask a kernel for: PyTorch's number, or where calls are noted 0, OpenMP's number when the kernel
    runs: there may be others when a call is repeated."""
    return torch.get_num_threads() if _note.get() is None else 0


@contextmanager
def noting(note: Note) -> Iterator[None]:
    """Within, in this thread, calls are noted. Addresses in them are good as long as the memory is kept."""
    token = _note.set(note)
    try:
        yield
    finally:
        _note.reset(token)
