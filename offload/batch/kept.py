"""The full caches of an engine: those of running sequences and, while memory allows, those of ended sequences.

So a follow-up question reuses the cache of its book. The next turn of a conversation reuses that of the earlier turns.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from weakref import WeakKeyDictionary, WeakSet

from ...tp.decoder import Decoder
from ...tp.errors import CapacityError
from ..caches.full import RECENT_ROWS, FullCache
from ..caches.states import States
from ..caches.windows import WindowBlocks
from ..contexts.home import contexts_root
from ..held import Held, Holder, bytes_by_part, held_bytes
from ..planning.memory import plan_here, shortage_explained
from ..planning.request import RunRequest
from ..planning.run_plan import RunPlan, make_plan, planned_budget
from ..system import THIS_MACHINE, System
from ..transfer.link import Link, LinkError, Traffic
from ..transfer.staged.block_file import DiskSpace
from .drafting_caches import DraftingCaches

_MORE_ON_DISK = 1.25
"""The maximum factor by which several sequences, or room for longer runs, may increase the bytes of a text on a disk,
compared with one sequence alone."""

_SHORT = 1024
"""Up to this number of tokens of its own, a text is short: reading it again takes little time."""

LEFT_FREE = 1 / 2
"""The share of the free host memory that stays free beside caches of ended sequences, unless the memory to take is set
by hand. Other programs and later sequences need memory too."""


@dataclass(frozen=True)
class _Taken:
    """Bytes that a cache takes, without its prefix."""

    device: int
    """On the device, without memory that no token has touched yet if the device is a CPU."""
    kept: int
    """See `FullCache.kept_bytes`."""
    host: int
    """In host memory, if the device is not the host."""
    disk: int
    """On a disk."""
    shown: int
    """What `KeptCache.memory_bytes` counts."""

    @classmethod
    def of(cls, cache: FullCache, *, on_host: bool) -> _Taken:
        """Args: `on_host` is whether the device is a CPU."""
        footprint = cache.blocks.footprint
        untouched = footprint.untouched if on_host else 0
        return cls(
            device=held_bytes(cache.held()) - untouched,
            kept=cache.kept_bytes,
            host=cache.bytes_on_host,
            disk=footprint.disk,
            shown=cache.kept_bytes - held_bytes(cache.blocks.held(), "prefill") + cache.bytes_on_host - untouched,
        )


@dataclass(eq=False)
class KnownText:
    """A text whose keys and values a full cache holds."""

    full: FullCache
    tokens: array[int]
    """Prompt and answer so far. The cache holds the first `full.length` of them. Empty if only the memory of the cache
    is of use."""
    prompt_tokens: int
    """The number of tokens in the prompt."""
    in_use: bool = True
    """Whether the text's sequence has not ended."""

    def start_behind(self, other: KnownText) -> int:
        """The position up to which this text takes its tokens from the other text's cache or from that cache's prefix;
        0 if it takes none."""
        holder = self.full
        while holder.prefix and holder.prefix is not other.full:
            holder = holder.prefix
        return holder.start if holder.prefix else 0

    def builds_on(self, other: KnownText) -> bool:
        """Whether the first tokens of this text are in the other text's cache."""
        return self.start_behind(other) > 0


Shared = tuple[KnownText | None, int]
"""The text from whose cache tokens are taken over, and their number; `None` and 0 if there is none."""


class KeptCache:
    """All full caches, with the tokens whose keys and values they hold.

    Caches of ended sequences are dropped if a new sequence would not fit beside them, or if more of it would be in host
    memory or on a disk. The least recently used cache is dropped first.
    """

    def __init__(
        self,
        decoder: Decoder,
        link_gbps: float | None = None,
        system: System = THIS_MACHINE,
        draft: Decoder | None = None,
    ) -> None:
        """Args: `draft` is the draft model on the same device, if there is one."""
        self._decoder, self._link_gbps, self._system, self._draft = decoder, link_gbps, system, draft
        self.others: WeakSet[Holder] = WeakSet()
        """Other objects that hold tensors on the device: sequences, while they are decoded."""
        self.folder: Path | None = None
        """The folder for blocks that exceed host memory; `None`: beside the user's saved contexts."""
        self.room = 0
        """Further tokens for which a new cache has room beyond its run's, if that changes nothing else. A longer run
        can then use the cache without moving anything."""
        self.moved = 0
        """Bytes of caches on this rank that have left the device so far because memory there became short."""
        self._texts: list[KnownText] = []  # the least recently used first
        self._made: WeakSet[FullCache] = WeakSet()  # all caches that exist, known as texts or not
        self._link: Link | None = None
        self.drafting: DraftingCaches | None = None
        """The drafting caches of the sequence that ended last, until another sequence of its run is opened."""
        self._taken: WeakKeyDictionary[FullCache, _Taken] = WeakKeyDictionary()  # of ended texts

    @property
    def caches(self) -> list[FullCache]:
        """The caches of all known texts, the least recently used first. A cache that they share may be known through
        them only."""
        return [text.full for text in self._texts]

    @cached_property
    def disk(self) -> DiskSpace:
        """The disk space for blocks that exceed host memory."""
        return DiskSpace(self.folder or contexts_root(), self._system.host)

    def traffic(self) -> Traffic:
        """The traffic over the link, and from and to the disk, so far."""
        return (self._link.traffic() if self._link else Traffic()) + self.disk.traffic()

    def start_threads(self) -> None:
        """Starts the threads of the link and the disk. A GPU's link has no threads."""
        if self._decoder.device.type == "cpu":
            self._make_link()
        self.disk.start_threads()

    def _make_link(self) -> None:
        if self._link is None:
            self._link = self._system.make_link(self._decoder.device, self._link_gbps)

    def rotate_for(self, prompt_length: int) -> None:
        """Sets the rotation of keys for a prompt of this length. If the rotation differs from before, the caches' texts
        are forgotten. Only while no sequence runs."""
        if self._decoder.rope.begin(prompt_length):
            self.drafting = None
            for text in self._texts[:-1]:
                self._drop(text)
            for text in self._texts[:]:
                self._empty(text)

    def find(
        self,
        prompt: array[int],
        most: int | None = None,
        *,
        whole: bool = False,
        alike: Mapping[FullCache, int] | None = None,
    ) -> Shared:
        """The text from whose cache a run may take over the most tokens of a prompt, and the number of these tokens.
        Among equals, it is a text in use, as sharing it costs no memory; else the text with the shortest cache.

        Args:
            most: the maximum number of tokens to take over; `None`: any number.
            whole: whether nothing is to be shared with other sequences.
            alike: the result of `common_lengths` for the prompt; `None`: it is found out here.
        """
        most = reusable(prompt) if most is None else min(most, reusable(prompt))
        alike = self.common_lengths(prompt) if alike is None else alike
        texts = [text for text in self._texts if not (whole and (text.in_use or text.full.prefix))]
        limits = [min(most, alike[text.full]) for text in texts]
        best, found = None, (0, False, 0, 0)
        for place in sorted(range(len(texts)), key=limits.__getitem__, reverse=True):
            if limits[place] < found[0]:
                break  # none of the others shares as many
            text = texts[place]
            this = self._shared(text, prompt, limits[place]), text.in_use, -text.full.length, -place
            if this > found:
                best, found = text, this
        return (best, found[0]) if found[0] else (None, 0)

    def common_lengths(self, prompt: array[int]) -> dict[FullCache, int]:
        """For each known text, by its cache: the number of leading tokens that it has in common with a prompt. Tokens
        that several texts share are compared once."""
        found: dict[FullCache, int] = {}
        compared: dict[FullCache, tuple[int, int]] = {}  # by cache: how many tokens were compared, how many are equal
        likely = 0  # where the previous text differed; most differ there
        for text in self._texts:
            prefix, start = text.full.prefix, text.full.start
            known, alike = compared.get(prefix, (0, 0)) if prefix else (0, 0)
            known = min(known, start)
            if alike >= known:
                alike = likely = common_length(text.tokens, prompt, known, likely)
            found[text.full] = alike
            compared[text.full] = len(text.tokens), alike
            if prefix and known < start:
                compared[prefix] = start, min(alike, start)
        return found

    def _shared(self, text: KnownText, prompt: array[int], most: int) -> int:
        """How many tokens of a prompt can be taken over from a text, of the `most` leading tokens in common."""
        full = text.full
        tokens = min(full.start if full.is_set_aside else full.length, most)
        if not text.in_use:
            tokens = full.reachable(tokens)
            return tokens if tokens > full.start else 0  # else another text has as many
        # Only of the prompt: generated tokens were computed with other tiles.
        tiling, lengths = self._decoder.tiling, (len(prompt), text.prompt_tokens)
        tokens, found = min(tokens, text.prompt_tokens), -1
        while tokens != found or tokens % full.chunk_size:
            tokens -= tokens % full.chunk_size if tokens == found else 0
            found = tiling.shareable(tokens, *lengths)
            tokens = full.reachable(found)
        return tokens

    def can_be_taken_over(self, text: KnownText | None) -> bool:
        """Whether the cache of a text can be taken over: its sequence has ended, and no running sequence builds on it.
        `False` for `None`."""
        return (
            text is not None and not text.in_use and not any(one.in_use and one.builds_on(text) for one in self._texts)
        )

    def prepare(
        self,
        prompt: array[int],
        request: RunRequest,
        text: KnownText | None = None,
        shared: int = 0,
        on_memory: Callable[[float], None] | None = None,
    ) -> tuple[FullCache, RunPlan]:
        """Returns a full cache with room for the request's tokens, and the plan of the run. With `text`, whose sequence
        has ended, it is the text's cache with the first `shared` tokens of the prompt, or a replacement for it. The
        replacement holds these tokens only if there was memory for both caches; otherwise it is empty
        (`FullCache.length`).

        Every rank calls it. All ranks decide alike, as they agree on the available memory. `on_memory`: see
        `StreamedBlocks`.

        Raises:
            CapacityError: there is too little memory.
        """
        if text is None:  # a cache whose memory can be reused, if there is one
            text = next((one for one in self._texts if not one.in_use and not one.tokens), None)
        elif text.full.prefix:
            streams = not text.full.prefix.all_on_device
            request = replace(request, shared=text.full.start, shared_streams=streams)
        text, plan = self._make_way(request, text, beside=False)
        old = text and text.full
        plan = plan or self._plan(request, replaces=text)
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
            old, request = None, replace(request, shared=0, shared_streams=False)  # else its memory would stay taken
            return self.prepare(prompt, request, on_memory=on_memory)  # there may be memory in place of both
        asked, request = request, self._with_room(request, plan, text)
        if request is not asked:
            plan = self._plan(request, replaces=text)
        if old:
            beside = self._plan(request, replaces=None)
            more = beside.disk_kv > plan.disk_kv  # every pass would read these blocks while the cache is kept
            if shared and beside.fits and beside.placement.streams != old.blocks.all_on_device and not more:
                plan = beside  # the shared tokens move while both are there
            else:
                plan.check()  # else the cache would be dropped for nothing
                self._drop(text)
                text = old = None  # frees its memory before memory is looked for
                plan = self._plan(request, replaces=None)
                if not plan.fits and request is not asked:
                    request, plan = asked, self._plan(asked, replaces=None)
        while True:
            try:
                cache = self._make(plan, on_memory=on_memory)
                break
            except CapacityError:
                before, alone = plan, old is None
                self._drop(text)  # there may be memory in its place, though not beside it
                text = old = None
                plan = self._plan(request, replaces=None)
                if alone and (not plan.fits or plan.resident_kv >= before.resident_kv):
                    raise  # otherwise, others have taken memory since the plan was made
        if text and old:
            self._retire(text, shared)
            builders = {holder for full in self.caches for holder in full.holders if holder.prefix is old}
            with self._taking(text):
                cache.move_from(old, shared)
            for holder in builders:
                holder.prefix = cache
            del text.full  # as in `_drop`
        self.moved += max(0, resident - held_bytes(cache.blocks.held(), "resident_kv"))
        self._known(cache, prompt)
        return cache, plan if request is asked else self._plan(asked, replaces=self._texts[-1])

    def beside(
        self,
        prompt: array[int],
        request: RunRequest,
        text: KnownText | None = None,
        shared: int = 0,
        *,
        whole: bool = False,
    ) -> tuple[FullCache, RunPlan]:
        """Returns a further full cache, beside the existing ones, and the plan of its memory. None of it is on a disk.
        Of the `shared` tokens in the cache of `text`, it shares those that can be shared, and copies the others. Every
        rank calls it.

        Args: `whole` is whether to copy all tokens that are the text's own. Set it if the tokens are to be saved, or if
            no other sequence runs: passes over a cache in one piece are faster.

        Raises:
            CapacityError: there is too little memory.
        """
        superseded = takes_over(text, shared) and self.can_be_taken_over(text)
        prefix, start = self._prefix(text, shared, whole=superseded or whole) if text else (None, 0)
        request = replace(request, shared=start, shared_streams=prefix is not None and not prefix.all_on_device)
        _, plan = self._make_way(request, text, beside=True)
        while True:
            plan = plan or self._plan(request, replaces=None, on_disk=False)
            plan.check()
            try:
                cache = self._make(plan, prefix=prefix)
                break
            except CapacityError:  # others have taken memory since the plan was made
                droppable = self._droppable(text)
                if not droppable:
                    raise
                self._drop(droppable[0])
                plan = None
        if text and shared:
            cache.copy_from(text.full, shared)
        if superseded:
            self._drop(text)
        return self._known(cache, prompt), plan

    def _prefix(self, text: KnownText, shared: int, *, whole: bool) -> tuple[FullCache | None, int]:
        """The cache that a new cache can share if it has `shared` tokens in common with a text, and how many of its
        tokens. `None` and 0 if there are none to share.

        Args: `whole` is whether to copy all of the text's own tokens.
        """
        full, rows = text.full, self._decoder.tiling.tail_rows
        start = full.start if whole else shared // rows * rows
        while start % full.chunk_size:
            start -= rows
        while full.prefix and start <= full.start:
            full = full.prefix
        return (full, start) if start > 0 else (None, 0)

    def _known(self, full: FullCache, tokens: array[int]) -> FullCache:
        """Records a cache, with the tokens that its sequence begins with, and returns it."""
        self._taken.pop(full, None)  # it changes from here on
        self._texts.append(KnownText(full, tokens, len(tokens)))
        return full

    def end(self, tokens: array[int], drafting: DraftingCaches | None = None) -> None:
        """Records that a sequence has ended. Later sequences can reuse its keys and values. `tokens` must be the
        sequence's own array, not an equal one.

        Args: `drafting`: the sequence's drafting caches, if they stay.
        """
        self.drafting = drafting
        for text in [text for text in self._texts if text.tokens is tokens]:
            text.in_use = False
            text.full.end_run()
            self._texts.remove(text)
            self._texts.append(text)
            self._drop_builders(text, text.full.length)  # it may be shorter than the text it was taken over from
            if text.full.length <= text.full.start:
                self._empty(text)
        while len(self._droppable(None)) > self._system.limits.kept_texts:
            self._drop(self._oldest(None, short=True) or self._oldest(None))

    def take_drafting(self, full: FullCache) -> DraftingCaches | None:
        """Returns the drafting caches of the sequence that ended last, if `full` is its full cache. They are not kept
        here any longer."""
        found, self.drafting = self.drafting, None
        return found if found and found.retrieval.source is full else None

    def end_all(self, *, broken: bool) -> None:
        """Records that all sequences have ended.

        Args: `broken` is whether a pass was interrupted. The newest tokens of a streamed cache may then be incomplete.
        """
        in_use = [text for text in self._texts if text.in_use]
        passed = [one for one in self._texts if any(one is text or text.builds_on(one) for text in in_use)]
        for text in in_use:
            self.end(text.tokens)
        for text in passed if broken else ():
            if text in self._texts and not text.full.blocks.all_on_device:
                self._empty(text)

    def _empty(self, text: KnownText) -> None:
        """Forgets the tokens of an ended text. Its memory can be reused. Its cache is the first to be dropped."""
        if text.full.prefix:
            self._drop(text)
            return
        self._drop_builders(text, 0)
        text.tokens = array("i")
        self._texts.remove(text)
        self._texts.insert(0, text)

    def _drop_builders(self, text: KnownText, length: int) -> None:
        """Drops the texts that build on more than the first `length` tokens of a text."""
        for one in [one for one in self._texts if one.start_behind(text) > length]:
            self._drop(one)

    def forget(self, tokens: array[int]) -> None:
        """Drops the cache of a sequence, so that it is not reused. `tokens` must be the sequence's own array."""
        for text in [text for text in self._texts if text.tokens is tokens]:
            self._drop(text)

    def forget_all(self) -> None:
        """Drops the caches of all ended sequences."""
        for text in [text for text in self._texts if not text.in_use]:
            self._drop(text)

    def _droppable(self, text: KnownText | None) -> list[KnownText]:
        """The texts whose caches are not needed, the least recently used first. Needed are the caches of running
        sequences and of `text`, and all caches that these build on."""
        needed = [one for one in self._texts if one.in_use or one is text]
        holders = {holder for one in needed for holder in one.full.holders}
        return [one for one in self._texts if one.full not in holders]

    def _oldest(self, text: KnownText | None, *, short: bool = False) -> KnownText | None:
        """The text to drop first, of those that are not needed: no other of them builds on it.

        Args: `short` is whether only texts with few tokens of their own may be dropped, which are soon read again.
        """
        droppable = self._droppable(text)
        built_on = {holder for one in droppable for holder in one.full.holders[:-1]}
        most = _SHORT if short else sys.maxsize
        leaves = (one for one in droppable if one.full not in built_on)
        return next((one for one in leaves if one.full.length - one.full.start <= most), None)

    def _make_way(
        self, request: RunRequest, text: KnownText | None, *, beside: bool
    ) -> tuple[KnownText | None, RunPlan | None]:
        """Drops caches that are not needed, the least recently used first. It stops when the remaining ones change
        neither whether the run fits nor where its keys and values are placed. Every rank calls it.

        Args: `text` is needed: it is to be taken over, or the run is to have a cache `beside` it.

        Returns:
            The text to take over: `text`, or, if it is `None`, a text whose memory the run can use as it is, if any.
            And the run's plan, if it was made.

        Raises:
            CapacityError: even without all of these caches, there would be too little memory. None is dropped.
        """
        spare, on_disk = self._droppable(text), not beside
        if not spare:
            return text, None

        def planned(without: Sequence[KnownText] = ()) -> RunPlan:
            return self._plan(request, replaces=None if beside else text, without=without, on_disk=on_disk)

        found = None
        if self._decoder.ranks.size == 1:  # most often, one plan shows that all can stay
            found = planned()
            if self._cannot_be_better(found, spare):
                return text, found
        best = planned(without=spare)
        if beside or not text or not (text.full.prefix or text.full.capacity >= request.context):
            best.check()  # else the text's cache is large enough
        while oldest := self._oldest(text):
            found = found or planned()
            if self._is_as_good(found, best):
                return text, found
            found = None
            fits = oldest.full.capacity >= request.context and not oldest.full.prefix
            if text is None and fits and not beside:
                text = oldest
            else:
                self._drop(oldest)
        return text, None

    def _is_as_good(self, plan: RunPlan, best: RunPlan) -> bool:
        """Whether the caches of ended sequences can stay: `plan`, made with them, is as good as `best`, made without
        them, and leaves enough host memory free (`LEFT_FREE`)."""
        alike = (plan.placement, plan.budget) == (best.placement, best.budget)
        return plan.fits and alike and _leaves_enough(plan, best.request.host_bytes or 0)

    def _cannot_be_better(self, plan: RunPlan, spare: Sequence[KnownText]) -> bool:
        """Whether the caches of the ended sequences `spare` can stay, as `_is_as_good` says, because `plan`, made with
        them, has everything on the device, the largest retrieval cache, and enough host memory beside it."""
        wanted = planned_budget(plan.request.settings, plan.request.context)
        if not plan.fits or plan.placement.streams or plan.budget < wanted:
            return False
        taken, on_host = self._taken_by(self._given_back(None, spare)), self._on_cpu
        given_back = sum(one.host + (one.device if on_host else 0) for one in taken.values())
        return _leaves_enough(plan, (plan.request.host_bytes or 0) + given_back)

    def _retire(self, text: KnownText, shared: int) -> None:
        """Removes a text that another text replaces, which shares its first `shared` tokens. Texts that build on more
        are dropped."""
        self._drop_builders(text, shared)
        self._texts.remove(text)

    @contextmanager
    def _taking(self, text: KnownText) -> Iterator[None]:
        """A context in which the cache of a text is moved or rolled back. If that fails, all texts that build on it are
        dropped."""
        try:
            yield
        except BaseException:
            self.drafting = None  # it would hold the cache
            self._drop_builders(text, 0)
            raise

    def _make(
        self, plan: RunPlan, *, prefix: FullCache | None = None, on_memory: Callable[[float], None] | None = None
    ) -> FullCache:
        """Makes an empty cache as planned.

        Raises:
            CapacityError: there is too little memory.
        """
        self.drafting = None  # the plan counts its memory as free
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
            error.__traceback__ = error.__cause__ = error.__context__ = None  # they hold the allocated memory
            failure = error
        reasons = decoder.ranks.gather(str(failure) if failure else None)
        short = next((rank for rank, reason in enumerate(reasons) if reason is not None), None)
        if blocks is None or windows is None or short is not None:
            blocks = windows = states = None  # else the error would hold them
            try:
                raise failure or CapacityError(f"rank {short}: {reasons[short or 0]}")
            finally:
                failure = None  # else the error and this frame would hold each other, and the frames that catch it
        sizes = {"chunk_size": plan.chunk_size, "step_rows": limits.step_rows, "start": plan.request.shared}
        made = FullCache(part, decoder.rope, blocks, **sizes, prefix=prefix, windows=windows, states=states)
        self._made.add(made)
        return made

    def _with_room(self, request: RunRequest, plan: RunPlan, text: KnownText | None) -> RunRequest:
        """`request`, or a request for `room` more tokens, if they fit and are placed like those of `plan`."""
        most = min(request.context + self.room, self._decoder.config.max_position_embeddings)
        if most <= request.context:
            return request
        larger = replace(request, context=most)
        found = self._plan(larger, replaces=text)
        as_planned = found.placement.streams == plan.placement.streams and found.disk_kv <= _MORE_ON_DISK * plan.disk_kv
        return larger if found.fits and as_planned else request

    def _going_on(self, cache: FullCache, plan: RunPlan) -> RunPlan | None:
        """The plan of a run that reuses a cache of an earlier run; `plan` is that of a new cache. `None` if the cache
        leaves too little GPU memory for the run, by more than `Limits.free_varies`. If moving blocks to spare host
        memory is needed and enough, they are moved. Every rank calls it."""
        request, blocks = plan.request, cache.blocks
        going_on = plan if blocks.placement == plan.placement else make_plan(request, blocks.placement)
        if request.gpu_bytes is None or request.gpu_total_bytes is None:
            return going_on
        left = request.gpu_bytes - going_on.device_needed + int(request.limits.free_varies * request.gpu_total_bytes)
        left, spare = self._decoder.ranks.least([left, blocks.footprint.spare])
        if left >= 0:
            return going_on
        if spare < -left:
            return None
        moved = blocks.offload(-left)
        self._taken.clear()
        self.moved += moved
        (moved,) = self._decoder.ranks.least([moved])
        return make_plan(request, blocks.placement) if moved >= -left else None

    def make_room(self, caches: Iterable[FullCache], needed: Callable[[], int]) -> None:
        """Makes room on a GPU that has fewer free bytes than are `needed`. Drops caches that are not needed, then moves
        blocks of `caches` to host memory, as far as it has room. Every rank calls it. The rank with the least memory
        decides."""
        if self._decoder.device.type == "cpu" and self._on_cpu:
            return
        holders = dict.fromkeys(holder.blocks for cache in caches for holder in cache.holders)
        ranks = self._decoder.ranks
        may = bool(self._droppable(None)) or any(blocks.footprint.spare for blocks in holders)
        if not may and ranks.size == 1:
            return
        found = self._system.device_memory(self._decoder.device)
        if found is None or ranks.least([int(not may)])[0]:  # ranks may differ: one whose blocks did not pack has more
            return
        (left,) = ranks.least([found.free - needed()])
        while left < 0 and (oldest := self._oldest(None)):
            self._drop(oldest)
            found = self._system.device_memory(self._decoder.device) or found
            (left,) = ranks.least([found.free - needed()])
        for blocks in holders:
            if left < 0:
                moved = blocks.offload(-left)
                self._taken.clear()  # an ended text's tokens may be shared
                self.moved, left = self.moved + moved, left + moved

    def fits(self, request: RunRequest) -> bool:
        """Whether there is memory for a run if all ended sequences give theirs back. On a disk, it may have hardly more
        than its first sequence alone would have there. Every rank calls it."""
        plan = self._plan(request, replaces=None, without=self._droppable(None))
        return plan.fits and (
            not plan.disk_kv or plan.disk_kv <= _MORE_ON_DISK * make_plan(replace(plan.request, sequences=1)).disk_kv
        )

    def planned_alone(self, request: RunRequest) -> RunPlan:
        """The plan of a run with the memory that is free on this rank."""
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
        """The plan of a run whose weights are loaded. Available memory includes that of the cache it `replaces`, and of
        the texts in `without`. Blocks that exceed host memory may be on a disk, unless `on_disk` is `False`."""
        decoder = self._decoder
        given_back = self._given_back(replaces, without)
        idle = [self.drafting] if self.drafting else []
        on_host = self._on_cpu
        limited = request.settings.host_memory is not None
        others = set(self._made).difference(given_back) if limited else ()
        taken = self._taken_by([*given_back, *others])
        return plan_here(
            request,
            decoder.device,
            decoder.ranks,
            held=self._held_by_part(),
            given_back=sum(taken[one].device for one in given_back) + held_bytes(x for one in idle for x in one.held()),
            given_back_on_host=sum(taken[one].host for one in given_back),
            given_back_on_disk=sum(taken[one].disk for one in given_back),
            held_on_host=sum(taken[one].host + (taken[one].kept if on_host else 0) for one in others),
            promised=sum(text.full.blocks.footprint.untouched for text in self._texts if text.in_use),
            free_disk=self.disk.free_bytes if on_disk else None,
            device_memory=self._system.device_memory,
        )

    def _given_back(self, replaces: KnownText | None, without: Sequence[KnownText]) -> list[FullCache]:
        """The caches whose memory is given back; see `_plan`."""
        stays = {holder for text in self._texts if text not in without for holder in text.full.holders}
        # Includes shared caches that are not known as texts any more, if no other text begins with them.
        dropped = dict.fromkeys(one for text in without for one in text.full.holders if one not in stays)
        return [*([replaces.full] if replaces else []), *dropped]

    @property
    def memory_bytes(self) -> int:
        """Bytes that full caches of running and ended sequences take in the memory of device and host, with the buffers
        through which blocks stream. On a CPU, memory that no token has touched yet is not counted."""
        holders = dict.fromkeys(holder for cache in self.caches for holder in cache.holders)
        return sum(one.shown for one in self._taken_by(holders).values())

    @property
    def _on_cpu(self) -> bool:
        """Whether the device is a CPU, so that its memory is the host's."""
        return self._system.device_memory(self._decoder.device) is None

    def _taken_by(self, caches: Iterable[FullCache]) -> dict[FullCache, _Taken]:
        """The bytes that caches take. Those of ended texts are computed once: hundreds may be kept, and several plans
        are made for each sequence."""
        on_host, found = self._on_cpu, dict[FullCache, _Taken]()
        lasts = {text.full for text in self._texts if not text.in_use}
        for one in caches:
            taken = self._taken.get(one)
            if taken is None:
                taken = _Taken.of(one, on_host=on_host)
                if one in lasts:
                    self._taken[one] = taken
            found[one] = taken
        return found

    def _held_by_part(self) -> dict[str, int]:
        """Bytes held on the device, by part. If the CPU computes, only those of RoPE's tables: a plan needs no more."""
        if self._on_cpu:
            return bytes_by_part(one for model in (self._decoder, self._draft) if model for one in model.rope.held())
        holders = self._decoder, self._draft, self, *self.others
        return bytes_by_part(one for holder in holders if holder for one in holder.held())

    def held(self) -> Held:
        """See `offload.held`: the tensors of all known caches, and of the drafting caches of the sequence that ended
        last."""
        for cache in self.caches:
            for holder in cache.holders:
                yield from holder.held()
        if self.drafting:
            yield from self.drafting.held()

    def _drop(self, text: KnownText | None) -> None:
        """Frees the cache of a text, and the caches of ended texts that build on it."""
        if text not in self._texts:  # it was dropped with another text
            return
        for one in [one for one in self._texts if one is text or (not one.in_use and one.builds_on(text))]:
            with suppress(LinkError):  # the copied data is not needed any more
                one.full.blocks.drain()
            self._system.synchronize(self._decoder.device)  # an interrupted pass may have copies in progress
            self._texts.remove(one)
            if self.drafting and self.drafting.retrieval.source is one.full:
                self.drafting = None
            del one.full  # others may still hold the text, but not its memory


def _leaves_enough(plan: RunPlan, all_free: int) -> bool:
    """Whether a run leaves enough host memory free (`LEFT_FREE`) of the bytes that would be free without kept caches.
    With `--host-memory`, it need not."""
    free = plan.request.host_bytes or 0
    return plan.request.settings.host_memory is not None or free - plan.host_total >= LEFT_FREE * all_free


def takes_over(text: KnownText | None, shared: int) -> bool:
    """Whether a prompt takes over the cache of a text: it shares at least half of the tokens in the cache, so at
    most half of them would be lost."""
    return text is not None and 2 * shared >= text.full.length


def common_length(some: array[int], others: array[int], known: int = 0, likely: int = 0) -> int:
    """The number of leading tokens that both have in common.

    Args:
        known: so many leading tokens are known to be equal.
        likely: so many probably are. They are compared first.
    """
    shortest, size = min(len(some), len(others)), 1
    start, stop = known, min(max(known, likely), shortest)
    while some[start:stop] == others[start:stop]:
        if stop == shortest:
            return shortest
        start, stop, size = stop, min(stop + size, shortest), 8 * size
    while stop - start > 1:  # they differ in there
        middle = (start + stop) // 2
        if some[start:middle] == others[start:middle]:
            start = middle
        else:
            stop = middle
    return start


def reusable(prompt: Sequence[int]) -> int:
    """The maximum number of tokens of a prompt that a run can reuse. The last `RECENT_ROWS` tokens are always read: the
    first new token is drawn from the logits of the last one, and chunks are chosen by the attention of all of them, as
    after a prefill of the whole prompt."""
    return max(0, len(prompt) - RECENT_ROWS)
