"""Writes what a run computes of a text to segments of a saved context, beside the work.

Every rank writes its own KV heads; of a head that several ranks hold, the first of them writes it. So it does with the
states of its own key heads, as they are behind the segment. A thread writes a segment while the next one is computed;
rank 0 enters it into the manifest once all ranks' files are there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

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
"""How long rank 0 waits for the other ranks' files where the run was broken off."""

_OTHER_FAILED = "another rank could not write its part"


@dataclass(frozen=True)
class SaveOrder:
    """A context that a run is to save: leading tokens of its prompt. All ranks get rank 0's."""

    directory: Path
    manifest: Manifest
    """As it is to be, without segments."""
    token_ids: list[int]
    salt: str
    """Part of the names of the files that this run writes, so that no file is ever written twice."""
    parts: tuple[tuple[int, int], ...]
    """The KV heads of each file of a segment."""
    states: tuple[tuple[int, int], ...] = ()
    """The key heads of each file with states."""
    required: bool = False
    """Whether the run is for nothing if it cannot be saved."""
    packed: bool = False
    """Whether keys and values are packed."""
    origin: Origin = "operator"
    """Who wants it saved, see `ContextRequest`."""


@dataclass(frozen=True)
class HeldHeads:
    """The KV heads that a rank holds, counted in the model."""

    first: int
    stop: int
    writes: bool
    """Whether it is the first rank that holds them."""
    key_heads: tuple[int, int] = (0, 0)
    """Those of linear attention, which no other rank holds: the first, and the one behind the last."""


class Saver:
    """Writes the segments of a context, one at a time, in a thread; on rank 0 also its manifest."""

    def __init__(
        self,
        store: ContextStore,
        ranks: Ranks,
        heads: HeldHeads,
        order: SaveOrder,
        kept: Sequence[Segment],
        later: Sequence[Segment],
    ) -> None:
        """Args:
        kept: the segments that are there and stay.
        later: those after them that are there, each until it is written anew: whatever happens, none is lost.
        """
        self._later = list(later)
        self._store, self._ranks, self._heads, self._order = store, ranks, heads, order
        self._manifest = replace(order.manifest, segments=tuple(kept))
        self._saved = self._manifest.saved  # and what is being written
        self._thread = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None
        self._deadline = inf  # until which files of other ranks are waited for
        self.failure: str | None = None

    @property
    def idle(self) -> bool:
        """Whether this rank has nothing to write at the moment."""
        return self._writing is None or self._writing.done()

    def save(self, full: FullCache) -> None:
        """Begins to write the segments that `full` has become long enough for, once the one before is written."""
        tokens = len(self._order.token_ids)
        while self.failure is None and (first := self._saved) < min(full.length, tokens):
            stop = min(first + self._manifest.segment_tokens, tokens)
            if stop > full.length or not self._agree():
                return
            if not full.holds_segment(first, stop):
                self.failure = "its layers with sliding windows or states have not kept what is to be saved"
                return
            full.blocks.drain()
            shape = self._manifest.shape
            layers = [full.export(layer, first, stop) for layer in range(shape.num_layers)]
            states = []
            if full.states and shape.states:
                states = [full.states.export(layer, stop) for layer in range(shape.states.num_layers)]
            self._saved = stop
            computed_with = full.computed_with(first, stop)
            self._writing = self._thread.submit(self._write, first, stop, layers, states, computed_with)

    def _agree(self) -> bool:
        """Waits until the segment before is written, by all ranks, however long their disks take; whether that went
        well. All ranks call it.

        Rank 0 waits for the others' files, so it must learn of their failures before it waits for itself.
        """
        if self._ranks.rank:
            self._wait()
        if not self._ranks.least([self.failure is None], patiently=True)[0]:
            self._deadline = 0.0
        self._wait()
        if not self._ranks.least([self.failure is None], patiently=True)[0]:
            self.failure = self.failure or _OTHER_FAILED
        return self.failure is None

    def finish(self, together: bool) -> None:
        """See `ContextUse.finish`."""
        if together:
            self._agree()
        else:
            self._deadline = time.monotonic() + _PATIENCE_S
            self._wait()
        self._thread.shutdown()

    def _wait(self) -> None:
        if self._writing is None:
            return
        try:
            self._writing.result()
        # RuntimeError is PyTorch's where memory ends.
        except (ContextError, OSError, DamagedError, LinkError, MemoryError, RuntimeError) as error:
            self.failure = self.failure or getattr(error, "strerror", None) or str(error)
        finally:
            self._writing = None

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
        layers.clear()  # they may hold copies
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
        """The part with its checksum, once the rank that writes it has done so."""
        path = self._order.directory / part.file
        while not path.exists():
            if time.monotonic() > self._deadline:
                raise OSError(_OTHER_FAILED)
            time.sleep(0.01)
        with SegmentFile(path, self._manifest.contents(segment, part)) as file:
            return replace(part, checksum=file.checksum)
