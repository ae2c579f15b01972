"""What plans say of an engine's device: how much of each part is held between two rounds, and how much is taken at most
meanwhile. A cache stays where it was placed; all else is planned anew, of each sequence beside those that run, on a GPU
that computes in PyTorch's operations, as the simulator's does."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from triforce.offload import Engine
from triforce.offload.batch.run import Run
from triforce.offload.batch.sequence import ActiveSequence, BatchSequence
from triforce.offload.caches.full import FullCache
from triforce.offload.graphs.passes import Pieces
from triforce.offload.held import bytes_by_part, held_bytes
from triforce.offload.planning.run_plan import RunPlan, make_plan, planned_budget

PLENTY = 2**42
"""Bytes of a GPU that holds everything."""


def planned(caches: ActiveSequence, beside: int) -> RunPlan:
    """A sequence's plan where so many others run."""
    plan, placement = caches.plan, caches.full.blocks.placement
    settings = plan.request.settings
    if plan.budget != planned_budget(settings, plan.request.context):  # several together have less
        settings = replace(settings, budget=plan.budget)
    gpu = {"gpu_bytes": PLENTY, "gpu_total_bytes": PLENTY, "kernels": False}
    request = replace(plan.request, settings=settings, sequences=1, beside=beside, unallocated_bytes=0, **gpu)
    return make_plan(request, placement)


@dataclass
class Planned:
    """What is planned of an engine's device, looked at between rounds."""

    engine: Engine
    _blocks: dict[weakref.ref[FullCache], int] = field(default_factory=dict)  # bytes of those that were there
    _read: list[tuple[Callable[[], BatchSequence | None], RunPlan]] = field(default_factory=list)
    # what was being read, as long as it is there, and its plan
    _plans: weakref.WeakKeyDictionary[FullCache, RunPlan] = field(default_factory=weakref.WeakKeyDictionary)
    _captured: int = 0
    _left: int = 0  # that was left free for captured passes of the sequences that ran last
    _together: int = 0  # sequences of the run under way, at most
    _run: weakref.ref[Run] | None = None  # that run
    live: int = 0
    """Bytes that lived when it was looked at last."""

    def __post_init__(self) -> None:
        self._bare = make_plan(replace(self.engine._models.request(1), gpu_bytes=PLENTY, kernels=False))
        self._rope = self._bare.rope
        config, dtype, ranks = self.engine.target.config, self.engine.target.dtype, self.engine.target.ranks
        # Of the output head plans count as many rows as the rank with the most has.
        missing = self._bare.request.matrices.head_rows - config.vocab_size // ranks.size
        self._other_heads = missing * config.hidden_size * dtype.itemsize

    def faults(self) -> Iterator[str]:
        """Parts of which more is held than is planned, or, of what lasts, less."""
        held, opened = bytes_by_part(self.engine.held()), dict(self._open())
        plans = [*opened.values(), *self._closed()]
        self._rope = max([self._rope, *(plan.rope for plan in [*plans, *(plan for _, plan in self._read)])])
        yield from _unlike("weights", held, self._bare.weights, least=self._bare.weights - self._other_heads)
        yield from _unlike("rope", held, self._rope, least=0)
        yield from _unlike("draft_kv", held, sum(plan.draft_kv for plan in plans), least=0)
        yield from _unlike("mass", held, self.and_slack(sum(plan.mass for plan in plans)), least=0)
        if self.engine.target.dtype == torch.float32:
            yield from _unlike("scratch", held, self.and_slack(_scratch(plans)), least=0)
        yield from _unlike("retrieval", held, sum(plan.retrieval + _chosen_bytes(plan) for plan in plans), least=0)
        for sequence, plan in opened.items():
            yield from _faults_of(sequence.active, plan)

    def _closed(self) -> Iterator[RunPlan]:
        """The plans of runs that were closed: their full caches keep what only a run needs until another begins."""
        opened = {one.active.full for one, _ in self._open()}
        for text in self.engine._kept._texts:
            if text.in_use and text.full not in opened and text.full in self._plans:
                yield replace(self._plans[text.full], retrieval=0, draft_kv=0)
        drafting = self.engine._kept.drafting
        if drafting and not opened:
            yield replace(self._plans[drafting.retrieval.source], mass=0)

    def most(self, captured: int, live: int) -> tuple[int, int]:
        """Bytes that may have been taken at most since this was last asked, and of them those that last.

        Args:
            captured: bytes that captured passes hold now.
            live: bytes that live now.
        """
        found = dict(self._open())
        plans = [*found.values(), *(plan for known, plan in self._read if known() not in found)]
        blocks = {weakref.ref(holder): holder.kept_bytes for one in self.engine._kept.caches for holder in one.holders}
        lasting = self._bare.weights + self._rope + sum((self._blocks | blocks).values())
        lasting += self._captured + captured + _scratch(plans) + sum(plan.draft_kv for plan in plans)
        most = max(self.live, lasting + _passing(plans) + self._paused(found))
        self._blocks, self._captured, self.live = blocks, captured, live
        self._read = [(weakref.ref(one), plan) for one, plan in found.items() if one.state == "reading"]
        return most, lasting

    def _paused(self, found: Mapping[BatchSequence, RunPlan]) -> int:
        """What a prefill has between two slices, if another prompt may have been read there since this was last asked.
        `found` are the sequences that have caches, and their plans."""
        begun = [plan for known, plan in self._read if (one := known()) in found and one and one.state == "reading"]
        if sum(one.state == "reading" or not one.statistics.rounds for one in found) < 2:
            return 0
        return max((plan.between_slices for plan in begun), default=0)

    def and_slack(self, planned: int) -> int:
        """One in a hundred more than these bytes, or one block of all layers."""
        blocks = (one.blocks.block_size * one.token_bytes for one in self.engine._kept.caches)
        return planned + min([planned // 100, *blocks])

    def note_reading(self, tokens: int) -> None:
        """Takes note that so many tokens were read by nobody's sequence."""
        if self.engine._kept.caches:
            request = replace(self.engine._models.request(tokens), gpu_bytes=PLENTY, kernels=False)
            self._read.append((lambda: None, make_plan(request, self.engine._kept.caches[-1].blocks.placement)))

    def captured(self, taken: Mapping[Any, int]) -> tuple[int, int]:
        """Bytes of what captured passes are given, bring and share on the way, and those that are left free for them.

        Args: `taken` is what each took on the way.
        """
        plans = [plan for _, plan in self._open()]
        running = self.engine._running
        if running is not None and (self._run is None or self._run() is not running):
            self._run, self._together = weakref.ref(running), 0
        self._together = max(self._together, len(plans))
        beside = max(0, self._together - 1)
        left = [replace(plan, request=replace(plan.request, beside=beside)).reserve_parts["graphs"] for plan in plans]
        left = [
            size + plan.scratch for size, plan in zip(left, plans, strict=True)
        ]  # in PyTorch's operations they take it
        decoders = [decoder for decoder in (self.engine.target, self.engine.draft) if decoder]
        tables = {table.untyped_storage()._cdata for decoder in decoders for _, table in decoder.rope.held()}
        found = 0
        for passes in self.engine._graphs._passes:
            if isinstance(passes, Pieces):
                found += held_bytes(passes.held()) + max(
                    (taken.get(one, 0) for one in passes._passes.values()), default=0
                )
                continue
            captured = [one for one in passes._captured.values() if one.replay is not None]
            lasting = [held for one in captured for held in one.held()]
            found += held_bytes(held for held in lasting if held[1].untyped_storage()._cdata not in tables)
            found += max((taken.get(one, 0) for one in captured), default=0)
        # What pieces hold stays while no sequence runs.
        self._left = max(left, default=self._left)
        return found, self._left

    def _open(self) -> Iterator[tuple[BatchSequence, RunPlan]]:
        """The sequences that have caches, and their plans."""
        live = self.engine._running.live if self.engine._running else []
        opened = [one for one in live if one.active_or_none]
        for one in opened:
            plan = self._plans[one.active.full] = planned(one.active, len(opened) - 1)
            yield one, plan


def _faults_of(caches: ActiveSequence, plan: RunPlan) -> Iterator[str]:
    """Of one sequence."""
    held, was, placement = bytes_by_part(caches.full.blocks.held()), caches.plan.placement, plan.placement
    for part in ("resident_kv", "ring", "open_stretches"):
        yield from _unlike(part, held, getattr(plan, part))
    yield from _unlike("windows", bytes_by_part(caches.full.windows.held()), plan.windows)
    yield from _unlike("states", bytes_by_part(caches.full.held()), plan.states)
    same = ("block_size", "num_blocks", "open_tokens", "packed")
    if (
        any(getattr(was, name) != getattr(placement, name) for name in same)
        or placement.num_resident > was.num_resident
    ):
        yield f"{placement} where {was} is planned"
    if caches.streaming:
        yield from _unlike("draft_kv", bytes_by_part(caches.streaming.held()), plan.draft_kv)
    if caches.retrieval and (held := bytes_by_part(caches.retrieval.held())).get("retrieval"):
        chunk = plan.chunk_size * plan.request.part.kv_bytes_per_token(plan.request.dtype)
        yield from _unlike("retrieval", held, plan.retrieval + _chosen_bytes(plan), least=plan.retrieval - chunk + 1)


def _chosen_bytes(plan: RunPlan) -> int:
    """Of the numbers of chunks that were chosen and are copied by the next pass, which plans leave out: less than a
    hundredth of their keys and values."""
    part = plan.request.part
    return plan.budget // plan.chunk_size * part.kv_layers * part.num_kv_heads * 8


def _unlike(part: str, held: Mapping[str, int], planned: int, least: int | None = None) -> Iterator[str]:
    """What is wrong with a part of which so much is planned, and `least` is to be there, by default all of it."""
    found = held.get(part, 0)
    if found > planned or found < (planned if least is None else least):
        yield f"{found} bytes of {part} where {planned} are planned"


def _scratch(plans: Sequence[RunPlan]) -> int:
    """What attention keeps, of sequences that are decoded together."""
    alone = [make_plan(replace(plan.request, beside=0), plan.placement).scratch for plan in plans]
    together = [plan.scratch - own for plan, own in zip(plans, alone, strict=True)]
    return sum(alone) + max(together, default=0)


def _passing(plans: Sequence[RunPlan]) -> int:
    """The most that sequences with these plans take beside what lasts: all of them decode, or one is read while the
    others do."""
    decoding = [plan.retrieval + plan.mass for plan in plans]
    rounds = (plan.round_bytes(plan.request.sequences + plan.request.beside) for plan in plans)
    most = sum(decoding) + max(rounds, default=0)
    return max([most, *(sum(decoding) - own + plan.reading for plan, own in zip(plans, decoding, strict=True))])
