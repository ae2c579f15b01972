"""The speculation loop: tiers that draft for one another, each a decoder with a cache, all running the same step.

A tier's `step` asks its drafter for tokens, tests them in one pass, keeps those that are accepted and draws one more:
what it emits is distributed exactly as its own decoding would be. A tier without a drafter decodes token by token.
Three tiers (small model, target on a retrieval cache, target on the full cache) are three of these in a row.

Sequences that are decoded together take every step together: one pass for all of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...kernels.selection import FEW_ROWS
from ...tp.decoder import Decoder
from ...tp.devices import to_device
from ..graphs.passes import JOINED, JoinedPasses, Passes
from ..held import Held
from ..vocabulary import cover, readable
from .acceptance import accept
from .confidence import Confidence
from .distribution import check_finite, in_millionths
from .lengths import Acceptance, PassCost, StepCost
from .sampler import distributions, draw
from .sequence import Counts, TokenSequence
from .switch import PROBE_EVERY, Switch, Upkeep, next_upkeep

READ_TOGETHER = 8
"""Draft tokens between which a GPU is not waited for: with so many at a time it is seen whether the draft ends early.
On a CPU, which computes as it is told, that is seen after each."""

_FINE = 2**30
"""Chances are multiples of one part in so many: ranks share whole numbers."""

AcceptanceRule = Callable[..., tuple[list[tuple[int, int]], list[list[float]]]]
"""`acceptance.accept`, or what a test has in its place."""

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
    """Draft tokens for one pass, for each sequence, that are expected to be fastest; 0 where none are."""
    most_asked: int | None = None
    """Draft tokens to ask of the drafter at most, where drafts end early; `None` is `draft_tokens`."""
    asked_next: int | None = None
    """The same for the next pass alone, where that tries another number."""
    least_chance: float = 0.0
    """A draft ends where it is less likely than this that the next token, and all before it, are accepted; with 0 it
    never does."""
    early_end: float | None = None
    """`least_chance` as set by hand; `None` is by costs."""
    upkeep: Upkeep = Upkeep.FULL
    """What the next round does for the retrieval caches. Of the tier that decides about the text."""
    may_rest: bool | None = None
    """Whether retrieval caches may be left alone while nothing is drafted; `None` of a tier that does not decide."""
    after_round: float = 0.0
    """Seconds that a round took for the retrieval caches after the last pass."""
    fixed: int | None = None
    """`draft_tokens` as set by hand."""
    adapts_to_time: bool = True
    """Whether the number is chosen by measured times; if not, by those that the plan expects."""
    longest: int = 8
    """The most `draft_tokens` may become."""
    acceptance: Acceptance = field(default_factory=Acceptance)
    counts: Counts = field(default_factory=Counts)
    """Of all sequences together; their own are kept with each."""
    replicated: bool = False
    """Whether each of several ranks runs the whole tier."""
    confidence: Confidence = field(default_factory=Confidence)
    """How likely the tokens that this tier drafts are accepted."""
    clock: Callable[[], float] = time.perf_counter
    """Seconds; what passes are timed with."""
    accept: AcceptanceRule = accept
    """Which of the drafter's tokens are kept, and what follows them."""
    switch: Switch = field(default_factory=Switch, init=False)
    _steady: bool = field(default=True, init=False)  # whether nothing was compiled or captured in a step so far
    _last_drafted: int = field(default=0, init=False)
    _round: Upkeep = field(default=Upkeep.FULL, init=False)  # the upkeep of the last round
    _step: StepCost | None = field(default=None, init=False)  # what a step is expected to take
    _kept: dict[tuple[Passes, ...], JoinedPasses] = field(default_factory=dict, init=False)

    def step(self, sequences: Sequence[TokenSequence], limits: Sequence[int], *, rated: bool = False) -> list[Emitted]:
        """Emits 1 to `limits[i]` tokens that follow the context of each sequence, and this tier's own distributions.

        Nothing comes after an end-of-sequence token. Contexts are not changed.

        Raises:
            NotFiniteError: of some sequences logits are not finite; contexts and caches are as far as they came.

        Args: `rated`: whether `TokenSequence.rated` gets how sure this tier is of the tokens.
        """
        if self.drafter is None:
            return self._draw_alone(sequences, 1, rated=rated)
        began = self.clock()
        self._round = self.upkeep
        asked = self.draft_tokens if self.most_asked is None else self.most_asked
        if self.asked_next is not None:
            asked, self.asked_next = self.asked_next, None
        wanted = [min(asked, limit - 1) for limit in limits]
        if not any(wanted):
            return self._draw_alone(sequences, 1, rated=rated)
        drafts: list[Emitted | None] = [None] * len(sequences)
        drafting = [i for i, count in enumerate(wanted) if count]
        self.drafter._steady = True
        some = [sequences[i] for i in drafting], [wanted[i] for i in drafting]
        for i, draft in zip(drafting, self.drafter.extend(*some, self.least_chance), strict=True):
            drafts[i] = draft
        proposed = [draft[0] if draft else [] for draft in drafts]
        drafted = self.clock()
        rows = [len(tokens) + 1 for tokens in proposed]
        self._catch_up(sequences, sum(rows))
        pending = [self._pending(s) + tokens for s, tokens in zip(sequences, proposed, strict=True)]
        logits = self._logits(sequences, self._joined(pending), [len(tokens) for tokens in pending], rows)
        samplers = [sequence.sampler for sequence in sequences]
        target = distributions(logits, samplers, rows)
        starts = [len(sequence.context) for sequence in sequences]
        given = proposed, [draft and draft[1] for draft in drafts], target, samplers, starts
        outcomes, ratings = self.accept(*given, logits if rated else None)
        check_finite(sequences, [[token] for _, token in outcomes])
        emitted: list[Emitted] = []
        parts = target.split(rows) if len(rows) > 1 else (target,)
        for i, (sequence, tokens, part) in enumerate(zip(sequences, proposed, parts, strict=True)):
            accepted, token = outcomes[i]
            kept = sequence.sampler.until_end([*tokens[:accepted], token])
            self.rollback(sequence, len(sequence.context) + len(kept) - 1)
            emitted.append((kept, part[: len(kept)]))
            sequence.rated[self.name] = ratings[i][: len(kept)]
            sequence.keep_logprobs(kept)
        steady = self._measure(sequences, 1, sum(map(len, pending)), self.clock() - drafted)
        for sequence, tokens, (accepted, _) in zip(sequences, proposed, outcomes, strict=True):
            self._count_draft(sequence, len(tokens), accepted)
        self._learn(steady and self.drafter._steady, began, max(wanted), max(map(len, proposed)), emitted)
        return emitted

    def _learn(self, steady: bool, began: float, asked: int, drafted: int, emitted: list[Emitted]) -> None:
        """Has the switch learn from a step, unless something was compiled or captured in it."""
        self._steady &= steady
        if not steady:
            self.switch.postpone()
        elif self._step and self.adapts_to_time:
            seconds = self.clock() - began + (self.after_round if drafted else 0.0)
            brought = sum(len(tokens) for tokens, _ in emitted) / len(emitted)
            self.switch.note(self._step, asked, drafted, brought, seconds)

    def extend(
        self, sequences: Sequence[TokenSequence], counts: Sequence[int], least_chance: float = 0.0
    ) -> list[Emitted]:
        """Repeats `step` until `counts[i]` tokens follow each sequence's context, or it ends, or a further token is not
        worth its time; returns the same as `step`.

        Args: `least_chance`: ends where it is less likely than this that the next token, and all of these before it,
            are accepted, on average over the sequences; after one step at the earliest. `TokenSequence.rated` then has
            how sure this tier was of them.
        """
        if self.drafter is None and not least_chance:
            return self._draw_alone(sequences, max(counts), counts)
        starts = [len(sequence.context) for sequence in sequences]
        rows: list[list[Tensor]] = [[] for _ in sequences]
        rated: list[list[float]] = [[] for _ in sequences]
        missing, chances = list(counts), [1.0] * len(sequences)
        while going := [i for i, count in enumerate(missing) if count > 0]:
            likely = sum(chances[i] for i in going) * self.confidence.rate
            if likely < least_chance * len(sequences) and rows[0]:
                break
            some, limits = [sequences[i] for i in going], [missing[i] for i in going]
            if self.drafter:
                found = self.step(some, limits, rated=least_chance > 0)
            else:
                found = self._draw_alone(some, min(self._read_together, max(limits)), limits, rated=True)
            # Copies: rows of a pass over all would keep those of all that were rejected, as long as they last.
            found = [(tokens, target.clone()) for tokens, target in found]
            for i, (tokens, target) in zip(going, found, strict=True):
                sequences[i].context.extend(tokens)
                rows[i].append(target)
                missing[i] = 0 if sequences[i].sampler.ends(tokens[-1]) else missing[i] - len(tokens)
                if least_chance:
                    new = sequences[i].rated[self.name]
                    rated[i] += new
                    chances[i] *= math.prod(map(self.confidence.chance, new))
        emitted: list[Emitted] = []
        for i, (sequence, start, parts) in enumerate(zip(sequences, starts, rows, strict=True)):
            emitted.append((sequence.context[start:], parts[0] if len(parts) == 1 else torch.cat(parts)))
            parts.clear()
            del sequence.context[start:]
            sequence.rated[self.name] = rated[i]
        return emitted

    def _draw_alone(
        self,
        sequences: Sequence[TokenSequence],
        steps: int,
        counts: Sequence[int] | None = None,
        *,
        rated: bool = False,
    ) -> list[Emitted]:
        """`extend` without a draft. Tokens drawn after an end-of-sequence token, or beyond those that were asked for,
        are dropped."""
        began = self.clock()
        rows = sum(len(self._pending(sequence)) + steps - 1 for sequence in sequences)
        drawn, targets, sure = self._drawn(sequences, steps, rated)
        emitted: list[Emitted] = []
        numbers = (drawn if sure is None else torch.cat((drawn, sure))).flatten().tolist()
        tokens = numbers[: drawn.numel()]
        check_finite(sequences, [tokens[i * steps : (i + 1) * steps] for i in range(len(sequences))])
        for i, sequence in enumerate(sequences):
            wanted = steps if counts is None else counts[i]
            kept = sequence.sampler.until_end(tokens[i * steps : (i + 1) * steps][:wanted])
            self.rollback(sequence, len(sequence.context) + len(kept) - 1)
            emitted.append((kept, targets[i, : len(kept)]))
            first = drawn.numel() + i * steps  # nothing is there unless they were rated
            sequence.rated[self.name] = [number / 1e6 for number in numbers[first : first + len(kept)]]
            sequence.keep_logprobs(kept)
        steady = self._measure(sequences, steps, rows, self.clock() - began)
        self._learn(steady, began, 0, 0, emitted)
        return emitted

    def _drawn(
        self, sequences: Sequence[TokenSequence], count: int, rated: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Draws `count` tokens of each sequence one after another: `[sequences, count]`, their distributions
        `[sequences, count, vocab]`, and if `rated` the `sampling.in_millionths` of the tokens, `[sequences, count]`.
        They stay on the device; those that were drawn from NaN are below 0."""
        self._catch_up(sequences, len(sequences))
        waiting = [self._pending(sequence) for sequence in sequences]
        pending, counts = self._joined(waiting), [len(tokens) for tokens in waiting]
        samplers, one_each = [sequence.sampler for sequence in sequences], [1] * len(sequences)
        tokens: list[Tensor] = []
        rows: list[Tensor] = []
        sure: list[Tensor] = []
        while len(tokens) < count:
            logits = self._logits(sequences, pending, counts, one_each)
            rows.append(distributions(logits, samplers, one_each))
            positions = [len(sequence.context) + len(tokens) for sequence in sequences]
            pending, counts = draw(rows[-1], samplers, one_each, positions), one_each
            tokens.append(pending)
            if rated:
                sure.append(in_millionths(logits, pending))
        drawn, targets = torch.stack(tokens, dim=1), torch.stack(rows, dim=1)
        return drawn, targets, torch.stack(sure, dim=1) if rated else None

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

    def _logits(
        self, sequences: Sequence[TokenSequence], pending: Tensor, counts: Sequence[int], rows: Sequence[int]
    ) -> Tensor:
        """Runs a pass over the next `counts[i]` tokens of each sequence; the logits over the target's vocabulary of
        what follows the last `rows[i]` of them."""
        token_ids = readable(pending, self.decoder.config.vocab_size)
        if len(sequences) == 1:
            logits = sequences[0].passes[self.name].forward(token_ids, rows[0])
        else:
            logits = self._together(sequences).forward(token_ids, counts, rows)
        logits = cover(logits, self.vocab_size)
        if self.name == "verify":
            for sequence, part in zip(sequences, logits.split(list(rows)), strict=True):
                sequence.note_logits(part)
        return logits

    def _together(self, sequences: Sequence[TokenSequence]) -> JoinedPasses:
        """The passes over all of these sequences, which are kept until others join or one of those that are decoded
        ends. Of all that run they are captured, and of some of them as long as their members are not more together than
        the plan's reserve counts: each set has captured passes of its own."""
        members = tuple(sequence.passes[self.name] for sequence in sequences)
        if members not in self._kept:
            most = max(map(len, self._kept), default=0)
            if len(members) > most:  # a round's first pass is of all that run
                self._kept.clear()
                most = len(members)
            room = JOINED * most - sum(len(known) for known, passes in self._kept.items() if passes.captures)
            self._kept[members] = JoinedPasses(members, captures=len(members) <= room)
        return self._kept[members]

    def held(self) -> Held:
        """See `offload.held`: what this tier and those below have of several sequences together."""
        for passes in self._kept.values():
            yield from passes.held()
        if self.drafter:
            yield from self.drafter.held()

    def part_with(self) -> None:
        """Drops what this tier and those below keep of the sequences of their last pass, as one of them has ended."""
        self._kept.clear()
        if self.drafter:
            self.drafter.part_with()

    def _measure(self, sequences: Sequence[TokenSequence], passes: int, rows: int, seconds: float) -> bool:
        """Counts `passes` over so many rows in all, and learns from how long they took, unless something was compiled
        or captured meanwhile, which will not happen again; whether it was not."""
        for counts in (self.counts, *(sequence.counts[self.name] for sequence in sequences)):
            counts.seconds += seconds
            counts.passes += passes
        used = sequences[0].passes[self.name] if len(sequences) == 1 else self._together(sequences)
        steady = used.was_steady()
        if self.adapts_to_time and steady:
            self.cost.observe(rows / passes, seconds / passes)
        return steady

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
        """Is told how many of the tokens that it proposed last for a sequence were accepted."""
        self.confidence.observe(sequence.rated.get(self.name, ())[:proposed], accepted)

    def rollback(self, sequence: TokenSequence, length: int) -> None:
        """Rolls the sequence's caches of this tier and those below back to its first `length` tokens, if they hold
        more."""
        sequence.rollback(self.name, length)
        if self.drafter:
            self.drafter.rollback(sequence, length)

    def choose_lengths(self, batch: int = 1) -> float:
        """Decides how many tokens this tier and those below draft for `batch` sequences, and where drafts end, by what
        is expected to be fastest, unless that is fixed; returns the seconds per token of each sequence that are
        expected of this tier."""
        if self.drafter is None or self._rests(batch):
            return self.cost.seconds(batch)
        draft_seconds = self.drafter.choose_lengths(batch)
        # More rows than those of a step would be computed with another arithmetic.
        most = max(0, FEW_ROWS // batch - 2) if batch > 1 else max(self.longest, self.fixed or 0)
        most = most if self.fixed is not None else min(self.longest, most)
        self.asked_next = self.most_asked = None
        self.least_chance = 0.0
        step = StepCost(self.cost, draft_seconds, self.acceptance.rate, batch)
        if self.fixed is not None:
            self.draft_tokens = min(self.fixed, most)
            seconds = step.best(0, min(self.longest, most))[1]
        elif self.adapts_to_time:
            self.draft_tokens, seconds, self.asked_next = self._by_time(step, most)
        else:
            self.draft_tokens, seconds = step.best(0, most)
            if self.draft_tokens:
                self._last_drafted = self.counts.passes
            elif self.counts.passes - self._last_drafted >= PROBE_EVERY:
                self.draft_tokens, self._last_drafted = min(1, most), self.counts.passes
                return seconds
        if self.draft_tokens and self.drafter.ends_early(self.draft_tokens):
            by_costs = 0.0 if self.fixed is not None else step.least_chance(self.draft_tokens, seconds)
            self.least_chance = by_costs if self.early_end is None else self.early_end
        if self.least_chance and self.fixed is None:
            self.most_asked = most
        return seconds

    @property
    def _read_together(self) -> int:
        """Draft tokens between which it is seen whether the draft ends."""
        return 1 if self.decoder.device.type == "cpu" else READ_TOGETHER

    def ends_early(self, tokens: int) -> bool:
        """Whether this tier's drafts of about so many tokens can end earlier. Not where every rank runs it whole: their
        last bits may differ, and with them where a draft ends."""
        return not self.replicated and (self.drafter is not None or tokens >= self._read_together)

    def _rests(self, batch: int) -> bool:
        """Whether nothing is drafted, and it is too early to decide anew."""
        step = self._step
        at_rest = self._round is self.upkeep is Upkeep.NONE and self.fixed is None and not self.draft_tokens
        return at_rest and step is not None and step.batch == batch and not self.switch.may_probe

    def _by_time(self, step: StepCost, most: int) -> tuple[int, float, int | None]:
        """What `Switch.decide` says, once the retrieval caches are ready for it."""
        switch = self.switch
        self._step = switch.known(step)
        tokens, seconds, probe = switch.decide(self._step, most)
        if self.may_rest is not None:
            drafts = bool(tokens if probe is None else probe)
            self.upkeep = next_upkeep(self._round, drafts, self.may_rest and not tokens)
            if self.upkeep is Upkeep.REBUILD:
                probe = 0
                switch.postpone()
        return tokens, seconds, probe

    @property
    def decisions(self) -> list[int]:
        """What `choose_lengths` has decided, in numbers, for other ranks."""
        asked = [-1 if number is None else number for number in (self.most_asked, self.asked_next)]
        return [self.draft_tokens, *asked, round(self.least_chance * _FINE), int(self.upkeep)]

    @decisions.setter
    def decisions(self, numbers: Sequence[int]) -> None:
        self.draft_tokens, *asked, chance, upkeep = numbers
        self.most_asked, self.asked_next = (None if number < 0 else number for number in asked)
        self.least_chance, self.upkeep = chance / _FINE, Upkeep(upkeep)
