"""Tensors with offsets of more than 2^31 elements, which a cache of a million tokens has: memory is reserved and hardly
touched, so that this takes a few megabytes. Linux only."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

FAR = 2**31 + 2**12
"""Elements."""

NO_RESERVE = 0x4000
"""`MAP_NORESERVE` of Linux, which Python has a name for from 3.13 on."""


def spread(x: Tensor, *strides: int) -> Tensor:
    """A copy of `x` with these strides, in memory of which only the pages that it touches are taken."""
    last = sum((size - 1) * step for size, step in zip(x.shape, strides, strict=True))
    size = (last + 1) * x.element_size()
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    there = torch.frombuffer(memory, dtype=x.dtype).as_strided(x.shape, strides)
    return there.copy_(x)


STRIDES: dict[str, tuple[int, int, int]] = {
    "heads": (FAR, 64, 1),
    "rows": (64, 2**24, 1),  # each product fits into 32 bits, and most of them do not
    "both": (2**31 - 64, 2**24 - 64, 1),
}
