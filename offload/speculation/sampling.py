"""How tokens are to be drawn, and what can be told of those that were. Needs no PyTorch."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from ...tp.errors import UsageError


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. `temperature` 0 is greedy; `top_p` 1, `top_k` 0 and `min_p` 0 switch the filters off.

    A seed is any whole number of 64 bits with a sign; -1 is one like others. One that was given is a text: the tokens
    then follow from model, prompt and sampling parameters (and from the number of ranks, the dtype and the kernels),
    not from what was drafted. With `None` tokens are drawn with fresh noise, with which a little more of the draft is
    accepted.

    Raises:
        UsageError: a value out of range.
    """

    temperature: float = 0.6
    top_p: float = 0.9
    top_k: int = 0
    min_p: float = field(default=0.0, kw_only=True)
    """Tokens are left out that are less likely than so much of the likeliest one's probability, after temperature."""
    seed: int | None = None

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
        return self.temperature == 0.0

    @property
    def filters(self) -> dict[str, Any]:
        """All but the seed, by name: what makes a distribution of logits."""
        return {name: value for name, value in vars(self).items() if name != "seed"}


OFF = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
"""The values that switch filters off."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of probabilities that the target gave, before temperature and filters."""

    token: int
    """A token of the text."""
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens in its place, and theirs."""
