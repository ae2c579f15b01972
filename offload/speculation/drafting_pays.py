"""Decides whether drafting for a tier pays, from the measured times of its steps with and without a draft.

Now and then, a *probe* tries the other way for one step. Its loss is the time by which it is slower than a step of the
current way, with the time of filling empty drafting caches for it. Losses are paid from an allowance, which is a share
of the time of all steps. So probing takes no larger share, and takes none if both ways are about equally fast.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from statistics import fmean, median

from .lengths import StepCost, expected_tokens

SHARE = 0.004
"""The share of the time of a tier's steps that probes may lose. Two levels together stay below 1 %."""

LEARNING = 32
"""The first tokens of a tier, of all texts together, in which both ways are tried. `_ENOUGH` steps of each way are
measured. Only one is measured if the way is expected to take more than `_WORSE` times as long as the other, and none if
it is expected to take more than `_HOPELESS` times as long. The first step with a draft is not measured. It comes before
the measured ones, however long it is expected to take."""

_HOPELESS, _WORSE = 3.0, 1.5

_ENOUGH = 3
"""The number of measured steps of a kind from which on their time counts as known."""

_RECENT = 11
"""The number of last steps of a kind whose median counts. Another process may take the processor at any time."""

PROBE_EVERY = 24
"""The minimum number of steps between probes. If times must not decide: the number of steps without a draft after which
one token is drafted again."""

_AGAIN = 4
"""The minimum number of steps after a probe that was faster than the current way."""

KEEP, MARGIN = 0.98, 0.95
"""A tier goes on drafting while the expected time of a token is below the first share of the time without a draft. If
it has stopped, it begins again below the second share. The expected times are not exact, and little is lost if hardly
any time would be gained."""

_MOST_FILLING = 0.1
"""To try a draft, drafting caches are filled only if this takes at most this share of the time that the following
tokens take without drafts."""

_UNFORESEEN = 0.02
"""The minimum loss that is assumed for a probe, as a share of a token's time."""


class _Recent:
    """The last measurements of a kind of step."""

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
    """The times of a tier's steps with and without a draft, in seconds, and the current way: with or without."""

    def __init__(self) -> None:
        self.on = True
        """Whether tokens are drafted."""
        self._plain, self._plain_batch = _Recent(), 0  # seconds of steps without a draft, and their batch size
        self._beyond, self._ratio = _Recent(), _Recent()  # of steps with a draft: measured - and ÷ expected
        self._found = _Recent(4 * _RECENT)  # of steps that asked for a draft: whether they had one
        self._written = 0.0  # tokens so far
        self._drafted = 0  # steps with a draft so far
        self._allowance = 0.0  # seconds that probes may lose
        self._since = 0  # steps since the last probe
        self._interval = 1  # steps until the next probe
        self._other = 0.0  # while a probe is in progress: seconds per token of the current way; else 0
        self._lost = 0.0  # seconds lost by the last probe with a draft
        self._price = 0.0  # the expected loss of the next probe
        self._prepared = False  # whether caches are rebuilt for a probe with a draft, which then comes in any case

    def known(self, step: StepCost) -> StepCost:
        """`step` with measured values in place of expected ones, as far as there are any."""
        known = {}
        if self._plain_batch == step.batch and self._plain.count:
            known["plain"] = self._plain.median
        if self._ratio.count >= _ENOUGH:
            known |= {"scale": min(1.0, self._ratio.median), "overhead": max(0.0, self._beyond.median)}
        if self._found.count:
            known["drafted"] = self._found.mean
        return replace(step, **known)

    def note(self, step: StepCost, asked: int, tokens: int, emitted: float, seconds: float) -> None:
        """Records a step.

        Args:
            step: its expected cost.
            asked, tokens: the maximum numbers of draft tokens per sequence that were asked for, and that were drafted.
            emitted: the mean number of new tokens per sequence.
            seconds: the time of the whole step.
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
            self._prepared = False
            self._drafted += 1
            if self._drafted > 1:  # the first allocates memory and does much other work that is done only once
                expected = step.expected(tokens)
                self._ratio.add(seconds / expected)
                self._beyond.add(seconds - expected)
        if self._other:
            lost = seconds - emitted * self._other
            self._allowance -= max(0.0, lost)
            self._interval = PROBE_EVERY if lost > 0 else _AGAIN
            self._lost, self._other, self._since = max(0.0, lost), 0.0, 0

    def decide(self, step: StepCost, most: int) -> tuple[int, float, int | None]:
        """Decides on the draft of the next steps, and whether the very next step is a probe.

        Args:
            step: see `known`.
            most: the maximum number of draft tokens.

        Returns:
            The number of draft tokens of a step, 0 for none; the expected seconds per token; and the number of draft
            tokens of the next step if it is a probe, else `None`.
        """
        tokens, seconds = step.best(1, most)
        plain = step.without
        self._other = 0.0
        if not tokens:
            return 0, plain, None
        known_plain = self._plain_batch == step.batch and self._plain.count >= _ENOUGH
        on = seconds < plain * (KEEP if self.on else MARGIN)
        best = min(seconds, plain)
        too_short = not on and step.filling > _MOST_FILLING * plain  # too few tokens to come for a try
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
            lost = max((seconds - step.filling - plain) * expected_tokens(step.rate, tokens), self._lost / 2)
            due = self._since >= self._interval and not too_short
        self._price = lost = max(lost, _UNFORESEEN * best) + (0.0 if self.on else step.filling_s)
        self._allowance = min(self._allowance, 2 * max(lost, best))
        current, other = (tokens, 0) if self.on else (0, tokens)
        prepared = self._prepared and not self.on
        if not prepared and (not due or lost > self._allowance):
            return current, best, None
        self._other = seconds if self.on else plain
        return current, best, other

    def _learns(self, plain: int, worse_plain: float, worse_drafted: float) -> bool | None:
        """Whether the next step, one of the first, is to have a draft, so that its time is learnt; `None` if it does
        not matter.

        Args:
            plain: the number of steps without a draft so far.
            worse_plain, worse_drafted: the expected time per token without, or with a draft, ÷ that of the other way.
        """
        wants_plain = plain < (_ENOUGH if worse_plain < _WORSE else worse_plain < _HOPELESS)
        wants_draft = self._drafted <= (_ENOUGH if worse_drafted < _WORSE else worse_drafted < _HOPELESS)
        # A draft comes first even if it loses: after steps without a draft, caches would have to be updated first.
        if wants_draft and (not self.on or self._drafted <= plain + 1 or not wants_plain):
            return True
        return False if wants_plain else None

    @property
    def may_probe(self) -> bool:
        """Whether a probe is due and the allowance covers its expected loss."""
        return self._since >= self._interval and self._allowance >= self._price

    def begin_anew(self) -> None:
        """Says that another drafter drafts from here on. It is tried, independently of earlier results."""
        self.on, self._since, self._found = True, 0, _Recent(4 * _RECENT)

    def prepare_probe(self) -> None:
        """Says that caches are rebuilt in the next step for a probe with a draft, which comes after it."""
        self._prepared = True

    def note_filling(self, seconds: float) -> None:
        """Records the time of filling drafting caches. It is a loss if nothing is drafted but a probe. The first tries
        (`LEARNING`) cost nothing."""
        if not self.on and self._written >= LEARNING:
            self._allowance -= seconds

    def postpone(self) -> None:
        """Says that the next step is not the probe that was decided on."""
        self._other = 0.0
