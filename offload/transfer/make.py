"""Makes the blocks of a planned full cache and the link that some of them cross."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...tp.model.config import ModelConfig
from ..planning.placement import Placement
from .device_blocks import Blocks, DeviceBlocks
from .link import Link, ThreadLink
from .staged.block_file import DiskSpace
from .streamed_blocks import StreamedBlocks


def make_link(device: torch.device, gbps: float | None = None) -> Link:
    """The link between host memory and `device`.

    Args:
        gbps: on a CPU, what it may carry in gigabytes a second; `None` is as much as memory does.
    """
    if device.type == "cuda":
        from .cuda_link import CudaLink  # only where it is used: a CPU has no streams

        return CudaLink(device)
    return ThreadLink(gbps * 1e9 if gbps else None)


def make_blocks(
    part: ModelConfig,
    placement: Placement,
    link: Link | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    on_memory: Callable[[float], None] | None = None,
    disk: DiskSpace | None = None,
) -> Blocks:
    """Takes the memory for the blocks of one rank's part of a model; `link` is needed where some stream, and `disk`
    where some are on one. `on_memory`: see `StreamedBlocks`.

    Raises:
        CapacityError: the system does not page-lock so much host memory, or the disk has no room.
    """
    if not placement.streams:
        capacity, size = placement.capacity, placement.block_size
        return DeviceBlocks(part, dtype=dtype, device=device, capacity=capacity, block_size=size)
    assert link is not None
    return StreamedBlocks(part, link, placement, dtype=dtype, device=device, on_memory=on_memory, disk=disk)
