"""Joins attention over parts of the keys into attention over all of them: the split-KV identity of FlashDecoding."""

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
        The output `[num_heads, n, head_dim]` and the log-sum-exp `[num_heads, n]` over all keys. The output of several
        parts has the dtype of `lses`; a single part is returned unchanged. Rows that see no key in any part have output
        0 and log-sum-exp -inf.
    """
    if len(outs) == 1:
        return outs[0], lses[0]
    stacked = torch.stack(tuple(lses))  # [parts, num_heads, n]
    peak = stacked.amax(dim=0)
    peak.masked_fill_(peak == float("-inf"), 0.0)  # a row that sees no key
    weights = torch.exp(stacked - peak)
    total = weights[0].clone()
    out = outs[0] * weights[0].unsqueeze(-1)
    for part, weight in zip(outs[1:], weights[1:], strict=True):  # in one order, however many rows there are
        total += weight
        out.addcmul_(part.to(out.dtype), weight.unsqueeze(-1))
    out /= total.clamp_min(torch.finfo(total.dtype).tiny).unsqueeze(-1)
    return out, peak.add_(total.log_())


EMPTY = -1e30
"""The peak of a row that has no scores. It is finite, so that differences from it are finite."""


def new_running(q: Tensor) -> Tensor:
    """A running result over no keys. Several calls of `attend` add keys to it, in the order of their positions.

    Args:
        q: `[num_heads, n, head_dim]`, the rows.

    Returns:
        `[num_heads, n, head_dim + 16]` float32 (float64 for float64): for each row the sum of values weighted by
        exponentials of scores, then the peak that these are relative to, then the sum of the exponentials. The other 14
        numbers, and the unit of scores, depend on the implementation. So all calls must use the same implementation.
    """
    num_heads, n, head_dim = q.shape
    running = q.new_zeros(num_heads, n, head_dim + 16, dtype=accumulation_dtype(q.dtype))
    running[..., head_dim].fill_(EMPTY)  # an assignment would make a tensor of the number first
    return running


def add_partial(running: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Adds attention over further keys to `running`, and returns output and log-sum-exp over all keys so far.

    Args:
        running: see `new_running`; updated. Only that of PyTorch's operations: compiled and Triton kernels keep powers
            of two in theirs.
        out: `[num_heads, n, head_dim]`, the output over the further keys.
        lse: `[num_heads, n]`, its log-sum-exp.
    """
    head_dim = out.shape[2]
    sums, peak, total = running[..., :head_dim], running[..., head_dim], running[..., head_dim + 1]
    here = lse.clamp_min(EMPTY)
    higher = torch.maximum(peak, here)
    old, new = torch.exp(peak - higher), torch.exp(here - higher).masked_fill_(lse == float("-inf"), 0.0)
    sums.mul_(old.unsqueeze(-1)).addcmul_(out.to(sums.dtype), new.unsqueeze(-1))
    total.mul_(old).add_(new)
    peak.copy_(higher)
    seen = total.clamp_min(torch.finfo(total.dtype).tiny)
    return sums / seen.unsqueeze(-1), torch.where(total > 0, peak + seen.log(), float("-inf"))
