"""What draws the tokens of a run: sampling parameters, noise, and where the text ends."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .noise import Noise
from .sampling import Sampling, distribution


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
