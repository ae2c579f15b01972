"""Keys and values of the last tokens, of layers with sliding windows in a model that has others without: on the device,
a few blocks of each layer, of which the oldest is written over.

A layer that has read them holds its window before every position of the last `window_slack` tokens, so that so many can
be rolled back, or left to another sequence that begins alike; one that was restored, before the next token. Blocks
begin at whole multiples of their size, wherever a sequence began, so attention sums keys in the same order as where all
of them are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...tp.model.config import ModelConfig
from ..held import Held
from ..limits import LIMITS, Limits
from ..transfer.device_blocks import write_tokens
from ..transfer.placement import window_blocks


@dataclass
class _LastBlocks:
    """Of one layer."""

    window: int
    blocks: Tensor
    """`[count, 2, num_kv_heads, block_size, head_dim]`; that of the tokens from `i * block_size` on is `i % count`."""
    first: int = 0
    """Tokens from this position on are there."""
    stop: int = 0
    """Position behind the last token that was written."""

    @property
    def size(self) -> int:
        """Tokens of a block."""
        return self.blocks.shape[3]

    def of(self, index: int) -> Tensor:
        """The block of tokens from `index * size` on."""
        return self.blocks[index % len(self.blocks)]

    def first_seen(self, length: int) -> int:
        """Position of the first token that the token at `length` sees."""
        return max(0, length + 1 - self.window)

    def write(self, start: int, k: Tensor, v: Tensor) -> None:
        """Writes tokens from `start` on over the oldest; of more than there is room for, the last."""
        size, room = self.size, len(self.blocks)
        stop = start + k.shape[1]
        oldest = max(0, (-(-stop // size) - room) * size)
        if oldest > start:
            k, v, start = k[:, oldest - start :], v[:, oldest - start :], oldest
        position = start
        while position < stop:
            index, offset = divmod(position, size)
            n = min(stop - position, size - offset)
            taken = slice(position - start, position - start + n)
            is_new = index > (self.stop - 1) // size
            write_tokens(self.of(index)[None], offset, k[:, taken], v[:, taken], 0 if is_new else 1)
            position += n
            self.stop = max(self.stop, position)
        self.first = max(self.first, (-(-self.stop // size) - room) * size)


class WindowBlocks:
    """Those of one sequence."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        chunk_size: int,
        limits: Limits = LIMITS,
    ) -> None:
        """Args: `config` is of a rank's part of the model; a block is whole chunks."""
        self._layers: dict[int, _LastBlocks] = {}
        for layer, window in config.kept_windows.items():
            count, size = window_blocks(window, chunk_size, limits)
            shape = count, 2, config.num_kv_heads, size, config.head_dim
            blocks = torch.empty(shape, dtype=dtype, device=device).zero_()  # now, so that it counts as taken
            self._layers[layer] = _LastBlocks(window, blocks)
        self._workspace: tuple[int, int, Tensor] | None = None
        """Of the layer that a pass over many tokens is at: which one, the position of the first token, and keys and
        values `[2, num_kv_heads, any, head_dim]`."""

    def held(self) -> Held:
        """See `offload.held`."""
        yield from (("windows", held.blocks) for held in self._layers.values())

    def reaches(self, length: int) -> bool:
        """Whether the token at this position has all that its windows see."""
        return all(held.first <= held.first_seen(length) and length <= held.stop for held in self._layers.values())

    def first_seen(self, layer: int, length: int) -> int:
        """Position of the first token that the token at `length` sees in a layer."""
        return self._layers[layer].first_seen(length)

    def append(self, layer: int, start: int, k: Tensor, v: Tensor) -> None:
        """Writes the keys and values `[num_kv_heads, n, head_dim]` of tokens `start` to `start + n`. Those of a pass
        over more than there is room for are there until the next call."""
        held = self._layers[layer]
        size, stop = held.size, start + k.shape[1]
        assert held.first <= held.first_seen(start) and start <= held.stop, "what comes before is gone"
        held.stop = min(held.stop, start)  # what was there behind is of a pass that was rolled back
        base = held.first_seen(start) // size * size
        self._workspace = None
        if -(-stop // size) - base // size > len(held.blocks):
            heads, _, head_dim = k.shape
            whole = k.new_empty(2, heads, -(-stop // size) * size - base, head_dim)
            for position, block in self._blocks(held, base, start):
                whole[:, :, position - base : position - base + size] = block
            whole[0, :, start - base : stop - base], whole[1, :, start - base : stop - base] = k, v
            whole[:, :, stop - base :].zero_()
            self._workspace = layer, base, whole
        held.write(start, k, v)

    def pieces(self, layer: int, first: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """The blocks that hold tokens `first` (or some before) to `stop` of those appended last or before; see
        `Blocks.pieces`."""
        if self._workspace is not None and self._workspace[0] == layer:
            _, base, whole = self._workspace
            self._workspace = None
            # One piece for flash kernels; float32, which they do not take, needs memory by the keys of a piece.
            step = whole.shape[2] if whole.dtype.itemsize == 2 else self._layers[layer].size
            for offset in range(0, whole.shape[2], step):
                yield base + offset, whole[:, :, offset : offset + step]
            return
        yield from self._blocks(self._layers[layer], first, stop)

    @staticmethod
    def _blocks(held: _LastBlocks, first: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        for index in range(first // held.size, -(-stop // held.size)):
            yield index * held.size, held.of(index)

    def slice(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the tokens `start` to `stop`, each `[num_kv_heads, stop - start, head_dim]`."""
        k, v = torch.cat(self._tokens(layer, start, stop), dim=2)
        return k, v

    def _tokens(self, layer: int, start: int, stop: int) -> list[Tensor]:
        """Them where they lie, in pieces `[2, num_kv_heads, any, head_dim]`."""
        found = self._blocks(self._layers[layer], start, stop)
        return [block[:, :, max(start - position, 0) : stop - position] for position, block in found]

    def gather(self, layer: int, chunks: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
        """Keys and values of `chunks` `[num_kv_heads, count]`, each `[num_kv_heads, count * chunk_size, head_dim]`.
        Those of chunks that no window reaches any more are of any others."""
        held = self._layers[layer]
        chunks = chunks.clamp(min=-(-held.first // chunk_size))
        within = torch.arange(chunk_size, device=chunks.device)
        positions = (chunks.unsqueeze(-1) * chunk_size + within).flatten(1)  # [num_kv_heads, count * chunk_size]
        heads = torch.arange(len(chunks), device=chunks.device).unsqueeze(1)
        index, offset = positions // held.size % len(held.blocks), positions % held.size
        return held.blocks[index, 0, heads, offset], held.blocks[index, 1, heads, offset]

    def copy_from(self, other: WindowBlocks, length: int) -> None:
        """Takes what another sequence's have of its first `length` tokens, which it reaches, or of none."""
        if not length:
            self.forget()
            return
        for layer, held in self._layers.items():
            theirs = other._layers[layer]
            held.blocks.copy_(theirs.blocks)
            held.first, held.stop = theirs.first, min(theirs.stop, length)

    def release(self) -> None:
        """Gives back what was taken for a pass over many tokens, which has ended."""
        self._workspace = None

    def forget(self) -> None:
        """Says that no token is there."""
        self.release()
        for held in self._layers.values():
            held.first = held.stop = 0

    def export(self, layer: int, start: int, stop: int) -> Callable[[], list[Tensor]]:
        """See `Blocks.export`. Those that are gone are zeros."""
        held = self._layers[layer]
        border = min(max(start, held.first), stop)
        there = [piece.clone().cpu() for piece in self._tokens(layer, border, stop)]
        _, _, heads, _, head_dim = held.blocks.shape
        gone = 2, heads, border - start, head_dim
        return lambda: [torch.zeros(gone, dtype=held.blocks.dtype), *there] if border > start else there

    def restore(self, layer: int, start: int, stop: int, read: Callable[[list[Tensor]], None]) -> None:
        """Takes tokens `start` to `stop` of a layer, of which it keeps the last, in place of all that were there; see
        `Blocks.restore`."""
        held = self._layers[layer]
        _, _, heads, _, head_dim = held.blocks.shape
        piece = torch.empty(2, heads, stop - start, head_dim, dtype=held.blocks.dtype)
        held.first = held.stop = start  # what is read may turn out to be damaged
        read([piece])
        k, v = piece.to(held.blocks.device)
        if start < stop:
            held.of(start // held.size).zero_()  # of which some before may be what was read and was damaged
        held.write(start, k, v)
        held.first = max(start, held.first_seen(stop))  # what is before that may not have been saved
