"""The speculation loop: tiers that draft for one another, each a decoder with a cache, all running the same step.

A tier's `step` asks its drafter for tokens, tests them in one pass, keeps those that are accepted and draws one more:
what it emits is distributed exactly as its own decoding would be. A tier without a drafter decodes token by token.
Three tiers (small model, target on a retrieval cache, target on the full cache) are three of these in a row.

Sequences that are decoded together take every step together: one pass for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...kernels.selection import FEW_ROWS
from ...tp.devices import to_device
from ...tp.model.decoder import Decoder
from ..graphs.passes import JoinedPasses, Passes
from .acceptance import accept
from .lengths import Acceptance, PassCost, best_length
from .sampler import distributions, draw
from .sampling import read
from .sequence import Counts, TokenSequence
from .vocabulary import cover, readable

PROBE_EVERY = 24
"""Passes after which a tier that stopped drafting, as that was slower, tries one draft token again."""

Emitted = tuple[list[int], Tensor]
"""Tokens that follow a sequence's context, and the distributions `[tokens, vocab]` they were drawn from."""


@dataclass
class Tier:
    """One level of speculation.

    Between steps a sequence's cache may lack the last tokens of its context; a step's first pass processes those too.
    """

    name: str
    decoder: Decoder
    cost: PassCost
    """By the rows of a pass, those of all sequences."""
    vocab_size: int
    """Of the target: every tier's distributions are over its tokens."""
    drafter: Tier | None = None
    draft_tokens: int = 4
    """Draft tokens to ask of the drafter for one pass, for each sequence."""
    fixed: int | None = None
    """`draft_tokens` as set by hand."""
    adapts_to_time: bool = True
    """Whether the number is chosen by measured times; if not, by those that the plan expects."""
    longest: int = 8
    """The most `draft_tokens` may become."""
    acceptance: Acceptance = field(default_factory=Acceptance)
    counts: Counts = field(default_factory=Counts)
    """Of all sequences together; their own are kept with each."""
    _last_drafted: int = field(default=0, init=False)
    _kept: dict[tuple[Passes, ...], JoinedPasses] = field(default_factory=dict, init=False)

    def step(self, sequences: Sequence[TokenSequence], limits: Sequence[int]) -> list[Emitted]:
        """Emits 1 to `limits[i]` tokens that follow the context of each sequence, and this tier's own distributions.

        Nothing comes after an end-of-sequence token. Contexts are not changed.
        """
        if self.drafter is None:
            return self._draw_alone(sequences, 1)
        wanted = [min(self.draft_tokens, limit - 1) for limit in limits]
        drafts: list[Emitted | None] = [None] * len(sequences)
        drafting = [i for i, count in enumerate(wanted) if count]
        if drafting:
            found = self.drafter.extend([sequences[i] for i in drafting], [wanted[i] for i in drafting])
            for i, draft in zip(drafting, found, strict=True):
                drafts[i] = draft
        proposed = [draft[0] if draft else [] for draft in drafts]

        began = time.perf_counter()
        rows = [len(tokens) + 1 for tokens in proposed]
        self._catch_up(sequences, sum(rows))
        pending = [self._pending(s) + tokens for s, tokens in zip(sequences, proposed, strict=True)]
        target = self._distributions(sequences, self._joined(pending), [len(tokens) for tokens in pending], rows)
        samplers = [sequence.sampler for sequence in sequences]
        starts = [len(sequence.context) for sequence in sequences]
        outcomes = accept(proposed, [draft and draft[1] for draft in drafts], target, samplers, starts)
        emitted: list[Emitted] = []
        parts = target.split(rows) if len(rows) > 1 else (target,)
        for sequence, tokens, part, (accepted, token) in zip(sequences, proposed, parts, outcomes, strict=True):
            kept = sequence.sampler.until_end([*tokens[:accepted], token])
            self.rollback(sequence, len(sequence.context) + len(kept) - 1)
            emitted.append((kept, part[: len(kept)]))
            sequence.keep_logprobs(kept)
        seconds = time.perf_counter() - began
        self._measure(sequences, 1, sum(len(tokens) for tokens in pending), seconds)
        for sequence, tokens, (accepted, _) in zip(sequences, proposed, outcomes, strict=True):
            self._count_draft(sequence, len(tokens), accepted)
        return emitted

    def extend(self, sequences: Sequence[TokenSequence], counts: Sequence[int]) -> list[Emitted]:
        """Repeats `step` until `counts[i]` tokens follow each sequence's context or it ends; returns the same as
        `step`."""
        if self.drafter is None:
            return self._draw_alone(sequences, max(counts), counts)
        starts = [len(sequence.context) for sequence in sequences]
        rows: list[list[Tensor]] = [[] for _ in sequences]
        missing = list(counts)
        while going := [i for i, count in enumerate(missing) if count > 0]:
            found = self.step([sequences[i] for i in going], [missing[i] for i in going])
            for i, (tokens, target) in zip(going, found, strict=True):
                sequences[i].context.extend(tokens)
                rows[i].append(target)
                missing[i] = 0 if sequences[i].sampler.ends(tokens[-1]) else missing[i] - len(tokens)
        emitted: list[Emitted] = []
        for sequence, start, parts in zip(sequences, starts, rows, strict=True):
            emitted.append((sequence.context[start:], parts[0] if len(parts) == 1 else torch.cat(parts)))
            del sequence.context[start:]
        return emitted

    def _draw_alone(
        self, sequences: Sequence[TokenSequence], steps: int, counts: Sequence[int] | None = None
    ) -> list[Emitted]:
        """`extend` without a drafter. Tokens drawn after an end-of-sequence token, or beyond those that were asked for,
        are dropped."""
        began = time.perf_counter()
        rows = sum(len(self._pending(sequence)) + steps - 1 for sequence in sequences)
        drawn, targets = self.draw_ahead(sequences, steps)
        emitted: list[Emitted] = []
        tokens = read(drawn.flatten())
        for i, sequence in enumerate(sequences):
            wanted = steps if counts is None else counts[i]
            kept = sequence.sampler.until_end(tokens[i * steps : i * steps + wanted])
            self.rollback(sequence, len(sequence.context) + len(kept) - 1)
            emitted.append((kept, targets[i, : len(kept)]))
            sequence.keep_logprobs(kept)
        self._measure(sequences, steps, rows, time.perf_counter() - began)
        return emitted

    def draw_ahead(self, sequences: Sequence[TokenSequence], count: int) -> tuple[Tensor, Tensor]:
        """Draws `count` tokens of each sequence one after another: `[sequences, count]`, and their distributions
        `[sequences, count, vocab]`.

        The tokens stay on the device, and the host never waits for it; `sampling.read` brings them to the host and
        reports those that were drawn from NaN.
        """
        self._catch_up(sequences, len(sequences))
        waiting = [self._pending(sequence) for sequence in sequences]
        pending, counts = self._joined(waiting), [len(tokens) for tokens in waiting]
        samplers, one_each = [sequence.sampler for sequence in sequences], [1] * len(sequences)
        tokens: list[Tensor] = []
        rows: list[Tensor] = []
        while len(tokens) < count:
            rows.append(self._distributions(sequences, pending, counts, one_each))
            positions = [len(sequence.context) + len(tokens) for sequence in sequences]
            pending, counts = draw(rows[-1], samplers, one_each, positions), one_each
            tokens.append(pending)
        return torch.stack(tokens, dim=1), torch.stack(rows, dim=1)

    def _pending(self, sequence: TokenSequence) -> list[int]:
        """The tokens of the context that this tier's cache lacks."""
        return sequence.context[sequence.passes[self.name].cache.length :]

    def _catch_up(self, sequences: Sequence[TokenSequence], rows: int) -> None:
        """Brings caches that lack many tokens, as nothing was drafted for a while, up to the last token of the context,
        where all together would be more than the rows of a step; `rows` come besides."""
        if len(sequences) == 1 or rows + sum(len(self._pending(sequence)) for sequence in sequences) <= FEW_ROWS:
            return
        for sequence in sequences:
            behind = self._pending(sequence)[:-1]
            if behind:
                tokens = readable(to_device(behind, self.decoder.device), self.decoder.config.vocab_size)
                sequence.passes[self.name].forward(tokens)

    def _joined(self, tokens: Sequence[list[int]]) -> Tensor:
        return to_device([token for part in tokens for token in part], self.decoder.device)

    def _distributions(
        self, sequences: Sequence[TokenSequence], pending: Tensor, counts: Sequence[int], rows: Sequence[int]
    ) -> Tensor:
        """Runs a pass over the next `counts[i]` tokens of each sequence; the distributions that follow the last
        `rows[i]` of them."""
        token_ids = readable(pending, self.decoder.config.vocab_size)
        if len(sequences) == 1:
            logits = sequences[0].passes[self.name].forward(token_ids, rows[0])
        else:
            logits = self._together(sequences).forward(token_ids, counts, rows)
        samplers, logits = [sequence.sampler for sequence in sequences], cover(logits, self.vocab_size)
        if self.name == "verify":
            for sequence, part in zip(sequences, logits.split(list(rows)), strict=True):
                sequence.note_logits(part)
        return distributions(logits, samplers, rows)

    def _together(self, sequences: Sequence[TokenSequence]) -> JoinedPasses:
        """The passes over all of these sequences, which are kept until one of those that are decoded ends."""
        members = tuple(sequence.passes[self.name] for sequence in sequences)
        if members not in self._kept:
            self._kept[members] = JoinedPasses(members)
        return self._kept[members]

    def part_with(self) -> None:
        """Drops what this tier and those below keep of the sequences of their last pass, as one of them has ended."""
        self._kept.clear()
        if self.drafter:
            self.drafter.part_with()

    def _measure(self, sequences: Sequence[TokenSequence], passes: int, rows: int, seconds: float) -> None:
        """Counts `passes` over so many rows in all, and learns from how long they took, unless something was compiled
        or captured meanwhile, which will not happen again."""
        for counts in (self.counts, *(sequence.counts[self.name] for sequence in sequences)):
            counts.seconds += seconds
            counts.passes += passes
        used = sequences[0].passes[self.name] if len(sequences) == 1 else self._together(sequences)
        if self.adapts_to_time and used.was_steady():
            self.cost.observe(rows / passes, seconds / passes)

    def _count_draft(self, sequence: TokenSequence, proposed: int, accepted: int) -> None:
        """Counts the draft tokens that a pass tested, and those it accepted."""
        if not proposed:
            return
        if self.drafter:
            self.drafter.judge(sequence, proposed, accepted)
        for counts in (self.counts, sequence.counts[self.name]):
            counts.proposed += proposed
            counts.accepted += accepted
            counts.tested += min(accepted + 1, proposed)
        self.acceptance.observe(accepted, proposed)

    def judge(self, sequence: TokenSequence, proposed: int, accepted: int) -> None:
        """Is told how many of the tokens that it proposed last were accepted."""

    def rollback(self, sequence: TokenSequence, length: int) -> None:
        """Rolls the sequence's caches of this tier and those below back to its first `length` tokens, if they hold
        more."""
        sequence.rollback(self.name, length)
        if self.drafter:
            self.drafter.rollback(sequence, length)

    def choose_lengths(self, batch: int = 1) -> float:
        """Sets `draft_tokens` of this tier and those below to what is expected to be fastest for `batch` sequences,
        unless they are fixed; returns the seconds per token of each sequence that are expected of this tier."""
        if self.drafter is None:
            return self.cost.seconds(batch)
        draft_seconds = self.drafter.choose_lengths(batch)
        # More rows than those of a step would be computed with another arithmetic.
        most = max(0, FEW_ROWS // batch - 2) if batch > 1 else max(self.longest, self.fixed or 0)
        best, seconds = best_length(self.cost, draft_seconds, self.acceptance.rate, min(self.longest, most), batch)
        if self.fixed is not None:
            self.draft_tokens = min(self.fixed, most)
            return seconds
        if best:
            self._last_drafted = self.counts.passes
        elif self.counts.passes - self._last_drafted >= PROBE_EVERY:
            best, self._last_drafted = min(1, most), self.counts.passes
        self.draft_tokens = best
        return seconds
