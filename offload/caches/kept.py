"""The full cache that an engine keeps between runs, so that a follow-up question finds its book there already."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from weakref import WeakSet

from ...tp.errors import CapacityError
from ...tp.model.decoder import Decoder
from ..contexts.home import contexts_root
from ..held import Holder, bytes_by_part, held_bytes
from ..planning.memory import plan_here, shortage_explained
from ..planning.request import RunRequest
from ..planning.run_plan import RunPlan, make_plan
from ..system import THIS_MACHINE, System
from ..transfer.device_blocks import Blocks
from ..transfer.link import Link, LinkError, Traffic
from ..transfer.staged.block_file import DiskSpace
from .full import FullCache
from .recent_mass import RECENT_ROWS

_MORE_ON_DISK = 1.25
"""Sequences that are decoded together, or room for longer runs, may push so many times as much of a text to a disk as
one sequence alone does."""


class KeptCache:
    """At most one full cache and the tokens whose keys and values are in it."""

    def __init__(
        self,
        decoder: Decoder,
        link_gbps: float | None = None,
        system: System = THIS_MACHINE,
        draft: Decoder | None = None,
    ) -> None:
        """Args: `draft` is another model on the same device, if there is one."""
        self._decoder, self._link_gbps, self._system, self._draft = decoder, link_gbps, system, draft
        self.others: WeakSet[Holder] = WeakSet()
        """Who else holds tensors on the device: sequences, while they are decoded."""
        self.folder: Path | None = None
        """Where what exceeds host memory is kept; `None`: beside the user's saved contexts."""
        self.room = 0
        """Tokens that a new cache has room for beyond a run's, where that changes nothing else: a longer run after it
        then need not move anything."""
        self.cache: FullCache | None = None
        """The one that is kept."""
        self.moved = 0
        """Bytes of caches on this rank that have left the device so far because memory there became short."""
        self._blocks: WeakSet[Blocks] = WeakSet()  # of all caches there are
        self._link: Link | None = None
        self.context: list[int] = []
        """The tokens of the last run, prompt and answer; as many of them as the cache holds are in it."""

    @cached_property
    def disk(self) -> DiskSpace:
        """Where blocks of the cache are that exceed host memory."""
        return DiskSpace(self.folder or contexts_root(), self._system.host)

    def traffic(self) -> Traffic:
        """What crossed the link, or was read from the disk, so far."""
        return (self._link.traffic() if self._link else Traffic()) + self.disk.traffic()

    def rotate_for(self, prompt_length: int) -> None:
        """Has keys rotated for a prompt of so many tokens; what the cache holds is forgotten where that differs."""
        if self._decoder.rope.begin(prompt_length):
            self.context = []

    def prepare(
        self,
        prompt: list[int],
        request: RunRequest,
        reuse: int | None = None,
        on_memory: Callable[[float], None] | None = None,
    ) -> tuple[FullCache, RunPlan]:
        """A full cache with room for the request's tokens that holds what it shares with `prompt` already, of that at
        most `reuse` tokens; if that is 0, the memory of the old one is given back first. Also the plan of the run.

        Every rank calls it, and all decide alike: they agree on the memory there is. `on_memory`: see `StreamedBlocks`.

        Raises:
            CapacityError: there is not so much memory.
        """
        if reuse == 0:
            self._drop()
        old, shared = self.cache, self.shared_tokens(prompt)
        shared = shared if reuse is None else min(shared, reuse)
        plan = self._plan(request, replaces=old)
        same = old and (shared or old.blocks.block_size == plan.placement.block_size)
        resident = 0
        if old and same and old.capacity >= request.context:
            going_on = self._going_on(old, plan)
            if going_on:
                old.rollback(shared)
                return old, going_on
            resident = held_bytes(old.blocks.held(), "resident_kv")
        asked, request = request, self._with_room(request, plan, old)
        if request is not asked:
            plan = self._plan(request, replaces=old)
        if old:
            beside = self._plan(request, replaces=None)
            more = beside.disk_kv > plan.disk_kv  # every pass would read it, for as long as the cache is kept
            if shared and beside.fits and beside.placement.streams != old.blocks.all_on_device and not more:
                plan = beside  # the shared tokens move while both are there
            else:
                self._drop()
                old = None  # before its memory is looked for
                plan = self._plan(request, replaces=None)
                if not plan.fits and request is not asked:
                    request, plan = asked, self._plan(asked, replaces=None)
        while True:
            try:
                self.cache = self._make(plan, on_memory=on_memory)
                break
            except CapacityError:
                before, alone = plan, old is None
                old = None
                self._drop()  # its memory may do, though not beside it
                plan = self._plan(request, replaces=None)
                if alone and (not plan.fits or plan.resident_kv >= before.resident_kv):
                    raise  # else others have taken memory since it was planned
        if old:
            self.cache.move_from(old, shared)
        self.moved += max(0, resident - held_bytes(self.cache.blocks.held(), "resident_kv"))
        return self.cache, plan if request is asked else self._plan(asked, replaces=self.cache)

    def beside(self, request: RunRequest, prefix: FullCache | None) -> tuple[FullCache, RunPlan]:
        """Another full cache, for a sequence that is decoded beside the one whose cache is kept, and the plan of its
        memory. It is its sequence's alone, and lasts as long; none of it is on a disk. Every rank calls it.

        Args: `prefix` holds the first `request.shared` tokens.

        Raises:
            CapacityError: there is not so much memory.
        """
        plan = self._plan(request, replaces=None, on_disk=False)
        return self._make(plan, prefix=prefix), plan

    def _make(
        self, plan: RunPlan, *, prefix: FullCache | None = None, on_memory: Callable[[float], None] | None = None
    ) -> FullCache:
        """An empty cache as planned.

        Raises:
            CapacityError: there is not so much memory.
        """
        plan.check()
        decoder, placement = self._decoder, plan.placement
        if placement.streams and self._link is None:
            self._link = self._system.make_link(decoder.device, self._link_gbps)
        blocks = failure = None
        try:
            with shortage_explained(decoder.device, self._system.device_memory):
                where = {"dtype": decoder.dtype, "device": decoder.device, "host": self._system.host, "disk": self.disk}
                blocks = self._system.make_blocks(decoder.part, placement, self._link, **where, on_memory=on_memory)
        except CapacityError as error:
            error.__traceback__ = error.__cause__ = error.__context__ = None  # which hold what was taken
            failure = error
        reasons = decoder.ranks.everyones(str(failure) if failure else None)
        short = next((rank for rank, reason in enumerate(reasons) if reason is not None), None)
        if blocks is None or short is not None:
            blocks = None  # or the error would hold it
            try:
                raise failure or CapacityError(f"rank {short}: {reasons[short or 0]}")
            finally:
                failure = None  # or the error and this frame would hold each other, and the frames of who catches it
        self._blocks.add(blocks)
        sizes = {"chunk_size": plan.chunk_size, "few_rows": self._system.limits.few_rows}
        return FullCache(decoder.part, decoder.rope, blocks, **sizes, prefix=prefix, start=plan.request.shared)

    def _with_room(self, request: RunRequest, plan: RunPlan, old: FullCache | None) -> RunRequest:
        """`request`, or one for more tokens, if they fit and lie where those of its `plan` do."""
        most = min(request.context + self.room, self._decoder.config.max_position_embeddings)
        if most <= request.context:
            return request
        larger = replace(request, context=most)
        found = self._plan(larger, replaces=old)
        as_planned = found.placement.streams == plan.placement.streams and found.disk_kv <= _MORE_ON_DISK * plan.disk_kv
        return larger if found.fits and as_planned else request

    def _going_on(self, cache: FullCache, plan: RunPlan) -> RunPlan | None:
        """The plan of a run in a cache that was made for another one, where `plan` is what would be made for it now;
        `None` if the cache does not leave a GPU what the run takes beside it, but for a hundredth of its memory, by
        which what is free may vary. Blocks leave for host memory that has room for them, if they have to and that is
        enough. Every rank calls it."""
        request, blocks = plan.request, cache.blocks
        going_on = make_plan(request, blocks.placement)
        if request.gpu_bytes is None or request.gpu_total_bytes is None:
            return going_on
        left = request.gpu_bytes - going_on.device_needed + request.gpu_total_bytes // 100
        left, spare = self._decoder.ranks.least([left, blocks.spare_bytes])
        if left >= 0:
            return going_on
        if spare < -left:
            return None
        moved = blocks.offload(-left)
        self.moved += moved
        (moved,) = self._decoder.ranks.least([moved])
        return make_plan(request, blocks.placement) if moved >= -left else None

    def make_room(self, caches: Iterable[FullCache], needed: Callable[[], int]) -> None:
        """Has blocks of these caches leave a GPU that has fewer bytes free than are `needed`, as far as host memory has
        room for them. Every rank calls it, and the one with the least memory counts."""
        holders = dict.fromkeys(holder.blocks for cache in caches for holder in cache.holders)
        if not any(blocks.spare_bytes for blocks in holders):
            return
        found = self._system.device_memory(self._decoder.device)
        if found is None:
            return
        (left,) = self._decoder.ranks.least([found.free - needed()])
        for blocks in holders:
            if left < 0:
                moved = blocks.offload(-left)
                self.moved, left = self.moved + moved, left + moved

    def fits(self, request: RunRequest) -> bool:
        """Whether there is memory for such a run, in place of the cache that is kept, with hardly more on a disk than
        its first sequence has there alone. Every rank calls it."""
        plan = self._plan(request, replaces=self.cache)
        return plan.fits and (
            not plan.disk_kv or plan.disk_kv <= _MORE_ON_DISK * make_plan(replace(plan.request, sequences=1)).disk_kv
        )

    def planned_alone(self, request: RunRequest) -> RunPlan:
        """The plan of a run as this rank alone sees the memory that is free."""
        free_disk, memory = self.disk.free_bytes, self._system.device_memory
        held = self._held_by_part()
        return plan_here(request, self._decoder.device, held=held, free_disk=free_disk, device_memory=memory)

    def distrust(self) -> None:
        """Takes into account that a pass was broken off: the newest tokens of a streamed cache may be half done."""
        if self.cache and not self.cache.blocks.all_on_device:
            self.context = []

    def _plan(self, request: RunRequest, *, replaces: FullCache | None, on_disk: bool = True) -> RunPlan:
        """The plan of a run whose weights are loaded, with the memory there is, that of `replaces` included; what
        exceeds host memory may be on a disk, unless it says otherwise."""
        blocks, decoder = replaces.blocks if replaces else None, self._decoder
        on_host = self._system.device_memory(decoder.device) is None
        others = (one for one in self._blocks if one is not blocks)
        return plan_here(
            request,
            decoder.device,
            decoder.ranks,
            held=self._held_by_part(),
            given_back=held_bytes(replaces.held()) if replaces else 0,
            given_back_on_host=blocks.host_bytes if blocks else 0,
            given_back_on_disk=blocks.disk_bytes if blocks else 0,
            held_on_host=sum(one.host_bytes + (held_bytes(one.held()) if on_host else 0) for one in others),
            free_disk=self.disk.free_bytes if on_disk else None,
            device_memory=self._system.device_memory,
        )

    def _held_by_part(self) -> dict[str, int]:
        holders = self._decoder, self._draft, self.cache, *self.others
        return bytes_by_part(one for holder in holders if holder for one in holder.held())

    def _drop(self) -> None:
        """Gives the cache's memory back."""
        if self.cache:
            with suppress(LinkError):  # of what is not wanted any more
                self.cache.blocks.drain()
            self._system.synchronize(self._decoder.device)  # a pass that was broken off may have copies under way
        self.cache, self.context = None, []

    def shared_tokens(self, prompt: list[int]) -> int:
        """Leading tokens of `prompt` that the cache holds, of those that a run may take over."""
        known = self.context[: self.cache.length] if self.cache else []
        return common_length(known, prompt[: reusable(prompt)])


_COMPARED = 4096
"""Tokens that are compared together, which is faster than one by one."""


def common_length(some: list[int], others: list[int]) -> int:
    """How many tokens both begin with."""
    shortest = min(len(some), len(others))
    for first in range(0, shortest, _COMPARED):
        piece = slice(first, min(first + _COMPARED, shortest))
        if some[piece] != others[piece]:
            return first + next(i for i, (a, b) in enumerate(zip(some[piece], others[piece], strict=True)) if a != b)
    return shortest


def reusable(prompt: Sequence[int]) -> int:
    """How many tokens of a prompt need not be read again where they are known. The last ones are: from the last one's
    logits the first new token is drawn, and from the attention of `RECENT_ROWS` chunks are chosen, as after a reading
    of the whole prompt."""
    return max(0, len(prompt) - RECENT_ROWS)
