"""Learns how likely draft tokens are accepted, from the certainty of the tier that drafts them.

A draft ends early if it is unlikely that all its tokens so far, and the next token, will be accepted. This is decided
only by the tokens drafted so far. So the following tokens are still drawn from the same distributions
(docs/exactness.md).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from .lengths import Acceptance

EDGES = (0.1, 0.3, 0.5, 0.55, 0.6, 0.65, 0.7, 0.8, 0.9, 0.97, 0.995)
"""Bounds of certainties (`distribution.certainties`). Tokens between two bounds are counted together, as a kind."""

_DECAY = 0.99
"""Factor on the weight of earlier tokens with each new one of the same kind: about the last hundred count."""

_PRIOR = 4.0
"""The number of tokens that are assumed for each kind before any were tested, with the acceptance rate of all tokens.
"""

_MOST = 0.999
"""The maximum probability of acceptance that is assumed for a token."""


class Confidence:
    """The acceptance rate of a tier's draft tokens, by the tier's certainty of them."""

    def __init__(self, start: Acceptance | None = None) -> None:
        """Args: `start` is the expected acceptance of all tokens before any was tested."""
        self._all = start or Acceptance()
        self._kinds = [[0.0, 0.0] for _ in range(len(EDGES) + 1)]  # accepted, tested

    def observe(self, certainties: Sequence[float], accepted: int) -> None:
        """Adds a tested draft: the certainty of each token, and how many tokens were accepted."""
        if not certainties:
            return
        self._all.observe(accepted, len(certainties))
        for i, certainty in enumerate(certainties[: accepted + 1]):
            kind = self._kinds[bisect_right(EDGES, certainty)]
            kind[0] = kind[0] * _DECAY + (i < accepted)
            kind[1] = kind[1] * _DECAY + 1.0

    @property
    def rate(self) -> float:
        """The expected acceptance rate of a token that is not drafted yet."""
        return self._all.rate

    def chance(self, certainty: float) -> float:
        """The probability that a token of this certainty is accepted, if the tokens before it are."""
        accepted, tested = self._kinds[bisect_right(EDGES, certainty)]
        return min(_MOST, (accepted + _PRIOR * self.rate) / (tested + _PRIOR))
