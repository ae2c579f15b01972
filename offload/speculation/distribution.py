"""From logits to the distribution that a token is drawn from, the same for every tier.

The order and the meaning of the filters are those of `transformers`: temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels.cpu.sampling import certainties_compiled, distribution_compiled, samples_compiled
from ...kernels.selection import on_cpu
from ...tp.errors import ModelError
from .sampling import Sampling, TokenLogprobs

_LIKELY = 256
"""The most likely tokens, which nearly always reach top-p together: finding so many takes a tenth of the time that
sorting 4,096 takes."""

CPU_NUMBERS, GPU_NUMBERS = 2**15, 2**20
"""Numbers of rows `[n, vocab]` that are computed together: as many as stay in a CPU's cache, and as take, with what is
computed from them, some tens of MB of a GPU's memory."""

SORTING = 11
"""Times the float32 numbers of rows that are computed together: what their distributions take besides themselves while
they are sorted. The sorted numbers and their places, and eight times as much that CUDA's stable sort of several rows
takes meanwhile: rows and places as pairs, twice, and the sorted pairs' keys and buffers
(aten/src/ATen/native/cuda/SortStable.cu)."""

_COLDEST, _HOTTEST = 1e-30, 1e30
"""Temperatures beyond make no other distributions, and in float32 they would be 0 or infinite."""


def logprobs_of(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    """The logarithms for `tokens`, which were drawn from the rows of `logits` `[len(tokens), vocab]`.

    Args: `top` of the likeliest tokens are given, too.
    """
    rows = logits.float().log_softmax(dim=-1)
    own = rows.gather(1, torch.tensor(tokens, device=rows.device).unsqueeze(1)).squeeze(1).tolist()
    best = rows.topk(min(top, rows.shape[1]), dim=-1)
    found = zip(tokens, own, best.indices.tolist(), best.values.tolist(), strict=True)
    return [TokenLogprobs(token, own, tuple(zip(ids, values, strict=True))) for token, own, ids, values in found]


def distribution(logits: Tensor, sampling: Sampling, out: Tensor | None = None) -> Tensor:
    """The distributions that `sampling` makes of `logits` `[n, vocab]`: rows of probabilities, float32; written to
    `out`, where that is given.

    Greedy gives probability 1 to the first of the largest logits. A row whose largest logit is not finite becomes NaN,
    and a token drawn from it is below 0, see `check_finite`: checking here would wait for the device.
    """
    temperature = 0.0 if sampling.greedy else min(max(float(sampling.temperature), _COLDEST), _HOTTEST)
    if samples_compiled(logits):
        return distribution_compiled(logits, temperature, sampling.top_k, sampling.top_p, sampling.min_p, out)
    if out is None:
        out = torch.empty_like(logits, dtype=torch.float32)
    together = rows_at_once(logits)
    for some, found in zip(logits.split(together), out.split(together), strict=True):
        if sampling.greedy:
            peak = some.amax(dim=-1, keepdim=True)
            one = (peak - peak + 1.0).float()  # NaN where the peak is not finite
            found.zero_().scatter_(-1, some.argmax(dim=-1, keepdim=True), one)
            continue
        torch.softmax(_scaled(some, temperature, sampling.top_k), dim=-1, out=found)
        if sampling.top_p < 1.0:
            _cut_to_nucleus(found, sampling.top_p)
        if sampling.min_p > 0.0:
            _cut_to_likely(found, sampling.min_p)
    return out


def _scaled(logits: Tensor, temperature: float, top_k: int) -> Tensor:
    """`logits` at a temperature, but for those that are not among the `top_k` largest of their row."""
    scaled = (logits - logits.amax(dim=-1, keepdim=True)).float().div_(temperature)
    if 0 < top_k < scaled.shape[-1]:
        smallest_kept = scaled.topk(top_k, dim=-1).values[:, -1:]
        scaled.masked_fill_(scaled < smallest_kept, float("-inf"))
    return scaled


def rows_at_once(rows: Tensor) -> int:
    """How many of the rows `[n, vocab]` are computed together."""
    return max(1, (CPU_NUMBERS if on_cpu(rows.device) else GPU_NUMBERS) // rows.shape[-1])


def certainties(logits: Tensor, tokens: Tensor) -> Tensor:
    """How sure a model is of each of `tokens` `[n]`, by rows of `logits` `[n, vocab]`: the token's probability at
    temperature 1, if it and its strongest rival were the only ones. 0.5 for a tie; 0 where it was drawn from NaN.

    Whether another tier accepts a token depends on that more than on its probability among all: greedy tokens of the
    embedded pair's retrieval cache that are accepted have a higher certainty than rejected ones in 95 of 100 pairs of
    one of each, a higher probability in 76 (novel, 3,000 tokens).
    """
    drawn = tokens.clamp(min=0).unsqueeze(1)
    values, ids = logits.topk(2, dim=-1)
    rival = torch.where(ids[:, :1] == drawn, values[:, 1:], values[:, :1])
    return (logits.gather(1, drawn) - rival).squeeze(1).sigmoid_().nan_to_num_(0.0)


def rounded_certainties(logits: Tensor, tokens: Tensor) -> Tensor:
    """`certainties` as int64, to be brought to the host together with tokens."""
    if samples_compiled(logits):
        return certainties_compiled(logits, tokens)
    return (certainties(logits, tokens) * 1e6).long()


def _cut_to_nucleus(probabilities: Tensor, top_p: float) -> None:
    """Leaves of each row of `[n, vocab]` only the most likely tokens, as many as reach `top_p` together; they sum to
    1."""
    ordered, order = _likeliest(probabilities, top_p)
    before = running_sum(ordered).sub_(ordered)
    kept = ordered.masked_fill_(before >= top_p, 0.0)
    kept /= kept.sum(dim=-1, keepdim=True)
    probabilities.zero_().scatter_(-1, order, kept)


def _cut_to_likely(probabilities: Tensor, min_p: float) -> None:
    """Leaves each row of `[n, vocab]` only tokens at least `min_p` times as likely as the likeliest; they sum to 1."""
    least = min_p * probabilities.amax(dim=-1, keepdim=True)
    probabilities.masked_fill_(probabilities < least, 0.0)
    probabilities /= probabilities.sum(dim=-1, keepdim=True)


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
    if on_cpu(probabilities.device):  # on a GPU sorting is faster than bringing the sum to the host
        ordered, order = probabilities.topk(min(_LIKELY, probabilities.shape[-1]), dim=-1)
        # Of tokens that are as likely as the last one, more may have been left out.
        enough = ordered.masked_fill(ordered == ordered[:, -1:], 0.0).sum(dim=-1) >= top_p
        if enough.all():
            order, ascending = order.sort(dim=-1)
            return _by_probability(ordered.gather(-1, ascending), order)
    return _by_probability(probabilities)


def _by_probability(probabilities: Tensor, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Both in the order of falling probability, and of equal ones as they were; `ids` are the places by themselves."""
    ordered, places = probabilities.sort(dim=-1, descending=True, stable=True)
    return ordered, places if ids is None else ids.gather(-1, places)


class SequencesFailed(ModelError):
    """A round failed because of some of its sequences; the others can go on."""

    def __init__(self, message: str, whose: Sequence[object]) -> None:
        """Args: `whose` are these sequences."""
        super().__init__(message)
        self.whose = whose

    def alone(self, one: object) -> SequencesFailed:
        """The error of one of them, which refers to none."""
        return SequencesFailed(str(self), ())


class NotFiniteError(SequencesFailed):
    """Tokens were drawn from rows that hold NaN."""

    def __init__(self, whose: Sequence[object]) -> None:
        """Args: `whose` are the sequences they are of."""
        message = (
            "the model's logits are not finite numbers: its weights are damaged, or its dtype overflows "
            "(try --dtype float32 or bfloat16)"
        )
        super().__init__(message, whose)

    def alone(self, one: object) -> NotFiniteError:
        return NotFiniteError(())


def check_finite(sequences: Sequence[object], tokens: Sequence[Sequence[int]]) -> None:
    """Args: `tokens` are those that were drawn for each sequence.

    Raises:
        NotFiniteError: some were drawn from a row that held NaN.
    """
    broken = [one for one, drawn in zip(sequences, tokens, strict=True) if min(drawn, default=0) < 0]
    if broken:
        raise NotFiniteError(broken)
