"""Sets up a sequence: a full cache, which may share tokens with others, the drafting tiers and their caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ...kernels.selection import STEP_ROWS
from ...tp.decoder import Decoder
from ...tp.devices import device_name
from ...tp.errors import CapacityError, UsageError
from ...tp.units import gib
from ..caches.full import FullCache
from ..caches.hidden_states import HiddenStates
from ..caches.retrieval import RetrievalCache
from ..caches.streaming import StreamingCache
from ..checks import tokens_are_exact
from ..contexts.model import ModelContexts
from ..graphs.passes import Graphs, Passes
from ..held import held_bytes
from ..planning.cost_model import Assumptions, Hardware, PassTimes, hardware_of
from ..planning.request import RunRequest
from ..planning.run_plan import RETRIEVAL_DRAFT_TOKENS, RunPlan, make_plan, planned_budget
from ..run_document import run_identity
from ..settings import Settings
from ..speculation.confidence import Confidence
from ..speculation.control import READ_TOGETHER, DraftControl
from ..speculation.grammar import Grammars, Matcher
from ..speculation.lengths import Acceptance
from ..speculation.lookup import LookupControl, LookupTier
from ..speculation.noise import CommonNoise, FreshNoise, Noise, key_of
from ..speculation.refresh import RefreshPolicy, RetrievalRefresh
from ..speculation.sampler import Sampler
from ..speculation.sampling import Sampling
from ..speculation.tiers import Tier
from ..system import THIS_MACHINE, System
from ..threads import DecodingThreads
from ..transfer.link import Traffic
from .drafting_caches import DraftingCaches
from .kept import KeptCache, Shared, takes_over
from .sequence import ActiveSequence, BatchSequence


@dataclass(frozen=True)
class Models:
    """The models and objects that an engine has loaded, and its settings."""

    target: Decoder
    draft: Decoder | None
    settings: Settings
    names: tuple[str, str | None]
    """The names of target and draft in statistics."""
    kept: KeptCache
    """The full caches of running and ended sequences."""
    contexts: ModelContexts | None
    """The saved contexts; `None` if the engine was not loaded from files."""
    grammars: Grammars | None = None
    """Compiles grammars; `None` if the engine was not loaded from files."""
    system: System = THIS_MACHINE
    locks_embedding: bool = True
    """See `RunRequest`."""

    @property
    def padded(self) -> bool:
        """Whether passes that decide about the text are padded."""
        exact = self.settings.exact
        return exact == "on" or (exact == "auto" and self.target.device.type == "cuda")

    @property
    def exact(self) -> bool:
        """Whether tokens cannot depend on draft lengths and tiers."""
        return tokens_are_exact(self.target, self.settings.planned_chunk_size, self.padded)

    @property
    def reads_together(self) -> bool:
        """Whether several prompts can be computed in one pass: each row is computed as it is by itself."""
        return not self.padded and self.exact and bool(self.target.tiling.end_rows)

    def hardware(self, measured_link: float | None = None) -> Hardware:
        """See `hardware_of`."""
        device = self.target.device
        return hardware_of(device, device_name(device), self.settings.link_gbps, measured_link)

    def request(self, context: int, answer: int | None = None) -> RunRequest:
        """The request for a run over `context` tokens, `answer` of them generated. The available memory is not filled
        in. It has all tiers, as a later run may need them on the same cache."""
        draft = self.draft.config if self.draft else None
        models = self.target.config, draft, self.target.dtype
        found = RunRequest(*models, context, self.settings, self.target.ranks.size, limits=self.system.limits)
        return replace(found, answer=answer, locks_embedding=self.locks_embedding)


@dataclass
class MeasuredTiers:
    """Tiers, which measure their passes, and for what they were made."""

    tiers: list[Tier]
    made_for: tuple[object, ...]
    """Settings, draft model, number of tiers, and the draft lengths that they may choose."""
    begins: dict[str, float]
    """By tier: the seconds of a pass as first expected."""
    filling_s: float
    """Seconds of filling a sequence's drafting caches: expected, later measured."""
    filling_measured: bool = False
    to_measure: RunPlan | None = None
    """The plan for `use_measured_link`, until the link was measured."""

    def hold_for(self, made_for: tuple[object, ...], begins: dict[str, float]) -> bool:
        """Whether the measurements hold for such passes, too."""
        return self.made_for == made_for and _alike(self.begins, begins)


_WORTH_WAITING = 64
"""A prompt waits for another prompt that is being read, if it has over this many more tokens in common with it than
with known texts."""


_LIKE_PLANNED = 7 / 8
"""Drafting caches are reused if their budget is at least this share of the planned budget, which grows with the
text."""

_ALIKE = 1.125
"""Measurements are reused if the expected times of passes differ by at most this factor."""


class SequenceSetup:
    """Opens the sequences of one run."""

    def __init__(
        self,
        models: Models,
        graphs: Graphs,
        tiers: int,
        fresh_seed: int,
        expected: int = 1,
        earlier: MeasuredTiers | None = None,
    ) -> None:
        """Args:
        models: the loaded models.
        graphs: captures passes.
        tiers: the number of tiers, 1 to 3.
        fresh_seed: the seed of the generator for sequences without a seed of their own.
        expected: the minimum number of sequences for which memory is planned when no sequence runs.
        earlier: see `measured`, of an earlier run.
        """
        self._models, self._graphs, self._num_tiers = models, graphs, tiers
        self.target = models.target
        self._fresh_seed = fresh_seed
        self._generator = torch.Generator(models.target.device).manual_seed(fresh_seed)
        self._expected = expected
        self._moved_before = models.kept.moved
        self._budget = 0  # the reduced budget of each sequence, if several do not fit with full budgets; else 0
        self._current: MeasuredTiers | None = None
        self.measured = earlier
        """The tiers of the last sequences that began together, in this run or an earlier one. So a run does not have to
        find out anew whether drafts pay."""
        self.threads = DecodingThreads(adapts=False)
        """The CPU threads of rounds; chosen when a sequence is opened."""

    @property
    def tiers(self) -> list[Tier]:
        """The tiers, the one on the full cache first; none before a sequence was opened."""
        return self._current.tiers if self._current else []

    def traffic(self) -> Traffic:
        """The traffic over the link, and from and to a disk, so far."""
        return self._models.kept.traffic()

    @property
    def warnings(self) -> list[str]:
        """The warnings of the rounds so far, one line each."""
        found = self.threads.warnings + self._models.kept.disk.warnings
        moved = self._models.kept.moved - self._moved_before
        if moved:
            found.append(
                f"GPU memory ran low: {gib(moved)} of the KV cache went to host memory, and streams from there"
            )
        return found

    @property
    def kv_memory_bytes(self) -> int:
        """See `KeptCache.memory_bytes`."""
        return self._models.kept.memory_bytes

    @property
    def contexts(self) -> ModelContexts | None:
        """The contexts that are saved for the target."""
        return self._models.contexts

    def withdraw(self, sequence: BatchSequence, *, alike: bool) -> None:
        """Forgets a sequence that could not be opened on every rank.

        Args: `alike` is whether it failed on all ranks. Otherwise, kept caches may differ between ranks, so they are
            dropped too.
        """
        self.forget(sequence)
        if not alike:
            self._models.kept.forget_all()

    def forget(self, sequence: BatchSequence) -> None:
        """Drops the full cache of a sequence, so that no other shares it."""
        self._models.kept.forget(sequence.context)

    def leave(self, sequence: BatchSequence, *, last: bool) -> None:
        """Keeps the full cache of a sequence that ends. That of a failed sequence is dropped: its values may not be
        finite, and some layers may hold more tokens than others.

        Args: `last` is whether no other sequence has caches. Then the drafting caches stay too, until another sequence
            begins, unless they were never filled or have states.
        """
        if sequence.failure:
            self.forget(sequence)
        else:
            active, draft = sequence.active, self._models.draft
            # States include all tokens so far.
            stateless = not (self.target.part.linear or (draft and (draft.part.linear or draft.config.is_head)))
            stays = last and stateless and active.drafting_filled
            self._models.kept.end(sequence.context, active.drafting if stays else None)

    def drop_drafting(self) -> None:
        """Frees the drafting caches that are kept for a further sequence of the run."""
        self._models.kept.drafting = None

    @property
    def looks_up(self) -> bool:
        """Whether tokens are drafted by lookup."""
        return self._models.settings.lookup and self._num_tiers == 3

    def open(
        self,
        sequence: BatchSequence,
        running: Sequence[BatchSequence],
        waiting: Sequence[BatchSequence],
        *,
        aside: BatchSequence | None = None,
        known: Shared | None = None,
        reuse: int | None = None,
        on_memory: Callable[[float], None] | None = None,
    ) -> None:
        """Makes the caches of a sequence. Every rank calls it.

        Args:
            running: the sequences with which it may share tokens.
            waiting: the sequences that are to run together soon, including this one.
            aside: that one of `running` whose prefill goes on after that of this sequence, if there is one.
            known: what `shared_beside` has found just now, if others run; `None`: it is looked for here.
            reuse: the maximum number of leading tokens to take over from kept caches; `None`: any number.
            on_memory: see `StreamedBlocks`.

        Raises:
            CapacityError: there is too little memory.
            UsageError: the grammar of the sequence cannot be followed.
        """
        models, order = self._models, sequence.order
        prompt, matcher = sequence.context, self._matcher(sequence)
        request = models.request(len(prompt) + order.max_new_tokens, answer=order.max_new_tokens)
        if not running:
            self._budget = 0
            models.kept.rotate_for(len(prompt))
            expected = max(self._expected, len(waiting))
            while expected > 1 and not models.kept.fits(replace(request, sequences=expected)):
                expected //= 2  # further sequences then wait, or take the memory that is left
            request = replace(request, sequences=expected)
            full, plan = self._full_cache(sequence, request, first=True, reuse=reuse, on_memory=on_memory)
            if plan.budget < planned_budget(request.settings, request.context):
                self._budget = plan.budget
            made = self._make_tiers(replace(request, sequences=1), plan, waiting)
            if made is not self._current:
                self._current = made
                adapts = self.target.device.type == "cpu" and models.settings.threads is None
                self.threads = DecodingThreads(adapts and self.tiers[0].control.adapts_to_time)
        else:
            unallocated = sum(one.active.unallocated_bytes for one in running)
            unallocated += _further_slices_bytes(aside.active) if aside else 0
            request = replace(request, beside=len(running), unallocated_bytes=unallocated)
            full, plan = self._full_cache(sequence, request, first=False, known=known)
        sequence.active_or_none = self._activated(sequence, full, plan, matcher)
        models.kept.others.add(sequence.active_or_none)
        sequence.statistics = replace(sequence.statistics, reused_tokens=full.length)

    def to_compute(self, sequence: BatchSequence) -> int:
        """How many tokens of a sequence's prompt its prefill must compute, or had to when it began: those that it does
        not take over from a cache or a saved context."""
        prefix = sequence.order.contexts.prefix
        opened = sequence.active_or_none is not None
        shared = sequence.statistics.reused_tokens if opened else self._models.kept.find(sequence.context)[1]
        return len(sequence.order.prompt) - max(shared, prefix.tokens if prefix else 0)

    def could_use(self, sequence: BatchSequence, saving: Sequence[BatchSequence]) -> bool:
        """Whether a prompt that is to be saved has many more tokens in common with one of the sequences `saving`, when
        these have ended, than it can reuse now."""
        kept, prefix = self._models.kept, sequence.order.contexts.prefix
        alike = kept.common_lengths(sequence.context)
        _, shared = kept.find(sequence.context, whole=True, alike=alike)
        now = max(shared, prefix.tokens if prefix else 0)
        return any(alike.get(one.active.full, 0) > now + _WORTH_WAITING for one in saving)

    def reads_in_one_pass(self, opened: Sequence[BatchSequence]) -> bool:
        """Whether the unread tokens of these opened sequences can be computed in one pass. Each row must be computed as
        it is by itself, within the planned memory of a prefill."""
        return self._models.reads_together and self._fit_in_a_pass(opened, 0, 0)

    def shared_beside(self, opened: Sequence[BatchSequence], further: BatchSequence) -> Shared | None:
        """What `KeptCache.find` finds for a further sequence, which is not opened, if its unread tokens can be computed
        in one pass with those of these opened sequences; otherwise `None`."""
        prompt, contexts, kept = further.context, further.order.contexts, self._models.kept
        if contexts.save is not None or not self.reads_in_one_pass(opened):
            return None
        alike = kept.common_lengths(prompt)
        text, shared = kept.find(prompt, alike=alike)
        if contexts.prefix and contexts.prefix.tokens > shared:
            return None
        # It is faster to wait for the tokens that it shares with one of these sequences.
        if any(alike[one.active.full] > shared + _WORTH_WAITING for one in opened):
            return None
        return (text, shared) if self._fit_in_a_pass(opened, len(prompt) - shared, len(prompt)) else None

    def _fit_in_a_pass(self, opened: Sequence[BatchSequence], further_rows: int, longest: int) -> bool:
        """Whether the unread tokens of these sequences, and further rows of prompts of at most `longest` tokens, fit
        into one pass: nothing must be restored or saved between them, and there is memory for them."""
        if any(one.active.saved and one.active.saved.has_work(one.active.full) for one in opened):
            return False
        rows = further_rows + sum(one.unread for one in opened)
        longest = max(longest, *(len(one.context) for one in opened))
        plan, chunks = opened[0].active.plan, longest // self._models.settings.planned_chunk_size
        shares = self.target.part.num_heads * rows * chunks * 4  # bytes of the attention that rows give to chunks
        return rows <= STEP_ROWS and shares <= plan.prefill

    def make_room(self, running: Sequence[BatchSequence], readings: Sequence[BatchSequence] = ()) -> None:
        """Moves keys and values from a GPU to host memory, as far as room is planned there, if other programs have
        taken memory that `next_bytes` may need. Drops caches of ended sequences first. Every rank calls it."""
        caches = (one.active.full for one in [*running, *readings])
        self._models.kept.make_room(caches, lambda: self.next_bytes(running, readings))

    def next_bytes(self, running: Sequence[BatchSequence], readings: Sequence[BatchSequence] = ()) -> int:
        """Bytes that must be free on the device before the next round of these sequences, and before the next slices of
        the first prefill of `readings`. They may take this memory; half of the reserve for fragmentation is added."""
        caches = [one.active for one in [*running, *readings]]
        passing = max((one.plan.round_bytes(len(running)) for one in caches), default=0) if running else 0
        if readings:  # before its caches grow
            own = readings[0].active
            if own.retrieval and held_bytes(own.retrieval.held()):  # its drafting caches were kept
                passing += own.plan.prefill_of(own.full.length, len(readings[0].context))
            else:
                held = own.plan.between_slices if own.full.under_way else 0  # this memory is already allocated
                passing = max(passing + own.plan.between_slices - held, _further_slices_bytes(own))
        if self._models.settings.resident is None:  # a size that is set by hand may take the reserve
            passing += caches[0].plan.reserve_parts.get("fragmentation", 0) // 2
        return passing + sum(one.unallocated_bytes for one in caches)

    def filling(self, sequences: Sequence[BatchSequence]) -> tuple[float, float]:
        """Seconds of filling the empty drafting caches of these sequences: divided by the mean number of tokens of a
        sequence that are still to come, and in all. The sequences run together, or will."""
        assert self._current
        seconds = self._current.filling_s * sum(not one.active.drafting_filled for one in sequences)
        tokens_left = sum(one.missing for one in sequences)
        return seconds * len(sequences) / max(1, tokens_left), seconds

    def note_filling(self, seconds: float) -> None:
        """Records how long it took to fill the drafting caches of a sequence."""
        made = self._current
        assert made
        made.filling_s = (made.filling_s + seconds) / 2 if made.filling_measured else seconds
        made.filling_measured = True

    def use_measured_link(self) -> None:
        """Computes the expected time of a verification from the measured bandwidth of the link, instead of a data
        sheet. A card may have fewer lanes than its data sheet says. It is called after each prefill, and takes effect
        once enough bytes have crossed the link. In a prefill, all streamed blocks cross it. Every rank calls it: the
        slowest link counts, as ranks wait for it. If lengths do not adapt, they must not depend on the measurement."""
        made = self._current
        if made is None or made.to_measure is None:
            return
        (carried,) = self.target.ranks.least([int(self.traffic().bytes_per_s or 0)])
        if carried:  # else too little crossed the link, because the text's cache was reused
            times = PassTimes(made.to_measure, self._models.hardware(carried))
            made.to_measure, made.tiers[0].control.cost = None, times.costs()["verify"]

    def rotates_otherwise(self, sequence: BatchSequence) -> bool:
        """Whether the keys of a sequence need other rotation angles than those of running sequences. With dynamic RoPE,
        the angles depend on the prompt's length. The sequence then cannot be decoded together with the others."""
        return self.target.rope.changes_with(len(sequence.context))

    def _full_cache(
        self,
        sequence: BatchSequence,
        request: RunRequest,
        *,
        first: bool,
        known: Shared | None = None,
        reuse: int | None = None,
        on_memory: Callable[[float], None] | None = None,
    ) -> tuple[FullCache, RunPlan]:
        """Makes a full cache and the plan of its sequence. It reuses the cache that holds the most of the prompt, of a
        running or an ended sequence, unless a saved context has many more tokens. A prompt that is to be saved shares
        nothing with other sequences.

        Args:
            first: whether no sequence runs.
            known, reuse, on_memory: see `open`.

        Raises:
            CapacityError: there is too little memory.
        """
        kept, contexts, prompt = self._models.kept, sequence.order.contexts, sequence.context
        if reuse == 0:
            kept.forget_all()
        whole = contexts.save is not None
        text, shared = known or kept.find(prompt, reuse, whole=whole)
        if whole and (self.target.part.kept_windows or self.target.part.linear):
            text, shared = None, 0  # it lacks windows and states at the ends of the segments to save
        more = contexts.prefix.tokens - shared if contexts.prefix else 0
        if more > (self.target.tiling.prefill_rows if shared else 0):
            text, shared = None, 0
        if not first:
            request = replace(request, settings=self._like_others(request))
        elif text:
            request = replace(request, settings=self._like_before(request, text.full))
        free = kept.can_be_taken_over(text)
        if (first and text is None) or (free and takes_over(text, shared)):
            return kept.prepare(prompt, request, text, shared, on_memory)
        try:
            return kept.beside(prompt, request, text, shared, whole=whole or first)
        except CapacityError:
            if not free:
                raise
        return kept.prepare(prompt, request, text, shared, on_memory)

    def _like_others(self, request: RunRequest) -> Settings:
        """The settings of a sequence beside others: the same budget, and the same draft length in verifications."""
        settings = request.settings
        if 0 < self._budget < planned_budget(settings, request.context):
            settings = replace(settings, budget=self._budget)
        if len(self.tiers) > 1:
            settings = replace(settings, block_length=self.tiers[0].control.longest_draft)
        return settings

    def _like_before(self, request: RunRequest, full: FullCache) -> Settings:
        """The settings of a run that reuses a full cache: with the budget of its kept drafting caches, if the planned
        budget is hardly larger."""
        settings, idle = request.settings, self._models.kept.drafting
        planned = planned_budget(settings, request.context)
        if idle and idle.retrieval.source is full and _LIKE_PLANNED * planned <= idle.sizes["budget"] < planned:
            return replace(settings, budget=idle.sizes["budget"])
        return settings

    def _activated(
        self, sequence: BatchSequence, full: FullCache, plan: RunPlan, matcher: Matcher | None
    ) -> ActiveSequence:
        models, order = self._models, sequence.order
        speculates = len(self.tiers) > 1
        # All sequences of a batch are verified with the lengths of its tiers.
        rows = max(plan.mass_rows, self.tiers[0].control.longest_draft + 1) if speculates else 0
        full.keep_mass(rows=rows)
        if full.states:
            full.states.keep_rows(max(plan.state_rows, rows))
        drafting = self._drafting(sequence, full, plan) if speculates else None
        refresh = drafting and RetrievalRefresh(drafting.retrieval, RefreshPolicy(models.settings.refresh), rows)
        eos = () if order.ignore_eos else models.target.config.eos_token_ids
        sampler = Sampler(order.sampling, self._noise(order.sampling, order.number), frozenset(eos))
        return ActiveSequence(
            context=sequence.context,
            sampler=sampler,
            passes={"verify": self._passes("verify", models.target, full), **(drafting.passes if drafting else {})},
            matcher=matcher,
            top_logprobs=order.top_logprobs,
            logprobs=sequence.logprobs,
            plan=plan,
            full=full,
            drafting=drafting,
            refresh=refresh,
            saved=models.contexts.use(order.contexts, models.system.synchronize) if models.contexts else None,
            identity=partial(self._identity, order.sampling, plan.budget if speculates else 0, full),
            traffic_before=full.traffic(),
        )

    def _drafting(self, sequence: BatchSequence, full: FullCache, plan: RunPlan) -> DraftingCaches:
        """The caches of the drafting tiers. Those of the previous sequence in this full cache are reused, if they have
        the same sizes and there is memory for them during the prefill. Otherwise, they are new."""
        models, target = self._models, self.target
        sizes = {"budget": plan.budget, "chunk_size": plan.chunk_size}
        sizes |= {"tail": plan.tail, "headroom": plan.tail_ahead, "state_rows": plan.state_rows}
        idle = models.kept.take_drafting(full)
        there, stop, saves = full.length, len(sequence.context), sequence.order.contexts.save is not None
        if idle and idle.sizes == sizes and not saves and plan.reads_beside_drafting(there, stop):
            idle.begin_anew(there)
            return idle
        idle = None  # freed before other memory is allocated
        retrieval, streaming = RetrievalCache(full, target.rope, **sizes, join=target.mean_over_copies), None
        passes = {"retrieval": self._passes("retrieval", target, retrieval)}
        if models.draft and len(self.tiers) == 3:
            read = HiddenStates(target) if models.draft.config.is_head else None
            if read:
                full.leave_hidden_states_in(read)
            of_states = {"certain": lambda: full.length, "state_rows": plan.state_rows}
            streaming = StreamingCache(models.draft, **of_states, hidden_states=read)
            passes["draft"] = self._passes("draft", models.draft, streaming)
        return DraftingCaches(sizes, retrieval, streaming, passes)

    def _passes(self, name: str, decoder: Decoder, cache: Any) -> Passes:
        return Passes(decoder, cache, self._graphs, padded=self._models.padded and name == "verify")

    def _make_tiers(self, request: RunRequest, plan: RunPlan, first: Sequence[BatchSequence]) -> MeasuredTiers:
        """Makes the tiers, with the expected costs of their passes. Returns existing tiers if their measurements hold
        for these passes too."""
        models = self._models
        # Sequences that join later cannot change this.
        adapts = models.exact or not any(one.order.sampling.seed is not None for one in first)
        # If lengths follow from these costs for good, they must not depend on the free memory.
        lengths = plan if adapts else make_plan(request)
        verify = lengths.verify_draft  # memory is planned for its longest draft
        if adapts and plan.request.shared:  # every pass reads the shared tokens too
            lengths = make_plan(replace(plan.request, shared=0))
        lengths = replace(lengths, request=replace(lengths.request, sequences=1))
        times = PassTimes(lengths, models.hardware())
        costs = times.costs()
        drafts = {"verify": verify, "retrieval": lengths.retrieval_draft}
        begins = {name: cost.base + cost.per_row for name, cost in costs.items()}
        # From a single sequence, little is learnt that holds for the next: it would draft less than it should.
        together = len(first) > 1 and adapts
        made_for = models.settings, models.draft, self._num_tiers, drafts
        if together and self.measured and self.measured.hold_for(made_for, begins):
            self.measured.tiers[0].control.begin_with_empty_caches()
            return self.measured
        decoders = {"verify": models.target, "retrieval": models.target}
        if models.draft:
            decoders["draft"] = models.draft
        controls = [
            DraftControl(
                name,
                costs[name],
                adapts_to_time=adapts,
                read_together=1 if decoder.device.type == "cpu" else READ_TOGETHER,
                clock=models.system.clock,
            )
            for name, decoder in list(decoders.items())[: self._num_tiers]
        ]
        expected = Acceptance.starting_at(Assumptions().acceptance)
        controls[0].may_skip_retrieval, controls[0].acceptance = models.settings.refresh != "never", expected
        if len(controls) > 1:
            controls[1].confidence = Confidence(replace(expected))
        for control in controls[2:]:
            control.replicated = models.target.ranks.size > 1 and not (models.draft and models.draft.config.is_head)
        vocabulary = models.target.config.vocab_size
        lowest: Tier | None = None
        if models.draft and controls[2:]:
            lowest = Tier("draft", models.draft, controls[2], vocabulary)
        if self.looks_up:
            most_by_model = lengths.retrieval_draft.fixed or RETRIEVAL_DRAFT_TOKENS
            looks_up = LookupControl(lowest and lowest.control, controls[1], most_by_model)
            lowest = LookupTier(looks_up, lowest, models.target, vocabulary)
        tiers = [lowest] if lowest else []
        for control in reversed(controls[:2]):
            drafter = tiers[0] if tiers else None
            if drafter:
                control.draft_with(drafter.control, drafts[control.name], models.settings.least_chance)
            tiers.insert(0, Tier(control.name, models.target, control, vocabulary, drafter))
        controls[0].begin_with_empty_caches()
        made = MeasuredTiers(tiers, made_for, begins, times.filling())
        made.to_measure = lengths if adapts and lengths.streamed_per_pass else None
        if together:
            self.measured = made
        return made

    def _matcher(self, sequence: BatchSequence) -> Matcher | None:
        """The matcher of the sequence's grammar; `None` without a grammar.

        Raises:
            UsageError: the grammar cannot be followed.
        """
        grammar = sequence.order.grammar
        if grammar is None:
            return None
        if self._models.grammars is None:
            raise UsageError(
                "this engine was not loaded from files, so it has no tokenizer for a grammar; use Engine.load"
            )
        return self._models.grammars.matcher(grammar, len(sequence.order.prompt))

    def _noise(self, sampling: Sampling, number: int) -> Noise:
        """The noise with which a sequence draws its tokens."""
        if sampling.greedy:
            return CommonNoise(None)
        if sampling.seed is not None:
            return CommonNoise(key_of(sampling.seed, number))
        return FreshNoise(self._generator)

    def _identity(self, sampling: Sampling, budget: int, full: FullCache) -> dict[str, Any]:
        models = self._models
        return run_identity(
            models.target,
            models.names,
            models.settings,
            sampling,
            tiers=len(self.tiers),
            seed=self._fresh_seed if sampling.seed is None else sampling.seed,
            budget=budget,
            exact=models.exact,
            resident_bytes=sum(held_bytes(holder.blocks.held(), "resident_kv") for holder in full.holders),
            disk_bytes=sum(holder.blocks.footprint.disk for holder in full.holders),
            packed=any(holder.blocks.placement.packed for holder in full.holders),
        )


def _further_slices_bytes(own: ActiveSequence) -> int:
    """The maximum bytes that further slices of a prefill take beside those that are already allocated, and beside those
    that the sequence takes only afterwards."""
    held = own.plan.between_slices if own.full.under_way else 0
    return max(0, own.plan.prefill - own.unallocated_bytes - held)


def _alike(some: dict[str, float], others: dict[str, float]) -> bool:
    """Whether both give about the same seconds for the same tiers, by name."""
    return some.keys() == others.keys() and all(
        seconds <= _ALIKE * others[name] and others[name] <= _ALIKE * seconds for name, seconds in some.items()
    )
