"""Distributions and draws with the compiled CPU kernels (`source/sampling.c`). Each is one call; PyTorch takes three to
twenty operations on few numbers. The functions of `offload.speculation` that call them describe what they compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..selection import selected
from .calls import threads
from .library import Level, cpu_level, loaded

_LARGE = 2**16
"""From this number of elements on, rows are divided among threads."""


def samples_compiled(rows: Tensor) -> bool:
    """Whether the compiled kernels accept these logits or weights `[n, vocab]`."""
    return (
        rows.device.type == "cpu"
        and rows.dtype == torch.float32
        and rows.dim() == 2
        and rows.numel() > 0
        and selected().layers is None
        and cpu_level() > Level.NONE
    )


def distribution_compiled(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, out: Tensor | None = None
) -> Tensor:
    """See `distribution.distribution`; a temperature of 0 is greedy. `out` is contiguous.

    Raises:
        MemoryError: no memory for the temporaries.
    """
    logits = logits.contiguous()
    n, vocab = logits.shape
    out = torch.empty_like(logits) if out is None else out
    many = max(1, min(n, threads())) if logits.numel() >= _LARGE else 1
    filters = temperature, min(top_k, vocab), top_p, min_p
    if _kernels().triforce_distribution(logits.data_ptr(), n, vocab, *filters, out.data_ptr(), many):
        raise MemoryError(f"no memory for the temporaries of sampling from {vocab} tokens")
    return out


def certainties_compiled(logits: Tensor, tokens: Tensor) -> Tensor:
    """See `distribution.rounded_certainties`."""
    return _of_each_row("triforce_certainties", logits, tokens)


def likeliest_compiled(weights: Tensor) -> Tensor:
    """The index of the largest weight of each row, the first of equal ones; -1 if a weight of the row is NaN."""
    return _of_each_row("triforce_likeliest", weights)


def pick_compiled(weights: Tensor, shares: Tensor) -> Tensor:
    """The first token of each row at which the cumulative sum of weights exceeds a share of the total; -1 if there is
    none.

    Args:
        weights: `[n, vocab]`.
        shares: `[n, 1]` float64, below 1.
    """
    return _of_each_row("triforce_pick", weights, shares)


def gumbel_max_compiled(weights: Tensor, keys: Tensor) -> Tensor:
    """See `noise.gumbel_max`."""
    return _of_each_row("triforce_race", weights, keys)


def _of_each_row(kernel: str, rows: Tensor, *by: Tensor) -> Tensor:
    """The number that a kernel computes for each row: `[n]` int64."""
    rows, by = rows.contiguous(), tuple(one.contiguous() for one in by)
    found = torch.empty(rows.shape[0], dtype=torch.int64)
    addresses = (one.data_ptr() for one in (*by, found))
    getattr(_kernels(), kernel)(rows.data_ptr(), *rows.shape, *addresses)
    return found


def _kernels() -> Any:
    kernels = loaded()
    assert kernels is not None
    return kernels
