"""The full cache: every token's keys and values, exact, in blocks, attended block by block and merged.

Layout per layer: `[num_blocks, 2, num_kv_heads, block_size, head_dim]`, so that the keys and values of one block are
adjacent and contiguous, the unit that travels when the cache lives away from the compute device. Here it lives on the
compute device itself: a block is a view. Keys carry the rotation of their true position. A layer with a sliding window
keeps every token too, but attends only to the blocks its window reaches.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.attention import FEW_ROWS, Scratch, attend, merge_partials
from ..tp.config import ModelConfig
from ..tp.rope import Rope

LARGEST_BLOCK = 4096
"""Tokens of a block at most; short contexts use less, so that the ragged end costs little."""

RECENT_ROWS = 8
"""The last tokens, whose attention says which chunks matter."""

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
        keeps_mass: bool = True,
    ) -> None:
        """Reserves room for `capacity` tokens; memory is taken as tokens come. A block is whole chunks.

        Args: `keeps_mass`: whether to note the attention that chunks get, for a retrieval cache to choose by.
        """
        self.config = config
        self.chunk_size = chunk_size
        self._keeps_mass = keeps_mass
        self.block_size = block_size_for(capacity, chunk_size)
        self.bytes_read = 0
        """Bytes of keys and values attended so far."""
        self.read_s = 0.0
        """Seconds that took."""
        self._rope = rope
        self._dtype, self._device = dtype, device
        self._scale = config.head_dim**-0.5
        self._scratch = Scratch()
        self._mass: list[Tensor] = [torch.empty(config.num_kv_heads, 0, 0, device=device)] * config.num_layers
        self._mass_end = [0] * config.num_layers  # position after their last row
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

    def recent_mass(self, layer: int) -> Tensor:
        """The shares of attention that the last tokens gave to each whole chunk.

        `[num_kv_heads, rows, length // chunk_size]`: up to `RECENT_ROWS` rows, fewer after a rollback that reached
        beyond them, and at least one after the first `attend`; averaged over the query heads of a KV head.
        """
        kept = max(1, self._rows_left(layer, self.length))
        return self._mass[layer][:, max(0, kept - RECENT_ROWS) : kept, : self.length // self.chunk_size]

    def _rows_left(self, layer: int, length: int) -> int:
        """How many of the rows of mass belong to the first `length` tokens."""
        return self._mass[layer].shape[1] - max(0, self._mass_end[layer] - length)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        start, n = self._filled[layer], q.shape[1]
        q = self._rope.rotate(q, start)
        self._append(layer, self._rope.rotate(k, start), v)
        began = time.perf_counter()
        window = self.config.sliding_window(layer) or start + n
        first = max(0, start + 1 - window) // self.block_size  # blocks before it no row sees
        num_blocks = -(-(start + n) // self.block_size)
        rows = n if n <= FEW_ROWS else RECENT_ROWS  # any of a verification's rows may turn out to be the last
        mass = self._new_mass(num_blocks, first, rows, q) if self._keeps_mass else None
        row_lses: list[Tensor] = []
        outs: list[Tensor] = []
        lses: list[Tensor] = []
        for index in range(first, num_blocks):
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
                mass=None if mass is None else mass[index],
            )
            row_lses.append(lse[:, n - rows :])
            outs.append(out)
            lses.append(lse)
            if len(outs) == (_MERGE_AFTER if n <= FEW_ROWS else 2):
                out, lse = merge_partials(outs, lses)
                outs, lses = [out], [lse]
        out, lse = merge_partials(outs, lses)
        if mass is not None:
            mass[first:] *= torch.stack(row_lses).sub_(lse[:, n - rows :]).exp_().unsqueeze(-1)
            self._keep_mass(layer, start, mass)
        self.bytes_read += (start + n - first * self.block_size) * self.token_bytes // self.config.num_layers
        self.read_s += time.perf_counter() - began
        return out.to(q.dtype)

    def _new_mass(self, num_blocks: int, first: int, rows: int, q: Tensor) -> Tensor:
        """Room for shares `[num_blocks, num_heads, rows, chunks of a block]`; none goes to blocks before `first`."""
        shape = (num_blocks, q.shape[0], rows, self.block_size // self.chunk_size)
        mass = self._scratch.get("mass", shape, torch.promote_types(q.dtype, torch.float32), q.device)
        mass[:first].zero_()
        return mass

    def _keep_mass(self, layer: int, start: int, mass: Tensor) -> None:
        """Puts new rows of mass, `[num_blocks, num_heads, rows, chunks of a block]`, behind those still in; `start` is
        the position of the first token of this forward."""
        grouped = mass.unflatten(1, (self.config.num_kv_heads, -1))
        new = grouped.mean(dim=2).to(self._dtype).permute(1, 2, 0, 3).flatten(2)  # [num_kv_heads, rows, all chunks]
        kept = max(0, self._rows_left(layer, start))
        old = self._mass[layer][:, max(0, kept - RECENT_ROWS + 1) : kept, : new.shape[2]]
        old = F.pad(old, (0, new.shape[2] - old.shape[2]))
        self._mass[layer] = torch.cat((old, new), dim=1)
        self._mass_end[layer] = self._filled[layer]

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
