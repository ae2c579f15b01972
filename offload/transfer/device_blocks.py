"""Blocks of keys and values that are all on the compute device: a block is a view, and nothing moves.

The layout of a layer is `[num_blocks, 2, num_kv_heads, block_size, head_dim]`. So the keys and values of one block are
adjacent and contiguous, as for blocks that stream (`streamed_blocks`). This is used on a CPU, and on a GPU whose memory
holds the whole cache.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from ...kernels.chunks import gather_chunks
from ...kernels.layers import copy_rows
from ...kernels.selection import STEP_ROWS
from ...tp.model.config import ModelConfig
from ...tp.pages import HUGE_PAGE, has_huge_pages, in_new_pages, lasting_memory
from ..held import Held
from .link import Traffic
from .placement import Placement


@dataclass(frozen=True)
class PausedPass:
    """The state of a paused pass over many tokens, between two of its slices."""

    state: tuple[int, ...]
    workspace: Tensor | None
    """The workspace with the keys and values of the current layer."""


@dataclass(frozen=True)
class Footprint:
    """Bytes of blocks that `held` does not show, or does not show separately."""

    host: int = 0
    """Bytes taken in host memory, if the device is not the host."""
    disk: int = 0
    """Bytes taken on a disk, for blocks for which host memory has no room."""
    spare: int = 0
    """Bytes on the device of resident blocks for which host memory has room, too."""
    untouched: int = 0
    """Bytes on the device that no token has used yet. On a CPU, the system counts this memory as free."""


class Blocks(Protocol):
    """The blocks of a full cache. Positions are in tokens. Layers come in ascending order."""

    block_size: int
    dtype: torch.dtype
    device: torch.device
    all_on_device: bool
    """Whether all blocks stay on the device. If so, gathering chunks costs very little at any time. If not, chunks
    should be copied while their blocks stream."""

    @property
    def capacity(self) -> int:
        """The maximum number of tokens."""
        ...

    @property
    def placement(self) -> Placement:
        """The present placement of the blocks."""
        ...

    def held(self) -> Held:
        """See `offload.held`: `resident_kv`, keys and values that stay on the device, and the buffers through which
        other blocks stream."""
        ...

    @property
    def footprint(self) -> Footprint:
        """See `Footprint`: bytes that `held` does not show, or does not show separately."""
        ...

    def offload(self, num_bytes: int) -> int:
        """Moves resident blocks for which host memory has room off the device, between two passes. Stops when at least
        `num_bytes` of the device are freed, or no such block is left. Keys and values do not change.

        Returns:
            The bytes of the device that were freed.
        """
        ...

    def traffic(self) -> Traffic:
        """What crossed the link, and what was read from a disk and written to it, so far."""
        ...

    def prepare(
        self, start: int, n: int, *, rows: int | None = None, first_row: int | None = None, stop: int | None = None
    ) -> None:
        """Announces a pass in which tokens `start` to `start + n` are added to every layer.

        Args: if rows of other sequences attend to these blocks, too:
            rows: number of rows, which may come in several parts; default `n`.
            first_row: position of the first row; default `start`.
            stop: position of the last token to which rows attend, plus 1; default `start + n`.
        """
        ...

    def release(self) -> None:
        """Frees the memory that was taken for a pass over many tokens, after the pass has ended."""
        ...

    def pause(self) -> PausedPass | None:
        """Pauses the current pass, so that passes of other sequences can run before `resume`. If blocks stream, only a
        pass of more than `Limits.step_rows` rows can be paused."""
        ...

    def resume(self, paused: PausedPass | None) -> None:
        """Continues a paused pass. The tokens to which others attended in the meantime must not have changed."""
        ...

    def append(self, layer: int, start: int, k: Tensor, v: Tensor) -> None:
        """Writes the keys and values `[num_kv_heads, n, head_dim]` of tokens `start` to `start + n`."""
        ...

    def pieces(self, layer: int, first: int, stop: int, *, joined: bool = False) -> Iterator[tuple[int, Tensor]]:
        """Yields the blocks that hold tokens `first` (or some before) to `stop`, in order: the position of the block's
        first token, and the block `[2, num_kv_heads, any, head_dim]`. A block is on the device until the next one is
        requested.

        Args: `joined` is whether adjacent blocks may come as one.
        """
        ...

    def at_once(self, layer: int) -> Tensor | None:
        """All blocks of a layer, `[num_blocks, 2, num_kv_heads, block_size, head_dim]`; `None` if they are not in one
        tensor on the device."""
        ...

    def slice(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of tokens `start` to `stop`, each `[num_kv_heads, stop - start, head_dim]`, on the device."""
        ...

    def gather(self, layer: int, chunks: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
        """Keys and values of `chunks` `[num_kv_heads, count]`, each `[num_kv_heads, count * chunk_size, head_dim]`."""
        ...

    def rollback(self, length: int) -> None:
        """Forgets the tokens from `length` on in every layer."""
        ...

    def drain(self) -> None:
        """Waits until no copy is in progress, so that tokens can be exported or restored."""
        ...

    def export(self, layer: int, start: int, stop: int) -> Callable[[], list[Tensor]]:
        """A function that returns the keys and values of tokens `start` to `stop` in host memory.

        It returns pieces `[2, num_kv_heads, any, head_dim]` in the order of positions. They do not change while later
        tokens are added. Packed blocks are unpacked when the function is called; this takes memory.
        """
        ...

    def restore(self, layer: int, stop: int, read: Callable[[list[Tensor]], None]) -> None:
        """Replaces all tokens of a layer by `stop` tokens from elsewhere. Several threads may restore different layers
        at the same time.

        Args: `read` fills pieces `[2, num_kv_heads, any, head_dim]` in host memory, which hold `stop` tokens in the
            order of positions.
        """
        ...

    def move_from(self, other: Blocks, length: int) -> bool:
        """Moves the first `length` tokens of `other` to these empty blocks. Returns whether this was possible.

        Layers are moved one by one, so that hardly any tokens are in memory twice. `other` must not be used afterwards.
        """
        ...


_NO_TRAFFIC = Traffic()


class DeviceBlocks:
    """Blocks on the compute device. See `Blocks`."""

    all_on_device = True

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, capacity: int, block_size: int
    ) -> None:
        """Reserves room for `capacity` tokens. On a CPU, the system allocates memory of large blocks when tokens
        come."""
        self.block_size, self.dtype, self.device = block_size, dtype, device
        shape = (-(-capacity // block_size), 2, config.num_kv_heads, block_size, config.head_dim)
        layers = range(config.num_layers)
        self._layers = [lasting_memory(shape, dtype, device) for _ in layers]
        self._in_new_pages = list(map(in_new_pages, self._layers))
        self._clean = [0] * config.num_layers  # number of first blocks that have only finite values
        # By layer: the number of first blocks that may have other values behind their tokens. New pages are zeros, and
        # are not touched only to fill them with zeros; but what is restored from a damaged file may stay in them.
        self._doubtful = [0 if new else len(one) for one, new in zip(self._layers, self._in_new_pages, strict=True)]
        self._touched = [0] * config.num_layers  # the maximum number of tokens so far, without those of steps
        self._stepped = 0  # the position behind the last token of a step, in any layer
        self._footprint: tuple[list[int], Footprint] | None = None  # and the tokens by layer when it was computed

    @property
    def capacity(self) -> int:
        return self._layers[0].shape[0] * self.block_size

    @property
    def placement(self) -> Placement:
        num_blocks = self._layers[0].shape[0]
        return Placement(self.block_size, num_blocks, num_blocks)

    def held(self) -> Held:
        yield from (("resident_kv", blocks) for blocks in self._layers)

    @property
    def footprint(self) -> Footprint:
        touched = [max(tokens, self._stepped) for tokens in self._touched]
        if self._footprint is None or self._footprint[0] != touched:
            layers = zip(self._layers, touched, self._in_new_pages, strict=True)
            untouched = sum(self._untouched_bytes(blocks, tokens) for blocks, tokens, new in layers if new)
            self._footprint = touched, Footprint(untouched=untouched)
        return self._footprint[1]

    def _untouched_bytes(self, blocks: Tensor, tokens: int) -> int:
        """The bytes of a layer's pages that none of its first `tokens` tokens has touched."""
        page = HUGE_PAGE if blocks.nbytes >= HUGE_PAGE and has_huge_pages() else mmap.PAGESIZE
        whole, rest = divmod(tokens, self.block_size)
        block = blocks.nbytes // max(1, len(blocks))
        part = block // max(1, prod(blocks.shape[1:3]))  # keys, or values, of a head in a block
        begun = -(-rest * (part // self.block_size) // page) * page
        touched = whole * block + (block // max(1, part)) * min(part, begun)
        return max(0, blocks.nbytes - -(-touched // page) * page)

    def offload(self, num_bytes: int) -> int:
        return 0

    def traffic(self) -> Traffic:
        return _NO_TRAFFIC

    def prepare(
        self, start: int, n: int, *, rows: int | None = None, first_row: int | None = None, stop: int | None = None
    ) -> None:
        if n <= STEP_ROWS:  # a prepared step writes them without `append`
            self._stepped = max(self._stepped, start + n)

    def release(self) -> None:
        pass

    def pause(self) -> PausedPass | None:
        return None

    def resume(self, paused: PausedPass | None) -> None:
        pass

    def append(self, layer: int, start: int, k: Tensor, v: Tensor) -> None:
        blocks, clean = self._layers[layer], self._clean[layer]
        stop = start + k.shape[1]
        write_tokens(blocks, start, k, v, clean if clean < self._doubtful[layer] else len(blocks))
        self._clean[layer] = max(clean, -(-stop // self.block_size))
        self._touched[layer] = max(self._touched[layer], stop)

    def pieces(self, layer: int, first: int, stop: int, *, joined: bool = False) -> Iterator[tuple[int, Tensor]]:
        for index in range(first // self.block_size, -(-stop // self.block_size)):
            yield index * self.block_size, self._layers[layer][index]

    def at_once(self, layer: int) -> Tensor | None:
        return self._layers[layer]

    def slice(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        return read_tokens(self._layers[layer], start, stop)

    def gather(self, layer: int, chunks: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
        blocks = self._layers[layer]
        return gather_chunks(blocks[:, 0], chunks, chunk_size), gather_chunks(blocks[:, 1], chunks, chunk_size)

    def rollback(self, length: int) -> None:
        pass

    def drain(self) -> None:
        pass

    def export(self, layer: int, start: int, stop: int) -> Callable[[], list[Tensor]]:
        pieces = [piece.cpu() for piece in pieces_of(self._layers[layer], start, stop)]
        return lambda: pieces

    def restore(self, layer: int, stop: int, read: Callable[[list[Tensor]], None]) -> None:
        blocks, doubtful, whole = self._layers[layer], self._doubtful[layer], -(-stop // self.block_size)
        self._clean[layer] = 0  # in case the data that are read turn out to be damaged, here or later
        self._doubtful[layer] = max(doubtful, whole)
        places = pieces_of(blocks, 0, stop)
        pieces = [on_host(place) for place in places]
        read(pieces)
        for place, piece in zip(places, pieces, strict=True):
            if piece is not place:
                place.copy_(piece)
        if stop % self.block_size and whole <= doubtful:
            blocks[stop // self.block_size][:, :, stop % self.block_size :].zero_()
        self._clean[layer], self._touched[layer] = whole, max(self._touched[layer], stop)

    def move_from(self, other: Blocks, length: int) -> bool:
        if not isinstance(other, DeviceBlocks):
            return False
        for layer in range(len(self._layers)):
            if length:
                self.append(layer, 0, *other.slice(layer, 0, length))
            other._layers[layer] = torch.empty(0)
        other._footprint = None
        return True


def write_tokens(blocks: Tensor, start: int, k: Tensor, v: Tensor, clean: int) -> int:
    """Writes tokens from `start` on into `blocks` `[num_blocks, 2, num_kv_heads, block_size, head_dim]`.

    When a token is the first in its block (a block after the first `clean` ones), the rest of the block is filled with
    zeros: attention hides it, but it must be finite.

    Returns:
        How many first blocks are clean afterwards.

    Raises:
        ValueError: the blocks have no room for these tokens.
    """
    block_size = blocks.shape[3]
    position, stop, taken = start, start + k.shape[1], 0
    if stop > blocks.shape[0] * block_size:
        raise ValueError(f"the cache has room for {blocks.shape[0] * block_size} tokens, not for {stop}")
    while position < stop:
        index, offset = divmod(position, block_size)
        block = blocks[index]
        n = min(stop - position, block_size - offset)
        for x, half in ((k, block[0]), (v, block[1])):
            copy_rows(x[:, taken : taken + n], half[:, offset : offset + n])
        if index >= clean:
            block[:, :, offset + n :].zero_()
            clean = index + 1
        position, taken = position + n, taken + n
    return clean


def read_tokens(blocks: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Keys and values of tokens `start` to `stop` of `blocks`, each `[num_kv_heads, stop - start, head_dim]`."""
    parts = pieces_of(blocks, start, stop)
    k, v = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    return k, v


def pieces_of(blocks: Tensor | Sequence[Tensor], start: int, stop: int) -> list[Tensor]:
    """Views of tokens `start` to `stop` of `blocks` `[num_blocks, 2, num_kv_heads, block_size, head_dim]`, in pieces
    `[2, num_kv_heads, any, head_dim]`."""
    if start >= stop:
        return []
    block_size = blocks[0].shape[2]
    return [
        blocks[index][:, :, max(start - index * block_size, 0) : stop - index * block_size]
        for index in range(start // block_size, -(-stop // block_size))
    ]


def on_host(place: Tensor) -> Tensor:
    """`place` itself if it is in host memory, otherwise new host memory of the same shape and dtype."""
    return place if place.device.type == "cpu" else torch.empty(place.shape, dtype=place.dtype)
