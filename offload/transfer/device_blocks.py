"""Blocks of keys and values that all live on the compute device: a block is a view, and nothing moves.

Layout per layer: `[num_blocks, 2, num_kv_heads, block_size, head_dim]`, so that the keys and values of one block are
adjacent and contiguous, as they are where blocks travel (`streamed_blocks`). This is the CPU's own case, and a GPU's
whose memory holds the whole cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...kernels.chunks import gather_chunks
from ...kernels.layers import copy_rows
from ...tp.model.config import ModelConfig
from ...tp.pages import HUGE_PAGE, lasting_memory
from ..held import Held
from .link import Traffic
from .placement import Placement


@dataclass(frozen=True)
class PausedPass:
    """A pass over many tokens, between two of its slices."""

    state: tuple[int, ...]
    workspace: Tensor | None
    """Where the keys and values of the layer that it is at are collected."""


@dataclass(frozen=True)
class Footprint:
    """Bytes of blocks that `held` does not tell apart or does not know."""

    host: int = 0
    """Taken in host memory, where that is not the device's."""
    disk: int = 0
    """Taken on a disk, by what exceeds host memory."""
    spare: int = 0
    """On the device, of blocks that host memory has room for as well."""
    untouched: int = 0
    """On the device, of memory that no token has come to: a CPU's system counts it as free."""


class Blocks(Protocol):
    """Where the keys and values of a full cache are. Positions are tokens; layers come in ascending order."""

    block_size: int
    dtype: torch.dtype
    device: torch.device
    all_on_device: bool
    """Whether all blocks stay on the device, where chunks can be gathered at any time for next to nothing; else they
    are to be copied while their blocks pass."""

    @property
    def capacity(self) -> int:
        """Tokens there is room for."""
        ...

    @property
    def placement(self) -> Placement:
        """Where they are now."""
        ...

    def held(self) -> Held:
        """See `offload.held`: `resident_kv`, keys and values that live on the device, and what others pass through."""
        ...

    @property
    def footprint(self) -> Footprint: ...

    def offload(self, num_bytes: int) -> int:
        """Moves blocks to host memory that it has room for, between two passes, until at least so many bytes of the
        device are free or none is left; how many bytes are free then that were not. No token changes by it."""
        ...

    def traffic(self) -> Traffic:
        """What crossed a link, or was read from a disk, so far."""
        ...

    def prepare(
        self, start: int, n: int, *, rows: int | None = None, first_row: int | None = None, stop: int | None = None
    ) -> None:
        """Says that every layer's tokens `start` to `start + n` come next.

        Args: where rows of other sequences attend, too:
            rows: how many may come in several parts; default `n`.
            first_row: position of the first row; default `start`.
            stop: position behind the last token that rows attend to; default `start + n`.
        """
        ...

    def release(self) -> None:
        """Gives back what was taken for a pass over many tokens, which has ended."""
        ...

    def pause(self) -> PausedPass | None:
        """Sets the pass under way aside, one of more than `Limits.step_rows` where blocks stream: other sequences'
        passes may come before `resume` goes on with it."""
        ...

    def resume(self, paused: PausedPass | None) -> None:
        """Goes on with a pass that was set aside; what others attended to since is as it was."""
        ...

    def append(self, layer: int, start: int, k: Tensor, v: Tensor) -> None:
        """Writes the keys and values `[num_kv_heads, n, head_dim]` of tokens `start` to `start + n`."""
        ...

    def pieces(self, layer: int, first: int, stop: int, *, joined: bool = False) -> Iterator[tuple[int, Tensor]]:
        """The blocks that hold tokens `first` (or some before) to `stop`, in order: the position of a block's first
        token and the block, `[2, num_kv_heads, any, head_dim]`, on the device until the next one is asked for.

        Args: `joined`: whether blocks that lie together may come as one.
        """
        ...

    def at_once(self, layer: int) -> Tensor | None:
        """All blocks `[num_blocks, 2, num_kv_heads, block_size, head_dim]` where they lie on the device together."""
        ...

    def slice(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of tokens `start` to `stop`, each `[num_kv_heads, stop - start, head_dim]`, on the device."""
        ...

    def gather(self, layer: int, chunks: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
        """Keys and values of `chunks` `[num_kv_heads, count]`, each `[num_kv_heads, count * chunk_size, head_dim]`."""
        ...

    def rollback(self, length: int) -> None:
        """Says that tokens from `length` on are forgotten in every layer."""
        ...

    def drain(self) -> None:
        """Waits until no copy is under way, so that tokens can be exported or restored."""
        ...

    def export(self, layer: int, start: int, stop: int) -> Callable[[], list[Tensor]]:
        """What gives keys and values of tokens `start` to `stop` in host memory, in pieces `[2, num_kv_heads, any,
        head_dim]` in the order of positions. They stay as they are while tokens are added behind them. Packed ones are
        unpacked, which takes memory, when it is called."""
        ...

    def restore(self, layer: int, stop: int, read: Callable[[list[Tensor]], None]) -> None:
        """Takes the first `stop` tokens of a layer from elsewhere, in place of all that were there: `read` fills pieces
        `[2, num_kv_heads, any, head_dim]` in host memory, `stop` tokens in the order of positions. Layers may be
        restored at the same time by several threads."""
        ...

    def move_from(self, other: Blocks, length: int) -> bool:
        """Moves the first `length` tokens of `other` to these, which are empty, layer by layer, so that hardly any are
        held twice; whether that could be done. `other` must not be used afterwards."""
        ...


class DeviceBlocks:
    """Blocks on the compute device. See `Blocks`."""

    all_on_device = True

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, capacity: int, block_size: int
    ) -> None:
        """Reserves room for `capacity` tokens; on a CPU the system gives large ones memory as tokens come."""
        self.block_size, self.dtype, self.device = block_size, dtype, device
        shape = (-(-capacity // block_size), 2, config.num_kv_heads, block_size, config.head_dim)
        layers = range(config.num_layers)
        self._layers = [lasting_memory(shape, dtype, device) for _ in layers]
        self._clean = [0] * config.num_layers  # leading blocks whose memory holds finite numbers throughout

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
        num_blocks, size = self._layers[0].shape[0], self._layers[0].nbytes
        page = HUGE_PAGE if size >= HUGE_PAGE else 1
        touched = (-(-clean * (size // max(1, num_blocks)) // page) * page for clean in self._clean)
        return Footprint(untouched=sum(max(0, size - num_bytes) for num_bytes in touched))

    def offload(self, num_bytes: int) -> int:
        return 0

    def traffic(self) -> Traffic:
        return Traffic()

    def prepare(
        self, start: int, n: int, *, rows: int | None = None, first_row: int | None = None, stop: int | None = None
    ) -> None:
        pass

    def release(self) -> None:
        pass

    def pause(self) -> PausedPass | None:
        return None

    def resume(self, paused: PausedPass | None) -> None:
        pass

    def append(self, layer: int, start: int, k: Tensor, v: Tensor) -> None:
        self._clean[layer] = write_tokens(self._layers[layer], start, k, v, self._clean[layer])

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
        blocks = self._layers[layer]
        self._clean[layer] = 0  # what is read may turn out to be damaged
        places = pieces_of(blocks, 0, stop)
        pieces = [on_host(place) for place in places]
        read(pieces)
        for place, piece in zip(places, pieces, strict=True):
            if piece is not place:
                place.copy_(piece)
        if stop % self.block_size:
            blocks[stop // self.block_size][:, :, stop % self.block_size :].zero_()
        self._clean[layer] = -(-stop // self.block_size)

    def move_from(self, other: Blocks, length: int) -> bool:
        if not isinstance(other, DeviceBlocks):
            return False
        for layer in range(len(self._layers)):
            if length:
                self.append(layer, 0, *other.slice(layer, 0, length))
            other._layers[layer] = torch.empty(0)
        return True


def write_tokens(blocks: Tensor, start: int, k: Tensor, v: Tensor, clean: int) -> int:
    """Writes tokens from `start` on into `blocks` `[num_blocks, 2, num_kv_heads, block_size, head_dim]`.

    What lies behind them in a block that is entered for the first time (none of the `clean` leading ones) is zeroed:
    attention hides it, but it must be finite. Returns how many leading blocks are clean then.

    Raises:
        ValueError: there is no room for them.
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
    """Tokens `start` to `stop` of `blocks` `[num_blocks, 2, num_kv_heads, block_size, head_dim]` where they lie, in
    pieces `[2, num_kv_heads, any, head_dim]`."""
    if start >= stop:
        return []
    block_size = blocks[0].shape[2]
    return [
        blocks[index][:, :, max(start - index * block_size, 0) : stop - index * block_size]
        for index in range(start // block_size, -(-stop // block_size))
    ]


def on_host(place: Tensor) -> Tensor:
    """`place` itself where it is in host memory, else memory of its shape there."""
    return place if place.device.type == "cpu" else torch.empty(place.shape, dtype=place.dtype)
