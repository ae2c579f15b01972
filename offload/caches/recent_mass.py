"""The attention that the last tokens gave to each chunk of a full cache, its *mass*: what a retrieval cache selects by.

A row is what one token gave. Rows are added with the tokens of a pass and dropped with a rollback. Each layer has one
buffer, so that a pass writes its own rows and seldom moves earlier ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..held import Held

RECENT_ROWS = 8
"""The number of last tokens whose attention decides which chunks a retrieval cache takes."""

ROOM = 16
"""Rows of new tokens a buffer has room for at least: where passes bring fewer, earlier rows are moved less often."""


@dataclass(frozen=True)
class MassPart:
    """The shares that some consecutive chunks got."""

    first: int
    """The first chunk."""
    shares: Tensor
    """`[num_heads, rows, chunks]`."""
    factors: Tensor | None = None
    """`[num_heads, rows]`, by which they are to be multiplied."""


class Shares:
    """Memory for the shares that the pieces of a layer get, which hold until those of the next layer do: one buffer, as
    large as all pieces of a layer were together at most. A buffer for each would in time be as large as the largest
    piece there was in its place, as an open stretch moves on."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self._taken = self._most = 0  # numbers in the layer under way, and in any before

    def begin(self) -> None:
        """Begins a layer."""
        self._most, self._taken = max(self._most, self._taken), 0
        if self._buffer is not None and self._buffer.numel() < self._most:
            self._buffer = None  # before a larger one is taken

    def get(self, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """For the next piece, uninitialised: `shape` is `[num_heads, rows, chunks]`."""
        first, self._taken = self._taken, self._taken + math.prod(shape)
        if self._buffer is None:
            self._buffer = torch.empty(max(self._most, self._taken), dtype=dtype, device=device)
        if self._taken > self._buffer.numel():  # from the next layer on there is room for it
            return torch.empty(shape, dtype=dtype, device=device)
        return self._buffer[first : self._taken].view(shape)

    def held(self) -> Held:
        """See `offload.held`."""
        if self._buffer is not None:
            yield "mass", self._buffer


class RecentMass:
    """The shares of their attention that the last tokens gave to chunks, by layer, averaged over the query heads of a
    KV head."""

    def __init__(
        self, num_layers: int, num_kv_heads: int, max_chunks: int, chunk_size: int, dtype: torch.dtype
    ) -> None:
        self._num_kv_heads, self._max_chunks = num_kv_heads, max_chunks
        self._chunk_size, self._dtype = chunk_size, dtype
        self._buffers = [torch.empty(num_kv_heads, 0, 0, dtype=dtype)] * num_layers  # [num_kv_heads, room, max_chunks]
        self._rows = [0] * num_layers  # rows in the buffer
        self._ends = [0] * num_layers  # position behind the token of the last row
        self._chunks = [0] * num_layers  # chunks that rows are written up to, with zeros for those that came later

    def recent(self, layer: int, length: int) -> Tensor:
        """The rows `[num_kv_heads, rows, length // chunk_size]` of the last `RECENT_ROWS` of the first `length` tokens;
        fewer after a rollback beyond them, but at least one after the first `add`."""
        kept = max(1, self._rows_left(layer, length))
        return self._buffers[layer][:, max(0, kept - RECENT_ROWS) : kept, : length // self._chunk_size]

    def add(self, layer: int, start: int, stop: int, parts: Sequence[MassPart]) -> None:
        """Adds the rows of a pass behind those of tokens before `start`.

        Args:
            start, stop: positions of the pass's first token and behind its last.
            parts: of the last rows, in the order of chunks; chunks between them and before them got nothing.
        """
        shares, last = parts[0].shares, parts[-1]
        rows, chunks = shares.shape[1], min(last.first + last.shares.shape[2], -(-stop // self._chunk_size))
        # Rows are those of consecutive tokens: where a pass brings only its last ones, earlier ones are dropped.
        kept = max(0, self._rows_left(layer, start)) if rows == stop - start else 0
        kept = self._make_room(layer, kept, rows, shares.device)
        buffer, known = self._buffers[layer], self._chunks[layer]
        if chunks > known:
            buffer[:, :kept, known:chunks] = 0
            self._chunks[layer] = known = chunks
        new = buffer[:, kept : kept + rows]
        end = 0
        for part in parts:
            shares = part.shares if part.factors is None else part.shares * part.factors.unsqueeze(-1)
            if shares.shape[0] > self._num_kv_heads:
                shares = shares.unflatten(0, (self._num_kv_heads, -1)).mean(dim=1)
            new[..., end : part.first] = 0
            end = min(part.first + shares.shape[2], chunks)
            new[..., part.first : end] = shares[..., : end - part.first]
        if chunks < known:
            new[..., chunks:known] = 0
        self._rows[layer], self._ends[layer] = kept + rows, stop

    def held(self) -> Held:
        """See `offload.held`."""
        yield from (("mass", buffer) for buffer in self._buffers)

    def forget(self) -> None:
        """Drops all rows."""
        self._rows = [0] * len(self._rows)

    def _rows_left(self, layer: int, length: int) -> int:
        """How many of the rows belong to the first `length` tokens."""
        return self._rows[layer] - max(0, self._ends[layer] - length)

    def _make_room(self, layer: int, kept: int, rows: int, device: torch.device) -> int:
        """Makes room for `rows` rows behind the first `kept`. If they do not fit, the last few of those are moved to
        the front. Returns how many there are then."""
        buffer = self._buffers[layer]
        if kept + rows <= buffer.shape[1]:
            return kept
        last = min(kept, RECENT_ROWS - 1)
        moved = buffer[:, kept - last : kept, : self._chunks[layer]].clone()
        if last + rows > buffer.shape[1]:
            shape = self._num_kv_heads, RECENT_ROWS - 1 + max(rows, ROOM), self._max_chunks
            buffer = torch.empty(shape, dtype=self._dtype, device=device)
            self._buffers[layer] = buffer
        buffer[:, :last, : moved.shape[2]] = moved
        return last
