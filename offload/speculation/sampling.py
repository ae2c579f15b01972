"""Sampling parameters, and log probabilities of drawn tokens. Needs no PyTorch."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from ...tp.errors import UsageError


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. `temperature` 0 is greedy; `top_p` 1, `top_k` 0 and `min_p` 0 switch the filters off.

    A seed is any signed integer of 64 bits; -1 is a seed like any other. With a seed, the text is reproducible: the
    tokens follow from model, prompt and sampling parameters (and from the number of ranks, the dtype and the kernels),
    not from the draft tokens. With `None`, tokens are drawn with fresh noise, and the acceptance rate is a little
    higher.

    Raises:
        UsageError: a value is out of range.
    """

    temperature: float = 0.6
    """0 (greedy) or more."""
    top_p: float = 0.9
    """Above 0, at most 1 (off)."""
    top_k: int = 0
    """0 (off) or more."""
    min_p: float = field(default=0.0, kw_only=True)
    """From 0 (off) to 1. Leaves out tokens less likely than this share of the likeliest token's probability, after
    temperature."""
    seed: int | None = None
    """From -2^63 to 2^63 - 1; `None`: fresh noise."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= sys.float_info.max:
            raise UsageError(f"temperature is {self.temperature}; it must be 0 (greedy) or more")
        if not 0.0 < self.top_p <= 1.0:
            raise UsageError(f"top-p is {self.top_p}; it must be above 0 and at most 1 (off)")
        if self.top_k < 0:
            raise UsageError(f"top-k is {self.top_k}; it must be 0 (off) or more")
        if not 0.0 <= self.min_p <= 1.0:
            raise UsageError(f"min-p is {self.min_p}; it must be from 0 (off) to 1")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise UsageError(f"seed is {self.seed}; it must be from -2^63 to 2^63 - 1")

    @property
    def greedy(self) -> bool:
        """Whether the temperature is 0."""
        return self.temperature == 0.0

    @property
    def filters(self) -> dict[str, Any]:
        """All parameters except the seed, by name. They turn logits into a distribution."""
        return {name: value for name, value in vars(self).items() if name != "seed"}


OFF = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
"""The values that switch filters off."""


@dataclass(frozen=True)
class TokenLogprobs:
    """The target's log probabilities at one position (natural logarithm), before temperature and filters."""

    token: int
    """The token of the text."""
    logprob: float
    """The log probability of `token`."""
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens at this position, each with its log probability."""
