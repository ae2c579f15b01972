"""Attention of the rows of several sequences to shared keys and values, and to their own.

The tokens of a shared prefix are held by the full cache of one sequence (`FullCache.prefix`). So the caches form a
tree. After each fork, fewer rows attend to a block. Rows are ordered so that rows which attend to the same keys are
adjacent. Every row attends to its keys in the order of their positions, and the sum over each block continues the sum
over the block before. So a row's result has the same bits as without the other sequences.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ...kernels.attention import (
    Piece,
    PreparedStep,
    Scratch,
    StepPiece,
    StepRows,
    attend,
    attend_pieces,
    new_running,
    prepared_step,
    takes_blocks,
    takes_joined,
)
from ...kernels.selection import on_cpu
from ...tp.rope import RopeRows
from ..held import Held, held_scratch
from ..transfer.device_blocks import pieces_of
from .full import FullCache, MassPart, Shares
from .steps import StepOfPass, put_rows

_Keys = Tensor | tuple[Tensor, int]
"""Keys and values of a piece: `[2, num_kv_heads, m, head_dim]`; or blocks as in `Piece`, and the first key in them."""


@dataclass
class _Span:
    """Positions in one cache to which the same sequences attend."""

    first: int
    stop: int
    members: slice
    """The sequences, in the order of rows."""
    rows: slice
    causal: bool
    """Whether some positions are those of the rows themselves. Then the span has a single sequence."""


@dataclass
class _AttendedCache:
    """A cache with tokens to which some sequences attend."""

    cache: FullCache
    spans: list[_Span] = field(default_factory=list)
    parts: list[tuple[_Span, int, int]] = field(default_factory=list)
    """For layers whose blocks are all in one tensor: the calls of attention. Each has a span, its first key, counted
    from the cache's first key, and the number of keys."""


class SharedAttention:
    """Attention of sequences that are decoded together, to their full caches."""

    def __init__(self, caches: Sequence[FullCache]) -> None:
        """Args: `caches` are the caches of the sequences. They name the caches that hold their prefixes."""
        self._caches = list(caches)
        self._scratch, self._shares = Scratch(), Shares()
        self._scale = caches[0].config.attention_scale
        self._starts: list[int] = []
        self._counts: list[int] = []
        self.rows: list[slice] = []
        """The rows of each sequence in the prepared pass."""
        self._mass_rows: list[int] = []  # for each sequence, how many last rows have their attention mass recorded
        self._order: list[int] = []  # the sequences in the order in which attention takes their rows
        self._holders: list[_AttendedCache] = []
        self._places: list[slice] = []  # the rows of each sequence in this order
        self.rotation: RopeRows = ()
        """The rotation of the rows in the prepared pass, in the order of the sequences."""
        self._moved: Tensor | None = None  # the row numbers in this order, if it is not that of the sequences
        self._back: Tensor | None = None  # the inverse of `_moved`
        self._step = StepOfPass()
        self._stepped: list[int] = []  # the layers of the current pass that a prepared step has computed
        self._stepped_s = 0.0  # the time of their steps
        self._halves: list[int] = []  # bytes from a block's keys to its values, by holder

    def held(self) -> Held:
        """See `offload.held`. The memory besides the caches: that of the last pass, and the last step."""
        given = *self.rotation, self._moved, self._back, *self._step.tensors()
        yield from (("prefill", tensor) for tensor in given if tensor is not None)
        yield from held_scratch(self._scratch)
        yield from self._shares.held()

    def prepare(self, counts: Sequence[int]) -> None:
        """Announces a pass over the next `counts[i]` tokens of each sequence."""
        caches = self._caches
        self._stepped, self._stepped_s = [], 0.0
        self._counts, self.rows = list(counts), rows_of(counts)
        self._starts = [cache.length for cache in caches]
        self._mass_rows = [cache.mass_rows_of(count) for cache, count in zip(caches, counts, strict=True)]
        turned = [
            cache.rope.rows(start, count) for cache, start, count in zip(caches, self._starts, counts, strict=True)
        ]
        self.rotation = tuple(torch.cat(tables) for tables in zip(*turned, strict=True))
        numbers: dict[FullCache, int] = {}
        paths = [self._path(i, numbers) for i in range(len(caches))]
        self._order = sorted(range(len(caches)), key=paths.__getitem__)
        device = caches[0].blocks.device
        self._moved = self._back = None
        if self._order != list(range(len(caches))):
            moved = [torch.arange(self.rows[i].start, self.rows[i].stop) for i in self._order]
            self._moved = torch.cat(moved).to(device)
            self._back = self._moved.argsort()
        self._places = rows_of([self._counts[i] for i in self._order])
        self._holders = self._find_spans()
        owners = {cache: i for i, cache in enumerate(caches)}
        for holder in self._holders:
            cache, seen = holder.cache, [m for span in holder.spans for m in self._order[span.members]]
            own = self._counts[owners[cache]] if cache in owners else 0
            first = min(self._starts[m] for m in seen) - cache.start
            stop = holder.spans[-1].stop - cache.start
            cache.blocks.prepare(cache.length - cache.start, own, first_row=first, stop=stop)
            holder.parts = list(_parts_of(holder))
        enough = all(n <= cache.room_in_block() for cache, n in zip(caches, counts, strict=True))
        possible = enough and self._moved is None and on_cpu(device) and not any(self._mass_rows)
        self._step.begin(possible=possible and not any(cache.collector for cache in caches))

    def _path(self, i: int, numbers: dict[FullCache, int]) -> list[tuple[int, int]]:
        """The path of sequence `i` through the tree, as a key for sorting: for each cache, its number, and the position
        at which the sequence leaves it. Sequences that fork later become neighbours.

        Args: `numbers` are the numbers of the caches so far, in the order of their first use. So sequences keep their
            order where possible.
        """
        holders = self._caches[i].holders
        stops = [holder.start for holder in holders[1:]] + [self._starts[i] + self._counts[i]]
        return [(numbers.setdefault(holder, len(numbers)), -stop) for holder, stop in zip(holders, stops, strict=True)]

    def _find_spans(self) -> list[_AttendedCache]:
        """The caches to which rows attend, earlier positions first, with the spans of each."""
        ends: dict[FullCache, list[int]] = {}  # the position up to which each sequence uses it, in the order of rows
        places: dict[FullCache, int] = {}  # the place of the first of these sequences in this order
        for place, i in enumerate(self._order):
            stop = self._starts[i] + self._counts[i]
            for cache in reversed(self._caches[i].holders):
                ends.setdefault(cache, []).append(stop)
                places.setdefault(cache, place)
                stop = cache.start
        rows = self._places
        found = []
        for cache in sorted(ends, key=lambda cache: cache.start):
            holder, first, place = _AttendedCache(cache), cache.start, places[cache]
            for stop in sorted(set(ends[cache])):
                users = sum(end >= stop for end in ends[cache])
                members = slice(place, place + users)
                covered = slice(rows[members.start].start, rows[members.stop - 1].stop)
                causal = self._caches[self._order[place]] is cache and stop > self._starts[self._order[place]]
                holder.spans.append(_Span(first, stop, members, covered, causal))
                first = stop
            found.append(holder)
        return found

    def step(self, layer: int, rows: Callable[[StepRows | None], StepRows]) -> Callable[..., StepRows] | None:
        """Returns a function that appends the rows of a step to a layer, computes attention, and returns the rows.

        The function has an optional argument: the layer's queries, keys and values, not yet rotated. It then first
        writes these to the rows. The result is `None` if the step is not possible, so that `append` and `attend` must
        be used.

        Args: `rows` returns the memory of the pass's rows, for all layers. It is called once. Its argument is the
            memory of the last step's rows, or `None`.
        """
        if not self._step.possible or self._caches[0].config.sliding_window(layer) is not None:
            return None
        blocks = self._layer_blocks(layer)
        if blocks is None:
            return None
        step = self._step.get(lambda before: self._made_step(rows(before and before.rows), blocks, before))
        if step is None:
            return None
        places = zip((one.data_ptr() for one in blocks), self._halves, strict=True)
        return partial(self._take_step, layer, step, [at for place, half in places for at in (place, place + half)])

    def _made_step(self, rows: StepRows, blocks: list[Tensor], before: PreparedStep | None) -> PreparedStep | None:
        """See `step`. Args: `blocks` are the blocks of each holder in any layer."""
        calls: list[list[StepPiece]] = [[]]
        for number, holder in enumerate(self._holders):
            for span, first, m in holder.parts:
                ((seeing, diagonal, _),) = self._seeing(span, holder.cache.start + first, m, None)
                if calls[-1] and seeing.start < calls[-1][-1].rows.stop:
                    calls.append([])
                calls[-1].append(StepPiece(seeing, number, first, m, m if diagonal is None else diagonal))
        numbers = {holder.cache: number for number, holder in enumerate(self._holders)}
        starts = zip(self._caches, self._starts, self.rows, strict=True)
        written = [(numbers[cache], start - cache.start, own) for cache, start, own in starts]
        caches = [(one[:, 0], one[:, 1]) for one in blocks]
        self._halves = [one.stride(1) * one.element_size() for one in blocks]
        return prepared_step(rows, caches, calls, written, scale=self._scale, before=before)

    def _layer_blocks(self, layer: int) -> list[Tensor] | None:
        """For each holder, all blocks of a layer in one tensor; `None` if they are not in one tensor for every
        holder."""
        place = self._caches[0].places[layer]
        if place is None:
            return None
        found = [holder.cache.blocks.at_once(place) for holder in self._holders]
        together = [blocks for blocks in found if blocks is not None]
        return together if len(together) == len(found) else None

    def _take_step(
        self,
        layer: int,
        step: PreparedStep,
        addresses: Sequence[int],
        given: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> StepRows:
        """See `step`."""
        if given:
            put_rows(step.rows, layer, given, self._caches[0].rope, self.rotation)
        began = time.perf_counter()
        step(addresses)
        self._stepped_s += time.perf_counter() - began
        self._stepped.append(layer)
        self._end_layer(layer)
        return step.rows

    def _end_layer(self, layer: int) -> None:
        """Counts what steps have appended and read, after the last layer: all layers together."""
        if layer < self._caches[0].config.kv_layers - 1 or not self._stepped:
            return
        for cache, count in zip(self._caches, self._counts, strict=True):
            for stepped in self._stepped:
                cache.note_appended(stepped, count)
        read = [holder.cache.reads.num_bytes for holder in self._holders]
        for holder in self._holders:
            for span, first, m in holder.parts:
                holder.cache.count_read(min(m, span.stop - holder.cache.start - first), len(self._stepped))
        self._count_seconds(self._stepped_s, read)
        self._stepped = []

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """Attention of the tokens that were appended last to all tokens so far.

        Args: `q` is `[num_heads, n, head_dim]`, rotated, in the order of the sequences.

        Returns:
            `[num_heads, n, head_dim]`, in the order of the sequences.
        """
        self._end_layer(layer)
        if self._caches[0].places[layer] is None:  # in such a layer, no keys and values are shared
            both = zip(self._caches, self.rows, strict=True)
            return torch.cat([cache.attend_rotated(layer, q[:, rows]) for cache, rows in both], dim=1)
        began, read = time.perf_counter(), [holder.cache.reads.num_bytes for holder in self._holders]
        if self._moved is not None:
            q = q.index_select(1, self._moved)
        room = self._shares if any(self._mass_rows) else None
        rows = _RowsSoFar(q, self._scale, self._caches[0].chunk_size, room, self._scratch)
        window = self._caches[0].config.sliding_window(layer)
        collectors = [cache.collector for cache in self._caches]
        collected = any(collectors)
        for holder in self._holders:
            for span, position, keys, m in self._pieces(holder, layer, q, window):
                for seeing, diagonal, hides in self._seeing(span, position, m, window):
                    rows.attend(seeing, keys, m, position, diagonal, hides)
                for place in _range(span.members) if collected else ():
                    collect = collectors[self._order[place]]
                    if collect is not None:
                        for first, block in _blocks_of(keys, m):
                            collect(layer, position + first, block)
                holder.cache.count_read(min(m, span.stop - position))
        out = rows.out()
        for place, i in enumerate(self._order):
            if self._mass_rows[i]:
                self._caches[i].mass.add(layer, self._starts[i], *rows.mass_of(self._places[place], self._mass_rows[i]))
        if self._back is not None:
            out = out.index_select(1, self._back)
        if out.device.type == "cpu":
            self._count_seconds(time.perf_counter() - began, read)
        return out

    def _count_seconds(self, spent: float, read: Sequence[int]) -> None:
        """Counts the time `spent` as time of reading, divided between the holders by the bytes that were read.

        Args: `read` has the bytes of each holder before.
        """
        shares = [holder.cache.reads.num_bytes - before for holder, before in zip(self._holders, read, strict=True)]
        whole = max(1, sum(shares))
        for holder, share in zip(self._holders, shares, strict=True):
            holder.cache.reads.seconds += spent * share / whole

    def _pieces(
        self, holder: _AttendedCache, layer: int, q: Tensor, window: int | None
    ) -> Iterator[tuple[_Span, int, _Keys, int]]:
        """The pieces to which the rows of each span attend, in the order of positions: the span, the first position,
        the keys and values, and their number `m`."""
        cache, start, place = holder.cache, holder.cache.start, holder.cache.places[layer]
        assert place is not None
        together = cache.blocks.at_once(place)
        if together is not None and takes_blocks(q, together):
            for span, first, m in holder.parts:
                yield span, start + first, (together, first), m
            return
        oldest = min(self._starts[self._order[m]] for span in holder.spans for m in _range(span.members))
        seen = 0 if window is None else max(0, oldest + 1 - window - start)
        # With windows, rows may have to attend to a piece separately. Pieces are then not joined, to keep this small.
        joined = window is None and takes_joined(q, cache.blocks.block_size)
        for position, block in cache.blocks.pieces(place, seen, holder.spans[-1].stop - start, joined=joined):
            end = position + block.shape[2]
            for span in holder.spans:
                first = max(span.first - start, position)
                stop = end if span.causal else min(span.stop - start, end)
                if first < stop:
                    yield span, start + first, block[:, :, first - position : stop - position], stop - first

    def _seeing(
        self, span: _Span, position: int, m: int, window: int | None
    ) -> Iterable[tuple[slice, int | None, int | None]]:
        """The rows that attend to a piece, with the `diagonal` and `window` for `attend`. All rows of the span attend
        together. Exception: if windows hide some keys from some rows, each sequence attends separately."""
        places = _range(span.members)
        first = self._starts[self._order[places[0]]] - position if span.causal else None
        if window is None:
            return ((span.rows, first, None),)
        starts = [self._starts[self._order[place]] for place in places]
        stops = [start + self._counts[self._order[place]] for start, place in zip(starts, places, strict=True)]
        if position >= max(stops) - window:
            return ((span.rows, first, None),)
        return [
            (self._places[place], start - position, window)
            for place, start in zip(places, starts, strict=True)
            if position + m > start + 1 - window
        ]


class _RowsSoFar:
    """Attention of the rows of a pass to the keys so far."""

    def __init__(self, q: Tensor, scale: float, chunk_size: int, shares: Shares | None, scratch: Scratch) -> None:
        """Args:
        chunk_size: tokens of a chunk, for the shares of attention.
        shares: memory for the shares of attention that chunks get; `None`: these are not computed.
        """
        self._q, self._scale, self._chunk_size, self._scratch = q, scale, chunk_size, scratch
        self._shares = shares
        if shares:
            shares.begin()
        self._running = new_running(q)
        num_heads, n, head_dim = q.shape
        self._out = q.new_empty(n, num_heads, head_dim).transpose(0, 1)
        self._lse = self._running.new_empty(num_heads, n)
        self._masses: list[tuple[int, slice, Tensor, Tensor]] = []  # first chunk, rows, shares, log-sum-exp
        self._waiting: list[tuple[Piece, int]] = []  # pieces with different rows, and the positions of their first keys

    def attend(self, rows: slice, keys: _Keys, m: int, position: int, diagonal: int | None, window: int | None) -> None:
        """Adds attention of some rows to `m` keys. See `attend` for `diagonal` and `window`.

        Args: `position` is the position of the first key.
        """
        mass = None
        if self._shares:
            mass = self._shares.get(self._q, rows.stop - rows.start, m // self._chunk_size)
        if not isinstance(keys, Tensor):
            if self._waiting and rows.start < self._waiting[-1][0].rows.stop:
                self._attend_waiting()
            blocks, first = keys
            piece = Piece(rows, blocks, first, m, m if diagonal is None else diagonal, window, mass)
            self._waiting.append((piece, position))
            return
        self._attend_waiting()
        whole = rows.stop - rows.start == self._q.shape[1]
        running = self._running if whole else self._running[:, rows].contiguous()
        out, lse = attend(
            self._q[:, rows],
            keys[0],
            keys[1],
            scale=self._scale,
            diagonal=diagonal,
            window=window,
            scratch=self._scratch,
            mass=mass,
            running=running,
            rounded=True,
        )
        if not whole:
            self._running[:, rows] = running
        self._out[:, rows] = out
        self._note(rows, position, mass, lse)

    def out(self) -> Tensor:
        """The result: attention to all keys, `[num_heads, n, head_dim]`."""
        self._attend_waiting()
        return self._out

    def _attend_waiting(self) -> None:
        """Attends to the waiting pieces in one call."""
        if not self._waiting:
            return
        pieces = [piece for piece, _ in self._waiting]
        lses = attend_pieces(self._q, pieces, scale=self._scale, running=self._running, out=self._out)
        for (piece, position), lse in zip(self._waiting, lses, strict=True):
            self._note(piece.rows, position, piece.mass, lse)
        self._waiting = []

    def _note(self, rows: slice, position: int, mass: Tensor | None, lse: Tensor) -> None:
        """Keeps what `mass_of` needs."""
        if mass is not None:
            self._masses.append((position // self._chunk_size, rows, mass, lse))
            self._lse[:, rows] = lse

    def mass_of(self, rows: slice, last: int) -> tuple[list[MassPart], Tensor]:
        """The shares of attention that the last `last` of these rows gave to chunks, and their log-sum-exp over all
        keys."""
        rows = slice(rows.stop - last, rows.stop)
        parts = []
        for first, covered, shares, lse in self._masses:
            if covered.start <= rows.start and rows.stop <= covered.stop:
                here = slice(rows.start - covered.start, rows.stop - covered.start)
                parts.append(MassPart(first, shares[:, here], lse[:, here]))
        return parts, self._lse[:, rows]


def rows_of(counts: Sequence[int]) -> list[slice]:
    """The places of consecutive groups of rows with these counts."""
    return [slice(first, stop) for first, stop in pairwise(accumulate(counts, initial=0))]


def _range(places: slice) -> range:
    return range(places.start, places.stop)


def _parts_of(holder: _AttendedCache) -> Iterator[tuple[_Span, int, int]]:
    """See `_AttendedCache.parts`."""
    start, size, chunk = holder.cache.start, holder.cache.blocks.block_size, holder.cache.chunk_size
    for span in holder.spans:
        first, stop = span.first - start, span.stop - start
        stop = -(-stop // chunk) * chunk  # the diagonal hides positions after the last token
        if first % size:
            border = min(stop, -(-first // size) * size)
            yield span, first, border - first
            first = border
        if first < stop:
            yield span, first, stop - first


def _blocks_of(keys: _Keys, m: int) -> Iterator[tuple[int, Tensor]]:
    """The blocks of a piece: the first position of each, counted from the start of the piece, and keys and values."""
    if isinstance(keys, Tensor):
        yield 0, keys
        return
    blocks, start = keys
    first = 0
    for block in pieces_of(blocks, start, start + m):
        yield first, block
        first += block.shape[2]
