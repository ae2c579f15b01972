"""Attention to the keys and values of one layer that lie in blocks, and the share of it that each chunk gets.

Blocks are attended one by one, in the order of their positions, each call of a step going on from the one before; where
the compiled kernels take all blocks of a layer, in one call. Both give the same bits, but for the many rows of a
prefill that flash kernels or PyTorch's operations compute. Where blocks are stored and how they move is not known here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from ...kernels.attention import Scratch, accumulates, attend, attend_blocks, merge_partials, new_running, takes_blocks
from ..held import Held, held_scratch
from .recent_mass import MassPart, Shares


@dataclass(frozen=True)
class QueryRows:
    """The query rows of a pass, and how much of their attention is to be noted."""

    q: Tensor
    """`[num_heads, n, head_dim]`, rotated."""
    start: int
    """Position of the first row; each row sees the keys up to its own position."""
    window: int
    """The number of keys, its own included, that a row sees at most."""
    mass_rows: int
    """The last rows whose attention is to be summed by chunk; 0 for none."""

    @property
    def stop(self) -> int:
        """Position behind the last row."""
        return self.start + self.q.shape[1]

    @property
    def first_key(self) -> int:
        """Position of the first key that any row sees."""
        return max(0, self.start + 1 - self.window)

    def of_mass(self, lse: Tensor) -> Tensor:
        """Of `lse` `[num_heads, n]` what is of the rows whose attention is to be summed: of many a copy, as what each
        block gives is kept until the last one has come."""
        rest = lse.shape[1] - self.mass_rows
        return lse[:, rest:].clone() if rest and self.mass_rows else lse[:, rest:]


class BlockAttention:
    """Attention of a pass's rows to the blocks of a layer.

    Both ways give the output `[num_heads, n, head_dim]`, in the rows' dtype; the log-sum-exp of the last rows,
    `[num_heads, mass_rows]`; and what these give to chunks, part by part, which holds until the next call.
    """

    def __init__(self, scale: float, chunk_size: int) -> None:
        """Args: `scale` is the factor on scores; `chunk_size` is in tokens; a block is whole chunks."""
        self._scale = scale
        self._chunk_size = chunk_size
        self._scratch, self._shares = Scratch(), Shares()

    def held(self) -> Held:
        """See `offload.held`."""
        yield from held_scratch(self._scratch)
        yield from self._shares.held()

    @staticmethod
    def takes_together(rows: QueryRows, blocks: Tensor) -> bool:
        """Whether `together` can be called with them."""
        return takes_blocks(rows.q, blocks)

    def together(self, rows: QueryRows, blocks: Tensor) -> tuple[Tensor, Tensor, list[MassPart]]:
        """Attends to `blocks` `[num_blocks, 2, num_kv_heads, block_size, head_dim]`, which begin at the first token."""
        chunks = -(-rows.stop // self._chunk_size)
        self._shares.begin()
        mass = self._shares.get(rows.q, rows.mass_rows, chunks) if rows.mass_rows else None
        visible = chunks * self._chunk_size  # what is behind the last token in its chunk is hidden by the diagonal
        out, lse = attend_blocks(
            rows.q, blocks, visible, scale=self._scale, diagonal=rows.start, window=rows.window, mass=mass, rounded=True
        )
        lse = rows.of_mass(lse)
        return out, lse, [] if mass is None else [MassPart(0, mass, lse)]

    def one_by_one(
        self, rows: QueryRows, blocks: Iterable[tuple[int, Tensor]]
    ) -> tuple[Tensor, Tensor, list[MassPart]]:
        """Attends to blocks in the order of their positions: that of the first token and `[2, num_kv_heads, any,
        head_dim]`."""
        self._shares.begin()
        parts: list[MassPart] = []
        running: Tensor | None = None
        whole: tuple[Tensor, Tensor] | None = None  # over the blocks so far
        for position, block in blocks:
            if whole is None and accumulates(rows.q, block):
                running = new_running(rows.q)
            in_every_window = position > rows.stop - 1 - rows.window
            chunks = block.shape[2] // self._chunk_size
            mass = self._shares.get(rows.q, rows.mass_rows, chunks) if rows.mass_rows else None
            out, lse = attend(
                rows.q,
                block[0],
                block[1],
                scale=self._scale,
                diagonal=rows.start - position,
                window=None if in_every_window else rows.window,
                scratch=self._scratch,
                mass=mass,
                running=running,
            )
            if mass is not None:
                parts.append(MassPart(position // self._chunk_size, mass, rows.of_mass(lse)))
            if running is None and whole is not None:
                out, lse = merge_partials((whole[0], out), (whole[1], lse))
            whole = out, lse
        assert whole is not None
        out, lse = whole
        return out.to(rows.q.dtype), rows.of_mass(lse), parts

    @staticmethod
    def in_one_piece(rows: QueryRows, blocks: Iterable[tuple[int, Tensor]]) -> Iterable[tuple[int, Tensor]]:
        """The same keys and values copied together, for flash kernels, whose result in 16 bits depends on where pieces
        end; as they are for other implementations."""
        coming = iter(blocks)
        position, block = next(coming)
        if accumulates(rows.q, block):
            return chain([(position, block)], coming)
        parts = [block.clone(), *(block.clone() for _, block in coming)]  # each is there until the next is asked for
        return [(position, torch.cat(parts, dim=2))]
