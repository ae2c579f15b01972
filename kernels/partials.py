"""Joining attention over parts of the keys into attention over all of them: the split-KV identity of FlashDecoding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores and sums over inputs of `dtype`: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge_partials(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Joins attention over disjoint sets of keys into attention over their union.

    Args:
        outs: partial outputs, each `[num_heads, n, head_dim]`.
        lses: their log-sum-exps, each `[num_heads, n]`.

    Returns:
        The output and log-sum-exp over all keys; rows that see no key in any part have 0 and -inf.
    """
    if len(outs) == 1:
        return outs[0], lses[0]
    stacked = torch.stack(tuple(lses))  # [parts, num_heads, n]
    peak = stacked.amax(dim=0)
    peak.masked_fill_(peak == float("-inf"), 0.0)  # a row that sees nothing
    weights = torch.exp(stacked - peak)
    total = weights[0].clone()
    out = outs[0] * weights[0].unsqueeze(-1)
    for part, weight in zip(outs[1:], weights[1:], strict=True):  # in one order, however many rows there are
        total += weight
        out.addcmul_(part.to(out.dtype), weight.unsqueeze(-1))
    out /= total.clamp_min(torch.finfo(total.dtype).tiny).unsqueeze(-1)
    return out, peak.add_(total.log_())
