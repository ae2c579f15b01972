"""Drafts from what occurred before: what followed the last tokens when they came earlier in prompt or answer.

It takes no model and microseconds a token (prompt lookup decoding, github.com/apoorvumang/prompt-lookup-decoding).
Where a model drafts too, each proposal is by whoever has been right more often lately.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .noise import FreshNoise
from .sequence import TokenSequence
from .tiers import Emitted, Tier

LONG = 8
"""Matches of so many tokens and more are judged apart from shorter ones."""

SECONDS = 20e-6
"""Of a proposed token: a dictionary's look-up and a few comparisons in Python."""


class LookupTier(Tier):
    """Drafts from earlier occurrences and, where it is given a tier with a model, by that."""

    def __init__(self, model: Tier | None, upper: Tier) -> None:
        """Args: `upper` is the tier it drafts for."""
        super().__init__("lookup", upper.decoder, upper.cost, upper.vocab_size)
        self._model = model

    def extend(self, sequences: Sequence[TokenSequence], counts: Sequence[int]) -> list[Emitted]:
        """Proposes up to `counts[i]` tokens for each sequence; none where nothing occurred and no model drafts."""
        found: dict[int, Emitted] = {}
        asked: list[int] = []
        for i, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
            lookup = sequence.lookup
            lookup.occurrences.follow(sequence.context)
            place, matching = lookup.occurrences.longest()
            source = lookup.long if matching >= LONG else lookup.short
            if matching and (self._model is None or source.rate >= lookup.model.rate):
                lookup.last = source
                tokens = sequence.sampler.until_end(lookup.occurrences.after(place, count))
                found[i] = tokens, self._certain(tokens, sequence)
            elif self._model is None:
                lookup.last = None
                found[i] = [], self._certain([], sequence)
            else:
                lookup.last = lookup.model
                asked.append(i)
        if self._model is not None and asked:
            drafted = self._model.extend([sequences[i] for i in asked], [counts[i] for i in asked])
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
        if sequence.lookup.last:
            sequence.lookup.last.observe(accepted, proposed)

    def rollback(self, sequence: TokenSequence, length: int) -> None:
        sequence.lookup.occurrences.cut(length)
        if self._model:
            self._model.rollback(sequence, length)

    def choose_lengths(self, batch: int = 1) -> float:
        return max(SECONDS, self._model.choose_lengths(batch) if self._model else 0.0)

    def part_with(self) -> None:
        if self._model:
            self._model.part_with()
