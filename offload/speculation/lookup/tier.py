"""Drafts from what occurred before: what followed the last tokens when they came earlier in prompt or answer.

It takes no model and microseconds a token (prompt lookup decoding, github.com/apoorvumang/prompt-lookup-decoding).
Where a model drafts too, each proposal is by whoever has been right more often lately.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from ..lengths import LOOKUP_SECONDS
from ..noise import FreshNoise
from ..sequence import TokenSequence
from ..tiers import Emitted, Tier

LONG = 8
"""Matches of so many tokens and more are judged apart from shorter ones."""


class LookupTier(Tier):
    """Drafts from earlier occurrences and, where it is given a tier with a model, by that."""

    def __init__(self, model: Tier | None, upper: Tier, most_by_model: int) -> None:
        """Args:
        upper: the tier it drafts for.
        most_by_model: tokens that the model drafts at a time at most.
        """
        super().__init__("lookup", upper.decoder, upper.cost, upper.vocab_size)
        self._model, self._upper, self._most_by_model = model, upper, most_by_model

    def extend(
        self, sequences: Sequence[TokenSequence], counts: Sequence[int], least_chance: float = 0.0
    ) -> list[Emitted]:
        """Proposes up to `counts[i]` tokens for each sequence; none where nothing occurred and no model drafts. What is
        looked up ends where, as often as such tokens were accepted lately, the next one is less likely than
        `least_chance` to be accepted with all before it."""
        found: dict[int, Emitted] = {}
        asked: list[int] = []
        for i, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
            lookup = sequence.lookup
            lookup.occurrences.follow(sequence.context)
            place, matching = lookup.occurrences.longest()
            source = lookup.long if matching >= LONG else lookup.short
            if matching and (self._model is None or source.rate >= lookup.model.rate):
                lookup.last = source
                count = min(count, _worth(source.rate, least_chance))
                tokens = sequence.sampler.until_end(lookup.occurrences.after(place, count))
                found[i] = tokens, self._certain(tokens, sequence)
            elif self._model is None:
                lookup.last = None
                found[i] = [], self._certain([], sequence)
            else:
                lookup.last = lookup.model
                asked.append(i)
        if self._model is not None and asked:
            most = self._most_by_model
            if not self._model.ends_early(self._upper.draft_tokens):
                wanted = self._upper.draft_tokens or min(max(counts), most)  # a probe, where none are drafted
                most, least_chance = max(1, wanted), 0.0
            drafted = self._model.extend(
                [sequences[i] for i in asked], [min(counts[i], most) for i in asked], least_chance
            )
            found.update(zip(asked, drafted, strict=True))
        return [found[i] for i in range(len(sequences))]

    def _certain(self, tokens: list[int], sequence: TokenSequence) -> Tensor:
        """The distributions that proposed tokens come from: each token with certainty. Only the rule of fresh noise
        asks for them."""
        rows = len(tokens) if isinstance(sequence.sampler.noise, FreshNoise) else 0
        certain = torch.zeros(rows, self.vocab_size, device=self.decoder.device)
        if rows:
            certain.scatter_(1, torch.tensor(tokens, device=certain.device).unsqueeze(1), 1.0)
        return certain

    def judge(self, sequence: TokenSequence, proposed: int, accepted: int) -> None:
        lookup = sequence.lookup
        if lookup.last:
            lookup.last.observe(accepted, proposed)
        if self._model and lookup.last is lookup.model:
            self._model.judge(sequence, proposed, accepted)

    def rollback(self, sequence: TokenSequence, length: int) -> None:
        sequence.lookup.occurrences.cut(length)
        if self._model:
            self._model.rollback(sequence, length)

    def choose_lengths(self, batch: int = 1) -> float:
        return max(LOOKUP_SECONDS, self._model.choose_lengths(batch) if self._model else 0.0)

    def ends_early(self, tokens: int) -> bool:
        return True

    def part_with(self) -> None:
        if self._model:
            self._model.part_with()


def _worth(rate: float, least_chance: float) -> int:
    """Tokens, at least one, that are all accepted with a probability of `least_chance`, if each is with `rate`."""
    if not least_chance:
        return sys.maxsize
    return int(math.log(least_chance) / math.log(rate)) if rate > least_chance else 1
