"""Choosing implementations by hand. Without it the functions of this package take the fastest that the device has."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Literal

import torch

Backend = Literal["plain", "compiled", "flash_cpu", "flash_cuda", "flash_package", "triton"]
"""Implementations of attention: PyTorch operations, the compiled CPU kernels, PyTorch's flash kernels for CPUs and for
GPUs, the flash-attn package, and the Triton kernels of this package."""


@dataclass(frozen=True)
class Selection:
    """Implementations that were chosen by hand; `None` leaves the choice to the device and the call.

    A choice is ignored for calls that the implementation cannot compute: the compiled kernels support some dtypes and
    head sizes, the flash kernels no window.
    """

    attention: Backend | None = None
    """For passes of at most `STEP_ROWS` rows, and for prefill unless `prefill` says otherwise."""
    prefill: Backend | None = None
    """For passes of more rows."""
    layers: Literal["plain"] | None = None
    """For projections, MLP, rotation, and sampling on a CPU: `plain` does without the compiled kernels."""
    padded: bool = False
    """Whether passes of at most `STEP_ROWS` rows are computed `TILE_ROWS` rows at a time, the last of them filled up
    with rows that nobody reads: general products choose another arithmetic for another number of rows."""
    as_gpu: frozenset[str] | None = None
    """The packages (see `packages`) of the GPU that the CPU stands for, in tests without one: nothing is compiled for
    CPUs then, and nothing waits for the device to choose how to go on."""

    def backend(self, step: bool) -> Backend | None:
        """The chosen implementation of attention."""
        return self.attention if step else self.prefill or self.attention


STEP_ROWS = 288
"""Up to this many rows a pass is a step of decoding, a longest verification included. A row of a step is computed with
the same arithmetic however many rows come with it (on general products only where they are padded)."""

TILE_ROWS = 32
"""Rows of a step that general products compute together: on a GPU they take hardly longer than one, as reading weights,
keys and values is what takes time."""

KEYS_PER_SPLIT = 512
"""Keys of which the Triton kernels compute partial results. With 8 key/value heads, 8,192 keys are 128 programs, about
one for each multiprocessor of the GPUs of today. A split's results are `2 * group * n / KEYS_PER_SPLIT` of the bytes of
its keys and values (written and read again in float32): 2 % for one row of a group of four, 27 % for 17 rows, which
larger caches than that hold."""

MOST_PARTS = 64 * 2**20
"""Bytes of partial results at most, which bounds memory and keeps them in a large L2 cache: longer calls are several
launches, each going on from the one before."""

_BY_DEVICE = Selection()

_selection: ContextVar[Selection] = ContextVar("selection", default=_BY_DEVICE)

selected = _selection.get
"""The selection in force, in this thread."""


def on_cpu(device: torch.device) -> bool:
    """Whether what is computed on `device` is computed as on a CPU, not as on a GPU."""
    return device.type == "cpu" and selected().as_gpu is None


@contextmanager
def use_kernels(
    *,
    attention: Backend | None = None,
    prefill: Backend | None = None,
    layers: Literal["plain"] | None = None,
    as_gpu: Collection[str] | None = None,
) -> Iterator[None]:
    """Within, in this thread, attention and layers are computed by these implementations; see `Selection`.

    For measuring one against another, and for tests:

        with use_kernels(attention="plain", layers="plain"):  # PyTorch alone
            engine.generate(...)
    """
    now = _selection.get()
    gpu = now.as_gpu if as_gpu is None else frozenset(as_gpu)
    layers = layers if gpu is None else "plain"
    token = _selection.set(Selection(attention, prefill, layers, now.padded, gpu))
    try:
        yield
    finally:
        _selection.reset(token)


@contextmanager
def padded_rows(padded: bool = True) -> Iterator[None]:
    """Within, in this thread, rows of steps are padded or not; see `Selection.padded`."""
    token = _selection.set(replace(_selection.get(), padded=padded))
    try:
        yield
    finally:
        _selection.reset(token)
