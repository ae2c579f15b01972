"""The placement of the full cache's blocks: their size, how many stay on the device, and what streaming takes there.

This module only computes numbers. A block has a fixed number of consecutive positions of one layer, with their keys and
values. Every layer has the same number of blocks. The first blocks of each layer are the resident ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from ...kernels.slots import GROUP, Layout
from ...tp.model.config import ModelConfig
from ..limits import LIMITS, MOST_TOGETHER, Limits

SPLITS = (256, 512)
"""A block consists of whole splits of this number of tokens; of the second number for contexts from `LONG` tokens on.
The compiled kernels sum 256 keys together, those for GPUs 512. So separate blocks give the same bits as all keys in one
place. This does not hold if splits are not whole chunks."""

LONG = 16384
"""Tokens."""

SMALLEST_COPY = 16 * 2**20
"""Minimum bytes of a streamed block, rounded down to whole splits, if the context is large enough. Much smaller copies
do not use the full bandwidth of a PCIe link."""


@dataclass(frozen=True)
class Placement:
    """The number and size of each layer's blocks, and where they are."""

    block_size: int
    """Tokens of a block."""
    num_blocks: int
    """Blocks of a layer."""
    num_resident: int
    """Blocks of a layer that stay on the device: the first ones."""
    open_tokens: int = 0
    """Tokens for which each layer's open stretch has room. It holds the newest tokens on the device; 0 if nothing
    streams."""
    packed: bool = False
    """Whether blocks in host memory or on a disk are packed (`transfer.host_blocks`)."""
    num_disk: int = 0
    """Blocks of a layer on a disk: the first ones that are not resident, so that the newest blocks are in memory."""
    num_spare: int = 0
    """Resident blocks of a layer for which host memory has room, too: the last ones. They can leave the device."""
    together: int = 1
    """Packed blocks for which a buffer of the ring has room. They cross the link together, and attention uses them
    together."""
    limits: Limits = LIMITS
    """Limits for buffers and steps."""

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
        """A placement for `capacity` tokens, of whose blocks `num_resident` stay on the device. The last block always
        streams."""
        num_blocks = -(-capacity // block_size)
        open_tokens = _whole_chunks(block_size + limits.open_slack, chunk_size)
        num_resident = min(num_resident, num_blocks - 1)
        return cls(block_size, num_blocks, num_resident, open_tokens, packed, together=together, limits=limits)

    @property
    def streams(self) -> bool:
        """Whether some blocks are not resident."""
        return self.num_resident < self.num_blocks

    @property
    def capacity(self) -> int:
        """The maximum number of tokens."""
        return self.num_blocks * self.block_size

    @property
    def num_host(self) -> int:
        """Blocks of a layer in host memory."""
        return self.num_blocks - self.num_resident - self.num_disk

    @property
    def first_on_host(self) -> int:
        """The first block of a layer for which there is room in host memory or on a disk."""
        return self.num_resident - self.num_spare

    @property
    def ring_buffers(self) -> int:
        """Number of the ring's buffers; 0 if nothing streams."""
        return min(self.limits.ring_buffers, self.num_blocks) if self.streams else 0

    @property
    def ring_blocks(self) -> int:
        """Blocks for which the ring has memory. If blocks are packed, there is one more buffer for unpacking."""
        return (self.ring_buffers + (self.packed and self.streams)) * self.together

    def host_block_bytes(self, part: ModelConfig, dtype: torch.dtype) -> int:
        """Bytes of a block of one layer in host memory and on the link."""
        if self.packed:
            return block_slot(part.num_kv_heads, self.block_size, part.head_dim).slot_bytes
        return self.block_size * part.kv_bytes_per_token(dtype) // part.kv_layers

    @property
    def staging_buffers(self) -> int:
        """Blocks for which staging has memory, if it is needed."""
        return self.limits.disk_buffers if self.num_disk else self.limits.staging_buffers

    def staging_bytes(self, part: ModelConfig, dtype: torch.dtype) -> int:
        """Bytes of the buffers into which blocks on a disk are read; 0 without a disk. Blocks that cannot be packed
        fit, too."""
        block_bytes = self.block_size * part.kv_bytes_per_token(dtype) // part.kv_layers
        return self.staging_buffers * block_bytes if self.num_disk else 0

    def disk_blocks(self, context: int) -> int:
        """Blocks of a layer that are read from the disk in one pass over `context` tokens."""
        return min(self.num_disk, self.streamed_blocks(context))

    def streamed_blocks(self, context: int) -> int:
        """Blocks of a layer that cross the link in one pass over `context` tokens. The last block, which is not full
        yet, is not counted: it is in the open stretch."""
        return max(0, context // self.block_size - self.num_resident) if self.streams else 0


def block_slot(num_kv_heads: int, block_size: int, head_dim: int) -> Layout:
    """The layout of the slot of a packed block. It holds the keys and values of all heads."""
    return Layout(2 * num_kv_heads, block_size, head_dim)


def block_size_for(
    capacity: int, chunk_size: int, split: int | None = None, largest: int = LIMITS.largest_block
) -> int:
    """Chooses the tokens of a block for a context of up to `capacity` tokens, so that little room is unused.

    A block consists of whole splits, and has at most `largest` tokens. Then it is rounded up to whole chunks.

    Args: `split` is the number of tokens in a split; `None`: see `SPLITS`.
    """
    split = split or _split(capacity)
    splits = -(-capacity // split)
    most = min(largest // split, -(-splits // 4))
    # Of the sizes above a quarter of the maximum, the one that leaves the least room unused.
    size = min(range(most, most // 4, -1), key=lambda size: -splits % size)
    return _whole_chunks(size * split, chunk_size)


def window_blocks(window: int, chunk_size: int, limits: Limits = LIMITS) -> tuple[int, int]:
    """The number of blocks of a layer that keeps only its last tokens, and the tokens of a block.

    Args: `window` is the layer's sliding window, in tokens.
    """
    size = _whole_chunks(SPLITS[1], chunk_size)
    return -(-(window + limits.window_slack) // size) + 1, size


def window_bytes(part: ModelConfig, dtype: torch.dtype, chunk_size: int, limits: Limits = LIMITS) -> int:
    """Bytes of one sequence's keys and values in all layers that keep only their last tokens."""
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
    """A placement with all blocks on the compute device.

    Args:
        part: the configuration of one rank's part of the model.
        one_block: whether a layer is a single block where possible, so that attention needs one call. It is not
            possible in float32, where the scores take memory in proportion to the block, nor with sliding windows,
            which skip whole blocks.
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
    """A placement with as many blocks on the device as fit into `resident_bytes`, but not all. The others stream.

    On a GPU, blocks consist of whole splits of the GPU's kernels, even if the context is short, rounded up to whole
    chunks. If `packed`, blocks are packed, provided that their size allows it.
    """
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
