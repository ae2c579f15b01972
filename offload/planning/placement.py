"""Where a full cache lives: all of it on the device if it fits, else in host memory with as much resident as fits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...tp.model.config import ModelConfig
from ..caches.full import block_size_for
from ..transfer.device_blocks import Blocks, DeviceBlocks
from ..transfer.link import Link
from ..transfer.streamed_blocks import OPEN_SLACK, RING_BUFFERS, StreamedBlocks
from .memory import MemoryPlan

SMALLEST_COPY = 16 * 2**20
"""Bytes of a streamed block at least, where the context has so many: smaller copies do not fill a PCIe link."""

RESERVE = 0.05
"""Share of a GPU's memory that is left alone: fragmentation, libraries, CUDA graphs."""


@dataclass(frozen=True)
class Placement:
    """Blocks of each layer, and how many of them stay on the device."""

    block_size: int
    num_blocks: int
    num_resident: int

    @property
    def streams(self) -> bool:
        return self.num_resident < self.num_blocks


def plan_placement(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    capacity: int,
    chunk_size: int,
    resident_bytes: float | None,
    on_gpu: bool,
) -> Placement:
    """Places a cache for `capacity` tokens of a rank's part of a model.

    Args:
        resident_bytes: what keys and values may take on the device; `None` is all they need.
        on_gpu: on a GPU with Triton, where nothing streams, a layer is one block: it has attended to a block before the
            host has started what the next one takes. Not in float32, whose scores take memory by the block, nor with
            sliding windows, which leave out whole blocks.
    """
    size = block_size_for(capacity, chunk_size)
    layer_token = config.kv_bytes_per_token(dtype) // config.num_layers
    if resident_bytes is None or resident_bytes >= -(-capacity // size) * size * config.kv_bytes_per_token(dtype):
        num_blocks = -(-capacity // size)
        windows = any(config.sliding_window(layer) for layer in range(config.num_layers))
        if on_gpu and dtype.itemsize == 2 and not windows:
            return Placement(num_blocks * size, 1, 1)
        return Placement(size, num_blocks, num_blocks)
    size = min(size, -(-max(64, SMALLEST_COPY // layer_token) // chunk_size) * chunk_size)
    num_blocks = -(-capacity // size)
    resident = int(resident_bytes // (size * config.kv_bytes_per_token(dtype)))
    return Placement(size, num_blocks, min(resident, num_blocks - 1))


def resident_bytes(free: int, total: int, plan: MemoryPlan, placement: Placement, token_bytes: int, layers: int) -> int:
    """Bytes of keys and values that may stay on a GPU whose weights are loaded.

    Args:
        free, total: bytes of the GPU.
        plan: of the run; its prefill and its retrieval cache are never there together.
        placement: for the sizes of blocks that would stream.
        token_bytes: of one token's keys and values over all `layers`.
    """
    usable = free - RESERVE * total
    if plan.kv + max(plan.retrieval, plan.prefill) <= usable:
        return plan.kv  # nothing streams: neither ring nor open stretches nor a workspace
    block = placement.block_size * token_bytes // layers
    ring = RING_BUFFERS * block
    open_stretches = (placement.block_size + OPEN_SLACK) * token_bytes
    workspace = placement.num_blocks * block
    needed = ring + open_stretches + max(plan.retrieval, plan.prefill + workspace)
    return max(0, int(usable - needed))


def make_blocks(
    config: ModelConfig,
    placement: Placement,
    link: Link | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    capacity: int,
    chunk_size: int,
) -> Blocks:
    """The blocks of `placement`; `link` is needed where some stream.

    Raises:
        CapacityError: the system does not page-lock so much host memory.
    """
    if not placement.streams:
        return DeviceBlocks(config, dtype=dtype, device=device, capacity=capacity, block_size=placement.block_size)
    assert link is not None
    return StreamedBlocks(
        config,
        link,
        dtype=dtype,
        device=device,
        capacity=capacity,
        block_size=placement.block_size,
        chunk_size=chunk_size,
        num_resident=placement.num_resident,
    )
