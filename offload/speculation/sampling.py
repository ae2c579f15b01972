"""How the tokens of a run are drawn: sampling parameters, and what draws with them. The same for every tier."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...tp.errors import ModelError, UsageError
from .distribution import distribution
from .noise import Noise


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. `temperature` 0 is greedy; `top_p` 1 and `top_k` 0 switch the filters off.

    A seed that was given is a text: the tokens then follow from model, prompt and sampling parameters (and from the
    number of ranks, the dtype and the kernels), not from what was drafted. With `None` tokens are drawn with fresh
    noise, with which a little more of the draft is accepted.

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

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True)
class Sampler:
    """Draws the tokens of one run."""

    sampling: Sampling
    noise: Noise
    eos_token_ids: frozenset[int]
    """The tokens that end the text."""

    def distribution(self, logits: Tensor) -> Tensor:
        """See `distribution`."""
        return distribution(logits, self.sampling)

    def draw(self, weights: Tensor, position: int) -> Tensor:
        """See `CommonNoise.draw`."""
        return self.noise.draw(weights, position)

    def ends(self, token: int) -> bool:
        """Whether `token` ends the text."""
        return token in self.eos_token_ids

    def until_end(self, tokens: list[int]) -> list[int]:
        """`tokens` up to the first that ends the text, which is kept."""
        end = next((i for i, token in enumerate(tokens) if self.ends(token)), len(tokens))
        return tokens[: end + 1]


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
