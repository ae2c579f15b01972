"""Attention of the rows of several sequences to keys and values that they share, and to those of their own.

Tokens that sequences begin with are held by one of their full caches (`FullCache.prefix`). The caches form a tree;
where its branches part, the rows that attend to a block become fewer. Rows are ordered so that those which attend to
the same keys lie together, and every row meets its keys in the order of their positions: the sum over one block goes on
from the sum over the one before. So a row's result has the bits that it has alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ...kernels.attention import Scratch, attend, attend_blocks, new_running, takes_blocks
from ...tp.model.rope import Rows
from .full import BlockCollector, FullCache
from .recent_mass import MassPart


@dataclass
class _Span:
    """Positions of one cache's own tokens that the same sequences attend to."""

    first: int
    stop: int
    members: slice
    """The sequences, in the order of rows."""
    rows: slice
    causal: bool
    """Whether some of the positions are the rows' own: then it is one sequence's."""


@dataclass
class _Holder:
    """A cache with tokens that some sequences attend to."""

    cache: FullCache
    spans: list[_Span] = field(default_factory=list)


class SharedAttention:
    """Full caches of sequences that are decoded together."""

    def __init__(self, caches: Sequence[FullCache]) -> None:
        """Args: `caches` are those of the sequences; the ones that hold their prefixes are found from them."""
        self._caches = list(caches)
        self._scratch = Scratch()
        self._scale = caches[0].config.head_dim ** -0.5
        self._starts: list[int] = []
        self._counts: list[int] = []
        self._order: list[int] = []  # of the sequences, in which their rows are attended
        self._holders: list[_Holder] = []
        self._places: list[slice] = []  # the rows of each sequence in that order
        self._rotation: Rows = (torch.empty(0), torch.empty(0))
        self._moved: Tensor | None = None  # the rows in that order, where it is another one
        self._back: Tensor | None = None

    def prepare(self, counts: Sequence[int]) -> None:
        """Announces a pass over the next `counts[i]` tokens of each sequence."""
        caches = self._caches
        self._counts = list(counts)
        self._starts = [cache.length for cache in caches]
        turned = [
            cache.rope.rows(start, count) for cache, start, count in zip(caches, self._starts, counts, strict=True)
        ]
        self._rotation = torch.cat([cos for cos, _ in turned]), torch.cat([sin for _, sin in turned])
        paths = [self._path(i) for i in range(len(caches))]
        self._order = sorted(range(len(caches)), key=paths.__getitem__)
        device = caches[0].blocks.device
        self._moved = self._back = None
        if self._order != list(range(len(caches))):
            rows = rows_of(self._counts)
            self._moved = torch.cat([torch.arange(rows[i].start, rows[i].stop) for i in self._order]).to(device)
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

    def _path(self, i: int) -> list[tuple[int, int]]:
        """Where sequence `i` leaves each cache on its way through the tree: those that part later are neighbours."""
        holders = self._caches[i].holders
        stops = [holder.start for holder in holders[1:]] + [self._starts[i] + self._counts[i]]
        return [(id(holder), -stop) for holder, stop in zip(holders, stops, strict=True)]

    def _find_spans(self) -> list[_Holder]:
        """The caches to attend to, earlier positions first, and who attends to what of each."""
        ends: dict[FullCache, list[int]] = {}  # the position up to which each sequence uses it, in the order of rows
        places: dict[FullCache, int] = {}  # of the first of these sequences in that order
        for place, i in enumerate(self._order):
            stop = self._starts[i] + self._counts[i]
            for cache in reversed(self._caches[i].holders):
                ends.setdefault(cache, []).append(stop)
                places.setdefault(cache, place)
                stop = cache.start
        rows = self._places
        found = []
        for cache in sorted(ends, key=lambda cache: cache.start):
            holder, first, place = _Holder(cache), cache.start, places[cache]
            for stop in sorted(set(ends[cache])):
                users = sum(end >= stop for end in ends[cache])
                members = slice(place, place + users)
                covered = slice(rows[members.start].start, rows[members.stop - 1].stop)
                causal = self._caches[self._order[place]] is cache and stop > self._starts[self._order[place]]
                holder.spans.append(_Span(first, stop, members, covered, causal))
                first = stop
            found.append(holder)
        return found

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, collectors: Sequence[BlockCollector | None]
    ) -> Tensor:
        """See `tp.decoder.Cache`; rows and `collectors` are in the order of the sequences."""
        dtype, rope = q.dtype, self._caches[0].rope
        q, k = rope.rotate(q, self._rotation), rope.rotate(k, self._rotation)
        for cache, rows in zip(self._caches, rows_of(self._counts), strict=True):
            cache.append(layer, k[:, rows], v[:, rows])
        began, read = time.perf_counter(), [holder.cache.reads.num_bytes for holder in self._holders]
        if self._moved is not None:
            q = q.index_select(1, self._moved)
        notes_mass = any(cache.mass_rows_of(n) for cache, n in zip(self._caches, self._counts, strict=True))
        rows = _RowsSoFar(q, self._scale, self._caches[0].chunk_size if notes_mass else None, self._scratch)
        window = self._caches[0].config.sliding_window(layer)
        for holder in self._holders:
            for span, position, keys, m in self._pieces(holder, layer, q, window):
                self._attend_piece(rows, span, position, keys, m, window)
                for place in range(span.members.start, span.members.stop):
                    collect = collectors[self._order[place]]
                    if collect is not None:
                        for first, block in _blocks_of(keys, m):
                            collect(layer, position + first, block)
                holder.cache.count_read(min(m, span.stop - position))
        for place, i in enumerate(self._order):
            cache, start, count = self._caches[i], self._starts[i], self._counts[i]
            parts = rows.mass_of(self._places[place], cache.mass_rows_of(count))
            if parts:
                cache.add_mass(layer, start, start + count, parts)
        out = rows.out if self._back is None else rows.out.index_select(1, self._back)
        if out.device.type == "cpu":
            spent = time.perf_counter() - began
            shares = [holder.cache.reads.num_bytes - before for holder, before in zip(self._holders, read, strict=True)]
            for holder, share in zip(self._holders, shares, strict=True):
                holder.cache.reads.seconds += spent * share / max(1, sum(shares))
        return out.to(dtype)

    def _pieces(
        self, holder: _Holder, layer: int, q: Tensor, window: int | None
    ) -> Iterator[tuple[_Span, int, Tensor, int]]:
        """What each span's rows attend to, in the order of positions: the first position, keys and values as `attend`
        (`[2, num_kv_heads, m, head_dim]`) or `attend_blocks` take them, and how many of them count, `m`."""
        cache, start, chunk = holder.cache, holder.cache.start, holder.cache.chunk_size
        together = cache.blocks.at_once(layer)
        if together is not None and takes_blocks(q, together):
            size = cache.blocks.block_size
            for span in holder.spans:
                first, stop = span.first - start, span.stop - start
                stop = -(-stop // chunk) * chunk  # what is behind the last token in its chunk is hidden by the diagonal
                index, offset = divmod(first, size)
                if offset:
                    border = min(stop, (index + 1) * size)
                    yield span, start + first, together[index][:, :, offset : border - index * size], border - first
                    first = border
                if first < stop:
                    yield span, start + first, together[first // size :], stop - first
            return
        oldest = min(self._starts[self._order[m]] for span in holder.spans for m in _range(span.members))
        seen = 0 if window is None else max(0, oldest + 1 - window - start)
        for position, block in cache.blocks.pieces(layer, seen, holder.spans[-1].stop - start):
            end = position + block.shape[2]
            for span in holder.spans:
                first = max(span.first - start, position)
                stop = end if span.causal else min(span.stop - start, end)
                if first < stop:
                    yield span, start + first, block[:, :, first - position : stop - position], stop - first

    def _attend_piece(
        self, rows: _RowsSoFar, span: _Span, position: int, keys: Tensor, m: int, window: int | None
    ) -> None:
        """Attends to one piece: all rows of the span in one call, unless windows hide some of it from some of them."""
        places = _range(span.members)
        starts = [self._starts[self._order[place]] for place in places]
        stops = [start + self._counts[self._order[place]] for start, place in zip(starts, places, strict=True)]
        if window is None or position >= max(stops) - window:
            rows.attend(span.rows, keys, m, position, starts[0] - position if span.causal else None, None)
            return
        for place, start in zip(places, starts, strict=True):
            if position + m > start + 1 - window:
                rows.attend(self._places[place], keys, m, position, start - position, window)


class _RowsSoFar:
    """The rows of a pass, and attention to the keys so far."""

    def __init__(self, q: Tensor, scale: float, chunk_size: int | None, scratch: Scratch) -> None:
        """Args: `chunk_size` is of the chunks whose shares of attention are wanted; `None` for none."""
        self._q, self._scale, self._chunk_size, self._scratch = q, scale, chunk_size, scratch
        self._running = new_running(q)
        self.out = torch.empty(q.shape, dtype=self._running.dtype, device=q.device)
        self._lse = torch.empty(q.shape[:2], dtype=self._running.dtype, device=q.device)
        self._masses: list[tuple[int, slice, Tensor, Tensor]] = []  # first chunk, rows, shares, log-sum-exp

    def attend(
        self, rows: slice, keys: Tensor, m: int, position: int, diagonal: int | None, window: int | None
    ) -> None:
        """Adds keys to some rows; see `_pieces` for `keys` and `m`, and `attend` for the rest.

        Args: `position` is that of the first key.
        """
        whole = rows.stop - rows.start == self._q.shape[1]
        running = self._running if whole else self._running[:, rows].contiguous()
        q = self._q[:, rows]
        mass = None
        if self._chunk_size:
            shape = q.shape[0], q.shape[1], m // self._chunk_size
            mass = self._scratch.get(f"mass {len(self._masses)}", shape, self.out.dtype, q.device)
        if keys.dim() == 5:
            seen = m if diagonal is None else diagonal
            out, lse = attend_blocks(
                q, keys, m, scale=self._scale, diagonal=seen, window=window, mass=mass, running=running
            )
        else:
            out, lse = attend(
                q,
                keys[0],
                keys[1],
                scale=self._scale,
                diagonal=diagonal,
                window=window,
                scratch=self._scratch,
                mass=mass,
                running=running,
            )
        if mass is not None and self._chunk_size:
            self._masses.append((position // self._chunk_size, rows, mass, lse))
        if whole:
            self.out, self._lse = out, lse
        else:
            self._running[:, rows], self.out[:, rows], self._lse[:, rows] = running, out, lse

    def mass_of(self, rows: slice, last: int) -> list[MassPart]:
        """What the last `last` of these rows gave to chunks; nothing for 0."""
        if not last:
            return []
        rows = slice(rows.stop - last, rows.stop)
        whole, parts = self._lse[:, rows], []
        for first, covered, shares, lse in self._masses:
            if covered.start <= rows.start and rows.stop <= covered.stop:
                here = slice(rows.start - covered.start, rows.stop - covered.start)
                parts.append(MassPart(first, shares[:, here], (lse[:, here] - whole).exp_()))
        return parts


def rows_of(counts: Sequence[int]) -> list[slice]:
    """Where each of so many rows are that follow one another."""
    return [slice(first, stop) for first, stop in pairwise(accumulate(counts, initial=0))]


def _range(places: slice) -> range:
    return range(places.start, places.stop)


def _blocks_of(keys: Tensor, m: int) -> Iterator[tuple[int, Tensor]]:
    """The blocks of one or several: their first positions, and keys and values."""
    if keys.dim() == 4:
        yield 0, keys
        return
    size = keys.shape[3]
    for first in range(0, m, size):
        yield first, keys[first // size][:, :, : m - first]
