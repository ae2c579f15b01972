"""The full caches of an engine: of sequences that run, and of those that have ended, as long as memory allows, so that
a follow-up question finds its book there already, and a next turn what was said."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from weakref import WeakSet

from ...tp.decoder import Decoder
from ...tp.errors import CapacityError
from ..caches.full import RECENT_ROWS, FullCache
from ..caches.states import States
from ..caches.windows import WindowBlocks
from ..contexts.home import contexts_root
from ..held import Held, Holder, bytes_by_part, held_bytes
from ..planning.memory import plan_here, shortage_explained
from ..planning.request import RunRequest
from ..planning.run_plan import RunPlan, make_plan
from ..system import THIS_MACHINE, System
from ..transfer.link import Link, LinkError, Traffic
from ..transfer.staged.block_file import DiskSpace
from .drafting_caches import DraftingCaches

_MORE_ON_DISK = 1.25
"""Sequences that are decoded together, or room for longer runs, may push so many times as much of a text to a disk as
one sequence alone does."""

LEFT_FREE = 1 / 2
"""Of the host memory that is free: what stays so beside caches of sequences that have ended, unless it is set by hand
how much may be taken. Other programs live there, and whoever is to come wants memory, too."""


@dataclass(eq=False)
class KnownText:
    """Tokens whose keys and values a full cache holds."""

    full: FullCache
    tokens: list[int]
    """Prompt and answer so far. As many of them as the cache holds are in it. Empty where only its memory is of use."""
    prompt_tokens: int
    in_use: bool = True
    """Whether its sequence has not ended."""

    def builds_on(self, other: KnownText) -> bool:
        """Whether its first tokens are in the other's cache."""
        return other.full in self.full.holders[:-1]

    def start_behind(self, other: KnownText) -> int:
        """Where what it takes from the other's cache ends; 0 where that is nothing."""
        holders = self.full.holders
        return holders[holders.index(other.full) + 1].start if self.builds_on(other) else 0


class KeptCache:
    """The full caches there are, with the tokens whose keys and values they hold.

    Those of sequences that have ended are dropped, the one used last the latest, where a sequence that begins would be
    refused beside them, or more of it would be in host memory or on a disk.
    """

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
        self.moved = 0
        """Bytes of caches on this rank that have left the device so far because memory there became short."""
        self._texts: list[KnownText] = []  # the one used last is the last
        self._made: WeakSet[FullCache] = WeakSet()  # all caches there are, known or not
        self._link: Link | None = None
        self.drafting: DraftingCaches | None = None
        """Of the sequence that has ended last, until another one of its run is opened."""

    @property
    def caches(self) -> list[FullCache]:
        """All that are known, the one used last is the last; what they share with others may be in these alone."""
        return [text.full for text in self._texts]

    @cached_property
    def disk(self) -> DiskSpace:
        """Where blocks of the cache are that exceed host memory."""
        return DiskSpace(self.folder or contexts_root(), self._system.host)

    def traffic(self) -> Traffic:
        """What crossed the link, or was read from the disk, so far."""
        return (self._link.traffic() if self._link else Traffic()) + self.disk.traffic()

    def start_threads(self) -> None:
        """Starts what works beside computation; a GPU's link has no threads."""
        if self._decoder.device.type == "cpu":
            self._make_link()
        self.disk.start_threads()

    def _make_link(self) -> None:
        if self._link is None:
            self._link = self._system.make_link(self._decoder.device, self._link_gbps)

    def rotate_for(self, prompt_length: int) -> None:
        """Has keys rotated for a prompt of so many tokens; what caches hold is forgotten where that differs. Nobody
        runs."""
        if self._decoder.rope.begin(prompt_length):
            self.drafting = None
            for text in self._texts[:-1]:
                self._drop(text)
            for text in self._texts[:]:
                self._empty(text)

    def find(self, prompt: list[int], most: int | None = None, *, whole: bool = False) -> tuple[KnownText | None, int]:
        """The text whose cache holds the most of a prompt that a run may take over, and how many tokens of it; of those
        that hold as much one in use, as it costs no memory to share it, else the one that holds the least besides.

        Args:
            most: tokens that may be taken over; `None`: any number.
            whole: whether nothing is to be shared with others.
        """
        most = reusable(prompt) if most is None else min(most, reusable(prompt))
        alike = self.common_lengths(prompt)
        texts = [text for text in self._texts if not (whole and (text.in_use or text.full.prefix))]
        found = [
            (self._shared(text, prompt, min(most, alike[text.full])), text.in_use, -text.full.length) for text in texts
        ]
        best = max(range(len(found)), key=found.__getitem__, default=None)
        return (texts[best], found[best][0]) if best is not None and found[best][0] else (None, 0)

    def common_lengths(self, prompt: list[int]) -> dict[FullCache, int]:
        """How many tokens a prompt and each known text begin with alike, by the text's cache. What several texts share
        is compared once."""
        found: dict[FullCache, int] = {}
        compared: dict[FullCache, tuple[int, int]] = {}  # with the first tokens in a cache: how many, and how many fit
        for text in self._texts:
            prefix, start = text.full.prefix, text.full.start
            known, alike = compared.get(prefix, (0, 0)) if prefix else (0, 0)
            known = min(known, start)
            if alike >= known:
                alike = common_length(text.tokens, prompt, known)
            found[text.full] = alike
            compared[text.full] = len(text.tokens), alike
            if prefix and known < start:
                compared[prefix] = start, min(alike, start)
        return found

    def _shared(self, text: KnownText, prompt: list[int], most: int) -> int:
        """How many tokens of a prompt can be taken over from a text, of the `most` that they begin with alike."""
        full = text.full
        tokens = min(full.length, most)
        if not text.in_use:
            tokens = full.reachable(tokens)
            return tokens if tokens > full.start else 0  # else another has as many
        # What was generated was computed with other tiles than a prompt.
        tiling, lengths = self._decoder.tiling, (len(prompt), text.prompt_tokens)
        tokens, found = min(tokens, text.prompt_tokens), -1
        while tokens != found or tokens % full.chunk_size:
            tokens -= tokens == found
            found = tiling.shareable(tokens, *lengths)
            tokens = full.reachable(found)
        return tokens

    def can_be_taken_over(self, text: KnownText | None) -> bool:
        """Whether there is a text whose cache can be taken over: its sequence has ended, and none that runs builds on
        it."""
        return (
            text is not None and not text.in_use and not any(one.in_use and one.builds_on(text) for one in self._texts)
        )

    def prepare(
        self,
        prompt: list[int],
        request: RunRequest,
        text: KnownText | None = None,
        shared: int = 0,
        on_memory: Callable[[float], None] | None = None,
    ) -> tuple[FullCache, RunPlan]:
        """A full cache with room for the request's tokens, and the plan of the run: that of `text`, which is free, with
        `shared` tokens of the prompt in it already, or one in its place.

        Every rank calls it, and all decide alike: they agree on the memory there is. `on_memory`: see `StreamedBlocks`.

        Raises:
            CapacityError: there is not so much memory.
        """
        if text is None:  # one whose memory is of use, if there is one
            text = next((one for one in self._texts if not one.in_use and not one.tokens), None)
        elif text.full.prefix:
            streams = not text.full.prefix.all_on_device
            request = replace(request, shared=text.full.start, shared_streams=streams)
        text = self._make_way(request, text, beside=False)
        old = text and text.full
        plan = self._plan(request, replaces=text)
        same = old and (shared or old.blocks.block_size == plan.placement.block_size)
        resident = 0
        if text and old and same and old.capacity >= request.context:
            going_on = self._going_on(old, plan)
            if going_on:
                self._retire(text, shared)
                with self._taking(text):
                    old.rollback(shared)
                return self._known(old, prompt), going_on
            resident = held_bytes(old.blocks.held(), "resident_kv")
        if old and old.prefix:
            with suppress(CapacityError):
                return self.beside(prompt, request, text, shared)
            old, request = None, replace(request, shared=0, shared_streams=False)  # or its memory would stay taken
            return self.prepare(prompt, request, on_memory=on_memory)  # in place of both there may be memory
        asked, request = request, self._with_room(request, plan, text)
        if request is not asked:
            plan = self._plan(request, replaces=text)
        if old:
            beside = self._plan(request, replaces=None)
            more = beside.disk_kv > plan.disk_kv  # every pass would read it, for as long as the cache is kept
            if shared and beside.fits and beside.placement.streams != old.blocks.all_on_device and not more:
                plan = beside  # the shared tokens move while both are there
            else:
                plan.check()  # or it would be dropped for nothing
                self._drop(text)
                text = old = None  # before its memory is looked for
                plan = self._plan(request, replaces=None)
                if not plan.fits and request is not asked:
                    request, plan = asked, self._plan(asked, replaces=None)
        while True:
            try:
                cache = self._make(plan, on_memory=on_memory)
                break
            except CapacityError:
                before, alone = plan, old is None
                self._drop(text)  # its memory may do, though not beside it
                text = old = None
                plan = self._plan(request, replaces=None)
                if alone and (not plan.fits or plan.resident_kv >= before.resident_kv):
                    raise  # else others have taken memory since it was planned
        if text and old:
            self._retire(text, shared)
            builders = {holder for full in self.caches for holder in full.holders if holder.prefix is old}
            with self._taking(text):
                cache.move_from(old, shared)
            for holder in builders:
                holder.prefix = cache
        self.moved += max(0, resident - held_bytes(cache.blocks.held(), "resident_kv"))
        self._known(cache, prompt)
        return cache, plan if request is asked else self._plan(asked, replaces=self._texts[-1])

    def beside(
        self,
        prompt: list[int],
        request: RunRequest,
        text: KnownText | None = None,
        shared: int = 0,
        *,
        whole: bool = False,
    ) -> tuple[FullCache, RunPlan]:
        """Another full cache than those there are, and the plan of its memory; none of it is on a disk. Of `shared`
        tokens that the cache of `text` holds it begins with those that can be, and has copies of the others. Every rank
        calls it.

        Args: `whole` is whether it has copies of all that is the text's own: what it holds is to be saved, or nobody
            else runs, and passes over a cache in one piece are faster.

        Raises:
            CapacityError: there is not so much memory.
        """
        superseded = takes_over(text, shared) and self.can_be_taken_over(text)
        prefix, start = self._prefix(text, shared, whole=superseded or whole) if text else (None, 0)
        request = replace(request, shared=start, shared_streams=prefix is not None and not prefix.all_on_device)
        self._make_way(request, text, beside=True)
        while True:
            plan = self._plan(request, replaces=None, on_disk=False)
            plan.check()
            try:
                cache = self._make(plan, prefix=prefix)
                break
            except CapacityError:  # others have taken memory since it was planned
                droppable = self._droppable(text)
                if not droppable:
                    raise
                self._drop(droppable[0])
        if text and shared:
            cache.copy_from(text.full, shared)
        if superseded:
            self._drop(text)
        return self._known(cache, prompt), plan

    def _prefix(self, text: KnownText, shared: int, *, whole: bool) -> tuple[FullCache | None, int]:
        """The cache that another one can begin with where it shares so many tokens with a text, and with how many.

        Args: `whole` is whether the text's own tokens are all to be copied.
        """
        full, rows = text.full, self._decoder.tiling.tail_rows
        start = full.start if whole else shared // rows * rows
        while start % full.chunk_size:
            start -= rows
        while full.prefix and start <= full.start:
            full = full.prefix
        return (full, start) if start > 0 else (None, 0)

    def _known(self, full: FullCache, tokens: list[int]) -> FullCache:
        """Takes note of a cache whose sequence begins with these tokens."""
        self._texts.append(KnownText(full, tokens, len(tokens)))
        return full

    def end(self, tokens: list[int], drafting: DraftingCaches | None = None) -> None:
        """Takes note that the sequence of these tokens, the very list, has ended; what it has read and written is there
        to go on from.

        Args: `drafting`: its, if that stays.
        """
        self.drafting = drafting
        for text in [text for text in self._texts if text.tokens is tokens]:
            text.in_use = False
            text.full.end_run()
            self._texts.remove(text)
            self._texts.append(text)
            self._drop_builders(text, text.full.length)  # it may be shorter than what it was taken over from
            if text.full.length <= text.full.start:
                self._empty(text)

    def take_drafting(self, full: FullCache) -> DraftingCaches | None:
        """What the drafting tiers had of the sequence that has ended last, if this is its full cache; from here on it
        belongs to whoever asks."""
        found, self.drafting = self.drafting, None
        return found if found and found.retrieval.source is full else None

    def end_all(self, *, broken: bool) -> None:
        """Takes note that all sequences have ended.

        Args: `broken` is whether a pass was broken off: the newest tokens of a streamed cache may be half done.
        """
        in_use = [text for text in self._texts if text.in_use]
        passed = [one for one in self._texts if any(one is text or text.builds_on(one) for text in in_use)]
        for text in in_use:
            self.end(text.tokens)
        for text in passed if broken else ():
            if text in self._texts and not text.full.blocks.all_on_device:
                self._empty(text)

    def _empty(self, text: KnownText) -> None:
        """Has only the memory of a text that has ended be of use: it is the first to be dropped."""
        if text.full.prefix:
            self._drop(text)
            return
        self._drop_builders(text, 0)
        text.tokens = []
        self._texts.remove(text)
        self._texts.insert(0, text)

    def _drop_builders(self, text: KnownText, length: int) -> None:
        """Drops who builds on more of a text than so many tokens."""
        for one in [one for one in self._texts if one.start_behind(text) > length]:
            self._drop(one)

    def forget(self, tokens: list[int]) -> None:
        """Sees to it that nobody goes on from what the sequence of these tokens, the very list, has read or written."""
        for text in [text for text in self._texts if text.tokens is tokens]:
            self._drop(text)

    def forget_all(self) -> None:
        """Drops all caches of sequences that have ended."""
        for text in [text for text in self._texts if not text.in_use]:
            self._drop(text)

    def _droppable(self, text: KnownText | None) -> list[KnownText]:
        """The caches that are not needed, the one used last the latest: not of `text`, nor of who builds on it."""
        needed = [one for one in self._texts if one.in_use or one is text]
        holders = {holder for one in needed for holder in one.full.holders}
        return [one for one in self._texts if one.full not in holders]

    def _oldest(self, text: KnownText | None) -> KnownText | None:
        """Of those that are not needed the one that is to go first: nobody builds on it."""
        droppable = self._droppable(text)
        built_on = {holder for one in droppable for holder in one.full.holders[:-1]}
        return next((one for one in droppable if one.full not in built_on), None)

    def _make_way(self, request: RunRequest, text: KnownText | None, *, beside: bool) -> KnownText | None:
        """Drops caches that are not needed, the one used last the latest, until the others do not change whether such a
        run fits, and where its keys and values are. Every rank calls it.

        Args: `text` is needed: it is to be taken over, or the run is to have a cache `beside` it.

        Returns:
            What is to be taken over: the text, or, if there is none, one whose memory a run can be given as it is.

        Raises:
            CapacityError: without them all there would not be so much memory; none is dropped.
        """
        spare, on_disk = self._droppable(text), not beside
        if not spare:
            return text
        best = self._plan(request, replaces=None if beside else text, without=spare, on_disk=on_disk)
        if beside or not text or not (text.full.prefix or text.full.capacity >= request.context):
            best.check()  # else its memory is there
        while oldest := self._oldest(text):
            found = self._plan(request, replaces=None if beside else text, on_disk=on_disk)
            if self._is_as_good(found, best):
                break
            fits = oldest.full.capacity >= request.context and not oldest.full.prefix
            if text is None and fits and not beside:
                text = oldest
            else:
                self._drop(oldest)
        return text

    def _is_as_good(self, plan: RunPlan, best: RunPlan) -> bool:
        """Whether what has ended can stay beside a run with this plan, where without it there would be the best one."""
        free, all_free = plan.request.host_bytes or 0, best.request.host_bytes or 0
        leaves = plan.request.settings.host_memory is not None or free - plan.host_total >= LEFT_FREE * all_free
        return plan.fits and leaves and (plan.placement, plan.budget) == (best.placement, best.budget)

    def _retire(self, text: KnownText, shared: int) -> None:
        """Has a text be another one, which goes on from its first `shared` tokens: who builds on more is dropped."""
        self._drop_builders(text, shared)
        self._texts.remove(text)

    @contextmanager
    def _taking(self, text: KnownText) -> Iterator[None]:
        """Within, what a text holds is moved or rolled back; if that fails, nobody is to build on it any more."""
        try:
            yield
        except BaseException:
            self.drafting = None  # which would hold the cache
            self._drop_builders(text, 0)
            raise

    def _make(
        self, plan: RunPlan, *, prefix: FullCache | None = None, on_memory: Callable[[float], None] | None = None
    ) -> FullCache:
        """An empty cache as planned.

        Raises:
            CapacityError: there is not so much memory.
        """
        self.drafting = None  # its memory is planned with
        plan.check()
        decoder, placement = self._decoder, plan.placement
        if placement.streams:
            self._make_link()
        blocks = windows = states = failure = None
        part, limits = decoder.part, self._system.limits
        where = {"dtype": decoder.dtype, "device": decoder.device}
        try:
            with shortage_explained(decoder.device, self._system.device_memory):
                host = {"host": self._system.host, "disk": self.disk, "on_memory": on_memory}
                blocks = self._system.make_blocks(part.full_layers, placement, self._link, **where, **host)
                windows = WindowBlocks(part, **where, chunk_size=plan.chunk_size, limits=limits)
                states = States.of(part, **where, rows=plan.state_rows)
        except CapacityError as error:
            error.__traceback__ = error.__cause__ = error.__context__ = None  # which hold what was taken
            failure = error
        reasons = decoder.ranks.gather(str(failure) if failure else None)
        short = next((rank for rank, reason in enumerate(reasons) if reason is not None), None)
        if blocks is None or windows is None or short is not None:
            blocks = windows = states = None  # or the error would hold them
            try:
                raise failure or CapacityError(f"rank {short}: {reasons[short or 0]}")
            finally:
                failure = None  # or the error and this frame would hold each other, and the frames of who catches it
        sizes = {"chunk_size": plan.chunk_size, "step_rows": limits.step_rows, "start": plan.request.shared}
        made = FullCache(part, decoder.rope, blocks, **sizes, prefix=prefix, windows=windows, states=states)
        self._made.add(made)
        return made

    def _with_room(self, request: RunRequest, plan: RunPlan, text: KnownText | None) -> RunRequest:
        """`request`, or one for more tokens, if they fit and lie where those of its `plan` do."""
        most = min(request.context + self.room, self._decoder.config.max_position_embeddings)
        if most <= request.context:
            return request
        larger = replace(request, context=most)
        found = self._plan(larger, replaces=text)
        as_planned = found.placement.streams == plan.placement.streams and found.disk_kv <= _MORE_ON_DISK * plan.disk_kv
        return larger if found.fits and as_planned else request

    def _going_on(self, cache: FullCache, plan: RunPlan) -> RunPlan | None:
        """The plan of a run in a cache that was made for another one, where `plan` is what would be made for it now;
        `None` if the cache does not leave a GPU what the run takes beside it, but for `Limits.free_varies`. Blocks
        leave for host memory that has room for them, if they have to and that is enough. Every rank calls it."""
        request, blocks = plan.request, cache.blocks
        going_on = make_plan(request, blocks.placement)
        if request.gpu_bytes is None or request.gpu_total_bytes is None:
            return going_on
        left = request.gpu_bytes - going_on.device_needed + int(request.limits.free_varies * request.gpu_total_bytes)
        left, spare = self._decoder.ranks.least([left, blocks.footprint.spare])
        if left >= 0:
            return going_on
        if spare < -left:
            return None
        moved = blocks.offload(-left)
        self.moved += moved
        (moved,) = self._decoder.ranks.least([moved])
        return make_plan(request, blocks.placement) if moved >= -left else None

    def make_room(self, caches: Iterable[FullCache], needed: Callable[[], int]) -> None:
        """Drops caches that are not needed, and has blocks of these leave, where a GPU has fewer bytes free than are
        `needed`, as far as host memory has room for them. Every rank calls it, and the one with the least memory
        counts."""
        holders = dict.fromkeys(holder.blocks for cache in caches for holder in cache.holders)
        ranks = self._decoder.ranks
        may = bool(self._droppable(None)) or any(blocks.footprint.spare for blocks in holders)
        if not may and ranks.size == 1:
            return
        found = self._system.device_memory(self._decoder.device)
        if found is None or ranks.least([int(not may)])[0]:  # where one did not pack, a rank has more left to move
            return
        (left,) = ranks.least([found.free - needed()])
        while left < 0 and (oldest := self._oldest(None)):
            self._drop(oldest)
            found = self._system.device_memory(self._decoder.device) or found
            (left,) = ranks.least([found.free - needed()])
        for blocks in holders:
            if left < 0:
                moved = blocks.offload(-left)
                self.moved, left = self.moved + moved, left + moved

    def fits(self, request: RunRequest) -> bool:
        """Whether there is memory for such a run, in place of all that has ended, with hardly more on a disk than its
        first sequence has there alone. Every rank calls it."""
        plan = self._plan(request, replaces=None, without=self._droppable(None))
        return plan.fits and (
            not plan.disk_kv or plan.disk_kv <= _MORE_ON_DISK * make_plan(replace(plan.request, sequences=1)).disk_kv
        )

    def planned_alone(self, request: RunRequest) -> RunPlan:
        """The plan of a run as this rank alone sees the memory that is free."""
        free_disk, memory = self.disk.free_bytes, self._system.device_memory
        held = self._held_by_part()
        return plan_here(request, self._decoder.device, held=held, free_disk=free_disk, device_memory=memory)

    def _plan(
        self,
        request: RunRequest,
        *,
        replaces: KnownText | None,
        without: Sequence[KnownText] = (),
        on_disk: bool = True,
    ) -> RunPlan:
        """The plan of a run whose weights are loaded, with the memory there is, that of the cache it `replaces`
        included, and of those that it is to be `without`; what exceeds host memory may be on a disk, unless it says
        otherwise."""
        decoder = self._decoder
        stays = {holder for text in self._texts if text not in without for holder in text.full.holders}
        given_back = [replaces.full] if replaces else []
        # With those that nobody else begins with, and that are not known as texts any more.
        given_back += dict.fromkeys(one for text in without for one in text.full.holders if one not in stays)
        blocks, idle = [cache.blocks for cache in given_back], [self.drafting] if self.drafting else []
        on_host = self._system.device_memory(decoder.device) is None
        untouched = sum(one.footprint.untouched for one in blocks) if on_host else 0
        limited = request.settings.host_memory is not None
        others = [one for one in self._made if one not in given_back] if limited else []
        return plan_here(
            request,
            decoder.device,
            decoder.ranks,
            held=self._held_by_part(),
            given_back=held_bytes(one for holder in (*given_back, *idle) for one in holder.held()) - untouched,
            given_back_on_host=sum(one.bytes_on_host for one in given_back),
            given_back_on_disk=sum(one.footprint.disk for one in blocks),
            held_on_host=sum(one.bytes_on_host + (one.kept_bytes if on_host else 0) for one in others),
            promised=sum(text.full.blocks.footprint.untouched for text in self._texts if text.in_use),
            free_disk=self.disk.free_bytes if on_disk else None,
            device_memory=self._system.device_memory,
        )

    @property
    def memory_bytes(self) -> int:
        """What full caches take in the memory of device and host, of sequences that run and of those that have
        ended; on a CPU without what no token has come to yet."""
        on_cpu, found = self._decoder.device.type == "cpu", 0
        for one in {holder for cache in self.caches for holder in cache.holders}:
            placement = one.blocks.placement
            found += placement.num_resident * placement.block_size * one.token_bytes + one.bytes_on_host
            found += held_bytes(one.held_beside())
            found -= one.blocks.footprint.untouched if on_cpu else 0
        return found

    def _held_by_part(self) -> dict[str, int]:
        """What is held on the device, by part. Where the CPU computes a plan asks for the models' own alone."""
        if self._system.device_memory(self._decoder.device) is None:
            return bytes_by_part(one for holder in (self._decoder, self._draft) if holder for one in holder.held())
        holders = self._decoder, self._draft, self, *self.others
        return bytes_by_part(one for holder in holders if holder for one in holder.held())

    def held(self) -> Held:
        """See `offload.held`: of all caches that are known, and what the drafting tiers had of the sequence that has
        ended last."""
        for cache in self.caches:
            for holder in cache.holders:
                yield from holder.held()
        if self.drafting:
            yield from self.drafting.held()

    def _drop(self, text: KnownText | None) -> None:
        """Gives a cache's memory back, and that of those that have ended and build on it."""
        if text not in self._texts:  # it went with another
            return
        for one in [one for one in self._texts if one is text or (not one.in_use and one.builds_on(text))]:
            with suppress(LinkError):  # of what is not wanted any more
                one.full.blocks.drain()
            self._system.synchronize(self._decoder.device)  # a pass that was broken off may have copies under way
            self._texts.remove(one)
            if self.drafting and self.drafting.retrieval.source is one.full:
                self.drafting = None
            del one.full  # whoever has the text still is not to have its memory


def takes_over(text: KnownText | None, shared: int) -> bool:
    """Whether a prompt goes on from a text that it shares so many tokens with: little else of it would be lost."""
    return text is not None and 2 * shared >= text.full.length


_COMPARED = 4096
"""Tokens that are compared together, which is faster than one by one."""


def common_length(some: list[int], others: list[int], known: int = 0) -> int:
    """How many tokens both begin with, of which the first ones are `known` to be alike."""
    shortest = min(len(some), len(others))
    for first in range(known, shortest, _COMPARED):
        stop = min(first + _COMPARED, shortest)
        if some[first:stop] == others[first:stop]:
            continue
        while stop - first > 1:  # the first one that differs is among these
            middle = (first + stop) // 2
            if some[first:middle] == others[first:middle]:
                first = middle
            else:
                stop = middle
        return first
    return shortest


def reusable(prompt: Sequence[int]) -> int:
    """How many tokens of a prompt need not be read again where they are known. The last ones are: from the last one's
    logits the first new token is drawn, and from the attention of `RECENT_ROWS` chunks are chosen, as after a reading
    of the whole prompt."""
    return max(0, len(prompt) - RECENT_ROWS)
