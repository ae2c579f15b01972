"""Draws the tokens of sequences: combines sampling parameters, noise, and the tokens that end a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .distribution import distribution
from .noise import CommonNoise, FreshNoise, Noise, gumbel_max, row_keys, signed
from .sampling import Sampling


@dataclass(frozen=True)
class Sampler:
    """Draws the tokens of one sequence."""

    sampling: Sampling
    noise: Noise
    eos_token_ids: frozenset[int]
    """The tokens that end the text."""

    def ends(self, token: int) -> bool:
        """Whether `token` ends the text."""
        return token in self.eos_token_ids

    def until_end(self, tokens: list[int]) -> list[int]:
        """`tokens` up to and including the first that ends the text."""
        end = next((i for i, token in enumerate(tokens) if self.ends(token)), len(tokens))
        return tokens[: end + 1]


def distributions(logits: Tensor, samplers: Sequence[Sampler], rows: Sequence[int]) -> Tensor:
    """The distributions `[n, vocab]` that each sampler makes of its rows of `logits`; see `distribution`.

    Args:
        logits: `[n, vocab]`: the rows of the first sampler's sequence, then those of the second, and so on.
        rows: the number of each sampler's rows.
    """
    filters = [sampler.sampling.filters for sampler in samplers]
    if filters.count(filters[0]) == len(filters):
        return distribution(logits, samplers[0].sampling)
    found = logits.new_empty(logits.shape, dtype=torch.float32)
    parts = zip(logits.split(list(rows)), found.split(list(rows)), samplers, strict=True)
    for part, out, sampler in parts:
        distribution(part, sampler.sampling, out)
    return found


def certain(tokens: Sequence[int], sampler: Sampler, vocab_size: int, device: torch.device) -> Tensor:
    """The distributions `[len(tokens), vocab]` of proposed tokens that were not drawn: each row gives its token
    probability 1. Only the acceptance rule of fresh noise needs them; otherwise the result is `[0, vocab]`."""
    rows = len(tokens) if isinstance(sampler.noise, FreshNoise) else 0
    found = torch.zeros(rows, vocab_size, device=device)
    if rows:
        found.scatter_(1, torch.tensor(tokens, device=device).unsqueeze(1), 1.0)
    return found


def draw(weights: Tensor, samplers: Sequence[Sampler], rows: Sequence[int], positions: Sequence[int]) -> Tensor:
    """Draws a token from each row of `weights` `[n, vocab]`; see `CommonNoise.draw`.

    Args:
        rows: the number of each sampler's rows.
        positions: the position in the text of each sampler's first row. The other rows are at the next positions.
    """
    noises = [sampler.noise for sampler in samplers]
    if len(noises) == 1 or (noises.count(noises[0]) == len(noises) and _position_free(noises[0])):
        return noises[0].draw(weights, positions[0])
    keys = [noise.key for noise in noises if isinstance(noise, CommonNoise) and noise.key is not None]
    if len(keys) < len(noises):
        parts = weights.split(list(rows))
        drawn = [noise.draw(part, at) for noise, part, at in zip(noises, parts, positions, strict=True)]
        return torch.cat(drawn)
    each = torch.tensor(rows, device=weights.device)
    at = torch.cat([torch.arange(first, first + n) for first, n in zip(positions, rows, strict=True)])
    key = torch.tensor([signed(key) for key in keys], device=weights.device).repeat_interleave(each)
    return gumbel_max(weights, row_keys(key, at.to(weights.device)))


def _position_free(noise: Noise) -> bool:
    """Whether the draws of `noise` do not depend on positions."""
    return not isinstance(noise, CommonNoise) or noise.key is None
