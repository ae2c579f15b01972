"""How likely draft tokens are accepted, learned from how sure the tier was that drafted them.

A draft ends early where it is unlikely that all of it so far, and the next token too, will be accepted. That is decided
by the tokens drafted so far alone, so the tokens that come are still drawn from the same distributions
(docs/exactness.md).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from .lengths import Acceptance

EDGES = (0.1, 0.3, 0.5, 0.55, 0.6, 0.65, 0.7, 0.8, 0.9, 0.97, 0.995)
"""Certainties (`distribution.certainties`) between which tokens are counted together."""

_DECAY = 0.99
"""Factor on the weight of earlier tokens with each new one of the same kind: about the last hundred count."""

_PRIOR = 4.0
"""Tokens that are assumed of each kind before any, accepted as often as all tokens are."""

_MOST = 0.999
"""No token is taken to be more certain than this."""


class Confidence:
    """How often tokens that a tier was so sure of were accepted, of those that were tested."""

    def __init__(self, start: Acceptance | None = None) -> None:
        """Args: `start` is what is expected of all tokens before any was tested."""
        self._all = start or Acceptance()
        self._kinds = [[0.0, 0.0] for _ in range(len(EDGES) + 1)]  # accepted, tested

    def observe(self, certainties: Sequence[float], accepted: int) -> None:
        """Adds a draft of tokens with such certainties of which the first `accepted` were accepted."""
        if not certainties:
            return
        self._all.observe(accepted, len(certainties))
        for i, certainty in enumerate(certainties[: accepted + 1]):
            kind = self._kinds[bisect_right(EDGES, certainty)]
            kind[0] = kind[0] * _DECAY + (i < accepted)
            kind[1] = kind[1] * _DECAY + 1.0

    @property
    def rate(self) -> float:
        """Of a token that is not drafted yet."""
        return self._all.rate

    def chance(self, certainty: float) -> float:
        """That a token with such a certainty is accepted, if those before it are."""
        accepted, tested = self._kinds[bisect_right(EDGES, certainty)]
        return min(_MOST, (accepted + _PRIOR * self.rate) / (tested + _PRIOR))
