"""From logits to the distribution that a token is drawn from, and the drawing. The same for every tier.

The order and the meaning of the filters are those of `transformers`: temperature, then top-k, then top-p.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...tp.errors import ModelError, UsageError

_LIKELY = 256
"""The most likely tokens, which nearly always reach top-p together: finding so many takes a tenth of the time that
sorting 4,096 takes."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. `temperature` 0 is greedy; `top_p` 1 and `top_k` 0 switch the filters off.

    With `seed` `None` a seed is drawn when generation starts. A seed that was given yields the same tokens again on the
    same machine: the numbers of draft tokens then adapt to counts and modelled costs only, not to measured times, as
    they decide which random number is used for which token (and, in 16 bits, how a near-tie rounds).

    Raises:
        UsageError: a value out of range.
    """

    temperature: float = 0.6
    top_p: float = 0.9
    top_k: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise UsageError(f"temperature is {self.temperature}; it must be 0 (greedy) or more")
        if not 0.0 < self.top_p <= 1.0:
            raise UsageError(f"top-p is {self.top_p}; it must be above 0 and at most 1 (off)")
        if self.top_k < 0:
            raise UsageError(f"top-k is {self.top_k}; it must be 0 (off) or more")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise UsageError(f"seed is {self.seed}; it must be between 0 and 2^63 - 1")

    def with_seed(self) -> Sampling:
        """The same parameters, with a seed drawn from the operating system where none was given."""
        return self if self.seed is not None else replace(self, seed=secrets.randbelow(2**31))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True)
class Sampler:
    """Draws the tokens of one run."""

    sampling: Sampling
    generator: torch.Generator
    """On the device that tokens are drawn on; its state advances with every token."""
    eos_token_ids: frozenset[int]
    """The tokens that end the text."""
    adapts_to_time: bool
    """Whether draft lengths and refreshes adapt to measured times; if not, a seed gives the same tokens again."""

    def distribution(self, logits: Tensor) -> Tensor:
        """See `distribution`."""
        return distribution(logits, self.sampling)

    def draw(self, weights: Tensor) -> Tensor:
        """See `draw`."""
        return draw(weights, self.generator)

    def ends(self, token: int) -> bool:
        """Whether `token` ends the text."""
        return token in self.eos_token_ids

    def until_end(self, tokens: list[int]) -> list[int]:
        """`tokens` up to the first that ends the text, which is kept."""
        end = next((i for i, token in enumerate(tokens) if self.ends(token)), len(tokens))
        return tokens[: end + 1]


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
    """The probabilities and the ids of each row's tokens, most likely first, at least as many as reach `top_p`."""
    if probabilities.device.type == "cpu":  # on a GPU sorting is faster than bringing the sum to the host
        ordered, order = probabilities.topk(min(_LIKELY, probabilities.shape[-1]), dim=-1)
        if (ordered.sum(dim=-1) >= top_p).all():
            return ordered, order
    ordered, order = probabilities.sort(dim=-1, descending=True)
    return ordered, order


def draw(weights: Tensor, generator: torch.Generator) -> Tensor:
    """Draws a token from each row of `weights` `[n, vocab]`, which need not sum to one.

    Returns:
        `[n]` int64 on the device, without waiting for it (`torch.multinomial` waits, to check its input); -1 for a row
        that holds NaN. `read` brings them to the host.
    """
    reach = running_sum(weights, torch.float64)  # token i is drawn from reach[i - 1] <= point < reach[i]
    total = reach[:, -1:]
    point = torch.empty_like(total).uniform_(generator=generator).mul_(total)  # below the total, rounded or not
    return torch.searchsorted(reach, point, right=True).masked_fill_(total.isnan(), -1).squeeze(-1)


def read(tokens: Tensor) -> list[int]:
    """Drawn tokens, brought to the host; waits for the device.

    Raises:
        ModelError: one was drawn from a row that held NaN.
    """
    numbers: list[int] = tokens.tolist()
    if min(numbers) < 0:
        raise ModelError(
            "the model's logits are not finite numbers: its weights are damaged, or its dtype overflows "
            "(try --dtype float32 or bfloat16)"
        )
    return numbers
