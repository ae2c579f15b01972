"""The full cache: every token's keys and values, exact, attended block by block and merged.

Where the blocks are is the business of `device_blocks` or `streamed_blocks`; here they are attended as they come, in
any order. Keys carry the rotation of their true position. A layer with a sliding window keeps every token too, but
attends only to the blocks its window reaches.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.attention import FEW_ROWS, Scratch, attend, merge_partials
from ...kernels.cpu.attention import attend_blocks, takes_blocks
from ...tp.model.config import ModelConfig
from ...tp.model.rope import Rope
from ..planning.placement import block_size_for
from ..transfer.device_blocks import Blocks, DeviceBlocks
from .recent_mass import RECENT_ROWS, RecentMass

_MERGE_AFTER = 16
"""Partial results held before they are merged; for many rows two, as each is as large as the output."""


class FullCache:
    """Keys and values of every token. See `tp.decoder.Cache` for the interface."""

    def __init__(
        self, config: ModelConfig, rope: Rope, blocks: Blocks, *, chunk_size: int = 1, keeps_mass: bool = True
    ) -> None:
        """Args:
        config: of the rank's part of the model.
        blocks: where keys and values are, empty; a block is whole chunks.
        keeps_mass: whether to note the attention that chunks get, for a retrieval cache to choose by.
        """
        self.config = config
        self.blocks = blocks
        self.chunk_size = chunk_size
        self.on_piece: Callable[[int, int, Tensor], None] | None = None
        """Called with layer, position of the first token, and `[2, num_kv_heads, any, head_dim]`, of each block as it
        passes."""
        self.bytes_read = 0
        """Bytes of keys and values attended so far."""
        self.read_s = 0.0
        """Seconds that took; on a GPU, which works on its own, it is not known and stays 0."""
        self._keeps_mass = keeps_mass
        self._rope = rope
        self._scale = config.head_dim**-0.5
        self._scratch = Scratch()
        max_chunks = -(-blocks.capacity // chunk_size)
        self._mass = RecentMass(config.num_layers, config.num_kv_heads, max_chunks, chunk_size, blocks.dtype)
        self._filled = [0] * config.num_layers
        rope.reserve(blocks.capacity)

    @property
    def length(self) -> int:
        return self._filled[-1]

    @classmethod
    def on_device(
        cls,
        config: ModelConfig,
        rope: Rope,
        *,
        dtype: torch.dtype,
        device: torch.device,
        capacity: int,
        chunk_size: int = 1,
        keeps_mass: bool = True,
    ) -> FullCache:
        """A cache with room for `capacity` tokens, all of them on the compute device."""
        size = block_size_for(capacity, chunk_size)
        blocks = DeviceBlocks(config, dtype=dtype, device=device, capacity=capacity, block_size=size)
        return cls(config, rope, blocks, chunk_size=chunk_size, keeps_mass=keeps_mass)

    @property
    def capacity(self) -> int:
        """Tokens there is room for."""
        return self.blocks.capacity

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return self.config.kv_bytes_per_token(self.blocks.dtype)

    def begin(self, *, keeps_mass: bool) -> None:
        """Begins a run on what is there, with or without a retrieval cache that `keeps_mass` is for."""
        self.on_piece = None
        if not keeps_mass:  # what is there would be older than the last tokens
            self._mass.forget()
        self._keeps_mass = keeps_mass

    def prepare(self, n: int) -> None:
        self.blocks.prepare(self.length, n)

    def recent_mass(self, layer: int) -> Tensor:
        """The shares of attention that the last tokens gave to each whole chunk.

        `[num_kv_heads, rows, length // chunk_size]`: up to `RECENT_ROWS` rows, fewer after a rollback that reached
        beyond them, and at least one after the first `attend`; averaged over the query heads of a KV head.
        """
        return self._mass.recent(layer, self.length)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        start, n = self._filled[layer], q.shape[1]
        q = self._rope.rotate(q, start)
        self.blocks.append(layer, start, self._rope.rotate(k, start), v)
        self._filled[layer] = start + n
        began = time.perf_counter()
        window = self.config.sliding_window(layer) or start + n
        first = max(0, start + 1 - window)  # no row sees anything before it
        rows = n if n <= FEW_ROWS else RECENT_ROWS  # any of a verification's rows may turn out to be the last
        at_once = self.blocks.at_once(layer)
        if at_once is not None and takes_blocks(q, at_once):
            out, read = self._attend_at_once(layer, q, at_once, start, window, rows), start + n - first
        else:
            out, read = self._attend_pieces(layer, q, start, first, window, rows)
        self.bytes_read += read * self.token_bytes // self.config.num_layers
        if self.blocks.device.type == "cpu":
            self.read_s += time.perf_counter() - began
        return out.to(q.dtype)

    def _attend_at_once(self, layer: int, q: Tensor, blocks: Tensor, start: int, window: int, rows: int) -> Tensor:
        stop = start + q.shape[1]
        chunks = -(-stop // self.chunk_size)
        mass = self._room_for_mass("mass", q, rows, chunks) if self._keeps_mass else None
        visible = chunks * self.chunk_size  # what is behind the last token in its chunk is hidden by the diagonal
        out, _ = attend_blocks(q, blocks, visible, scale=self._scale, diagonal=start, window=window, mass=mass)
        if mass is not None:
            self._mass.add(layer, start, stop, mass)
        return out

    def _attend_pieces(
        self, layer: int, q: Tensor, start: int, first: int, window: int, rows: int
    ) -> tuple[Tensor, int]:
        """Attends block by block, as they come; also returns how many tokens that were."""
        n = q.shape[1]
        masses: list[_Mass] = []
        outs: list[Tensor] = []
        lses: list[Tensor] = []
        read = 0
        for position, block in self.blocks.pieces(layer, first, start + n):
            if self.on_piece:
                self.on_piece(layer, position, block)
            within = position > start + n - 1 - window  # every row sees all of it that is not ahead
            chunks = block.shape[2] // self.chunk_size
            mass = self._room_for_mass(f"mass {len(masses)}", q, rows, chunks) if self._keeps_mass else None
            out, lse = attend(
                q,
                block[0],
                block[1],
                scale=self._scale,
                diagonal=start - position,
                window=None if within else window,
                scratch=self._scratch,
                mass=mass,
            )
            if mass is not None:
                masses.append(_Mass(position, mass, lse[:, n - rows :]))
            outs.append(out)
            lses.append(lse)
            read += min(block.shape[2], start + n - position)
            if len(outs) == (_MERGE_AFTER if n <= FEW_ROWS else 2):
                out, lse = merge_partials(outs, lses)
                outs, lses = [out], [lse]
        out, lse = merge_partials(outs, lses)
        if masses:
            self._mass.add(layer, start, start + n, self._join(masses, lse[:, n - rows :]))
        return out, read

    def _room_for_mass(self, name: str, q: Tensor, rows: int, chunks: int) -> Tensor:
        dtype = torch.promote_types(q.dtype, torch.float32)
        return self._scratch.get(name, (q.shape[0], rows, chunks), dtype, q.device)

    def _join(self, masses: list[_Mass], lse: Tensor) -> Tensor:
        """The shares `[num_heads, rows, chunks]` of all blocks' chunks from those of each.

        Args:
            masses: of the blocks, in any order.
            lse: `[num_heads, rows]`, of each row over all blocks.
        """
        masses.sort(key=lambda mass: mass.position)
        parts = [torch.zeros(lse.shape[0], lse.shape[1], masses[0].position // self.chunk_size, device=lse.device)]
        parts += [mass.shares.mul_((mass.lse - lse).exp_().unsqueeze(-1)) for mass in masses]
        return torch.cat(parts, dim=-1)

    def pretend(self, length: int) -> None:
        """Says that `length` tokens are there, all zeros: for measuring what they cost. The cache was empty."""
        self.blocks.pretend(length)
        self._filled = [length] * len(self._filled)

    def move_from(self, other: FullCache, length: int) -> None:
        """Moves the first `length` tokens of `other` here, if that can be done. This was empty; `other` is now."""
        if self.blocks.move_from(other.blocks, length):
            self._filled = [length] * len(self._filled)

    def rollback(self, length: int) -> None:
        self._filled = [min(filled, length) for filled in self._filled]
        self.blocks.rollback(self.length)


@dataclass
class _Mass:
    """What the last rows gave to the chunks of one block."""

    position: int
    """Of the block's first token."""
    shares: Tensor
    """`[num_heads, rows, chunks]`, of each row's attention within the block."""
    lse: Tensor
    """`[num_heads, rows]`, of each row within the block."""
