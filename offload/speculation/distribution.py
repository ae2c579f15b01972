"""Turns logits into the distribution from which a token is drawn, in the same way for every tier.

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
"""The number of most likely tokens that are looked for first. They nearly always reach top-p together. Finding them
takes a tenth of the time of sorting 4,096."""

CPU_NUMBERS, GPU_NUMBERS = 2**15, 2**20
"""How many numbers of rows `[n, vocab]` are computed together. On a CPU, they stay in its cache. On a GPU, they take,
with all that is computed from them, some tens of MB of its memory."""

SORTING = 11
"""The memory for sorting distributions, besides the distributions: this many times the bytes of the float32 rows that
are computed together. It holds the sorted numbers and their places. Eight times are for CUDA's stable sort of several
rows: rows and places as pairs, twice, and the sorted pairs' keys and buffers
(aten/src/ATen/native/cuda/SortStable.cu)."""

_COLDEST, _HOTTEST = 1e-30, 1e30
"""Limits of the temperature. Temperatures beyond give the same distributions, but would be 0 or infinite in float32."""


def logprobs_of(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    """The log probabilities of `tokens`, which were drawn from the rows of `logits` `[len(tokens), vocab]`.

    Args: `top` is the number of likeliest tokens that are given too.
    """
    rows = logits.float().log_softmax(dim=-1)
    own = rows.gather(1, torch.tensor(tokens, device=rows.device).unsqueeze(1)).squeeze(1).tolist()
    best = rows.topk(min(top, rows.shape[1]), dim=-1)
    found = zip(tokens, own, best.indices.tolist(), best.values.tolist(), strict=True)
    return [TokenLogprobs(token, own, tuple(zip(ids, values, strict=True))) for token, own, ids, values in found]


def distribution(logits: Tensor, sampling: Sampling, out: Tensor | None = None) -> Tensor:
    """The distributions that `sampling` makes of `logits` `[n, vocab]`: rows of probabilities `[n, vocab]`, float32.
    Written to `out`, if it is given.

    Greedy sampling gives probability 1 to the first of the largest logits. A row whose largest logit is not finite
    becomes NaN. A token drawn from this row is below 0, and `check_finite` reports it; a check here would wait for the
    device.
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
    """`logits`, minus the largest of their row, divided by a temperature. Those below the `top_k`-th largest of their
    row become minus infinity."""
    scaled = (logits - logits.amax(dim=-1, keepdim=True)).float().div_(temperature)
    if 0 < top_k < scaled.shape[-1]:
        smallest_kept = scaled.topk(top_k, dim=-1).values[:, -1:]
        scaled.masked_fill_(scaled < smallest_kept, float("-inf"))
    return scaled


def rows_at_once(rows: Tensor) -> int:
    """How many of the rows `[n, vocab]` are computed together."""
    return max(1, (CPU_NUMBERS if on_cpu(rows.device) else GPU_NUMBERS) // rows.shape[-1])


def certainties(logits: Tensor, tokens: Tensor) -> Tensor:
    """The certainty of each of `tokens` `[n]`, from rows of `logits` `[n, vocab]`: the probability of the token at
    temperature 1, if it and its strongest rival were the only tokens. 0.5 for a tie; 0 if the token was drawn from NaN.

    The certainty tells more about acceptance by another tier than the probability among all tokens does. This was
    measured for greedy tokens of the embedded pair's retrieval cache, in pairs of an accepted and a rejected token. The
    accepted token has the higher certainty in 95 of 100 pairs, and the higher probability in 76 (novel, 3,000 tokens).
    """
    drawn = tokens.clamp(min=0).unsqueeze(1)
    values, ids = logits.topk(2, dim=-1)
    rival = torch.where(ids[:, :1] == drawn, values[:, 1:], values[:, :1])
    return (logits.gather(1, drawn) - rival).squeeze(1).sigmoid_().nan_to_num_(0.0)


def rounded_certainties(logits: Tensor, tokens: Tensor) -> Tensor:
    """`certainties` in millionths as int64, so that they can be copied to the host together with tokens."""
    if samples_compiled(logits):
        return certainties_compiled(logits, tokens)
    return (certainties(logits, tokens) * 1e6).long()


def _cut_to_nucleus(probabilities: Tensor, top_p: float) -> None:
    """Keeps only the most likely tokens of each row of `[n, vocab]`, as many as reach `top_p` together, and scales them
    to sum to 1. In place."""
    ordered, order = _likeliest(probabilities, top_p)
    before = running_sum(ordered).sub_(ordered)
    kept = ordered.masked_fill_(before >= top_p, 0.0)
    kept /= kept.sum(dim=-1, keepdim=True)
    probabilities.zero_().scatter_(-1, order, kept)


def _cut_to_likely(probabilities: Tensor, min_p: float) -> None:
    """Keeps only the tokens of each row of `[n, vocab]` that are at least `min_p` times as likely as the likeliest, and
    scales them to sum to 1. In place."""
    least = min_p * probabilities.amax(dim=-1, keepdim=True)
    probabilities.masked_fill_(probabilities < least, 0.0)
    probabilities /= probabilities.sum(dim=-1, keepdim=True)


def running_sum(rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`rows.cumsum(-1)` with reproducible rounding. For a single row, CUDA adds parts in the order in which they are
    finished. Of several rows, it sums each row by itself."""
    if rows.device.type == "cuda" and rows.shape[0] == 1:
        return rows.expand(2, -1).contiguous().cumsum(dim=-1, dtype=dtype)[:1]
    return rows.cumsum(dim=-1, dtype=dtype)


def _likeliest(probabilities: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The probabilities and the ids of each row's tokens, most likely first, at least as many as reach `top_p`.

    Equally likely tokens come in the order of their ids, so that a row's nucleus does not depend on the rows beside it.
    """
    if on_cpu(probabilities.device):  # on a GPU, sorting is faster than copying the sum to the host
        ordered, order = probabilities.topk(min(_LIKELY, probabilities.shape[-1]), dim=-1)
        # Further tokens that are as likely as the last one may be missing, so these tokens are not counted.
        enough = ordered.masked_fill(ordered == ordered[:, -1:], 0.0).sum(dim=-1) >= top_p
        if enough.all():
            order, ascending = order.sort(dim=-1)
            return _by_probability(ordered.gather(-1, ascending), order)
    return _by_probability(probabilities)


def _by_probability(probabilities: Tensor, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Sorts probabilities and ids by falling probability; equal ones keep their order. Without `ids`, the ids are the
    places in the row."""
    ordered, places = probabilities.sort(dim=-1, descending=True, stable=True)
    return ordered, places if ids is None else ids.gather(-1, places)


class SequencesFailed(ModelError):
    """A round failed because of some of its sequences; the others can go on."""

    def __init__(self, message: str, whose: Sequence[object]) -> None:
        """Args: `whose` are these sequences."""
        super().__init__(message)
        self.whose = whose

    def alone(self, one: object) -> SequencesFailed:
        """The error for one of the sequences. It holds no reference to a sequence."""
        return SequencesFailed(str(self), ())


class NotFiniteError(SequencesFailed):
    """Tokens were drawn from rows that hold NaN."""

    def __init__(self, whose: Sequence[object]) -> None:
        """Args: `whose` are the sequences of these rows."""
        message = (
            "the model's logits are not finite numbers: its weights are damaged, or its dtype overflows "
            "(try --dtype float32 or bfloat16)"
        )
        super().__init__(message, whose)

    def alone(self, one: object) -> NotFiniteError:
        """The error for one of the sequences. It holds no reference to a sequence."""
        return NotFiniteError(())


def check_finite(sequences: Sequence[object], tokens: Sequence[Sequence[int]]) -> None:
    """Checks drawn tokens.

    Args: `tokens` are the tokens that were drawn for each sequence.

    Raises:
        NotFiniteError: some tokens were drawn from a row that held NaN.
    """
    broken = [one for one, drawn in zip(sequences, tokens, strict=True) if min(drawn, default=0) < 0]
    if broken:
        raise NotFiniteError(broken)
