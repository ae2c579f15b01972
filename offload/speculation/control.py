"""How far a tier drafts: what its passes took and what was accepted, and what follows from that for its next steps.

A `Tier` asks its `DraftControl` how many tokens to draft, and tells it what came of them. Nothing here changes what
tokens are distributed as. Rank 0 decides, once a round; others take its `decisions`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...kernels.selection import STEP_ROWS
from .confidence import Confidence
from .drafting_pays import PROBE_EVERY, DraftingPays
from .lengths import Acceptance, DraftTokens, PassCost, StepCost
from .refresh import RetrievalWork, next_work
from .sequence import Counts, TokenSequence

READ_TOGETHER = 8
"""Draft tokens between which a GPU is not waited for: with so many at a time it is seen whether the draft ends early.
On a CPU, which computes as it is told, that is seen after each."""

_FINE = 2**30
"""Chances are multiples of one part in so many: ranks share whole numbers."""


@dataclass(eq=False)
class DraftControl:
    """How far is drafted for one tier, and by it."""

    name: str
    """The tier's."""
    cost: PassCost
    """By the rows of a pass, those of all sequences."""
    adapts_to_time: bool = True
    """Whether the number is chosen by measured times; if not, by those that the plan expects."""
    may_skip_retrieval: bool | None = None
    """Whether retrieval caches may be left alone while nothing is drafted; `None` of a tier that does not decide."""
    replicated: bool = False
    """Whether each of several ranks runs the whole tier."""
    read_together: int = 1
    """Tokens that the tier draws before it is seen whether a draft ends: see `READ_TOGETHER`."""
    acceptance: Acceptance = field(default_factory=Acceptance)
    """Of what is drafted for the tier."""
    confidence: Confidence = field(default_factory=Confidence)
    """How likely the tokens that the tier drafts are accepted."""
    clock: Callable[[], float] = time.perf_counter
    """Seconds; what passes are timed with."""

    lower: DraftControl | None = field(default=None, init=False)
    """Of the tier that drafts for this one."""
    fixed: int | None = field(default=None, init=False)
    """`draft_tokens` as set by hand."""
    longest: int = field(default=8, init=False)
    """The maximum of `draft_tokens`, unless it is set by hand."""
    early_end: float | None = field(default=None, init=False)
    """`least_chance` as set by hand; `None` is by costs."""
    draft_tokens: int = field(default=4, init=False)
    """Draft tokens for one pass, for each sequence, that are expected to be fastest; 0 where none are."""
    most_asked: int | None = field(default=None, init=False)
    """Draft tokens to ask for at most, where drafts end early; `None` is `draft_tokens`."""
    asked_next: int | None = field(default=None, init=False)
    """The same for the next pass alone, where that tries another number."""
    least_chance: float = field(default=0.0, init=False)
    """A draft ends where it is less likely than this that the next token, and all before it, are accepted; with 0 it
    never does."""
    retrieval_work: RetrievalWork = field(default=RetrievalWork.FULL, init=False)
    """What the next round does for the retrieval caches. Of the tier that decides about the text."""
    last_retrieval_work: RetrievalWork = field(default=RetrievalWork.FULL, init=False)
    """What the last round did that was not broken off."""
    after_round: float = field(default=0.0, init=False)
    """Seconds that a round took for the retrieval caches after the last pass."""
    counts: Counts = field(default_factory=Counts, init=False)
    """Of all sequences together; their own are kept with each."""
    pays: DraftingPays = field(default_factory=DraftingPays, init=False)
    steady: bool = field(default=True, init=False)
    """Whether nothing was compiled or captured in the tier's steps since this was set."""
    _last_drafted: int = field(default=0, init=False)
    _step: StepCost | None = field(default=None, init=False)  # what a step is expected to take
    _step_began: float = field(default=0.0, init=False)
    _pass_began: float = field(default=0.0, init=False)

    def draft_with(self, lower: DraftControl, tokens: DraftTokens, early_end: float | None) -> None:
        """Has the tier of `lower` draft for this one, `tokens` for a pass; see `early_end`."""
        self.lower, self.longest, self.fixed, self.early_end = lower, tokens.most, tokens.fixed, early_end
        self.draft_tokens = tokens.fixed or self.draft_tokens

    # What a step asks.

    def begin_step(self) -> int:
        """Begins a step of the tier; how many tokens to draft for each sequence, at most."""
        self._step_began = self.clock()
        asked = self.draft_tokens if self.most_asked is None else self.most_asked
        if self.asked_next is not None:
            asked, self.asked_next = self.asked_next, None
        return asked

    def begin_pass(self, *, drafted: bool) -> None:
        """Begins the tier's own pass, or several without a draft, which are a step of their own."""
        self._pass_began = self.clock()
        if not drafted:
            self._step_began = self._pass_began

    def begin_with_empty_caches(self) -> None:
        """Says that nobody runs, and of those who begin the retrieval caches can be filled when they are needed: once
        it is known whether anything is drafted."""
        if self.adapts_to_time and self.fixed is None:
            self.retrieval_work = self.last_retrieval_work = RetrievalWork.TAIL

    # What a step tells.

    def note_passes(self, sequences: Sequence[TokenSequence], passes: int, rows: int, steady: bool) -> None:
        """Counts `passes` over so many rows in all since `begin_pass`, and learns from how long they took, if they were
        `steady`: nothing was compiled or captured meanwhile, which will not happen again."""
        seconds = self.clock() - self._pass_began
        for counts in (self.counts, *(sequence.counts[self.name] for sequence in sequences)):
            counts.seconds += seconds
            counts.passes += passes
        if self.adapts_to_time and steady:
            self.cost.observe(rows / passes, seconds / passes)

    def note_draft(self, sequence: TokenSequence, proposed: int, accepted: int, forced: int = 0) -> None:
        """Counts the draft tokens that a pass tested, and those it accepted.

        Args: `forced` of them, the first ones, say nothing of who drafted the others.
        """
        if not proposed:
            return
        drafted, kept = proposed - forced, max(0, accepted - forced)
        if self.lower and drafted and accepted >= forced:
            self.lower.judge(sequence, drafted, kept)
        for counts in (self.counts, sequence.counts[self.name]):
            counts.proposed += proposed
            counts.accepted += accepted
            counts.tested += min(accepted + 1, proposed)
        if drafted and accepted >= forced:
            self.acceptance.observe(kept, drafted)

    def note_step(self, steady: bool, asked: int, drafted: int, brought: float) -> None:
        """Learns what a step took, unless something was compiled or captured in it.

        Args:
            asked, drafted: draft tokens of each sequence that were asked for at most, and came.
            brought: tokens of each sequence, on average.
        """
        self.steady &= steady
        if not steady:
            self.pays.postpone()
        elif self._step and self.adapts_to_time:
            seconds = self.clock() - self._step_began + (self.after_round if drafted else 0.0)
            self.pays.note(self._step, asked, drafted, brought, seconds)

    def judge(self, sequence: TokenSequence, proposed: int, accepted: int) -> None:
        """Is told how many of the tokens that the tier proposed last for a sequence were accepted."""
        self.confidence.observe(sequence.rated.get(self.name, ())[:proposed], accepted)

    # What is decided.

    def choose_lengths(self, batch: int = 1, filling: float = 0.0) -> float:
        """Decides how many tokens are drafted for this tier and those below, for `batch` sequences, and where drafts
        end, by what is expected to be fastest, unless that is fixed; returns the seconds per token of each sequence
        that are expected of this tier.

        Args: `filling`: see `StepCost`; measured, so it counts only where the number may follow from times.
        """
        filling = filling if self.adapts_to_time else 0.0
        if self.lower is None or self._rests(batch):
            return self.cost.seconds(batch)
        draft_seconds = self.lower.choose_lengths(batch)
        # More rows than those of a step would be computed with another arithmetic.
        most = max(0, STEP_ROWS // batch - 2) if batch > 1 else max(self.longest, self.fixed or 0)
        most = most if self.fixed is not None else min(self.longest, most)
        self.asked_next = self.most_asked = None
        self.least_chance = 0.0
        step = StepCost(self.cost, draft_seconds, self.acceptance.rate, batch, filling=filling)
        if self.fixed is not None:
            self.draft_tokens = min(self.fixed, most)
            # What is longer is hardly ever asked for in full: the tier above needs fewer tokens.
            seconds = step.seconds_per_token(min(self.draft_tokens, self.longest))
        elif self.adapts_to_time:
            self.draft_tokens, seconds, self.asked_next = self._by_time(step, most)
        else:
            self.draft_tokens, seconds = step.best(0, most)
            if self.draft_tokens:
                self._last_drafted = self.counts.passes
            elif self.counts.passes - self._last_drafted >= PROBE_EVERY:
                self.draft_tokens, self._last_drafted = min(1, most), self.counts.passes
                return seconds
        if self.draft_tokens and self.lower.ends_early(self.draft_tokens):
            by_costs = 0.0 if self.fixed is not None else step.least_chance(self.draft_tokens, seconds - filling)
            self.least_chance = by_costs if self.early_end is None else self.early_end
        if self.least_chance and self.fixed is None:
            self.most_asked = most
        return seconds

    def ends_early(self, tokens: int) -> bool:
        """Whether the tier's drafts of about so many tokens can end earlier. Not where every rank runs it whole: their
        last bits may differ, and with them where a draft ends."""
        return not self.replicated and (self.lower is not None or tokens >= self.read_together)

    def _rests(self, batch: int) -> bool:
        """Whether nothing is drafted, and it is too early to decide anew."""
        at_rest = (
            self.last_retrieval_work is self.retrieval_work is RetrievalWork.NONE
            and self.fixed is None
            and not self.draft_tokens
        )
        return at_rest and self._step is not None and self._step.batch == batch and not self.pays.may_probe

    def _by_time(self, step: StepCost, most: int) -> tuple[int, float, int | None]:
        """What `DraftingPays.decide` says, once the retrieval caches are ready for it."""
        self._step = self.pays.known(step)
        tokens, seconds, probe = self.pays.decide(self._step, most)
        if self.may_skip_retrieval is not None:
            drafts = bool(tokens if probe is None else probe)
            self.retrieval_work = next_work(self.last_retrieval_work, drafts, self.may_skip_retrieval and not tokens)
            if self.retrieval_work is RetrievalWork.REBUILD:
                probe = 0
                self.pays.postpone()
        return tokens, seconds, probe

    @property
    def longest_draft(self) -> int:
        """The most tokens that are ever drafted for one pass."""
        return self.fixed or self.longest

    @property
    def decisions(self) -> list[int]:
        """What `choose_lengths` has decided, in numbers, for other ranks."""
        asked = [-1 if number is None else number for number in (self.most_asked, self.asked_next)]
        return [self.draft_tokens, *asked, round(self.least_chance * _FINE), int(self.retrieval_work)]

    @decisions.setter
    def decisions(self, numbers: Sequence[int]) -> None:
        self.draft_tokens, *asked, chance, work = numbers
        self.most_asked, self.asked_next = (None if number < 0 else number for number in asked)
        self.least_chance, self.retrieval_work = chance / _FINE, RetrievalWork(work)
