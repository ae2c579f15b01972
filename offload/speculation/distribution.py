"""From logits to the distribution that a token is drawn from, the same for every tier.

The order and the meaning of the filters are those of `transformers`: temperature, then top-k, then top-p.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .sampling import Sampling

_LIKELY = 256
"""The most likely tokens, which nearly always reach top-p together: finding so many takes a tenth of the time that
sorting 4,096 takes."""


def distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distributions that `sampling` makes of `logits` `[n, vocab]`: rows of probabilities, float32.

    Greedy gives probability 1 to the first of the largest logits. A row whose largest logit is not finite becomes NaN,
    and `read` raises an error for a token drawn from it: checking here would wait for the device.
    """
    peak = logits.amax(dim=-1, keepdim=True)
    if sampling.greedy:
        one = (peak - peak + 1.0).float()  # NaN where the peak is not finite
        return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, logits.argmax(dim=-1, keepdim=True), one)
    logits = (logits - peak).float() / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        smallest_kept = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest_kept, float("-inf"))
    probabilities = logits.softmax(dim=-1)
    return _nucleus(probabilities, sampling.top_p) if sampling.top_p < 1.0 else probabilities


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Each row of `[n, vocab]` with only the most likely tokens, as many as reach `top_p` together; they sum to 1."""
    ordered, order = _likeliest(probabilities, top_p)
    before = running_sum(ordered) - ordered
    kept = ordered.masked_fill(before >= top_p, 0.0)
    kept /= kept.sum(dim=-1, keepdim=True)
    return torch.zeros_like(probabilities).scatter_(-1, order, kept)


def running_sum(rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`rows.cumsum(-1)`, the same each time it is computed: of a single row CUDA adds parts in the order in which they
    are done, of several rows each one by itself."""
    if rows.device.type == "cuda" and rows.shape[0] == 1:
        return rows.expand(2, -1).contiguous().cumsum(dim=-1, dtype=dtype)[:1]
    return rows.cumsum(dim=-1, dtype=dtype)


def _likeliest(probabilities: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The probabilities and the ids of each row's tokens, most likely first, at least as many as reach `top_p`.

    Equally likely tokens come in the order of their ids, so that a row's nucleus does not depend on the rows beside it.
    """
    if probabilities.device.type == "cpu":  # on a GPU sorting is faster than bringing the sum to the host
        ordered, order = probabilities.topk(min(_LIKELY, probabilities.shape[-1]), dim=-1)
        # Of tokens that are as likely as the last one, more may have been left out.
        enough = ordered.masked_fill(ordered == ordered[:, -1:], 0.0).sum(dim=-1) >= top_p
        if enough.all():
            order, ascending = order.sort(dim=-1)
            return _by_probability(ordered.gather(-1, ascending), order)
    ids = torch.arange(probabilities.shape[-1], device=probabilities.device)
    return _by_probability(probabilities, ids.expand_as(probabilities))


def _by_probability(probabilities: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the order of falling probability, and of equal ones as they were."""
    ordered, places = probabilities.sort(dim=-1, descending=True, stable=True)
    return ordered, ids.gather(-1, places)
