"""Decides how many tokens are drafted for a tier, from the measured times of its passes and its acceptance rate.

A `Tier` asks its `DraftControl` how many tokens to draft, and reports the results. Nothing here changes the
distribution of tokens. Rank 0 decides, once a round; the other ranks take over its `decisions`.
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
"""The number of draft tokens that a GPU draws before the host waits for them. Only then the host decides whether the
draft ends early. On a CPU, which computes at once, it decides after each token."""

_FINE = 2**30
"""Probabilities are shared between ranks as multiples of 1 / `_FINE`, because ranks share integers."""


@dataclass(eq=False)
class DraftControl:
    """Controls the drafts for one tier, and the drafts that the tier makes."""

    name: str
    """The name of the tier."""
    cost: PassCost
    """The cost of a pass by its rows, those of all sequences."""
    adapts_to_time: bool = True
    """Whether draft lengths follow from measured times; otherwise, from times that the plan expects."""
    may_skip_retrieval: bool | None = None
    """Whether retrieval caches may be left alone while nothing is drafted; `None` for a tier that does not decide it.
    """
    replicated: bool = False
    """Whether each of several ranks runs the whole tier."""
    read_together: int = 1
    """The number of tokens that the tier draws before the host decides whether a draft ends: see `READ_TOGETHER`."""
    acceptance: Acceptance = field(default_factory=Acceptance)
    """The acceptance of the tokens that are drafted for the tier."""
    confidence: Confidence = field(default_factory=Confidence)
    """How likely the tokens that the tier drafts are accepted."""
    clock: Callable[[], float] = time.perf_counter
    """Returns the time in seconds, to time passes."""

    lower: DraftControl | None = field(default=None, init=False)
    """The control of the tier that drafts for this one."""
    fixed: int | None = field(default=None, init=False)
    """`draft_tokens`, if set by hand."""
    longest: int = field(default=8, init=False)
    """The maximum of `draft_tokens`, unless it is set by hand."""
    early_end: float | None = field(default=None, init=False)
    """`least_chance`, if set by hand; `None`: it follows from costs."""
    draft_tokens: int = field(default=4, init=False)
    """The number of draft tokens for one pass, for each sequence, that is expected to be fastest; 0: no draft."""
    most_asked: int | None = field(default=None, init=False)
    """The maximum number of draft tokens to ask for, if drafts end early; `None`: `draft_tokens`."""
    asked_next: int | None = field(default=None, init=False)
    """The maximum for the next pass only, if that pass tries another number."""
    least_chance: float = field(default=0.0, init=False)
    """A draft ends early if the next token, with all before it, is less likely than this to be accepted; 0: never."""
    retrieval_work: RetrievalWork = field(default=RetrievalWork.FULL, init=False)
    """The work of the next round for the retrieval caches. For the tier that decides about the text."""
    last_retrieval_work: RetrievalWork = field(default=RetrievalWork.FULL, init=False)
    """The work of the last round that was not interrupted."""
    after_round: float = field(default=0.0, init=False)
    """Seconds of the last round's work for the retrieval caches, after its pass."""
    counts: Counts = field(default_factory=Counts, init=False)
    """The counts of all sequences together. Each sequence has its own too."""
    pays: DraftingPays = field(default_factory=DraftingPays, init=False)
    """Decides whether drafting pays."""
    steady: bool = field(default=True, init=False)
    """Whether nothing was compiled or captured in the tier's steps since this was set to `True`."""
    _last_drafted: int = field(default=0, init=False)
    _step: StepCost | None = field(default=None, init=False)  # the expected cost of a step
    _step_began: float = field(default=0.0, init=False)
    _pass_began: float = field(default=0.0, init=False)

    def draft_with(self, lower: DraftControl, tokens: DraftTokens, early_end: float | None) -> None:
        """Makes the tier of `lower` draft for this one, `tokens` for a pass. `early_end`: see the attribute."""
        self.lower, self.longest, self.fixed, self.early_end = lower, tokens.most, tokens.fixed, early_end
        self.draft_tokens = tokens.fixed or self.draft_tokens

    # Called before and in a step.

    def begin_step(self) -> int:
        """Begins a step of the tier. Returns the maximum number of tokens to draft for each sequence."""
        self._step_began = self.clock()
        asked = self.draft_tokens if self.most_asked is None else self.most_asked
        if self.asked_next is not None:
            asked, self.asked_next = self.asked_next, None
        return asked

    def begin_pass(self, *, drafted: bool) -> None:
        """Begins the tier's own pass. Without a draft, it begins one or several passes that are a step of their own."""
        self._pass_began = self.clock()
        if not drafted:
            self._step_began = self._pass_began

    def begin_with_empty_caches(self) -> None:
        """Says that no sequence runs. Retrieval caches of the next sequences can then be filled later, when it is known
        whether anything is drafted."""
        if self.adapts_to_time and self.fixed is None:
            self.retrieval_work = self.last_retrieval_work = RetrievalWork.TAIL
            self.after_round = 0.0

    # Called at the end of a step.

    def note_passes(self, sequences: Sequence[TokenSequence], passes: int, rows: int, steady: bool) -> None:
        """Counts `passes` since `begin_pass`, over `rows` rows in all. Learns from their time if they were `steady`:
        nothing was compiled or captured in them, which would not happen again."""
        seconds = self.clock() - self._pass_began
        for counts in (self.counts, *(sequence.counts[self.name] for sequence in sequences)):
            counts.seconds += seconds
            counts.passes += passes
        if self.adapts_to_time and steady:
            self.cost.observe(rows / passes, seconds / passes)

    def note_draft(self, sequence: TokenSequence, proposed: int, accepted: int, forced: int = 0) -> None:
        """Counts the draft tokens that a pass tested, and those that it accepted.

        Args: `forced` is the number of leading tokens that follow from the grammar. They do not count for the drafter.
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
        """Learns the time of a step, unless something was compiled or captured in it.

        Args:
            asked, drafted: the maximum numbers of draft tokens per sequence that were asked for, and that came.
            brought: the mean number of new tokens per sequence.
        """
        self.steady &= steady
        if not steady:
            self.pays.postpone()
        elif self._step and self.adapts_to_time:
            seconds = self.clock() - self._step_began + (self.after_round if drafted else 0.0)
            self.pays.note(self._step, asked, drafted, brought, seconds)

    def judge(self, sequence: TokenSequence, proposed: int, accepted: int) -> None:
        """Records how many of the tokens that the tier last proposed for a sequence were accepted."""
        self.confidence.observe(sequence.rated.get(self.name, ())[:proposed], accepted)

    # Decisions.

    def choose_lengths(self, batch: int = 1, filling: float = 0.0, filling_s: float = 0.0) -> float:
        """Decides how many tokens are drafted for this tier and those below, for `batch` sequences, and when drafts end
        early. Unless these are fixed, it chooses what is expected to be fastest. Returns the expected seconds per token
        of each sequence for this tier.

        Args: `filling`, `filling_s`: see `StepCost`. They are measured, so they count only if lengths may follow from
            measured times.
        """
        filling, filling_s = (filling, filling_s) if self.adapts_to_time else (0.0, 0.0)
        if self.lower is None or self._rests(batch):
            return self.cost.seconds(batch)
        draft_seconds = self.lower.choose_lengths(batch)
        # A pass with more rows than a step would be computed with another arithmetic.
        most = max(0, STEP_ROWS // batch - 2) if batch > 1 else max(self.longest, self.fixed or 0)
        most = most if self.fixed is not None else min(self.longest, most)
        self.asked_next = self.most_asked = None
        self.least_chance = 0.0
        step = StepCost(self.cost, draft_seconds, self.acceptance.rate, batch, filling=filling, filling_s=filling_s)
        if self.fixed is not None:
            self.draft_tokens = min(self.fixed, most)
            # Longer drafts are hardly ever asked for in full: the tier above needs fewer tokens.
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
        """Whether the tier's drafts of about so many tokens can end early. Not if every rank runs the whole tier: the
        last bits of ranks may differ, and drafts would end at different tokens."""
        return not self.replicated and (self.lower is not None or tokens >= self.read_together)

    def _rests(self, batch: int) -> bool:
        """Whether nothing is drafted, and it is too early to decide again."""
        at_rest = (
            self.last_retrieval_work is self.retrieval_work is RetrievalWork.NONE
            and self.fixed is None
            and not self.draft_tokens
        )
        return at_rest and self._step is not None and self._step.batch == batch and not self.pays.may_probe

    def _by_time(self, step: StepCost, most: int) -> tuple[int, float, int | None]:
        """The decision of `DraftingPays.decide`, delayed until the retrieval caches are ready for it."""
        self._step = self.pays.known(step)
        tokens, seconds, probe = self.pays.decide(self._step, most)
        if self.may_skip_retrieval is not None:
            drafts = bool(tokens if probe is None else probe)
            self.retrieval_work = next_work(self.last_retrieval_work, drafts, self.may_skip_retrieval and not tokens)
            if self.retrieval_work is RetrievalWork.REBUILD:
                if not tokens:
                    self.pays.prepare_probe()
                probe = 0
                self.pays.postpone()
        return tokens, seconds, probe

    @property
    def longest_draft(self) -> int:
        """The maximum number of tokens that are drafted for one pass."""
        return self.fixed or self.longest

    @property
    def decisions(self) -> list[int]:
        """The decisions of `choose_lengths` as integers, for other ranks."""
        asked = [-1 if number is None else number for number in (self.most_asked, self.asked_next)]
        return [self.draft_tokens, *asked, round(self.least_chance * _FINE), int(self.retrieval_work)]

    @decisions.setter
    def decisions(self, numbers: Sequence[int]) -> None:
        self.draft_tokens, *asked, chance, work = numbers
        self.most_asked, self.asked_next = (None if number < 0 else number for number in asked)
        self.least_chance, self.retrieval_work = chance / _FINE, RetrievalWork(work)
