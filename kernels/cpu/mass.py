"""Sums the attention that chunks received with the compiled CPU kernels (`source/mass.c`). This is one call; PyTorch
takes a dozen operations for each of many sequences and layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..selection import selected
from .calls import call
from .library import Level, MassPartCall, cpu_level, loaded


def adds_mass_compiled(shares: Tensor) -> bool:
    """Whether the compiled kernels accept these shares."""
    return (
        shares.device.type == "cpu"
        and shares.dtype == torch.float32
        and shares.stride(-1) == 1
        and selected().layers is None
        and cpu_level() > Level.NONE
    )


def add_mass_compiled(
    mean: Tensor, parts: Sequence[tuple[int, Tensor, Tensor]], lse: Tensor, kept: int, weight: float
) -> None:
    """Adds to `mean` the attention that the rows of a pass gave to chunks: the mean over rows and over the query heads
    of a KV head. NaN counts as 0, infinities as the largest numbers.

    Args:
        mean: `[num_kv_heads, max_chunks]`, float32 and contiguous, updated.
        parts: each has the index of its first chunk, shares `[num_heads, rows, chunks]` of the attention to some keys,
            and log-sum-exps `[num_heads, rows]` over these keys.
        lse: `[num_heads, rows]`, over all keys.
        kept: for chunks before this index, the earlier value counts with 1 - `weight`; for the others, not at all.
        weight: that of the attention of this pass.
    """
    num_heads, rows, _ = parts[0][1].shape
    calls = (MassPartCall * len(parts))()
    for one, (first, shares, of_part) in zip(calls, parts, strict=True):
        head, row, _ = shares.stride()
        one.shares, one.head, one.row, one.first, one.chunks = shares.data_ptr(), head, row, first, shares.shape[2]
        one.lse, (one.lse_head, one.lse_row) = of_part.data_ptr(), of_part.stride()
    kernels = loaded()
    assert kernels is not None
    (num_kv_heads, max_chunks), (lse_head, lse_row) = mean.shape, lse.stride()
    sizes = max_chunks, num_kv_heads, num_heads // num_kv_heads, rows
    given = calls, len(parts), lse.data_ptr(), lse_head, lse_row, kept, weight
    call(kernels.triforce_add_mass, mean.data_ptr(), *sizes, *given)
