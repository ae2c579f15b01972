"""Chooses implementations by hand. Without a choice, the functions of this package use the fastest implementation that
the device has."""

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

    The choice of compiled kernels is ignored for calls with a device, dtype, head size or layout that they do not
    support. The choice of flash kernels is ignored for calls with a window, with `running`, or with a diagonal that is
    a tensor. Another call that the chosen implementation cannot compute fails.
    """

    attention: Backend | None = None
    """For passes of at most `STEP_ROWS` rows, and for prefill unless `prefill` says otherwise."""
    prefill: Backend | None = None
    """For passes of more than `STEP_ROWS` rows."""
    layers: Literal["plain"] | None = None
    """For projections, MLP, rotation, and sampling on a CPU: `plain` does not use the compiled kernels."""
    padded: bool = False
    """Whether passes of at most `STEP_ROWS` rows are computed in tiles of `TILE_ROWS` rows. The last tile is filled up
    with empty rows. Without padding, PyTorch's matrix products round differently if the number of rows differs."""
    as_gpu: frozenset[str] | None = None
    """The packages (see `packages`) of the GPU that the CPU stands for, in tests without a GPU. Then no compiled CPU
    kernel is used, and no decision waits for a result of the device."""

    def backend(self, step: bool) -> Backend | None:
        """The chosen implementation of attention, for a step or for more rows."""
        return self.attention if step else self.prefill or self.attention


STEP_ROWS = 288
"""The maximum number of rows of a step. It is large enough for the longest verification. The arithmetic of a row does
not depend on how many rows are in the step; with PyTorch's matrix products, only if rows are padded."""

TILE_ROWS = 32
"""Rows of a step that PyTorch's matrix products compute together. On a GPU, they take hardly longer than one row,
because most of the time goes into reading weights, keys and values."""

KEYS_PER_SPLIT = 512
"""Keys for each partial result of the Triton kernels (a split). With 8 key/value heads, 8,192 keys are 128 programs,
about one for each multiprocessor of the GPUs of today. The results of a split are written and read again in float32.
For `n` rows, and `group` query heads for each key/value head, this moves `2 * group * n / KEYS_PER_SPLIT` times as many
bytes as reading the split's 16-bit keys and values: 2 % for one row and a group of four, 27 % for 17 rows. Hardware
caches that are larger than these results hold them."""

MOST_PARTS = 64 * 2**20
"""Maximum number of bytes of partial results. This limits memory, and keeps the results in a large L2 cache. Longer
calls are several launches, each of which continues from the launch before."""

_BY_DEVICE = Selection()

_selection: ContextVar[Selection] = ContextVar("selection", default=_BY_DEVICE)

selected = _selection.get
"""Returns the selection that applies in this thread."""


def on_cpu(device: torch.device) -> bool:
    """Whether `device` is a CPU that does not stand for a GPU (see `Selection.as_gpu`)."""
    return device.type == "cpu" and selected().as_gpu is None


@contextmanager
def use_kernels(
    *,
    attention: Backend | None = None,
    prefill: Backend | None = None,
    layers: Literal["plain"] | None = None,
    as_gpu: Collection[str] | None = None,
) -> Iterator[None]:
    """Within the context, this thread computes attention and layers with these implementations; see `Selection`.

    For measuring one implementation against another, and for tests:

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
    """Within the context, this thread pads the rows of steps if `padded`, otherwise not; see `Selection.padded`."""
    token = _selection.set(replace(_selection.get(), padded=padded))
    try:
        yield
    finally:
        _selection.reset(token)
