"""The retrieval cache: a fixed budget of the most relevant chunks of a full cache, and everything since, in one buffer.

The drafting tier runs the target's own weights on it. Chunks are chosen per layer and KV head by the attention that the
last tokens gave them in the full cache; keys keep the rotation of their true position. Tokens since the choice form the
tail: exact once the full cache has seen them, the drafting tier's own until then.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.attention import Scratch, attend
from ..kernels.chunks import chunk_scores, gather_chunks, select_chunks
from ..tp.rope import Rope
from .full_cache import FullCache

_FIRST_TAIL = 64
"""Tokens of room behind the chunks; doubled whenever it runs out."""


class RetrievalCache:
    """A budget of chunks of `source` and the tail behind them. `refresh` must come before the first `attend`."""

    def __init__(self, source: FullCache, rope: Rope, *, budget: int, chunk_size: int) -> None:
        """Args: `budget` in tokens, of which whole chunks of `chunk_size` tokens are kept (at least one)."""
        self.source = source
        self.chunk_size = chunk_size
        self.max_chunks = max(1, budget // chunk_size)
        self._rope = rope
        self._scale = source.config.head_dim**-0.5
        self._scratch = Scratch()
        num_layers = source.config.num_layers
        self._buffers: list[tuple[Tensor, Tensor]] = []  # keys, values [num_kv_heads, room, head_dim] per layer
        self._kept = 0  # tokens in chunks, at the front of a buffer
        self._base = 0  # position of the first token of the tail
        self._exact = 0  # tokens before this position hold the full cache's own keys and values
        self._filled = [0] * num_layers

    @property
    def length(self) -> int:
        return self._filled[-1]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        start, n = self._filled[layer], q.shape[1]
        q = self._rope.rotate(q, start)
        slot = self._kept + start - self._base
        self._make_room(slot + n)
        keys, values = self._buffers[layer]
        keys[:, slot : slot + n] = self._rope.rotate(k, start)
        values[:, slot : slot + n] = v
        self._filled[layer] = start + n
        window = self.source.config.sliding_window(layer)  # two slots are never further apart than their positions
        if window is not None and window >= slot + n:
            window = None
        out, _ = attend(q, keys, values, scale=self._scale, diagonal=slot, window=window, scratch=self._scratch)
        return out.to(q.dtype)

    def rollback(self, length: int) -> None:
        """Forgets tokens from `length` on; if some of them were in chunks, the next `refresh` must come first."""
        self._filled = [min(filled, length) for filled in self._filled]
        self._exact = min(self._exact, length)

    @torch.inference_mode()
    def refresh(self) -> None:
        """Chooses the chunks anew by what `source` looked at last, and takes the tail behind them from it."""
        length = self.source.length
        num_chunks = length // self.chunk_size
        self._kept = min(self.max_chunks, num_chunks) * self.chunk_size
        self._base = self._exact = num_chunks * self.chunk_size
        self._make_room(self._kept + _FIRST_TAIL)
        for layer, (keys, values) in enumerate(self._buffers):
            if num_chunks:
                first = self._first_chunk(layer, length)
                scores = chunk_scores(self.source.recent_mass(layer)[:, :, first:])
                chosen = select_chunks(scores, self.max_chunks) + first
                keys[:, : self._kept] = gather_chunks(self.source.keys(layer), chosen, self.chunk_size)
                values[:, : self._kept] = gather_chunks(self.source.values(layer), chosen, self.chunk_size)
        self._filled = [self._base] * len(self._filled)
        self.adopt()

    @torch.inference_mode()
    def adopt(self) -> None:
        """Puts the full cache's keys and values in place of the tail's own, up to the last token it has seen."""
        length = self.source.length
        start, stop = self._kept + self._exact - self._base, self._kept + length - self._base
        self._make_room(stop)
        for layer, (keys, values) in enumerate(self._buffers):
            if stop > start:
                keys[:, start:stop], values[:, start:stop] = self.source.slice(layer, self._exact, length)
        self._exact = length
        self._filled = [max(filled, length) for filled in self._filled]

    def _first_chunk(self, layer: int, length: int) -> int:
        """The first chunk to choose from: with a sliding window the first that the token at `length` sees, but no later
        than leaves the budget full. Where the budget holds the whole window, `attend` hides what is before it."""
        window = self.source.config.sliding_window(layer) or length + 1
        return max(0, min((length + 1 - window) // self.chunk_size, length // self.chunk_size - self.max_chunks))

    def _make_room(self, slots: int) -> None:
        room = self._buffers[0][0].shape[1] if self._buffers else 0
        if slots <= room:
            return
        c = self.source.config
        wanted = max(slots, self._kept + 2 * (room - self._kept), self._kept + _FIRST_TAIL)
        shape = (c.num_kv_heads, wanted, c.head_dim)
        grown = []
        for layer in range(c.num_layers):
            pair = self.source.keys(layer).new_zeros(shape), self.source.keys(layer).new_zeros(shape)
            if self._buffers:
                for new, old in zip(pair, self._buffers[layer], strict=True):
                    new[:, :room] = old
            grown.append(pair)
        self._buffers = grown


def planned_budget(context: int, chunk_size: int) -> int:
    """The budget in tokens for a context of so many: about 3 %, from 256 to 4,096 (the published on-chip setting)."""
    budget = min(4096, max(256, context // 32))
    return budget // chunk_size * chunk_size or chunk_size
