"""Makes the blocks of a planned full cache."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...tp.model.config import ModelConfig
from .device_blocks import Blocks, DeviceBlocks
from .host import HOST, Host
from .link import Link
from .placement import Placement
from .staged.block_file import DiskSpace
from .streamed_blocks import StreamedBlocks


def make_blocks(
    part: ModelConfig,
    placement: Placement,
    link: Link | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    on_memory: Callable[[float], None] | None = None,
    disk: DiskSpace | None = None,
    host: Host = HOST,
) -> Blocks:
    """Takes the memory for the blocks of one rank's part of a model.

    Args:
        part: the configuration of this part.
        link: needed if blocks stream.
        disk: needed if some blocks are on a disk.
        on_memory, host: see `StreamedBlocks`.

    Raises:
        CapacityError: the system does not page-lock the minimum of host memory, or the disk has no room.
    """
    if not placement.streams:
        capacity, size = placement.capacity, placement.block_size
        return DeviceBlocks(part, dtype=dtype, device=device, capacity=capacity, block_size=size)
    assert link is not None
    where = {"dtype": dtype, "device": device}
    return StreamedBlocks(part, link, placement, **where, on_memory=on_memory, disk=disk, host=host)
