"""Lookup: copies draft tokens from an earlier place in prompt or answer, where the same tokens came before.

It needs no model and takes microseconds per token (prompt lookup decoding,
github.com/apoorvumang/prompt-lookup-decoding). If a model drafts too, each draft comes from the source that was right
more often lately. The model is asked only while that is expected to pay. Lookup costs next to nothing, and goes on
without the model.
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
"""The minimum length in tokens of a long match. Long and short matches have separate acceptance rates."""

_FOLLOWS = 0.05
"""The weight of a new proposal in the share of proposed tokens that come from the model. About the last twenty count.
"""


class LookupControl(DraftControl):
    """Controls the drafts by lookup, and by a model beside it. `draft_tokens` is the number of tokens that the model
    drafts at a time, 0 while that is not worth its time."""

    def __init__(self, model: DraftControl | None, upper: DraftControl, most_by_model: int) -> None:
        """Args:
        model: the control of the tier that drafts with a model, if there is one.
        upper: the control of the tier that is drafted for.
        most_by_model: the maximum number of tokens that the model drafts at a time.
        """
        super().__init__("lookup", upper.cost, clock=upper.clock)
        self.model, self._upper, self._most_by_model = model, upper, most_by_model
        self.draft_tokens = most_by_model if model else 0
        self._by_model, self._tried = Acceptance(), False  # of the model's drafts for all sequences; whether it drafted
        self._share = 1.0  # the share of proposed tokens that come from the model
        self._unasked = 0  # steps without a proposal since the model was last asked

    def asks_model(self) -> bool:
        """Whether the model drafts if lookup finds nothing: while it pays, and now and then to test whether it does."""
        return self.model is not None and (self.draft_tokens > 0 or self._unasked >= PROBE_EVERY)

    def begin_model(self) -> int:
        """Records that the model is asked. Returns the maximum number of tokens to draft for each sequence."""
        self._unasked = 0
        return self.draft_tokens or 1

    def note_proposals(self, looked_up: Sequence[int], by_model: Sequence[int]) -> None:
        """Records how many tokens were proposed for each sequence, by lookup and by the model."""
        if not by_model:
            self._unasked += any(not count for count in looked_up)
        if self.model is not None and (proposed := sum(looked_up) + sum(by_model)):
            self._share += _FOLLOWS * (sum(by_model) / proposed - self._share)

    def judge(self, sequence: TokenSequence, proposed: int, accepted: int) -> None:
        """See `DraftControl.judge`: counts for the source of the last proposal."""
        lookup = sequence.lookup
        if lookup.last:
            lookup.last.observe(accepted, proposed)
        if self.model and lookup.last is lookup.model:
            self._by_model.observe(accepted, proposed)
            self._tried = True
            self.model.judge(sequence, proposed, accepted)

    def choose_lengths(self, batch: int = 1, filling: float = 0.0, filling_s: float = 0.0) -> float:
        """See `DraftControl.choose_lengths`: decides how many tokens the model drafts, and returns the expected seconds
        per draft token."""
        if self.model is None:
            return LOOKUP_SECONDS
        seconds, upper = self.model.choose_lengths(batch), self._upper
        # Uses the upper tier's measurements of its steps. Else that tier could stop all drafts, lookup included.
        known = upper.pays.known(StepCost(upper.cost, seconds, self._by_model.rate, batch))
        alone = replace(known, drafted=1.0)
        tokens, expected = alone.best(1, self._most_by_model)
        pays = expected < alone.without * (KEEP if self.draft_tokens else MARGIN) or not self._tried
        if upper.fixed is not None:
            tokens, pays = min(upper.fixed, self._most_by_model), True
        if pays != (self.draft_tokens > 0):
            upper.pays.begin_anew()  # another source drafts from here on
            upper.acceptance = Acceptance()
        self.draft_tokens = tokens if pays else 0
        return max(LOOKUP_SECONDS, self._share * seconds) if pays else LOOKUP_SECONDS

    def ends_early(self, tokens: int) -> bool:
        """Whether drafts can end early: always."""
        return True


class LookupTier(Tier):
    """Drafts by lookup and, if it is given a tier with a model, also by the model."""

    def __init__(self, control: LookupControl, model: Tier | None, decoder: Decoder, vocab_size: int) -> None:
        """Args: `decoder` is that of the tier for which it drafts."""
        super().__init__("lookup", decoder, control, vocab_size)
        self._lookup, self._model = control, model

    def extend(
        self, sequences: Sequence[TokenSequence], counts: Sequence[int], least_chance: float = 0.0
    ) -> list[Emitted]:
        """Proposes up to `counts[i]` tokens for each sequence; none if lookup finds nothing and no model drafts. A
        draft by lookup ends early if the next token, with all before it, is less likely than `least_chance` to be
        accepted, by the recent acceptance rate of these tokens. A model that is not worth its time drafts a single
        token now and then, to test whether it is worth it again."""
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
        """The tokens that the model drafts."""
        assert self._model
        model, most = self._model.control, self._lookup.begin_model()
        model.steady = True
        if not model.ends_early(most):
            least_chance = 0.0
        drafted = self._model.extend(sequences, [min(count, most) for count in counts], least_chance)
        # The time of a step with a single try of the model says nothing about steps without the model.
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
    """The maximum number of tokens, at least one, that are all accepted with at least the probability `least_chance`,
    if each is accepted with probability `rate`."""
    if not least_chance:
        return sys.maxsize
    return int(math.log(least_chance) / math.log(rate)) if rate > least_chance else 1
