"""How many tokens to draft: the numbers that maximise expected tokens per second, from acceptance and costs.

A pass that tests `n` draft tokens, each accepted with probability `a`, yields `1 + a + ... + a^n` tokens. It takes `n`
times the time per draft token plus a pass over `n + 1` rows (Leviathan et al., arXiv 2211.17192, section 3.3). The same
formula decides both levels, the lower one first, as its time per token is the upper one's time per draft token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_DECAY = 0.97
"""Factor on the weight of earlier observations with each new one: about the last thirty count."""

_FIRST_DECAY = 0.25
"""Factor on the weight of the modelled cost with the first measurement."""

_TRUSTED = 3
"""Measurements from which on another one can be called an outlier."""

_OUTLIER = 2.0
"""A measurement is counted as at most this many times what was expected."""

_SPREAD = 2.0
"""Variance of the measured passes' rows, in rows squared, at which measured and modelled slope weigh the same."""


@dataclass
class PassCost:
    """Seconds of one pass as a linear function of its rows: modelled at first, then measured.

    The line goes through the weighted mean of the measurements. Its slope is the measured one as far as the rows of
    passes differ; where they hardly do, slope and mean keep the ratio that the model gives.
    """

    base: float
    """Modelled seconds of a pass over no rows."""
    per_row: float
    """Modelled seconds of each row."""

    @classmethod
    def through(cls, one_row: float, many_rows: float, rows: int) -> PassCost:
        """The line through the seconds of a pass over one row and over `rows` rows."""
        slope = max(0.0, many_rows - one_row) / (rows - 1)
        return cls(one_row - slope, slope)

    def __post_init__(self) -> None:
        # Decayed sums over observations of rows x and seconds y; the model counts as one, for a single row.
        self._n = self._x = self._xx = 1.0
        self._y = self._xy = self.base + self.per_row
        self._observed = 0

    def observe(self, rows: float, seconds: float) -> None:
        """Adds a measured pass, or the mean of several. A time far beyond what is expected, as when another process
        takes the processor, is cut (see `_OUTLIER`)."""
        if self._observed >= _TRUSTED:
            seconds = min(seconds, _OUTLIER * self.seconds(rows))
        for name in ("_n", "_x", "_xx", "_y", "_xy"):
            setattr(self, name, getattr(self, name) * (_DECAY if self._observed else _FIRST_DECAY))
        self._observed += 1
        self._n += 1
        self._x += rows
        self._xx += rows * rows
        self._y += seconds
        self._xy += rows * seconds

    def seconds(self, rows: float) -> float:
        """Expected seconds of a pass over `rows` rows."""
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean_x**2
        modelled = self.per_row * mean_y / (self.base + self.per_row * mean_x)
        slope = (self._xy / self._n - mean_x * mean_y + _SPREAD * modelled) / (spread + _SPREAD)
        slope = min(max(slope, 0.0), mean_y / mean_x)
        return mean_y + slope * (rows - mean_x)


@dataclass
class Acceptance:
    """The probability that a tested draft token is accepted, from decayed counts that start at two of three."""

    accepted: float = 2.0
    tested: float = 3.0

    def observe(self, accepted: int, proposed: int) -> None:
        """Adds a pass that accepted `accepted` of `proposed`; nothing after the first rejection was tested."""
        self.accepted = self.accepted * _DECAY + accepted
        self.tested = self.tested * _DECAY + min(accepted + 1, proposed)

    @property
    def rate(self) -> float:
        return min(0.995, self.accepted / self.tested)


def expected_tokens(rate: float, drafted: int) -> float:
    """Tokens that a pass yields when each of `drafted` tokens is accepted with probability `rate`."""
    return float(drafted + 1) if rate >= 1.0 else (1.0 - rate ** (drafted + 1)) / (1.0 - rate)


def seconds_per_token(drafted: int, draft_seconds: float, pass_seconds: float, rate: float) -> float:
    """Seconds per token when a pass of `pass_seconds` tests `drafted` tokens of `draft_seconds` each, and each is
    accepted with probability `rate`."""
    return (drafted * draft_seconds + pass_seconds) / expected_tokens(rate, drafted)


def best_length(cost: PassCost, draft_seconds: float, rate: float, longest: int, batch: int = 1) -> tuple[int, float]:
    """The number of tokens to draft for a pass, 0 to `longest`, and the expected seconds per token it gives.

    Args:
        cost: of the pass that tests the draft.
        draft_seconds: time per draft token.
        rate: probability that one is accepted.
        longest: the largest number to consider.
        batch: sequences that a pass tests the draft of; `draft_seconds` are those of a token for each.
    """
    times = [seconds_per_token(n, draft_seconds, cost.seconds(batch * (n + 1)), rate) for n in range(longest + 1)]
    best = min(range(longest + 1), key=times.__getitem__)
    return best, times[best]


@dataclass(frozen=True)
class DraftTokens:
    """How many tokens are drafted for one pass."""

    fixed: int | None
    """The number, where it is set; else it is planned, and adapted while running."""
    most: int
    """The largest number that adapting may choose."""

    @property
    def longest(self) -> int:
        """The largest number there may be."""
        return self.most if self.fixed is None else self.fixed


def fastest_length(
    seconds: Callable[[int], float], draft_seconds: float, rate: float, planned: DraftTokens
) -> tuple[int, float]:
    """The draft tokens for a pass whose seconds over so many rows are known, and the seconds per token they give.

    Args:
        draft_seconds: time per draft token.
        rate: chance that one is accepted.
        planned: the number, or the largest to choose.
    """
    length = planned.fixed
    if length is None:
        cost = PassCost.through(seconds(1), seconds(planned.most + 1), planned.most + 1)
        length, _ = best_length(cost, draft_seconds, rate, planned.most)
    return length, seconds_per_token(length, draft_seconds, seconds(length + 1), rate)
