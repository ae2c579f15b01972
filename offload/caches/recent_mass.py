"""How much attention the last tokens gave to each chunk of a full cache: what a retrieval cache chooses by.

Rows come with the tokens and go with a rollback. They are kept in one buffer a layer, so that a forward writes its own
rows and moves hardly any.
"""

from __future__ import annotations

import torch
from torch import Tensor

RECENT_ROWS = 8
"""The last tokens, whose attention says which chunks matter."""

_ROOM = 16
"""Rows there is room for besides those that are kept, where a forward brings fewer."""


class RecentMass:
    """The shares of attention that the last tokens gave to chunks, by layer, averaged over a KV head's query heads."""

    def __init__(
        self, num_layers: int, num_kv_heads: int, max_chunks: int, chunk_size: int, dtype: torch.dtype
    ) -> None:
        self._num_kv_heads, self._max_chunks = num_kv_heads, max_chunks
        self._chunk_size, self._dtype = chunk_size, dtype
        self._buffers = [torch.empty(num_kv_heads, 0, 0, dtype=dtype)] * num_layers  # [num_kv_heads, room, max_chunks]
        self._rows = [0] * num_layers  # that are filled
        self._ends = [0] * num_layers  # position after the last of them
        self._chunks = [0] * num_layers  # that filled rows are written up to, with zeros where there was no such chunk

    def recent(self, layer: int, length: int) -> Tensor:
        """`[num_kv_heads, rows, length // chunk_size]`: the rows of up to `RECENT_ROWS` of the first `length` tokens'
        last, fewer after a rollback that reached beyond them, and at least one after the first `add`."""
        kept = max(1, self._rows_left(layer, length))
        return self._buffers[layer][:, max(0, kept - RECENT_ROWS) : kept, : length // self._chunk_size]

    def add(self, layer: int, start: int, stop: int, shares: Tensor) -> None:
        """Puts new rows behind those of tokens before `start`.

        Args:
            start, stop: positions of the forward's first token and behind its last.
            shares: `[num_heads, rows, chunks]`, of the last `rows` tokens.
        """
        rows, chunks = shares.shape[1], min(shares.shape[2], -(-stop // self._chunk_size))
        kept = max(0, self._rows_left(layer, start))
        kept = self._make_room(layer, kept, rows, shares.device)
        buffer, known = self._buffers[layer], self._chunks[layer]
        if chunks > known:
            buffer[:, :kept, known:chunks] = 0
            self._chunks[layer] = known = chunks
        new = buffer[:, kept : kept + rows]
        if shares.shape[0] > self._num_kv_heads:
            shares = shares.unflatten(0, (self._num_kv_heads, -1)).mean(dim=1)
        new[..., :chunks] = shares[..., :chunks]
        if chunks < known:
            new[..., chunks:known] = 0
        self._rows[layer], self._ends[layer] = kept + rows, stop

    def forget(self) -> None:
        """Drops all rows."""
        self._rows = [0] * len(self._rows)

    def _rows_left(self, layer: int, length: int) -> int:
        """How many of the rows belong to the first `length` tokens."""
        return self._rows[layer] - max(0, self._ends[layer] - length)

    def _make_room(self, layer: int, kept: int, rows: int, device: torch.device) -> int:
        """Makes room for `rows` rows behind `kept` ones, of which the last may be moved to the front; how many that
        are."""
        buffer = self._buffers[layer]
        if kept + rows <= buffer.shape[1]:
            return kept
        last = min(kept, RECENT_ROWS - 1)
        moved = buffer[:, kept - last : kept, : self._chunks[layer]].clone()
        if last + rows > buffer.shape[1]:
            room = RECENT_ROWS - 1 + max(rows, _ROOM)
            buffer = torch.empty(self._num_kv_heads, room, self._max_chunks, dtype=self._dtype, device=device)
            self._buffers[layer] = buffer
        buffer[:, :last, : moved.shape[2]] = moved
        return last
