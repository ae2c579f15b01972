"""Drafts from what occurred before: what followed the last tokens when they came earlier in prompt or answer.

It takes no model and microseconds a token (prompt lookup decoding, github.com/apoorvumang/prompt-lookup-decoding).
Where a model drafts too, each proposal is by whoever has been right more often lately, and the model is asked only
while that is expected to pay: what is looked up costs next to nothing, and goes on without it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from ...tp.decoder import Decoder
from ..held import Held
from .control import DraftControl
from .drafting_pays import KEEP, MARGIN, PROBE_EVERY
from .lengths import LOOKUP_SECONDS, Acceptance, StepCost
from .sampler import certain
from .sequence import TokenSequence
from .tiers import Emitted, Tier

LONG = 8
"""Matches of so many tokens and more are judged apart from shorter ones."""

_FOLLOWS = 0.05
"""Of a proposal, in the share of proposed tokens that are the model's: about the last twenty count."""


class LookupControl(DraftControl):
    """How many tokens the model that drafts beside what is looked up drafts at a time: `draft_tokens`, 0 while it is
    not worth its time."""

    def __init__(self, model: DraftControl | None, upper: DraftControl, most_by_model: int) -> None:
        """Args:
        model: of the tier that drafts with a model, if any does.
        upper: of the tier that is drafted for.
        most_by_model: tokens that the model drafts at a time at most.
        """
        super().__init__("lookup", upper.cost, clock=upper.clock)
        self.model, self._upper, self._most_by_model = model, upper, most_by_model
        self.draft_tokens = most_by_model if model else 0
        self._by_model, self._tried = Acceptance(), False  # of what it drafted, for all sequences; whether it has
        self._share = 1.0  # of proposed tokens, those that are the model's
        self._unasked = 0  # steps without a proposal since it was asked

    def asks_model(self) -> bool:
        """Whether the model is asked where nothing occurred: while it pays, and now and then to see whether it does."""
        return self.model is not None and (self.draft_tokens > 0 or self._unasked >= PROBE_EVERY)

    def begin_model(self) -> int:
        """Notes that the model is asked; for how many tokens of each sequence at most."""
        self._unasked = 0
        return self.draft_tokens or 1

    def note_proposals(self, looked_up: Sequence[int], by_model: Sequence[int]) -> None:
        """Notes how many tokens were proposed for each sequence, of those that were looked up and of the model's."""
        if not by_model:
            self._unasked += any(not count for count in looked_up)
        if self.model is not None and (proposed := sum(looked_up) + sum(by_model)):
            self._share += _FOLLOWS * (sum(by_model) / proposed - self._share)

    def judge(self, sequence: TokenSequence, proposed: int, accepted: int) -> None:
        lookup = sequence.lookup
        if lookup.last:
            lookup.last.observe(accepted, proposed)
        if self.model and lookup.last is lookup.model:
            self._by_model.observe(accepted, proposed)
            self._tried = True
            self.model.judge(sequence, proposed, accepted)

    def choose_lengths(self, batch: int = 1, filling: float = 0.0) -> float:
        if self.model is None:
            return LOOKUP_SECONDS
        seconds, upper = self.model.choose_lengths(batch), self._upper
        # With what its upper tier knows of its steps, or that would turn off what pays here, and looking up with it.
        known = upper.pays.known(StepCost(upper.cost, seconds, self._by_model.rate, batch))
        alone = replace(known, drafted=1.0)
        tokens, expected = alone.best(1, self._most_by_model)
        pays = expected < alone.without * (KEEP if self.draft_tokens else MARGIN) or not self._tried
        if upper.fixed is not None:
            tokens, pays = min(upper.fixed, self._most_by_model), True
        if pays != (self.draft_tokens > 0):
            upper.pays.begin_anew()  # what is proposed is another's
            upper.acceptance = Acceptance()
        self.draft_tokens = tokens if pays else 0
        return max(LOOKUP_SECONDS, self._share * seconds) if pays else LOOKUP_SECONDS

    def ends_early(self, tokens: int) -> bool:
        return True


class LookupTier(Tier):
    """Drafts from earlier occurrences and, where it is given a tier with a model, by that."""

    def __init__(self, control: LookupControl, model: Tier | None, decoder: Decoder, vocab_size: int) -> None:
        """Args: `decoder` is the one of the tier it drafts for."""
        super().__init__("lookup", decoder, control, vocab_size)
        self._lookup, self._model = control, model

    def extend(
        self, sequences: Sequence[TokenSequence], counts: Sequence[int], least_chance: float = 0.0
    ) -> list[Emitted]:
        """Proposes up to `counts[i]` tokens for each sequence; none where nothing occurred and no model drafts. What is
        looked up ends where, as often as such tokens were accepted lately, the next one is less likely than
        `least_chance` to be accepted with all before it. A model that is not worth its time drafts a single token now
        and then, to see whether it has become so."""
        found: dict[int, Emitted] = {}
        asked: list[int] = []
        control, asks = self._lookup, self._lookup.asks_model()
        for i, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
            lookup = sequence.lookup
            lookup.occurrences.follow(sequence.context)
            place, matching = lookup.occurrences.longest()
            source = lookup.long if matching >= LONG else lookup.short
            if matching and (not (asks and control.draft_tokens) or source.rate >= lookup.model.rate):
                lookup.last = source
                count = min(count, _worth(source.rate, least_chance))
                tokens = sequence.sampler.until_end(lookup.occurrences.after(place, count))
                found[i] = tokens, self._certain(tokens, sequence)
            elif not asks:
                lookup.last = None
                found[i] = [], self._certain([], sequence)
            else:
                lookup.last = lookup.model
                asked.append(i)
        looked_up = [len(tokens) for tokens, _ in found.values()]
        if asked:
            some, most = [sequences[i] for i in asked], [counts[i] for i in asked]
            found.update(zip(asked, self._by_model(some, most, least_chance), strict=True))
        control.note_proposals(looked_up, [len(found[i][0]) for i in asked])
        return [found[i] for i in range(len(sequences))]

    def _by_model(
        self, sequences: Sequence[TokenSequence], counts: Sequence[int], least_chance: float
    ) -> list[Emitted]:
        """What the model drafts."""
        assert self._model
        model, most = self._model.control, self._lookup.begin_model()
        model.steady = True
        if not model.ends_early(most):
            least_chance = 0.0
        drafted = self._model.extend(sequences, [min(count, most) for count in counts], least_chance)
        # What a model that is left out takes says nothing of steps without it.
        self._lookup.steady &= model.steady and self._lookup.draft_tokens > 0
        return drafted

    def _certain(self, tokens: list[int], sequence: TokenSequence) -> Tensor:
        return certain(tokens, sequence.sampler, self.vocab_size, self.decoder.device)

    def end_draft(self, sequences: Sequence[TokenSequence]) -> None:
        if self._model:
            self._model.end_draft(sequences)

    def rollback(self, sequence: TokenSequence, length: int) -> None:
        sequence.lookup.occurrences.cut(length)
        if self._model:
            self._model.rollback(sequence, length)

    def held(self) -> Held:
        if self._model:
            yield from self._model.held()

    def drop_joined(self) -> None:
        if self._model:
            self._model.drop_joined()


def _worth(rate: float, least_chance: float) -> int:
    """Tokens, at least one, that are all accepted with a probability of `least_chance`, if each is with `rate`."""
    if not least_chance:
        return sys.maxsize
    return int(math.log(least_chance) / math.log(rate)) if rate > least_chance else 1
