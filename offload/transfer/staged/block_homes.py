"""The places for blocks that are not resident, or that may leave the device: host memory, page-locked or not, and a
disk."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from math import prod

import torch

from ....tp.errors import CapacityError
from ....tp.model.config import ModelConfig
from ....tp.units import gib
from ..host import Host
from ..host_blocks import HostBlocks, Overflow, PackedBlocks, RawBlocks
from ..host_memory import HostMemory
from ..link import Link
from ..placement import Placement, block_slot
from ..staging import Staging
from .block_file import BlockFile, DiskSpace, aligned_size
from .disk_blocks import DiskBlocks

_OTHERS = 2
"""Number of other caches for whose staging page-locked memory is left free, if the system's limit is too low for all
memory of this cache. They are caches of sequences that join, or a larger cache that replaces this one."""


class BlockHomes:
    """Memory and disk space for the blocks of a cache, and the staging that some of them need."""

    def __init__(
        self,
        config: ModelConfig,
        link: Link,
        placement: Placement,
        dtype: torch.dtype,
        on_memory: Callable[[float], None] | None,
        disk: DiskSpace | None,
        host: Host,
    ) -> None:
        """See `StreamedBlocks`."""
        self._link, self._placement, self._dtype, self._disk = link, placement, dtype, disk
        self._block = (2, config.num_kv_heads, placement.block_size, config.head_dim)
        self._memory = HostMemory(link, host)
        self.overflow = Overflow(self._memory, self._block, dtype)
        self.host: list[HostBlocks] = []
        """The blocks of each layer."""
        self._locked: list[int] = []  # layers whose memory is page-locked
        self.file: BlockFile | None = None
        self.staging: Staging | None = None
        """Staging for blocks that the link cannot copy directly; `None` if there are none."""
        if placement.num_disk:
            assert disk
            slot_bytes = placement.host_block_bytes(config, dtype)
            self.file = disk.new_file(config.num_layers * placement.num_disk, slot_bytes)
            self.staging = self._make_staging()
        for layer in range(config.num_layers):
            self.host.append(self._blocks(layer))
            if not self._memory.refused and self.host[-1].num_bytes:
                self._locked.append(layer)
            if on_memory:
                on_memory((layer + 1) / config.num_layers)
        if self._memory.refused and self.staging is None:
            self.staging = self._make_staging()
        if self.staging:
            self._leave_room()
        self._memory.staged = self.staging is not None

    @property
    def host_bytes(self) -> int:
        """Bytes taken in host memory."""
        staging = self.staging.memory.nbytes if self.staging else 0
        return staging + self.overflow.num_bytes + sum(host.num_bytes for host in self.host)

    def _blocks(self, layer: int) -> HostBlocks:
        """Host memory for the blocks of a layer, and slots in the file for those on a disk."""
        count, num_disk = self._placement.num_host + self._placement.num_spare, self._placement.num_disk
        overflow: Overflow | None = None
        if self._placement.packed:
            overflow = self.overflow
            slots = self._memory.take((count, block_slot(*self._block[1:]).slot_bytes), torch.uint8)
            blocks: HostBlocks = PackedBlocks(slots, overflow, self._block)
        else:
            blocks = RawBlocks(self._memory.take((count, *self._block), self._dtype), self._memory)
        if self.file is None:
            return blocks
        return DiskBlocks(self.file, layer * num_disk, num_disk, blocks, self._block, self._dtype, overflow)

    def _make_staging(self) -> Staging:
        """Makes the staging, whose buffers have room for any block.

        If the system does not page-lock enough memory for it, page-locked layers are moved to ordinary memory. If that
        is not enough, the number of buffers is reduced to the minimum.

        Raises:
            CapacityError: the system does not page-lock the memory for the minimum number of buffers.
        """
        if self._disk and self.file:
            pool, note_wait = self._disk.pool, self._disk.note_wait
        else:
            pool, note_wait = self._memory.host.make_pool(), None
        buffers, least = self._placement.staging_buffers, self._placement.limits.staging_buffers
        while True:
            try:
                return Staging(self._link, self._staged_size, buffers, pool, note_wait)
            except CapacityError as error:
                if not self._locked and buffers > least:
                    buffers = least
                    continue
                if not self._locked:
                    raise CapacityError(
                        f"the system refused to page-lock {gib(buffers * self._staged_size)} of host memory, "
                        "the minimum for streaming; raise the limit (ulimit -l; in a container --ulimit "
                        "memlock=-1), or shorten the prompt until the GPU holds all of the KV cache"
                    ) from error
            self._unlock_layer()

    def _leave_room(self) -> None:
        """Moves page-locked layers to ordinary memory, until enough could be page-locked for the staging of `_OTHERS`
        more caches."""
        while self._locked:
            with suppress(CapacityError):  # a test: the memory is freed immediately
                buffers = _OTHERS * self._placement.limits.staging_buffers
                self._link.host_memory((buffers, self._staged_size), torch.uint8)
                return
            self._unlock_layer()

    @property
    def _staged_size(self) -> int:
        """Bytes of a staging buffer. Any block fits into it."""
        return aligned_size(prod(self._block) * self._dtype.itemsize)

    def _unlock_layer(self) -> None:
        self._memory.refused = True
        layer = self._locked.pop()
        self.host[layer] = RawBlocks(torch.empty(0))  # otherwise both memories would exist at the same time
        self.host[layer] = self._blocks(layer)
