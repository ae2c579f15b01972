"""Restores saved keys and values at the start of a run, and saves those that the run computes.

Every rank restores its own heads. The module `saver` writes what a run saves.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...kernels.cpu.library import arithmetic
from ...tp.devices import synchronize
from ...tp.parallel.ranks import Ranks
from ...tp.units import gib
from ..caches.full import FullCache
from .manifest import FILE_NAME, ContextError, Part, Segment
from .saver import HeldHeads, SaveOrder, Saver, done
from .segments.contents import DamagedError
from .segments.file import SegmentFile
from .segments.rows import SegmentRows, byte_views
from .segments.state_rows import empty_rows, from_rows
from .store import ContextStore, SavedPrefix, damaged

T = TypeVar("T")

_STEP_S = 0.005
"""Seconds that threads are waited for in a step of restoring: a round of other sequences takes longer."""

_READERS = max(4, min(8, os.cpu_count() or 1))
"""Threads that read segments, check them, and unpack packed keys and values."""

_Prepared = tuple[str, list[Segment], list[Segment]]
"""Why nothing can be saved, or nothing; the segments that are kept; and the saved segments after these."""


class ContextUse:
    """The saved contexts of one run on one rank."""

    def __init__(
        self,
        store: ContextStore,
        ranks: Ranks,
        heads: HeldHeads,
        prefix: SavedPrefix | None,
        order: SaveOrder | None,
        synchronize: Callable[[torch.device], None] = synchronize,
    ) -> None:
        """Args: `synchronize` waits for a device."""
        self._synchronize = synchronize
        self._store, self._ranks, self._heads = store, ranks, heads
        self.prefix = prefix
        """The first tokens of the prompt that are saved."""
        self._order = order
        self._thread = ThreadPoolExecutor(1)  # prepares to save, then writes segments
        self._preparing: Future[_Prepared] | None = None
        self._saver: Saver | None = None
        self._step_ends = 0.0
        self._held = ExitStack()
        self.warnings: list[str] = []
        """What could not be restored or saved, or was computed with another arithmetic: one line for each."""
        self.restored = 0
        """Number of tokens that were restored."""

    @property
    def name(self) -> str | None:
        """The name of the context that the run started from; `None` if nothing was restored."""
        return self.prefix.name if self.prefix and self.restored else None

    def has_work(self, full: FullCache) -> bool:
        """Whether `begin` has something to restore, or prepares to save."""
        return self._order is not None or (self.prefix is not None and not full.length)

    def begin(self, full: FullCache) -> Generator[Future[Any], None, None]:
        """Restores the saved tokens into `full`, and prepares to save.

        Tokens are restored up to the first damaged segment, and only if `full` is empty or is to be saved under the
        same name. Whenever it must wait for the disk, it yields what it waits for. The caller may do other work until
        that is done, or before. Every rank must iterate to the end, or all must stop at the same step. Several ranks
        restore without any steps.

        Raises:
            ContextError: nothing can be saved, although saving is required.
        """
        prefix, order = self.prefix, self._order
        self._step_ends = time.monotonic() + _STEP_S
        # A text that is saved under the name of its beginning must continue from the saved keys and values of this
        # beginning. Otherwise the segments of one context would come from two different computations.
        if prefix and (not full.length or (order and order.directory == prefix.directory)):
            with ExitStack() as using:
                yield from self._in_thread(partial(using.enter_context, self._store.in_use(prefix.name)))
                self.restored = yield from self._restore(prefix, full)
        elif prefix:
            self._store.note_use(prefix.name)
        if order:
            self._saver = yield from self._start_saving(order)

    def stops(self, start: int, stop: int) -> list[int]:
        """The positions at which a prefill of the tokens from `start` to `stop` must be cut, so that each part can be
        saved: the ends of segments, the end of the text to be saved, and `stop`."""
        if not self._saver or not self._order:
            return [stop]
        last = len(self._order.token_ids)
        size = self._order.manifest.segment_tokens
        ends = [end for end in range(size, last, size) if end > start]
        return sorted({*ends, *([last] if start < last else []), stop})

    def save(self, full: FullCache) -> Generator[Future[Any], None, None]:
        """Starts to write each segment that `full` completes. Every rank calls it after each part of the prefill, and
        changes nothing in `full` before the end. If the segment before is not written yet, it waits as `begin` does.

        Raises:
            ContextError: the context could not be saved, although saving is required.
        """
        if self._saver and self._order:
            yield from self._saver.save(full)
            if self._saver.failure and self._order.required:
                raise ContextError(_not_saved(self._order, self._saver.failure))

    @property
    def saves(self) -> bool:
        """Whether something is being saved, and `finish` was not called yet. The same on all ranks."""
        return self._saver is not None

    def settled(self) -> bool:
        """Whether all ranks have written everything, so that `finish` need not wait for a disk. Every rank calls it."""
        if self._saver:
            return self._saver.settled()
        return self._preparing is None or self._done_by_all(self._preparing)

    @property
    def work(self) -> Future[Any]:
        """What this rank's thread works at; done if it works at nothing."""
        return self._preparing or (self._saver and self._saver.writing) or done()

    def finish(self, *, together: bool) -> None:
        """Waits until everything that was saved is on the disk. Calls after the first do nothing.

        Args: `together` is true if all ranks call it, false if only this rank does because its run was broken off.

        Raises:
            ContextError: the context could not be saved, although saving is required. Only if `together` is true.
        """
        saver, self._saver = self._saver, None
        try:
            if saver:
                saver.finish(together)
        finally:
            with self._held:
                self._thread.shutdown()  # it may still prepare what this run does not save any more
        if saver and self._order and saver.failure:
            failure = _not_saved(self._order, saver.failure)
            if together and self._order.required:
                raise ContextError(failure)
            self.warnings.append(failure)

    def _restore(self, prefix: SavedPrefix, full: FullCache) -> Generator[Future[Any], None, int]:
        assert not full.prefix, "what others hold cannot be restored"
        full.blocks.drain()
        self._synchronize(full.blocks.device)  # a pass that was broken off may still read what is written here
        full.restored(0)
        agreed, good = prefix.tokens, -1
        while True:
            before = wanted = agreed
            # If need be down to 0 tokens, so that no damaged keys or values stay in `full`.
            while good != wanted and not (good > wanted and full.reachable(wanted) == wanted):
                try:
                    yield from self._read(prefix, full, wanted)
                    good = wanted
                except _Damage as damage:
                    wanted = damage.position
                    self.warnings.append(
                        f"{damage.error}; this run computes the text again from position {wanted:,} on"
                    )
            agreed = self._ranks.least([wanted], patiently=True)[0]  # disks may be slow, and not equally slow
            if agreed < wanted:
                self.warnings.append(
                    f"the context {prefix.name!r} could not be restored by another rank (damaged there, or not the "
                    f"same TRIFORCE_HOME); this run computes the text again from position {agreed:,} on"
                )
            if agreed == before:
                break
        wanted = agreed
        restored = (one for one in prefix.segments if one.first < wanted)
        computed_with = tuple(dict.fromkeys(number for one in restored for number in one.arithmetic))
        full.restored(good, computed_with)
        full.rollback(wanted)
        if wanted:
            yield from self._in_thread(partial(self._store.note_use, prefix.name))
            self._name_arithmetic(prefix.name, computed_with, arithmetic(full.blocks.device.type))
        return wanted

    def _name_arithmetic(self, name: str, saved: Collection[int | None], here: int | None) -> None:
        """Adds a warning if restored segments are known to come from another arithmetic than this run's."""
        others = sorted(number for number in saved if number not in (None, here))
        if here is not None and others:
            numbers = " and ".join(map(str, others))
            self.warnings.append(
                f"the context {name!r} was saved{' in part' if len(others) < len(saved) else ''} with other arithmetic "
                f"(number {numbers}; this run computes with {here}): in near-ties, answers may differ from those after "
                "a prefill of the text on this machine"
            )

    def _read(self, prefix: SavedPrefix, full: FullCache, stop: int) -> Generator[Future[Any], None, None]:
        """Restores the first `stop` tokens. For a model with linear attention, `stop` is the end of a segment.

        If the run also saves, it may keep these segments as they are. Then all that they hold is checked.

        Raises:
            _Damage: a segment is damaged. The exception names the first one that is known to be.
        """
        held, key_heads = range(self._heads.first, self._heads.stop), range(*self._heads.key_heads)
        shape, found = prefix.manifest.shape, []
        # If the cache is packed, or its blocks go to a GPU or a disk, the data pass through staging. Then one layer is
        # restored at a time, and its heads are read in parallel. Otherwise layers are restored in parallel.
        blocks = full.blocks
        by_layer = blocks.device.type == "cpu" and not blocks.placement.packed and not blocks.footprint.disk
        layers_at_once = _READERS if by_layer else 1
        opened = ExitStack()  # ends after the threads, which may still read the files when this generator is closed
        with opened, ThreadPoolExecutor(_READERS) as of_heads, ThreadPoolExecutor(layers_at_once) as of_layers:
            segments = [one for one in prefix.segments if one.first < stop]
            saves = self._order is not None
            ending = [one for one in segments if saves or one.stop == stop]

            def open_all() -> tuple[list[_OpenFile], list[_OpenFile]]:
                of_keys = list(_opened(opened, prefix, segments, lambda segment: segment.parts, held))
                return of_keys, list(_opened(opened, prefix, ending, lambda segment: segment.states, key_heads))

            files, of_states = yield from self._result(of_layers.submit(open_all))

            @torch.inference_mode()  # the mode is set for each thread separately
            def read(layer: int, start: int, pieces: list[Tensor], head: int) -> None:
                halves = [SegmentRows.of(pieces, half, head - held.start, shape.row_bytes) for half in (0, 1)]
                for one in files:
                    segment = one.segment
                    if head not in one.heads or (segment.stop <= start and not saves):
                        continue
                    saved = segment.first + one.file.contents.first_token(layer)
                    rows = saved - start, min(segment.stop, stop) - start
                    try:
                        if segment.stop <= start:
                            one.file.check(layer, head)
                        else:
                            one.file.read(layer, head, *(list(half.cut(*rows)) for half in halves))
                    except DamagedError as error:
                        found.append(one.damage(prefix, error))
                        break

            @torch.inference_mode()
            def restore(layer: int) -> None:
                first = full.first_restored(layer, stop)
                saved = {one.segment.first + one.file.contents.first_token(layer) for one in files}
                start = max((one for one in saved if one <= first), default=0)

                def read_heads(pieces: list[Tensor]) -> None:
                    list((map if by_layer else of_heads.map)(partial(read, layer, start, pieces), held))

                full.restore(layer, start, stop, read_heads)

            @torch.inference_mode()
            def restore_state(layer: int) -> None:
                assert shape.states and full.states
                rows = empty_rows(shape.states, len(key_heads))
                for one in of_states:
                    try:
                        for head in one.heads:
                            if one.segment.stop == stop:
                                halves = (byte_views([rows], half, head - key_heads.start) for half in (0, 1))
                                one.file.read(layer, head, *halves)
                            else:
                                one.file.check(layer, head)
                    except DamagedError as error:
                        found.append(one.damage(prefix, error))
                full.states.restore(layer, stop, from_rows(rows, shape.states))

            tasks = [partial(restore, layer) for layer in range(shape.num_layers)]
            if shape.states and stop:
                assert any(one.segment.stop == stop for one in of_states), "states are saved at ends of segments"
                tasks += [partial(restore_state, layer) for layer in range(shape.states.num_layers)]
            try:
                for reading in [of_layers.submit(task) for task in tasks]:
                    yield from self._result(reading)
            finally:
                of_layers.shutdown(cancel_futures=True)  # if this generator was closed, nothing needs the results
        if found:
            raise min(found, key=lambda damage: damage.position)
        if full.states:
            full.states.restored(stop)

    def _result(self, work: Future[T]) -> Generator[Future[Any], None, T]:
        """Waits for a part of the restoring, and returns its result. Several ranks wait without any steps: one may have
        to repeat a read that the others need not."""
        while self._ranks.size == 1 and wait([work], max(0.0, self._step_ends - time.monotonic())).not_done:
            yield work
            self._step_ends = time.monotonic() + _STEP_S
        return work.result()

    def _in_thread(self, act: Callable[[], T]) -> Generator[Future[Any], None, T]:
        return self._result(self._thread.submit(act))

    def _done_by_all(self, work: Future[Any]) -> bool:
        return bool(self._ranks.least([work.done()])[0])

    def _start_saving(self, order: SaveOrder) -> Generator[Future[Any], None, Saver | None]:
        """Prepares the directory of the context. Segments that this run starts from are kept or shared. Other segments
        under the name are replaced.

        Returns:
            The saver; `None`, with a warning, if nothing can be saved and saving is not required.

        Raises:
            ContextError: nothing can be saved, although saving is required.
        """
        self._preparing = self._thread.submit(self._prepare, order)
        while not self._done_by_all(self._preparing):
            yield self._preparing
        prepared, self._preparing = self._preparing.result(), None
        failure, kept, later = self._ranks.share(prepared, patiently=True)
        there = _probe(order).exists()
        if not failure and not self._ranks.least([there], patiently=True)[0]:
            failure = f"{self._store.root} is not the same directory on all machines; TRIFORCE_HOME must be shared"
        if failure and order.required:
            raise ContextError(failure)
        if failure:
            self._held.close()  # otherwise no other process could save under the name until this answer ends
            self.warnings.append(f"nothing is saved: {failure}")
            return None
        return Saver(self._store, self._ranks, self._heads, order, kept, later, self._thread)

    def _prepare(self, order: SaveOrder) -> _Prepared:
        """The part of `_start_saving` that only rank 0 does."""
        if self._ranks.rank:
            return "", [], []
        try:
            self._held.enter_context(self._store.locked(order.directory.name))
            self._held.callback(_remove_probe, order)
            own = self._own_segments(order)
            self._make_room(order)
            kept = self._kept_segments(order, own)
            _probe(order).touch(0o600)
        except (ContextError, OSError) as error:
            return str(error), [], []
        return "", kept, own[len(kept) :]

    def _own_segments(self, order: SaveOrder) -> list[Segment]:
        """The segments of this text that are saved under its name. Also removes files that killed runs left.

        Raises:
            ContextError: the name belongs to another text, or another process saved more under the name after this run
                was planned.
        """
        name = order.directory.name
        manifest = order.manifest
        own, shared = self._store.saved_of(name, manifest.fingerprint, manifest.shape, order.token_ids)
        prefix = self.prefix
        known = prefix.manifest.segments if prefix and prefix.directory == order.directory else ()
        if own and own.manifest.segments != known:
            raise ContextError(f"the context {name!r} was saved by another process meanwhile; run this again")
        present = list(own.manifest.segments) if own else []
        if own or not (order.directory / FILE_NAME).exists():
            self._store.tidy(name, present)
        return [segment for segment in present if segment.stop <= shared]

    def _make_room(self, order: SaveOrder) -> None:
        """Removes the least recently used contexts if the quota requires it. Removes none if that would not be enough.
        For a client, only contexts that clients saved are removed.

        Raises:
            ContextError: there is not enough disk space, or the quota would be exceeded.
        """
        store, manifest = self._store, order.manifest
        new = manifest.bytes_to_write(len(order.token_ids), self.restored, order.packed)
        keep = [order.directory.name]
        if self.prefix and self.prefix.name not in keep:
            keep.append(self.prefix.name)
        if new > store.free_bytes():
            raise ContextError(
                f"{gib(new)} are needed in {store.root}, which has {gib(store.free_bytes())} free; make room on the "
                "disk (triforce contexts prune --keep SIZE), or set TRIFORCE_HOME to a directory on another disk"
            )
        by_client = order.origin == "client"
        if by_client:
            store.check_reserve(new)
        if store.most_bytes is not None:
            keep += store.of_operator() if by_client else []
            if store.disk_bytes(keep) + new > store.most_bytes:
                quota = f"{gib(store.most_bytes)} (TRIFORCE_CONTEXTS_MAX); raise it"
                if by_client:
                    raise ContextError(
                        f"with another {gib(new)}, the contexts that are not removed for a client (those of the "
                        f"operator, and those in use) would exceed the quota of {quota}, or remove some: triforce "
                        "contexts rm NAME"
                    )
                names = f"context{'s' if len(keep) > 1 else ''} {' and '.join(map(repr, keep))}"
                remedy = f", or remove the second: triforce contexts rm {keep[1]}" if len(keep) > 1 else ""
                raise ContextError(f"with another {gib(new)}, the {names} would exceed the quota of {quota}{remedy}")
            removed = store.prune(store.most_bytes - new, keep)
            self.warnings += [
                f"removed the context {name}, the least recently used, to keep the quota" for name in removed
            ]

    def _kept_segments(self, order: SaveOrder, own: Sequence[Segment]) -> list[Segment]:
        """The first segments of the restored tokens that need not be written. Their files are in the context's
        directory, or are linked there from another context.

        Args: `own` are the segments that are in the directory already.
        """
        prefix, disk = self.prefix, self._store.disk
        kept: list[Segment] = []
        size = order.manifest.segment_tokens
        for segment in prefix.manifest.segments if prefix and prefix.manifest.segment_tokens == size else ():
            whole = segment.tokens == size or segment.stop == len(order.token_ids)
            if segment.stop > min(self.restored, len(order.token_ids)) or not whole:
                break
            if prefix and prefix.directory == order.directory and segment not in own:
                break
            kept.append(segment)
        new = not (order.directory / FILE_NAME).exists()
        if prefix and kept and prefix.directory != order.directory:
            new = True
            try:
                for part in (part for segment in kept for part in segment.files):
                    disk.remove(order.directory / part.file)
                    disk.link(prefix.directory / part.file, order.directory / part.file)
                disk.sync_directory(order.directory)
            except OSError:  # the other context was removed, or there are no hard links here: all is written anew
                kept = []
        if new:
            replace(order.manifest, segments=tuple(kept)).write(disk, order.directory)
        return kept


class _Damage(Exception):
    """A damaged segment, and its first position."""

    def __init__(self, position: int, error: ContextError) -> None:
        super().__init__(str(error))
        self.position, self.error = position, error


@dataclass(frozen=True)
class _OpenFile:
    """An open file of a segment, and those of its heads that this rank holds."""

    segment: Segment
    file: SegmentFile
    name: str
    heads: Sequence[int]

    def damage(self, prefix: SavedPrefix, error: DamagedError) -> _Damage:
        return _Damage(self.segment.first, damaged(prefix.name, self.segment, self.name, error))


def _opened(
    opened: ExitStack,
    prefix: SavedPrefix,
    segments: Sequence[Segment],
    parts_of: Callable[[Segment], Sequence[Part]],
    held: range,
) -> Iterator[_OpenFile]:
    """Opens those files of the segments that have heads in `held`, the heads of this rank.

    Raises:
        _Damage: a file is damaged or missing.
    """
    manifest = prefix.manifest
    for segment in segments:
        before = manifest.chain_before(manifest.segments.index(segment))
        for part in parts_of(segment):
            heads = [head for head in range(*part.kv_heads) if head in held]
            if not heads:
                continue
            try:
                file = opened.enter_context(manifest.open(prefix.directory, segment, part))
                if part in segment.parts:
                    file.token_ids(before)  # checks the token ids: nothing else may read them in this run
            except DamagedError as error:
                said: ContextError = damaged(prefix.name, segment, part.file, error)
                if not (prefix.directory / FILE_NAME).exists():
                    said = ContextError(f"the context {prefix.name!r} was removed meanwhile")
                raise _Damage(segment.first, said) from error
            yield _OpenFile(segment, file, part.file, heads)


def _probe(order: SaveOrder) -> Path:
    """The file by which ranks see that they have the same directory."""
    return order.directory / f".{order.salt}.probe"


def _remove_probe(order: SaveOrder) -> None:
    with suppress(OSError):  # the next run that saves under this name removes it
        _probe(order).unlink(missing_ok=True)


def _not_saved(order: SaveOrder, failure: str) -> str:
    return f"the context {order.directory.name} could not be saved completely: {failure}"
