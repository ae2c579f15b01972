"""Calls of compiled kernels. PyTorch does not see these calls, so they are reported to the code that captures a
pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

Note = Callable[[Callable[[], Any]], None]
"""Receives a function that repeats a call, on the same memory."""

_note: ContextVar[Note | None] = ContextVar("note", default=None)


def call(kernel: Callable[..., Any], *args: Any) -> Any:
    """Calls `kernel(*args)`, and reports the call inside `noting`."""
    note = _note.get()
    if note is not None:
        note(functools.partial(kernel, *args))
    return kernel(*args)


def threads() -> int:
    """The number of threads to request from a kernel: that of PyTorch. Inside `noting`, 0: the number that OpenMP has
    when the kernel runs, because it may be different when the call is repeated."""
    return torch.get_num_threads() if _note.get() is None else 0


@contextmanager
def noting(note: Note) -> Iterator[None]:
    """Within the context, `note` receives the calls of this thread. Addresses in them are valid as long as the memory
    is kept."""
    token = _note.set(note)
    try:
        yield
    finally:
        _note.reset(token)
