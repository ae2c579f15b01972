"""Computes how many tokens to draft, so that the expected tokens per second are maximal, from acceptance and costs.

A pass that tests `n` draft tokens, each accepted with probability `a`, yields `1 + a + ... + a^n` tokens. It takes `n`
times the time per draft token plus a pass over `n + 1` rows (Leviathan et al., arXiv 2211.17192, section 3.3). The same
formula decides both levels. The lower one comes first: its time per token is the upper one's time per draft token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

LOOKUP_SECONDS = 20e-6
"""Seconds to draft a token by lookup: a look-up in a dictionary and a few comparisons in Python."""

_DECAY = 0.97
"""Factor on the weight of earlier observations with each new one: about the last thirty count."""

_FIRST_DECAY = 0.25
"""Factor on the weight of the modelled cost with the first measurement."""

_EXPECTED = 8.0
"""The number of tested tokens that an expected rate counts as."""

_TRUSTED = 3
"""The number of measurements from which on a further one may be an outlier."""

_OUTLIER = 2.0
"""A measurement counts as at most this many times the expected time."""

_SPREAD = 2.0
"""Variance of the measured passes' rows, in rows squared, at which measured and modelled slope weigh the same."""


@dataclass
class PassCost:
    """Seconds of one pass as a linear function of its rows: modelled at first, then measured.

    The line goes through the weighted mean of the measurements. Its slope is the measured one as far as the rows of
    passes differ. If they hardly differ, slope and mean keep the ratio that the model gives.
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
        self._observed = 0
        self._forget()

    def _forget(self) -> None:
        # Decayed sums over observations of rows x and seconds y; the model counts as one, for a single row.
        self._n = self._x = self._xx = 1.0
        self._y = self._xy = self.base + self.per_row

    def observe(self, rows: float, seconds: float) -> None:
        """Adds a measured pass, or the mean of several. A time far above the expected one, as when another process
        takes the processor, is reduced (see `_OUTLIER`). The first pass allocates memory. It counts only until there is
        another measurement."""
        if self._observed == 1:
            self._forget()
        if self._observed >= _TRUSTED:
            seconds = min(seconds, _OUTLIER * self.seconds(rows))
        for name in ("_n", "_x", "_xx", "_y", "_xy"):
            setattr(self, name, getattr(self, name) * (_DECAY if self._observed > 1 else _FIRST_DECAY))
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
    """The acceptance rate of draft tokens, from counts with decay that start at two of three."""

    accepted: float = 2.0
    """The decayed number of accepted tokens."""
    tested: float = 3.0
    """The decayed number of tested tokens."""

    @classmethod
    def starting_at(cls, rate: float) -> Acceptance:
        """Starts at an expected rate, before any token was tested. The rate has enough weight that one draft that is
        rejected at once does not turn it into its opposite."""
        return cls(_EXPECTED * rate, _EXPECTED)

    def observe(self, accepted: int, proposed: int) -> None:
        """Adds a pass that accepted `accepted` of `proposed` tokens. Nothing after the first rejection was tested."""
        self.accepted = self.accepted * _DECAY + accepted
        self.tested = self.tested * _DECAY + min(accepted + 1, proposed)

    @property
    def rate(self) -> float:
        """Accepted ÷ tested tokens, at most 0.995."""
        return min(0.995, self.accepted / self.tested)


def expected_tokens(rate: float, drafted: int) -> float:
    """The expected number of tokens from a pass if each of `drafted` tokens is accepted with probability `rate`."""
    return float(drafted + 1) if rate >= 1.0 else (1.0 - rate ** (drafted + 1)) / (1.0 - rate)


def seconds_per_token(drafted: int, draft_seconds: float, pass_seconds: float, rate: float) -> float:
    """Seconds per token if a pass of `pass_seconds` tests `drafted` tokens of `draft_seconds` each, and each token is
    accepted with probability `rate`."""
    return (drafted * draft_seconds + pass_seconds) / expected_tokens(rate, drafted)


@dataclass(frozen=True)
class StepCost:
    """The cost in seconds of a tier's step, which is a draft and the pass that tests it, and the tokens it yields."""

    cost: PassCost
    """The cost of the pass by its rows."""
    draft_seconds: float
    """Seconds for each draft token; with several sequences, for one draft token of each."""
    rate: float
    """The probability that a draft token is accepted."""
    batch: int = 1
    """The number of sequences whose drafts a pass tests."""
    plain: float | None = None
    """Seconds of a step without a draft, if measured; `None`: computed from `cost`."""
    scale: float = 1.0
    """Measured ÷ expected seconds of steps with a draft, if below 1."""
    overhead: float = 0.0
    """Seconds of a step with a draft besides draft and pass."""
    drafted: float = 1.0
    """The share of steps that have a draft when one is asked for. Lookup does not always find an earlier place."""
    filling: float = 0.0
    """Seconds of filling empty drafting caches, for each token of each sequence that is still to come."""
    filling_s: float = 0.0
    """Seconds of filling empty drafting caches, in all."""

    @property
    def without(self) -> float:
        """Seconds of a step without a draft, which yields one token of each sequence."""
        return self.cost.seconds(self.batch) if self.plain is None else self.plain

    def expected(self, tokens: int) -> float:
        """Expected seconds of draft and pass, with this number of draft tokens."""
        return tokens * self.draft_seconds + self.cost.seconds(self.batch * (tokens + 1))

    def seconds_per_token(self, tokens: int) -> float:
        """Expected seconds per token of each sequence, if at most `tokens` tokens are drafted for a step."""
        if not tokens:
            return self.without
        with_draft = self.scale * self.expected(tokens) + self.overhead
        step = self.drafted * with_draft + (1 - self.drafted) * self.without
        return step / (self.drafted * expected_tokens(self.rate, tokens) + 1 - self.drafted) + self.filling

    def best(self, least: int, most: int) -> tuple[int, float]:
        """The number of draft tokens from `least` to `most` with the fewest seconds per token, and these seconds.

        Time grows linearly with the number, and each further token yields less. So the search ends at the first number
        whose successor is not better. Only a step without a draft is compared separately.
        """
        if not most:
            return 0, self.without
        best = max(1, least)
        seconds = self.seconds_per_token(best)
        while best < most and (longer := self.seconds_per_token(best + 1)) < seconds:
            best, seconds = best + 1, longer
        return (0, self.without) if least == 0 and self.without <= seconds else (best, seconds)

    def least_chance(self, tokens: int, seconds: float) -> float:
        """The minimum probability of acceptance, with all tokens before it, at which a further draft token is worth its
        time. It is the time that the token adds to a step, divided by `seconds`. If each token is accepted with
        probability `rate`, the probability falls below this exactly after the best number of draft tokens.

        Args:
            tokens: about the number of draft tokens.
            seconds: the seconds per token otherwise.
        """
        row = self.cost.seconds(self.batch * (tokens + 2)) - self.cost.seconds(self.batch * (tokens + 1))
        return (self.draft_seconds + row) / seconds


@dataclass(frozen=True)
class DraftTokens:
    """The number of tokens that are drafted for one pass."""

    fixed: int | None
    """The number, if it is set by hand; `None`: it is planned, and adapted while running."""
    most: int
    """The maximum that adapting may choose."""

    @property
    def longest(self) -> int:
        """The maximum number of draft tokens, set by hand or adapted."""
        return self.most if self.fixed is None else self.fixed


def fastest_length(
    seconds: Callable[[int], float], draft_seconds: float, rate: float, planned: DraftTokens
) -> tuple[int, float]:
    """The fastest number of draft tokens for a pass, and the seconds per token with this number.

    Args:
        seconds: the time of a pass by its rows.
        draft_seconds: the time per draft token.
        rate: the probability that a draft token is accepted.
        planned: the number if it is fixed, or the maximum.
    """
    length = planned.fixed
    if length is None:
        cost = PassCost.through(seconds(1), seconds(planned.most + 1), planned.most + 1)
        length, _ = StepCost(cost, draft_seconds, rate).best(0, planned.most)
    return length, seconds_per_token(length, draft_seconds, seconds(length + 1), rate)
