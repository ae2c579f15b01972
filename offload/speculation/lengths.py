"""How many tokens to draft: the numbers that maximise expected tokens per second, from acceptance and costs.

A pass that tests `n` draft tokens, each accepted with probability `a`, yields `1 + a + ... + a^n` tokens. It takes `n`
times the time per draft token plus a pass over `n + 1` rows (Leviathan et al., arXiv 2211.17192, section 3.3). The same
formula decides both levels, the lower one first, as its time per token is the upper one's time per draft token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

LOOKUP_SECONDS = 20e-6
"""Of a token that is looked up: a dictionary's look-up and a few comparisons in Python."""

_DECAY = 0.97
"""Factor on the weight of earlier observations with each new one: about the last thirty count."""

_FIRST_DECAY = 0.25
"""Factor on the weight of the modelled cost with the first measurement."""

_EXPECTED = 8.0
"""Tested tokens that an expected rate counts as."""

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
        self._observed = 0
        self._forget()

    def _forget(self) -> None:
        # Decayed sums over observations of rows x and seconds y; the model counts as one, for a single row.
        self._n = self._x = self._xx = 1.0
        self._y = self._xy = self.base + self.per_row

    def observe(self, rows: float, seconds: float) -> None:
        """Adds a measured pass, or the mean of several. A time far beyond what is expected, as when another process
        takes the processor, is cut (see `_OUTLIER`); the first, which takes memory, counts until there is another."""
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
    """The probability that a tested draft token is accepted, from decayed counts that start at two of three."""

    accepted: float = 2.0
    tested: float = 3.0

    @classmethod
    def starting_at(cls, rate: float) -> Acceptance:
        """Before anything was tested, where this is expected, and so well known that one draft that was rejected at
        once does not say the opposite."""
        return cls(_EXPECTED * rate, _EXPECTED)

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


@dataclass(frozen=True)
class StepCost:
    """What a step of a tier takes, that is a draft and the pass that tests it, and what it brings. Seconds."""

    cost: PassCost
    """Of the pass, by its rows."""
    draft_seconds: float
    """For each draft token; of several sequences for a token of each."""
    rate: float
    """Probability that a draft token is accepted."""
    batch: int = 1
    """Sequences that a pass tests the draft of."""
    plain: float | None = None
    """Of a step without a draft, where it was measured; else it follows from `cost`."""
    scale: float = 1.0
    """Measured ÷ expected seconds of steps with a draft, where that is below 1."""
    overhead: float = 0.0
    """What a step with a draft takes besides draft and pass."""
    drafted: float = 1.0
    """Share of the steps for which tokens are drafted when they are asked for: a text that is looked up has not always
    occurred before."""
    filling: float = 0.0
    """What filling the caches of those that draft takes, where they are empty, for each token of each sequence that is
    still to come."""

    @property
    def without(self) -> float:
        """Seconds of a step without a draft: per token of each sequence."""
        return self.cost.seconds(self.batch) if self.plain is None else self.plain

    def expected(self, tokens: int) -> float:
        """Seconds of draft and pass, with so many draft tokens."""
        return tokens * self.draft_seconds + self.cost.seconds(self.batch * (tokens + 1))

    def seconds_per_token(self, tokens: int) -> float:
        """For each sequence, if at most so many tokens are drafted for a step."""
        if not tokens:
            return self.without
        with_draft = self.scale * self.expected(tokens) + self.overhead
        step = self.drafted * with_draft + (1 - self.drafted) * self.without
        return step / (self.drafted * expected_tokens(self.rate, tokens) + 1 - self.drafted) + self.filling

    def best(self, least: int, most: int) -> tuple[int, float]:
        """The number of draft tokens from `least` to `most` that gives the fewest seconds per token, and these.

        Time grows linearly with the number, and what each further token brings becomes less and less: from the first
        number on whose successor is no better, none is. Only a step without a draft is a case of its own.
        """
        if not most:
            return 0, self.without
        best = max(1, least)
        seconds = self.seconds_per_token(best)
        while best < most and (longer := self.seconds_per_token(best + 1)) < seconds:
            best, seconds = best + 1, longer
        return (0, self.without) if least == 0 and self.without <= seconds else (best, seconds)

    def least_chance(self, tokens: int, seconds: float) -> float:
        """How likely a further draft token must be accepted, with all before it, to be worth its time: what it adds to
        a step, divided by the `seconds` that a token takes otherwise. Where each is accepted with probability `rate`,
        the chance falls below that exactly behind the best number of draft tokens.

        Args: `tokens` is about how many there are.
        """
        row = self.cost.seconds(self.batch * (tokens + 2)) - self.cost.seconds(self.batch * (tokens + 1))
        return (self.draft_seconds + row) / seconds


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
        length, _ = StepCost(cost, draft_seconds, rate).best(0, planned.most)
    return length, seconds_per_token(length, draft_seconds, seconds(length + 1), rate)
