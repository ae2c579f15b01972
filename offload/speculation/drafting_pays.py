"""Whether a tier has tokens drafted for it, by what its steps took with and without; and when to try the other way.

A step the other way, a *probe*, costs what it takes longer than one the way that is in force. Such losses are paid from
an allowance, a share of the time of all steps, so that probing takes no larger share, and takes none where both ways
are about as fast.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from statistics import fmean, median

from .lengths import StepCost, expected_tokens

SHARE = 0.004
"""Of the time of a tier's steps, for probes: two levels together stay below 1 %."""

LEARNING = 32
"""Tokens of all texts of a tier in which both ways are tried: once unless one is expected to take more than `_HOPELESS`
times as long, `_ENOUGH` times unless it takes more than `_WORSE` times as long."""

_HOPELESS, _WORSE = 3.0, 1.5

_ENOUGH = 3
"""Steps of a kind from which on what they took is known."""

_RECENT = 11
"""Steps of a kind that count: the median of the last ones, as another process may take the processor at any time."""

PROBE_EVERY = 24
"""Steps between probes at least; where times must not decide, steps after which one token is drafted again."""

_AGAIN = 4
"""The same after a probe that was faster than the way in force."""

KEEP, MARGIN = 0.98, 0.95
"""A tier drafts as long as a token is expected to take less than the first share of the time that it takes without; one
that stopped begins again at the second. What is expected is not that exact, and nothing is lost where hardly any time
would be gained."""

_MOST_FILLING = 0.1
"""Caches of those that draft are filled for a try alone where that takes at most this share of the time that the tokens
to come take without drafts."""

_UNFORESEEN = 0.02
"""Share of a token's time that a probe is taken to lose at least."""


class _Recent:
    """The last measurements of a kind."""

    def __init__(self, most: int = _RECENT) -> None:
        self._values: deque[float] = deque(maxlen=most)
        self.count = 0

    def add(self, value: float) -> None:
        self._values.append(value)
        self.count += 1

    @property
    def median(self) -> float:
        return median(self._values)

    @property
    def mean(self) -> float:
        return fmean(self._values)


class DraftingPays:
    """What a tier's steps took with a draft and without, and which way is in force. Seconds."""

    def __init__(self) -> None:
        self.on = True
        """Whether tokens are drafted."""
        self._plain, self._plain_batch = _Recent(), 0
        self._beyond, self._ratio = _Recent(), _Recent()  # of steps with a draft: measured - and ÷ expected
        self._found = _Recent(4 * _RECENT)  # of steps that were asked for a draft: whether they had one
        self._written = 0.0  # tokens so far
        self._drafted = 0  # steps with a draft so far
        self._allowance = 0.0
        self._since = 0  # steps since the last probe
        self._interval = 1
        self._other = 0.0  # seconds per token the other way than the probe under way; 0 where none is
        self._lost = 0.0  # by the last probe with a draft
        self._price = 0.0  # what the next probe is expected to lose

    def known(self, step: StepCost) -> StepCost:
        """`step` as far as steps were measured."""
        known = {}
        if self._plain_batch == step.batch and self._plain.count:
            known["plain"] = self._plain.median
        if self._ratio.count >= _ENOUGH:
            known |= {"scale": min(1.0, self._ratio.median), "overhead": max(0.0, self._beyond.median)}
        if self._found.count:
            known["drafted"] = self._found.mean
        return replace(step, **known)

    def note(self, step: StepCost, asked: int, tokens: int, emitted: float, seconds: float) -> None:
        """Notes a step.

        Args:
            step: what was expected.
            asked, tokens: draft tokens of each sequence that were asked for at most, and were drafted.
            emitted: tokens of each sequence that it brought.
            seconds: for all of it.
        """
        self._written += emitted
        self._allowance += SHARE * seconds
        self._since += 1
        if asked:
            self._found.add(float(tokens > 0))
        if not tokens:
            if self._plain_batch != step.batch:
                self._plain, self._plain_batch = _Recent(), step.batch
            self._plain.add(seconds)
        else:
            self._drafted += 1
            if self._drafted > 1:  # the first takes memory, and much that is done once
                expected = step.expected(tokens)
                self._ratio.add(seconds / expected)
                self._beyond.add(seconds - expected)
        if self._other:
            lost = seconds - emitted * self._other
            self._allowance -= max(0.0, lost)
            self._interval = PROBE_EVERY if lost > 0 else _AGAIN
            self._lost, self._other, self._since = max(0.0, lost), 0.0, 0

    def decide(self, step: StepCost, most: int) -> tuple[int, float, int | None]:
        """What the next steps do, and what the very next one does, if that is something else.

        Args: `step`: see `known`.

        Returns:
            The draft tokens of a step, 0 for none; the seconds per token that are expected; and the draft tokens of the
            next step where that is to show what the other way takes, or `None`.
        """
        tokens, seconds = step.best(1, most)
        plain = step.without
        self._other = 0.0
        if not tokens:
            return 0, plain, None
        known_plain = self._plain_batch == step.batch and self._plain.count >= _ENOUGH
        on = seconds < plain * (KEEP if self.on else MARGIN)
        best = min(seconds, plain)
        too_short = not on and step.filling > _MOST_FILLING * plain  # for a try
        if self._written < LEARNING:
            self.on = on
            tried = self._plain.count if self._plain_batch == step.batch else 0
            drafted = seconds - step.filling
            other = False if too_short else self._learns(tried, plain / drafted, drafted / plain)
            if other is not None:
                return (tokens if on else 0), best, None if other == on else tokens if other else 0
        known_drafted = self._ratio.count >= _ENOUGH or best * _HOPELESS < seconds
        if on != self.on and (on or known_drafted or too_short):
            self.on, self._interval, self._since = on, PROBE_EVERY, 0
        if self.on:
            lost, due = plain - seconds, self._since >= (self._interval if known_plain else 1)
        else:
            lost = max((seconds - plain) * expected_tokens(step.rate, tokens), self._lost / 2)
            due = self._since >= self._interval and not too_short
        self._price = lost = max(lost, _UNFORESEEN * best)
        self._allowance = min(self._allowance, 2 * max(lost, best))
        current, other = (tokens, 0) if self.on else (0, tokens)
        if not due or lost > self._allowance:
            return current, best, None
        self._other = seconds if self.on else plain
        return current, best, other

    def _learns(self, plain: int, worse_plain: float, worse_drafted: float) -> bool | None:
        """Whether the next step, one of the first, is one with a draft, to learn what it takes; `None` if it does not
        matter.

        Args:
            plain: steps without a draft so far.
            worse_plain, worse_drafted: how many times as long a step without, or with one, is expected to take.
        """
        wants_plain = plain < (_ENOUGH if worse_plain < _WORSE else worse_plain < _HOPELESS)
        wants_draft = self._drafted <= (_ENOUGH if worse_drafted < _WORSE else worse_drafted < _HOPELESS)
        # Drafts first where they lose: after steps without one, caches would have to be brought up to date.
        if wants_draft and (not self.on or self._drafted <= plain + 1 or not wants_plain):
            return True
        return False if wants_plain else None

    @property
    def may_probe(self) -> bool:
        """Whether it is time for a probe, by what is known since the last decision."""
        return self._since >= self._interval and self._allowance >= self._price

    def begin_anew(self) -> None:
        """Says that what is drafted from here on is another's: it is tried, whatever was found so far."""
        self.on, self._since, self._found = True, 0, _Recent(4 * _RECENT)

    def postpone(self) -> None:
        """Says that the probe which was decided on does not come yet."""
        self._other = 0.0
