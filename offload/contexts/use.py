"""What a run does with saved contexts: it starts from keys and values that are saved, and saves those it computes.

Every rank restores and writes its own KV heads; of a head that several ranks hold, the first of them writes it. Writing
goes on beside the work: a thread writes a segment while the next one is computed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

import torch
from torch import Tensor

from ...tp.parallel.ranks import Ranks
from ...tp.units import gib
from ..caches.full import FullCache
from .manifest import FILE_NAME, ContextError, Manifest, Part, Segment
from .segment import DamagedError, SegmentFile, byte_views, chained, write_segment
from .store import ContextStore, SavedPrefix, damaged

_READERS = 4
"""Threads that read segments; two cores suffice to check what they read."""

_PATIENCE_S = 5.0
"""How long rank 0 waits for the other ranks' files where the run was broken off."""

_OTHER_FAILED = "another rank could not write its part"


@dataclass(frozen=True)
class SaveOrder:
    """A context that a run is to save: the first `tokens` of its prompt. All ranks get rank 0's."""

    directory: Path
    manifest: Manifest
    """As it is to be, without segments."""
    token_ids: list[int]
    salt: str
    """Part of the names of the files that this run writes, so that no file is ever written twice."""
    parts: tuple[tuple[int, int], ...]
    """The KV heads of each file of a segment."""
    required: bool = False
    """Whether the run is for nothing if it cannot be saved."""


@dataclass(frozen=True)
class HeldHeads:
    """The KV heads that a rank holds, counted in the model."""

    first: int
    stop: int
    writes: bool
    """Whether it is the first rank that holds them."""


class ContextUse:
    """The saved contexts of one run on one rank."""

    def __init__(
        self,
        store: ContextStore,
        ranks: Ranks,
        heads: HeldHeads,
        prefix: SavedPrefix | None,
        order: SaveOrder | None,
    ) -> None:
        self._store, self._ranks, self._heads = store, ranks, heads
        self.prefix = prefix
        """What of the prompt is saved."""
        self._order = order
        self._saver: _Saver | None = None
        self._held = ExitStack()
        self.warnings: list[str] = []
        """What could not be restored or saved, a line each."""
        self.restored = 0
        """Tokens that were."""

    @property
    def name(self) -> str | None:
        """The context that the run starts from."""
        return self.prefix.name if self.prefix and self.restored else None

    def begin(self, full: FullCache) -> None:
        """Restores what is saved into `full`, in place of what that holds, as far as it is undamaged; and prepares to
        save. Every rank calls it.

        Raises:
            ContextError: nothing can be saved, where that is required.
        """
        prefix, order = self.prefix, self._order
        # What is saved under a name goes on from what is saved, or its segments would be of two computations.
        if prefix and (prefix.tokens > full.length or (order and order.directory == prefix.directory)):
            self.restored = self._restore(prefix, full)
        if self._order:
            self._saver = self._start_saving(self._order)

    def stops(self, start: int, stop: int) -> list[int]:
        """Where to cut a prefill of the tokens from `start` to `stop`, so that each part can be saved: at the ends of
        segments, and behind the last token that is to be saved."""
        if not self._saver or not self._order:
            return [stop]
        last = len(self._order.token_ids)
        size = self._order.manifest.segment_tokens
        ends = [end for end in range(size, last, size) if end > start]
        return sorted({*ends, *([last] if start < last else []), stop})

    def save(self, full: FullCache) -> None:
        """Saves what was added to `full` up to here, if that ends a segment. Every rank calls it after each part."""
        if self._saver and self._order:
            self._saver.save(full)
            # Where one rank cannot write, the others need not.
            if not self._ranks.least([self._saver.failure is None])[0]:
                self._saver.give_up()
                if self._order.required:
                    name = self._order.directory.name
                    raise ContextError(f"the context {name} could not be saved whole: {self._saver.failure}")

    def finish(self, *, together: bool) -> None:
        """Waits until what was saved is on the disk; of several calls the first counts.

        Args: `together` is whether every rank calls it now, and not this one alone because its run was broken off.

        Raises:
            ContextError: it could not be saved, where that is required and the run was not broken off.
        """
        saver, self._saver = self._saver, None
        try:
            if saver:
                saver.finish(together)
        finally:
            self._held.close()
        if saver and self._order and saver.failure:
            failure = f"the context {self._order.directory.name} could not be saved whole: {saver.failure}"
            if together and self._order.required:
                raise ContextError(failure)
            self.warnings.append(failure)

    def _restore(self, prefix: SavedPrefix, full: FullCache) -> int:
        full.blocks.drain()
        full.restored(0)
        wanted, good = prefix.tokens, -1
        while good != wanted:  # down to nothing at all, which leaves no damaged numbers behind
            try:
                self._read(prefix, full, wanted)
                good = wanted
            except _Damage as damage:
                wanted = damage.position
                self.warnings.append(f"{damage.error}; it is read again from position {wanted:,} on")
        wanted = self._ranks.least([wanted])[0]
        full.restored(good)
        full.rollback(wanted)
        if wanted:
            self._store.note_use(prefix.name)
        return wanted

    def _read(self, prefix: SavedPrefix, full: FullCache, stop: int) -> None:
        """Raises:
        _Damage: a segment is damaged; the first one that is known to be.
        """
        held = range(self._heads.first, self._heads.stop)
        manifest, found = prefix.manifest, []
        with ExitStack() as opened:
            files = []
            for segment in prefix.segments:
                if segment.first >= stop:
                    break
                before = manifest.chain_before(manifest.segments.index(segment))
                for part in segment.parts:
                    heads = [head for head in range(*part.kv_heads) if head in held]
                    if heads:
                        try:
                            file = opened.enter_context(manifest.open(prefix.directory, segment, part))
                            file.token_ids(before)  # nobody else may look at them, and they must be found damaged
                        except DamagedError as error:
                            raise _Damage(segment.first, damaged(prefix.name, segment, part.file, error)) from error
                        files.append((segment, part, file, heads))

            def read(layer: int, pieces: list[Tensor]) -> None:
                for segment, part, file, heads in files:
                    for head in heads:
                        halves = [
                            _cut(byte_views(pieces, half, head - held.start), segment, stop, manifest.shape.row_bytes)
                            for half in (0, 1)
                        ]
                        try:
                            file.read(layer, head, *halves)
                        except DamagedError as error:
                            found.append(_Damage(segment.first, damaged(prefix.name, segment, part.file, error)))
                            return

            def restore(layer: int) -> None:
                with torch.inference_mode():
                    full.blocks.restore(layer, stop, lambda pieces: read(layer, pieces))

            with ThreadPoolExecutor(_READERS) as pool:
                for done in [pool.submit(restore, layer) for layer in range(manifest.shape.num_layers)]:
                    done.result()
        if found:
            raise min(found, key=lambda damage: damage.position)

    def _start_saving(self, order: SaveOrder) -> _Saver | None:
        """Prepares the directory. Segments that this run starts from are kept or shared; what else was saved under the
        name is superseded."""
        failure = ""
        kept: list[Segment] = []
        if self._ranks.rank == 0:
            try:
                self._held.enter_context(self._store.locked(order.directory.name))
                self._make_room(order)
                kept = self._kept_segments(order)
                (order.directory / f".{order.salt}.probe").touch(0o600)
            except (ContextError, OSError) as error:
                failure = str(error)
        failure = self._ranks.share(failure)
        probe = order.directory / f".{order.salt}.probe"
        if not failure and not self._ranks.least([probe.exists()])[0]:
            failure = f"{self._store.root} is not the same directory on all machines; TRIFORCE_HOME must be shared"
        if self._ranks.rank == 0:
            probe.unlink(missing_ok=True)
        if failure and order.required:
            raise ContextError(failure)
        if failure:
            self.warnings.append(f"nothing is saved: {failure}")
            return None
        kept = self._ranks.share(kept)
        return _Saver(self._store, self._ranks, self._heads, order, kept)

    def _make_room(self, order: SaveOrder) -> None:
        """Removes contexts that were used longest ago, where the quota asks for it; none, where that would not do.

        Raises:
            ContextError: there is no room for what is to be saved.
        """
        store, new = self._store, max(0, len(order.token_ids) - self.restored) * order.manifest.shape.token_bytes
        keep = [order.directory.name]
        if self.prefix and self.prefix.name not in keep:
            keep.append(self.prefix.name)
        if store.most_bytes is not None:
            if store.disk_bytes(keep) + new > store.most_bytes:
                raise ContextError(
                    f"with {gib(new)} more the contexts in use would exceed the quota of {gib(store.most_bytes)} "
                    "(TRIFORCE_CONTEXTS_MAX); raise it, or remove some: triforce contexts rm NAME"
                )
            removed = store.prune(store.most_bytes - new, keep)
            self.warnings += [f"removed the context {name}, used longest ago, to keep the quota" for name in removed]
        if new > store.free_bytes():
            raise ContextError(
                f"{gib(new)} are needed in {store.root}, which has {gib(store.free_bytes())} free; free some (triforce "
                "contexts prune --keep SIZE), or set TRIFORCE_HOME to a directory on another disk"
            )

    def _kept_segments(self, order: SaveOrder) -> list[Segment]:
        """The leading segments that hold what was restored, each there under the context's directory.

        Raises:
            ContextError: another process has saved another text under the name since this run was prepared.
        """
        prefix, disk = self.prefix, self._store.disk
        kept: list[Segment] = []
        size = order.manifest.segment_tokens
        own, _ = self._store.saved_of(order.directory.name, order.manifest.fingerprint, order.token_ids)
        present = own.manifest.segments if own else ()  # by now
        for segment in prefix.manifest.segments if prefix and prefix.manifest.segment_tokens == size else ():
            whole = segment.tokens == size or segment.stop == len(order.token_ids)
            if segment.stop > self.restored or segment.stop > len(order.token_ids) or not whole:
                break
            if prefix and prefix.directory == order.directory and segment not in present:
                break
            kept.append(segment)
        new = not (order.directory / FILE_NAME).exists()
        if prefix and kept and prefix.directory != order.directory:
            new = True
            try:
                for part in (part for segment in kept for part in segment.parts):
                    disk.remove(order.directory / part.file)
                    disk.link(prefix.directory / part.file, order.directory / part.file)
                disk.sync_directory(order.directory)
            except OSError:  # that context was removed by now, or the file system has no links: all is written anew
                kept = []
        if new:
            replace(order.manifest, segments=tuple(kept)).write(disk, order.directory)
        return kept


class _Damage(Exception):
    """A damaged segment, and its first position."""

    def __init__(self, position: int, error: ContextError) -> None:
        super().__init__(str(error))
        self.position, self.error = position, error


class _Saver:
    """Writes the segments of a context, one at a time, in a thread; on rank 0 also its manifest."""

    def __init__(
        self, store: ContextStore, ranks: Ranks, heads: HeldHeads, order: SaveOrder, kept: Sequence[Segment]
    ) -> None:
        self._store, self._ranks, self._heads, self._order = store, ranks, heads, order
        self._manifest = replace(order.manifest, segments=tuple(kept))
        self._saved = self._manifest.saved  # and what is being written
        self._thread = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None
        self._deadline = inf  # until which files of other ranks are waited for
        self.failure: str | None = None

    def save(self, full: FullCache) -> None:
        """Begins to write the segments that `full` has become long enough for, once the one before is written."""
        tokens = len(self._order.token_ids)
        while self.failure is None and (first := self._saved) < min(full.length, tokens):
            stop = min(first + self._manifest.segment_tokens, tokens)
            if stop > full.length:
                return
            self._wait()
            if self.failure is not None:
                return
            full.blocks.drain()
            layers = [full.blocks.export(layer, first, stop) for layer in range(self._manifest.shape.num_layers)]
            self._saved = stop
            self._writing = self._thread.submit(self._write, first, stop, layers)

    def give_up(self) -> None:
        """Writes no more: another rank cannot."""
        self._deadline = 0.0
        self.failure = self.failure or _OTHER_FAILED

    def finish(self, together: bool) -> None:
        """See `ContextUse.finish`."""
        if self._ranks.rank:
            self._wait()
        if not together:
            self._deadline = time.monotonic() + _PATIENCE_S
        elif not self._ranks.least([self.failure is None])[0]:
            self.give_up()
        self._wait()
        self._thread.shutdown()

    def _wait(self) -> None:
        if self._writing is None:
            return
        try:
            self._writing.result()
        except (OSError, DamagedError) as error:
            self.failure = self.failure or getattr(error, "strerror", None) or str(error)
        finally:
            self._writing = None

    def _write(self, first: int, stop: int, layers: list[list[Tensor]]) -> None:
        order, heads = self._order, self._heads
        token_ids = order.token_ids[first:stop]
        chain = chained(self._manifest.segments[-1].chain if first else order.manifest.fingerprint, token_ids)
        segment = Segment(first, stop - first, chain, tuple(self._part(first, stop, held) for held in order.parts))
        if heads.writes:
            part = self._part(first, stop, (heads.first, heads.stop))
            contents = self._manifest.contents(segment, part)
            write_segment(self._store.disk, order.directory / part.file, contents, token_ids, layers)
        layers.clear()  # they may be copies
        if self._ranks.rank == 0:
            segment = replace(segment, parts=tuple(self._await(segment, part) for part in segment.parts))
            self._manifest = replace(self._manifest, segments=(*self._manifest.segments, segment))
            self._manifest.write(self._store.disk, order.directory)
            self._store.tidy(order.directory.name, self._manifest.segments, order.salt)
        else:
            self._manifest = replace(self._manifest, segments=(*self._manifest.segments, segment))

    def _part(self, first: int, stop: int, heads: tuple[int, int]) -> Part:
        name = f"{first:09d}-{stop:09d}.h{heads[0]}-{heads[1]}.{self._order.salt}.safetensors"
        return Part(name, heads, "")

    def _await(self, segment: Segment, part: Part) -> Part:
        """The part with its checksum, once the rank that writes it has done so."""
        path = self._order.directory / part.file
        while not path.exists():
            if time.monotonic() > self._deadline:
                raise OSError(_OTHER_FAILED)
            time.sleep(0.01)
        with SegmentFile(path, self._manifest.contents(segment, part)) as file:
            return replace(part, checksum=file.checksum)


def _cut(rows: Sequence[memoryview], segment: Segment, stop: int, row_bytes: int) -> list[memoryview]:
    """The memory of a segment's tokens, before `stop`, in that of all tokens."""
    first, last, at, found = segment.first * row_bytes, min(segment.stop, stop) * row_bytes, 0, []
    for part in rows:
        if at < last and at + len(part) > first:
            found.append(part[max(first - at, 0) : last - at])
        at += len(part)
    return found
