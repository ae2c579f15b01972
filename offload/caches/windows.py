"""The keys and values of the last tokens, for layers with sliding windows in a model that also has layers without.

They are on the device. Each layer has a few blocks, and new tokens overwrite the oldest block. A layer that computed
its tokens holds the whole window before each of the last `window_slack` tokens. So this number of tokens can be rolled
back, or replaced by those of another sequence with the same beginning. A layer that was restored holds only the window
before the next token. Blocks begin at multiples of their size, wherever a sequence began. So attention sums keys in the
same order as in a layer that keeps all tokens.
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
    """The blocks of one layer."""

    window: int
    blocks: Tensor
    """`[count, 2, num_kv_heads, block_size, head_dim]`. The tokens from `i * block_size` on are in block `i %
    count`."""
    first: int = 0
    """Position of the first token that is kept."""
    stop: int = 0
    """Position of the last token that was written, plus 1."""

    @property
    def size(self) -> int:
        """Tokens of a block."""
        return self.blocks.shape[3]

    def of(self, index: int) -> Tensor:
        """The block of the tokens from `index * size` on."""
        return self.blocks[index % len(self.blocks)]

    def first_seen(self, length: int) -> int:
        """Position of the first token in the window of the token at `length`."""
        return max(0, length + 1 - self.window)

    def write(self, start: int, k: Tensor, v: Tensor) -> None:
        """Writes the tokens from `start` on over the oldest. If there are more than fit, writes only the last ones."""
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
    """The last tokens of one sequence in all layers that keep only these."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        chunk_size: int,
        limits: Limits = LIMITS,
    ) -> None:
        """Args: `config` is that of the rank's part of the model. A block consists of whole chunks."""
        self._layers: dict[int, _LastBlocks] = {}
        for layer, window in config.kept_windows.items():
            count, size = window_blocks(window, chunk_size, limits)
            shape = count, 2, config.num_kv_heads, size, config.head_dim
            blocks = torch.empty(shape, dtype=dtype, device=device).zero_()  # zeros, so that it counts as taken
            self._layers[layer] = _LastBlocks(window, blocks)
        self._workspace: tuple[int, int, Tensor] | None = None
        """In a pass over many tokens: the current layer, the position of the first token, and the keys and values
        `[2, num_kv_heads, any, head_dim]` of this layer."""

    def held(self) -> Held:
        """See `offload.held`."""
        yield from (("windows", held.blocks) for held in self._layers.values())

    def reaches(self, length: int) -> bool:
        """Whether the windows of the token at position `length` are complete in all layers."""
        return all(held.first <= held.first_seen(length) and length <= held.stop for held in self._layers.values())

    def first_seen(self, layer: int, length: int) -> int:
        """Position of the first token in a layer's window of the token at `length`."""
        return self._layers[layer].first_seen(length)

    def append(self, layer: int, start: int, k: Tensor, v: Tensor) -> None:
        """Writes the keys and values `[num_kv_heads, n, head_dim]` of tokens `start` to `start + n`. If there are more
        than fit into the blocks, all of them stay available until the next call."""
        held = self._layers[layer]
        size, stop = held.size, start + k.shape[1]
        assert held.first <= held.first_seen(start) and start <= held.stop, "the tokens before these are gone"
        held.stop = min(held.stop, start)  # later tokens belong to a pass that was rolled back
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
        """The blocks that hold tokens `first` (or some before) to `stop`, including those that were appended last. See
        `Blocks.pieces`."""
        if self._workspace is not None and self._workspace[0] == layer:
            _, base, whole = self._workspace
            self._workspace = None
            # Flash kernels get one piece. They do not support float32, for which memory grows with the keys of a piece.
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
        """Views of the tokens `start` to `stop`, in pieces `[2, num_kv_heads, any, head_dim]`."""
        found = self._blocks(self._layers[layer], start, stop)
        return [block[:, :, max(start - position, 0) : stop - position] for position, block in found]

    def gather(self, layer: int, chunks: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
        """Keys and values of `chunks` `[num_kv_heads, count]`, each `[num_kv_heads, count * chunk_size, head_dim]`.
        For chunks that no window reaches any more, the result has those of any other chunks."""
        held = self._layers[layer]
        chunks = chunks.clamp(min=-(-held.first // chunk_size))
        within = torch.arange(chunk_size, device=chunks.device)
        positions = (chunks.unsqueeze(-1) * chunk_size + within).flatten(1)  # [num_kv_heads, count * chunk_size]
        heads = torch.arange(len(chunks), device=chunks.device).unsqueeze(1)
        index, offset = positions // held.size % len(held.blocks), positions % held.size
        return held.blocks[index, 0, heads, offset], held.blocks[index, 1, heads, offset]

    def copy_from(self, other: WindowBlocks, length: int) -> None:
        """Copies what another sequence keeps of its first `length` tokens. `length` must be 0, or reachable in `other`
        (`reaches`)."""
        if not length:
            self.forget()
            return
        for layer, held in self._layers.items():
            theirs = other._layers[layer]
            held.blocks.copy_(theirs.blocks)
            held.first, held.stop = theirs.first, min(theirs.stop, length)

    def release(self) -> None:
        """Frees the memory that was taken for a pass over many tokens, after the pass has ended."""
        self._workspace = None

    def forget(self) -> None:
        """Forgets all tokens."""
        self.release()
        for held in self._layers.values():
            held.first = held.stop = 0

    def export(self, layer: int, start: int, stop: int) -> Callable[[], list[Tensor]]:
        """See `Blocks.export`. Tokens that are no longer kept are zeros."""
        held = self._layers[layer]
        border = min(max(start, held.first), stop)
        there = [piece.clone().cpu() for piece in self._tokens(layer, border, stop)]
        _, _, heads, _, head_dim = held.blocks.shape
        gone = 2, heads, border - start, head_dim
        return lambda: [torch.zeros(gone, dtype=held.blocks.dtype), *there] if border > start else there

    def restore(self, layer: int, start: int, stop: int, read: Callable[[list[Tensor]], None]) -> None:
        """Replaces all tokens of a layer by tokens `start` to `stop`, of which it keeps the last. See
        `Blocks.restore`."""
        held = self._layers[layer]
        _, _, heads, _, head_dim = held.blocks.shape
        piece = torch.empty(2, heads, stop - start, head_dim, dtype=held.blocks.dtype)
        held.first = held.stop = start  # no tokens, in case the data that are read turn out to be damaged
        read([piece])
        k, v = piece.to(held.blocks.device)
        if start < stop:
            held.of(start // held.size).zero_()  # it may have damaged data of an earlier attempt before `start`
        held.write(start, k, v)
        held.first = max(start, held.first_seen(stop))  # earlier tokens may not have been saved
