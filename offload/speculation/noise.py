"""Noise for drawing tokens: fresh for every draw, or the same for all tiers that draw at a position.

Common noise uses the Gumbel-max trick in its exponential form: the token with the minimum `E / p` is drawn. `E` is
exponentially distributed and independent for each token, so a token is drawn with probability `p`. If `E` is a function
of a seed, the position and the token, all tiers that draw at a position use the same noise. Tiers with similar
distributions then nearly always draw the same token (drafter-invariant speculative decoding, Daliri et al., arXiv
2408.07978). Tokens that are drawn from the target's own distribution do not depend on the draft.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.cpu.sampling import gumbel_max_compiled, likeliest_compiled, pick_compiled, samples_compiled
from ...kernels.selection import on_cpu
from .distribution import rows_at_once, running_sum

_STEP = 0x9E3779B97F4A7C15
"""The increment of SplitMix64: 2^64 divided by the golden ratio, made odd."""

_MULTIPLIERS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True)
class FreshNoise:
    """Noise that is new for every draw, from a generator whose state advances."""

    generator: torch.Generator
    """A generator on the device on which tokens are drawn."""

    def draw(self, weights: Tensor, position: int) -> Tensor:
        """Draws a token from each row of `weights` `[n, vocab]`. A row need not sum to one.

        Args: `position`: see `CommonNoise.draw`; the noise does not depend on it.

        Returns:
            `[n]` int64 on the device, without waiting for it (`torch.multinomial` waits, to check its input). -1 for a
            row that holds NaN; `check_finite` reports it.
        """
        if samples_compiled(weights):
            shares = torch.empty(weights.shape[0], 1, dtype=torch.float64).uniform_(generator=self.generator)
            return pick_compiled(weights, shares)
        shape, rows = (weights.shape[0], 1), rows_at_once(weights)
        shares = torch.empty(shape, dtype=torch.float64, device=weights.device).uniform_(generator=self.generator)
        parts = zip(weights.split(rows), shares.split(rows), strict=True)
        return torch.cat([_reached(some, share) for some, share in parts])


def _reached(weights: Tensor, shares: Tensor) -> Tensor:
    """The first token of each row at which the running sum of weights exceeds the row's share `[n, 1]` of the total."""
    reach = running_sum(weights, torch.float64)  # token i is drawn from reach[i - 1] <= point < reach[i]
    total = reach[:, -1:]
    point = shares * total  # below the total, rounded or not
    return torch.searchsorted(reach, point, right=True).masked_fill_(total.isnan(), -1).squeeze(-1)


@dataclass(frozen=True)
class CommonNoise:
    """Noise that is the same for every draw at a position. The numbers are those of the counter-based generator
    SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), which computes any number without those before it."""

    key: int | None
    """See `key_of`; `None`: no noise, so the likeliest token is drawn."""

    def draw(self, weights: Tensor, position: int) -> Tensor:
        """Draws a token from each row of `weights` `[n, vocab]`. A row need not sum to one.

        Args: `position` is the position in the text of the token of the first row. The other rows are at the next
            positions.

        Returns:
            See `FreshNoise.draw`.
        """
        if self.key is None:
            if samples_compiled(weights):
                return likeliest_compiled(weights)
            most, tokens = weights.max(dim=-1)
            return tokens.masked_fill_(most.isnan(), -1)
        positions = torch.arange(position, position + weights.shape[0], device=weights.device)
        return gumbel_max(weights, row_keys(self.key, positions))


Noise = FreshNoise | CommonNoise


def key_of(seed: int, sequence: int = 0) -> int:
    """The key of one of several sequences with the same seed: a number of 64 bits. The key of sequence 0 is the seed
    itself, in two's complement."""
    return seed % 2**64 if sequence == 0 else mixed(mixed(seed) + sequence * _STEP)


def mixed(x: int) -> int:
    """SplitMix64's output for the state `x`: a bijection of 64-bit numbers."""
    x %= 2**64
    x = (x ^ (x >> 30)) * _MULTIPLIERS[0] % 2**64
    x = (x ^ (x >> 27)) * _MULTIPLIERS[1] % 2**64
    return x ^ (x >> 31)


def row_keys(key: int | Tensor, positions: Tensor) -> Tensor:
    """The keys `[n]` int64 of rows at `positions` `[n]`. The noise of a row is a function of its key and the token.

    Args: `key`: the key of the text, or an int64 tensor with one key for each row.
    """
    mixed_key = _mix(key.clone()) if isinstance(key, Tensor) else signed(mixed(key))
    return _mix(positions * signed(_STEP) + mixed_key)


def gumbel_max(weights: Tensor, keys: Tensor) -> Tensor:
    """Draws a token from each row of `weights` `[n, vocab]` with the noise of `keys` `[n]`; see `FreshNoise.draw`."""
    if samples_compiled(weights):
        return gumbel_max_compiled(weights, keys)
    if _mostly_zero(weights):
        return _gumbel_max_of_some(weights, keys)
    tokens, rows = torch.arange(weights.shape[1], device=weights.device), rows_at_once(weights)
    parts = [
        _exponential(some.unsqueeze(1), tokens).div_(part).min(dim=-1)
        for part, some in zip(weights.split(rows), keys.split(rows), strict=True)
    ]
    least, drawn = (torch.cat([part[i] for part in parts]) for i in (0, 1))
    return drawn.masked_fill_(least.isnan(), -1)


def _mostly_zero(weights: Tensor) -> bool:
    """Whether it pays to look for weights above 0 first. Never on a GPU, where the host would have to wait for it."""
    return on_cpu(weights.device) and 8 * int(weights.count_nonzero()) < weights.numel()


def _gumbel_max_of_some(weights: Tensor, keys: Tensor) -> Tensor:
    """`gumbel_max` if most weights are 0: computes noise only for the others. Waits for the device."""
    rows, tokens = weights.nonzero(as_tuple=True)  # NaN is among them
    times = _exponential(keys[rows], tokens).div_(weights[rows, tokens])
    least = times.new_full(weights.shape[:1], float("inf")).scatter_reduce_(0, rows, times, "amin")
    first = (times == least[rows]) | least.isnan()[rows]
    drawn = tokens.new_zeros(weights.shape[0]).scatter_(0, rows[first], tokens[first])
    return drawn.masked_fill_(least.isnan(), -1)


def _exponential(keys: Tensor, tokens: Tensor) -> Tensor:
    """Exponentially distributed numbers, float64, one for each key and token (broadcast)."""
    bits = _mix(keys + tokens * signed(_STEP))
    uniform = (bits >> 11).bitwise_and_(2**53 - 1).add_(1).double().mul_(2.0**-53)  # above 0, at most 1
    return uniform.log_().neg_().clamp_min_(2.0**-54)  # not 0, as 0 / 0 is no number


def _mix(x: Tensor) -> Tensor:
    """`mixed` for int64, in place; products wrap around."""
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        x = x.bitwise_xor_((x >> shift).bitwise_and_(2 ** (64 - shift) - 1)).mul_(signed(multiplier))
    return x.bitwise_xor_((x >> 31).bitwise_and_(2**33 - 1))


def signed(x: int) -> int:
    """The int64 with the lowest 64 bits of `x`."""
    return (x + 2**63) % 2**64 - 2**63
