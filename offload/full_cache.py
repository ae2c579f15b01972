"""The full cache: every token's keys and values, exact, in blocks, attended block by block and merged.

Layout per layer: `[num_blocks, 2, num_kv_heads, block_size, head_dim]`, so that the keys and values of one block are
adjacent and contiguous, the unit that travels when the cache lives away from the compute device. Here it lives on the
compute device itself: a block is a view. Keys carry the rotation of their true position. A layer with a sliding window
keeps every token too, but attends only to the blocks its window reaches.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from ..kernels.attention import FEW_ROWS, Scratch, attend, merge_partials
from ..tp.config import ModelConfig
from ..tp.rope import Rope

LARGEST_BLOCK = 4096
"""Tokens of a block at most; short contexts use less, so that the ragged end costs little."""

RECENT_QUERIES = 16
"""Queries of the last tokens that are kept for scoring chunks."""

_MERGE_AFTER = 16
"""Partial results held before they are merged; for many rows two, as each is as large as the output."""


class FullCache:
    """Keys and values of every token. See `tp.decoder.Cache` for the interface."""

    def __init__(
        self,
        config: ModelConfig,
        rope: Rope,
        *,
        dtype: torch.dtype,
        device: torch.device,
        capacity: int,
        chunk_size: int = 1,
    ) -> None:
        """Reserves room for `capacity` tokens; memory is taken as tokens come. A block is whole chunks."""
        self.config = config
        self.block_size = block_size_for(capacity, chunk_size)
        self.bytes_read = 0
        """Bytes of keys and values attended so far."""
        self.read_s = 0.0
        """Seconds that took."""
        self._rope = rope
        self._dtype, self._device = dtype, device
        self._scale = config.head_dim**-0.5
        self._scratch = Scratch()
        self._queries: list[Tensor] = [torch.empty(0)] * config.num_layers
        self._queries_end = 0  # position after their last row
        self._filled = [0] * config.num_layers
        self._clean = [0] * config.num_layers  # leading blocks whose memory holds finite numbers throughout
        self._layers = self._allocate(-(-capacity // self.block_size))
        rope.reserve(capacity)

    def _allocate(self, num_blocks: int) -> list[Tensor]:
        c = self.config
        shape = (num_blocks, 2, c.num_kv_heads, self.block_size, c.head_dim)
        return [torch.empty(shape, dtype=self._dtype, device=self._device) for _ in range(c.num_layers)]

    @property
    def length(self) -> int:
        return self._filled[-1]

    @property
    def capacity(self) -> int:
        """Tokens there is room for."""
        return self._layers[0].shape[0] * self.block_size

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return self.config.kv_bytes_per_token(self._dtype)

    def keys(self, layer: int) -> Tensor:
        """A layer's keys, `[num_blocks, num_kv_heads, block_size, head_dim]`, a view."""
        return self._layers[layer][:, 0]

    def values(self, layer: int) -> Tensor:
        """A layer's values, laid out as its keys, a view."""
        return self._layers[layer][:, 1]

    def slice(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """The keys and values of tokens `start` to `stop`, each `[num_kv_heads, stop - start, head_dim]`."""
        parts = []
        for index in range(start // self.block_size, -(-stop // self.block_size)):
            offset = index * self.block_size
            parts.append(self._layers[layer][index][:, :, max(start - offset, 0) : stop - offset])
        k, v = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        return k, v

    def recent_queries(self, layer: int) -> Tensor:
        """Rotated queries of the last forward's last tokens that are still in, `[num_heads, n >= 1, head_dim]`."""
        queries = self._queries[layer]
        return queries[:, : max(1, queries.shape[1] - (self._queries_end - self.length))]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        start, n = self._filled[layer], q.shape[1]
        q = self._rope.rotate(q, start)
        self._append(layer, self._rope.rotate(k, start), v)
        self._queries[layer] = q[:, -RECENT_QUERIES:].clone() if n > RECENT_QUERIES else q
        self._queries_end = start + n
        began = time.perf_counter()
        outs: list[Tensor] = []
        lses: list[Tensor] = []
        window = self.config.sliding_window(layer) or start + n
        first = max(0, start + 1 - window) // self.block_size  # blocks before it no row sees
        for index in range(first, -(-(start + n) // self.block_size)):
            block = self._layers[layer][index]
            within = index * self.block_size > start + n - 1 - window  # every row sees all of it that is not ahead
            out, lse = attend(
                q,
                block[0],
                block[1],
                scale=self._scale,
                diagonal=start - index * self.block_size,
                window=None if within else window,
                scratch=self._scratch,
            )
            outs.append(out)
            lses.append(lse)
            if len(outs) == (_MERGE_AFTER if n <= FEW_ROWS else 2):
                out, lse = merge_partials(outs, lses)
                outs, lses = [out], [lse]
        out = merge_partials(outs, lses)[0].to(q.dtype)
        self.bytes_read += (start + n - first * self.block_size) * self.token_bytes // self.config.num_layers
        self.read_s += time.perf_counter() - began
        return out

    def _append(self, layer: int, k: Tensor, v: Tensor) -> None:
        position, stop = self._filled[layer], self._filled[layer] + k.shape[1]
        if stop > self.capacity:
            raise ValueError(f"the cache has room for {self.capacity} tokens, not for {stop}")
        taken = 0
        while position < stop:
            index, offset = divmod(position, self.block_size)
            block = self._layers[layer][index]
            n = min(stop - position, self.block_size - offset)
            block[0, :, offset : offset + n] = k[:, taken : taken + n]
            block[1, :, offset : offset + n] = v[:, taken : taken + n]
            if index >= self._clean[layer]:
                block[:, :, offset + n :].zero_()
                self._clean[layer] = index + 1
            position, taken = position + n, taken + n
        self._filled[layer] = stop

    def rollback(self, length: int) -> None:
        self._filled = [min(filled, length) for filled in self._filled]

    def take(self, other: FullCache, length: int) -> None:
        """Moves the first `length` tokens of `other` here, layer by layer. This cache was empty; `other` is now."""
        for layer in range(self.config.num_layers):
            if length:
                self._append(layer, *other.slice(layer, 0, length))
            other._layers[layer] = torch.empty(0)


def block_size_for(capacity: int, chunk_size: int) -> int:
    """Tokens of a block for a context of up to `capacity`: at most `LARGEST_BLOCK`, and hardly more room in all than
    asked for. A multiple of 64, then of `chunk_size`."""
    num_blocks = max(4, -(-capacity // LARGEST_BLOCK))
    size = -(-capacity // num_blocks // 64) * 64
    return -(-size // chunk_size) * chunk_size
