"""Writes the keys, values and states that a run computes to segments of a saved context, while the run goes on.

Every rank writes its own KV heads. If several ranks hold a head, the first of them writes it. Every rank also writes
the states of its own key heads, as they are after the last token of the segment. A thread writes a segment while the
next segment is computed. When the files of all ranks are complete, rank 0 adds the segment to the manifest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from torch import Tensor

from ...tp.parallel.ranks import Ranks
from ..caches.full import FullCache
from ..transfer.link import LinkError
from .manifest import ContextError, Manifest, Origin, Part, Segment
from .segments.contents import DamagedError, chained
from .segments.file import SegmentFile
from .segments.state_rows import as_rows
from .segments.writing import write_segment
from .store import ContextStore

_PATIENCE_S = 5.0
"""How long rank 0 waits for the files of other ranks if the run was broken off."""

_POLL_S = 0.5
"""How often ranks that wait for one another's disks tell one another whether they are done."""

_OTHER_FAILED = "another rank could not write its part"


@dataclass(frozen=True)
class SaveOrder:
    """A context that a run saves. It holds the first tokens of the prompt. All ranks get the order of rank 0."""

    directory: Path
    manifest: Manifest
    """The manifest of the complete context, still without segments."""
    token_ids: Sequence[int]
    salt: str
    """A random part of the names of the files that this run writes, so that no existing file is overwritten."""
    parts: tuple[tuple[int, int], ...]
    """The KV heads of each file of a segment."""
    states: tuple[tuple[int, int], ...] = ()
    """The key heads of each file with states."""
    required: bool = False
    """Whether the run fails if the context cannot be saved."""
    packed: bool = False
    """Whether keys and values are packed."""
    origin: Origin = "operator"
    """Who wants the context saved, see `ContextRequest`."""


@dataclass(frozen=True)
class HeldHeads:
    """The heads that a rank holds, as numbers in the whole model."""

    first: int
    """The first KV head."""
    stop: int
    """The last KV head plus 1."""
    writes: bool
    """Whether this rank writes these KV heads: it is the first rank that holds them."""
    key_heads: tuple[int, int] = (0, 0)
    """The key heads of linear attention, which no other rank holds: the first one, and the last plus 1."""


class Saver:
    """Writes the segments of a context in a thread, one at a time. On rank 0 it also writes the manifest."""

    def __init__(
        self,
        store: ContextStore,
        ranks: Ranks,
        heads: HeldHeads,
        order: SaveOrder,
        kept: Sequence[Segment],
        later: Sequence[Segment],
        thread: ThreadPoolExecutor,
    ) -> None:
        """Args:
        kept: the first segments that are saved already, and are not written again.
        later: the saved segments after these. Each stays in the manifest until it is written again, so that none is
            lost if the run ends early.
        thread: writes the segments.
        """
        self._later = list(later)
        self._store, self._ranks, self._heads, self._order = store, ranks, heads, order
        self._manifest = replace(order.manifest, segments=tuple(kept))
        self._saved = self._manifest.saved  # includes the segment that is being written
        self._thread = thread
        self.writing: Future[None] | None = None
        """The write that this rank's thread works at, or whose result was not looked at yet."""
        self._deadline = inf  # rank 0 waits for files of other ranks until this time
        self.failure: str | None = None
        """Why a segment could not be saved. After a failure, nothing more is saved."""

    def save(self, full: FullCache) -> Generator[Future[Any], None, None]:
        """Starts to write each segment that `full` completes, as soon as the segment before it is written. While it
        waits for that, it yields what it waits for. All ranks iterate to the end."""
        tokens = len(self._order.token_ids)
        while self.failure is None and (first := self._saved) < min(full.length, tokens):
            stop = min(first + self._manifest.segment_tokens, tokens)
            if stop > full.length:
                return
            while not self.settled():
                yield self.writing or done()
            if self.failure is not None:
                return
            if not full.holds_segment(first, stop):
                self.failure = "layers with sliding windows or states no longer hold the data that must be saved"
                return
            full.blocks.drain()
            shape = self._manifest.shape
            layers = [full.export(layer, first, stop) for layer in range(shape.num_layers)]
            states = []
            if full.states and shape.states:
                states = [full.states.export(layer, stop) for layer in range(shape.states.num_layers)]
            self._saved = stop
            computed_with = full.computed_with(first, stop)
            self.writing = self._thread.submit(self._write, first, stop, layers, states, computed_with)

    def settled(self) -> bool:
        """Whether no rank is still writing. If a rank has failed, nothing more is saved on any rank. All ranks call it.

        The thread of rank 0 waits for the files of the others. So rank 0 must learn of their failures before its own
        thread is done.
        """
        if self.writing and self.writing.done():
            self._collect(self.writing)
        settled, none_failed = self._ranks.least([self.writing is None, self.failure is None])
        if not none_failed:
            self._deadline, self.failure = 0.0, self.failure or _OTHER_FAILED
        return bool(settled)

    def finish(self, together: bool) -> None:
        """See `ContextUse.finish`."""
        if together:
            try:
                while not self.settled():
                    wait([self.writing or done()], _POLL_S)
            except BaseException:
                self._deadline = 0.0  # else this rank's thread would wait for the files of one that has ended
                raise
            return
        self._deadline = time.monotonic() + _PATIENCE_S
        if self.writing:
            self._collect(self.writing)

    def _collect(self, writing: Future[None]) -> None:
        """Waits for the thread, and notes why it failed, if it did."""
        self.writing = None
        try:
            writing.result()
        # PyTorch raises RuntimeError if there is not enough memory.
        except (ContextError, OSError, DamagedError, LinkError, MemoryError, RuntimeError) as error:
            self.failure = self.failure or getattr(error, "strerror", None) or str(error)

    def _write(
        self,
        first: int,
        stop: int,
        layers: list[Callable[[], list[Tensor]]],
        states: list[Callable[[], Tensor]],
        computed_with: tuple[int | None, ...],
    ) -> None:
        order, heads = self._order, self._heads
        token_ids = order.token_ids[first:stop]
        chain = chained(self._manifest.segments[-1].chain if first else order.manifest.fingerprint, token_ids)
        name = f"{first:09d}-{stop:09d}"
        parts = tuple(self._part(f"{name}.h", held) for held in order.parts)
        of_states = tuple(self._part(f"{name}.s", held) for held in order.states)
        segment = Segment(first, stop - first, chain, parts, order.packed, computed_with, of_states)
        if heads.writes:
            part = self._part(f"{name}.h", (heads.first, heads.stop))
            contents = self._manifest.contents(segment, part)
            if order.origin == "client":
                self._store.check_reserve(contents.shape.saved_bytes(segment.tokens, segment.tokens, order.packed))
            layer_by_layer = (pieces() for pieces in layers)
            write_segment(self._store.disk, order.directory / part.file, contents, token_ids, layer_by_layer)
        layers.clear()  # frees copies of keys and values
        if states:
            part = self._part(f"{name}.s", heads.key_heads)
            layer_by_layer = ([as_rows(numbers())] for numbers in states)
            contents = self._manifest.contents(segment, part)
            write_segment(self._store.disk, order.directory / part.file, contents, [], layer_by_layer)
        states.clear()
        if self._ranks.rank == 0:
            written = {part: self._await(segment, part) for part in segment.files}
            segment = replace(
                segment,
                parts=tuple(written[part] for part in segment.parts),
                states=tuple(written[part] for part in segment.states),
            )
        self._manifest = replace(self._manifest, segments=(*self._manifest.segments, segment))
        if self._ranks.rank == 0:
            self._later = [one for one in self._later if one.first >= stop]
            goes_on = self._later and self._later[0].first == stop
            written = replace(self._manifest, segments=(*self._manifest.segments, *(self._later if goes_on else ())))
            written.write(self._store.disk, order.directory)
            self._store.tidy(order.directory.name, written.segments, order.salt)

    def _part(self, name: str, heads: tuple[int, int]) -> Part:
        return Part(f"{name}{heads[0]}-{heads[1]}.{self._order.salt}.safetensors", heads, "")

    def _await(self, segment: Segment, part: Part) -> Part:
        """Waits until another rank has written the part. Returns the part with its checksum.

        Raises:
            OSError: the deadline has passed.
            DamagedError: the file does not hold what it must.
        """
        path = self._order.directory / part.file
        while not path.exists():
            if time.monotonic() > self._deadline:
                raise OSError(_OTHER_FAILED)
            time.sleep(0.01)
        with SegmentFile(path, self._manifest.contents(segment, part)) as file:
            return replace(part, checksum=file.checksum)


def done() -> Future[None]:
    """A future that is done: what a rank waits for that has nothing to do while others work on their disks."""
    found: Future[None] = Future()
    found.set_result(None)
    return found
