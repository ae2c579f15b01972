"""Where the full cache's blocks live: how large they are, how many stay on the device, and what streaming takes there.

Pure arithmetic. A block is a fixed run of positions of one layer, keys and values together; every layer has the same
number of blocks, and the first ones of each are the resident ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from ...kernels.slots import GROUP, Layout
from ...tp.model.config import ModelConfig
from ..limits import LIMITS, MOST_TOGETHER, Limits

SPLITS = (256, 512)
"""A block is whole splits of so many tokens, of the second number from `LONG` tokens on: the compiled kernels sum 256
keys together, those for GPUs 512, so that blocks that lie apart give the same bits as all keys in one place. Not where
the chunk size does not divide them."""

LONG = 16384

SMALLEST_COPY = 16 * 2**20
"""Bytes of a streamed block, rounded down to whole splits, where the context has so many: much smaller copies do not
fill a PCIe link."""


@dataclass(frozen=True)
class Placement:
    """Blocks of each layer, and how many of them stay on the device."""

    block_size: int
    """Tokens."""
    num_blocks: int
    num_resident: int
    open_tokens: int = 0
    """Room of each layer's open stretch, which holds the newest tokens on the device; 0 where nothing streams."""
    packed: bool = False
    """Whether blocks in host memory or on a disk are packed (`transfer.host_blocks`)."""
    num_disk: int = 0
    """Of the blocks that are not resident, those on a disk: the first ones, so that the newest are in memory."""
    num_spare: int = 0
    """Of the resident blocks, those that host memory has room for as well: the last ones. They can leave the device."""
    together: int = 1
    """Packed blocks that a buffer of the ring has room for: so many cross the link, and are attended, at once."""
    limits: Limits = LIMITS
    """What buffers, and passes over few tokens, keep to."""

    @classmethod
    def streaming(
        cls,
        capacity: int,
        block_size: int,
        num_resident: int,
        chunk_size: int,
        *,
        packed: bool = False,
        together: int = 1,
        limits: Limits = LIMITS,
    ) -> Placement:
        """Blocks for `capacity` tokens of which `num_resident` stay on the device, and the last one never."""
        num_blocks = -(-capacity // block_size)
        open_tokens = _whole_chunks(block_size + limits.open_slack, chunk_size)
        num_resident = min(num_resident, num_blocks - 1)
        return cls(block_size, num_blocks, num_resident, open_tokens, packed, together=together, limits=limits)

    @property
    def streams(self) -> bool:
        return self.num_resident < self.num_blocks

    @property
    def capacity(self) -> int:
        """Tokens there is room for."""
        return self.num_blocks * self.block_size

    @property
    def num_host(self) -> int:
        """Blocks of a layer in host memory."""
        return self.num_blocks - self.num_resident - self.num_disk

    @property
    def first_on_host(self) -> int:
        """The first block of a layer that there is room for in host memory, or on a disk."""
        return self.num_resident - self.num_spare

    @property
    def ring_buffers(self) -> int:
        """Buffers of the ring; 0 where nothing streams."""
        return min(self.limits.ring_buffers, self.num_blocks) if self.streams else 0

    @property
    def ring_blocks(self) -> int:
        """Blocks that the ring has memory for: one more buffer where they come packed."""
        return (self.ring_buffers + (self.packed and self.streams)) * self.together

    def host_block_bytes(self, part: ModelConfig, dtype: torch.dtype) -> int:
        """Bytes of a block of one layer in host memory, and over the link."""
        if self.packed:
            return block_slot(part.num_kv_heads, self.block_size, part.head_dim).slot_bytes
        return self.block_size * part.kv_bytes_per_token(dtype) // part.kv_layers

    @property
    def staging_buffers(self) -> int:
        """Blocks that staging has memory for, where there is any."""
        return self.limits.disk_buffers if self.num_disk else self.limits.staging_buffers

    def staging_bytes(self, part: ModelConfig, dtype: torch.dtype) -> int:
        """Bytes of the buffers that blocks on a disk are read into; those that do not pack fit there too."""
        block_bytes = self.block_size * part.kv_bytes_per_token(dtype) // part.kv_layers
        return self.staging_buffers * block_bytes if self.num_disk else 0

    def disk_blocks(self, context: int) -> int:
        """Blocks of a layer that are read from a disk in one pass over `context` tokens."""
        return min(self.num_disk, self.streamed_blocks(context))

    def streamed_blocks(self, context: int) -> int:
        """Blocks of a layer that cross the link in one pass over `context` tokens: the last one, which is not full yet,
        is in the open stretch."""
        return max(0, context // self.block_size - self.num_resident) if self.streams else 0


def block_slot(num_kv_heads: int, block_size: int, head_dim: int) -> Layout:
    """The slot of a packed block: keys and values of all heads in one."""
    return Layout(2 * num_kv_heads, block_size, head_dim)


def block_size_for(
    capacity: int, chunk_size: int, split: int | None = None, largest: int = LIMITS.largest_block
) -> int:
    """Tokens of a block for a context of up to `capacity`, with little more room in all than asked for: whole splits
    (of `split` tokens, if that is given), at most `largest`, and then as many more as whole chunks take."""
    split = split or _split(capacity)
    splits = -(-capacity // split)
    most = min(largest // split, -(-splits // 4))
    # Of the larger sizes the one that leaves the least room unused.
    size = min(range(most, most // 4, -1), key=lambda size: -splits % size)
    return _whole_chunks(size * split, chunk_size)


def window_blocks(window: int, chunk_size: int, limits: Limits = LIMITS) -> tuple[int, int]:
    """How many blocks a layer with such a sliding window has that keeps the last tokens only, and the tokens of one."""
    size = _whole_chunks(SPLITS[1], chunk_size)
    return -(-(window + limits.window_slack) // size) + 1, size


def window_bytes(part: ModelConfig, dtype: torch.dtype, chunk_size: int, limits: Limits = LIMITS) -> int:
    """Bytes of one sequence's keys and values in all such layers."""
    tokens = sum(prod(window_blocks(window, chunk_size, limits)) for window in part.kept_windows.values())
    return tokens * part.kv_bytes_per_token(dtype) // part.kv_layers


def place_resident(
    part: ModelConfig,
    dtype: torch.dtype,
    capacity: int,
    chunk_size: int,
    *,
    one_block: bool,
    limits: Limits = LIMITS,
) -> Placement:
    """Everything on the compute device.

    Args:
        part: one rank's part of the model.
        one_block: a layer is one block where that is possible, so that attention over it starts once. Not in float32,
            whose scores take memory in proportion to the block, nor with sliding windows, which skip whole blocks.
    """
    size = block_size_for(capacity, chunk_size, largest=limits.largest_block)
    num_blocks = -(-capacity // size)
    windows = any(part.sliding_window(layer) for layer in range(part.kv_layers))
    if one_block and dtype.itemsize == 2 and not windows:
        return Placement(num_blocks * size, 1, 1, limits=limits)
    return Placement(size, num_blocks, num_blocks, limits=limits)


def place_streamed(
    part: ModelConfig,
    dtype: torch.dtype,
    capacity: int,
    chunk_size: int,
    resident_bytes: float,
    *,
    on_gpu: bool,
    packed: bool = False,
    limits: Limits = LIMITS,
) -> Placement:
    """As many blocks on the device as `resident_bytes` hold, but not all; the others stream, packed if asked for. On a
    GPU they are whole splits of its kernels, however short the context, and what whole chunks take besides."""
    token_bytes = part.kv_bytes_per_token(dtype)
    split = SPLITS[1] if on_gpu else _split(capacity)
    smallest = max(1, SMALLEST_COPY * part.kv_layers // token_bytes // split) * split
    largest = block_size_for(capacity, chunk_size, split, limits.largest_block)
    size = min(largest, _whole_chunks(smallest, chunk_size))
    num_resident, packed = int(resident_bytes // (size * token_bytes)), packed and size % GROUP == 0
    together = limits.ring_bytes * part.kv_layers // (size * token_bytes) if packed and on_gpu else 1
    together = min(max(1, together), MOST_TOGETHER, max(1, -(-capacity // size) - num_resident))
    return Placement.streaming(
        capacity, size, num_resident, chunk_size, packed=packed, together=together, limits=limits
    )


def _split(capacity: int) -> int:
    return SPLITS[capacity >= LONG]


def _whole_chunks(tokens: int, chunk_size: int) -> int:
    return -(-tokens // chunk_size) * chunk_size
