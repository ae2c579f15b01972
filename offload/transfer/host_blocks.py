"""Blocks in host memory, raw or packed, and the ring of device buffers through which they stream.

A packed block is a slot of `kernels.packing` with the keys and values of all heads, in three quarters of the bytes.
The slot crosses the link. A block is packed on the device before it leaves, and unpacked there after it arrives. A
block that does not fit into its slot stays raw. Memory for these blocks is taken one block at a time, and used again
(`Overflow`).

The ring has a few buffers. Each block passes through one of them, is used once, and is overwritten. The ring depends
neither on CUDA nor on the contents of a block. It keeps as many copies in progress as it has buffers, except for the
buffer of a raw block to which attention is computed. So the link is busy during attention, and also between layers.
Packed blocks are unpacked into one more buffer; several at once if they are small. Blocks that leave the device go
through the same buffers. Blocks that the link cannot copy directly also go through `staging`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from math import prod
from threading import Lock
from typing import cast

import torch
from torch import Tensor

from ...kernels.chunks import gather_chunks
from ...kernels.packing import gather_packed, unpack
from ...tp.errors import CapacityError
from ...tp.pages import available_memory
from ..limits import MOST_TOGETHER
from .host_memory import HostMemory
from .link import Arrival, Link, LinkError
from .placement import block_slot
from .staging import Source, Staged, StagedCopy, Staging

_LEFT_FREE = 2**29
"""Bytes of host memory that must stay free when memory is taken for blocks that cannot be packed."""

_PACKED_TOGETHER = 4
"""Maximum number of blocks that are packed in one call: plain PyTorch needs several times their memory for it."""


class HostBlocks(ABC):
    """Blocks `[2, num_kv_heads, block_size, head_dim]` of one layer in host memory."""

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes of host memory for all blocks, except for those that do not fit into their slots."""

    @abstractmethod
    def at(self, index: int, count: int = 1) -> Source:
        """The source of a block for the link: the block, or its slot `[slot_bytes]` uint8. For `count` blocks that
        cross the link `together`: their slots, `[count, slot_bytes]`."""

    def together(self, index: int, most: int) -> int:
        """How many blocks from `index` on, at most `most`, can cross the link in one copy."""
        return 1

    @abstractmethod
    def leave(self, index: int, block: Tensor, buffer: Tensor) -> tuple[Tensor, Source]:
        """Writes `block`, which is on the device, to `buffer`, also on the device, in the format of host memory.

        Returns what must be copied from the buffer, and where to. No copy of the block with this index may be in
        progress.

        Raises:
            CapacityError: the block cannot be packed, and there is no memory to keep it raw.
        """

    @abstractmethod
    def read(self, first: int, stop: int) -> Tensor:
        """Blocks `first` to `stop` in host memory, not packed: views or copies."""

    @abstractmethod
    def room(self, count: int) -> Sequence[Tensor]:
        """Host memory for `count` blocks that are then given to `write`."""

    @abstractmethod
    def write(self, blocks: Tensor | Sequence[Tensor]) -> None:
        """Sets the first blocks to `blocks`, which are in host memory: that of `room`, or other memory."""

    @abstractmethod
    def gather(self, chunks: Tensor, chunk_size: int) -> Tensor:
        """Keys and values of `chunks` `[num_kv_heads, count]`, in host memory: `[2, num_kv_heads, count * chunk_size,
        head_dim]`. The blocks of the chunks must have been written."""


class RawBlocks(HostBlocks):
    """Blocks that are not packed."""

    def __init__(self, blocks: Tensor, memory: HostMemory | None = None) -> None:
        """Args:
        blocks: `[num_blocks, 2, num_kv_heads, block_size, head_dim]`.
        memory: the memory that holds them; `None`: the link can copy from them.
        """
        self.blocks = blocks
        self._source = memory.source if memory and memory.is_pageable(blocks) else None

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def num_bytes(self) -> int:
        return self.blocks.nbytes

    def at(self, index: int, count: int = 1) -> Source:
        block = self.blocks[index]
        return self._source(block) if self._source else block

    def leave(self, index: int, block: Tensor, buffer: Tensor) -> tuple[Tensor, Source]:
        buffer.copy_(block)
        return buffer, self.at(index)

    def read(self, first: int, stop: int) -> Tensor:
        return self.blocks[first:stop]

    def room(self, count: int) -> Sequence[Tensor]:
        return list(self.blocks[:count])

    def write(self, blocks: Tensor | Sequence[Tensor]) -> None:
        for own, block in zip(self.blocks, blocks, strict=False):
            if own.data_ptr() != block.data_ptr():
                own.copy_(block)

    def gather(self, chunks: Tensor, chunk_size: int) -> Tensor:
        return torch.stack([gather_chunks(self.blocks[:, part], chunks, chunk_size) for part in (0, 1)])


class Overflow:
    """Memory for blocks of all layers that do not fit into their slots. It is taken one block at a time, and kept."""

    def __init__(self, memory: HostMemory, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Args:
        memory: the source of the memory.
        shape, dtype: of a block.
        """
        self.memory, self._shape, self._dtype = memory, shape, dtype
        self._free: list[Tensor] = []
        self._lock = Lock()
        self.blocks = 0
        """Number of blocks for which memory was taken."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the memory that was taken."""
        return self.blocks * prod(self._shape) * self._dtype.itemsize

    def take(self) -> Tensor:
        """Memory for a block.

        Raises:
            CapacityError: there is no memory.
        """
        with self._lock:  # several threads restore layers
            if self._free:
                return self._free.pop()
        size = prod(self._shape) * self._dtype.itemsize
        if available_memory() < size + _LEFT_FREE:
            raise CapacityError(
                f"{self.blocks + 1:,} blocks of the KV cache cannot be packed, and there is no memory to keep one more "
                "unpacked; give --pack off, free memory, or shorten the prompt"
            )
        block = self.memory.take((1, *self._shape), self._dtype, must_be_locked=not self.memory.staged)[0]
        with self._lock:
            self.blocks += 1
        return block

    def give_back(self, block: Tensor) -> None:
        self._free.append(block)

    def note(self, raw: dict[int, Tensor], index: int, fits: bool) -> None:
        """Records whether a block fits into its slot. If it does not, `raw` has memory for it afterwards.

        Args:
            raw: memory of the layer's blocks that do not fit, by index.

        Raises:
            CapacityError: see `take`.
        """
        if fits and index in raw:
            self.give_back(raw.pop(index))
        elif not fits and index not in raw:
            raw[index] = self.take()

    def leave(self, raw: dict[int, Tensor], index: int, block: Tensor, buffer: Tensor) -> Tensor:
        """Packs `block` into a slot in `buffer`. If it does not fit, copies it to `buffer` without packing. Returns the
        slot or the block in `buffer`.

        Raises:
            CapacityError: see `take`.
        """
        slot = _slot_in(buffer, block_slot(*self._shape[1:]).slot_bytes)
        _, fits = self.memory.host.pack(block.flatten(0, 1), slot)
        self.note(raw, index, bool(fits))
        return buffer.copy_(block) if index in raw else slot


class PackedBlocks(HostBlocks):
    """Blocks in slots. Blocks that do not fit into their slots are raw, in `overflow`."""

    def __init__(self, slots: Tensor, overflow: Overflow, shape: Sequence[int]) -> None:
        """Args:
        slots: `[num_blocks, slot_bytes]` uint8, in the memory of `overflow`.
        overflow: memory for blocks that do not fit.
        shape: of a block.
        """
        self._slots, self._overflow, self._shape = slots, overflow, shape
        self._layout = block_slot(*shape[1:])
        slots[:, self._layout.starts : self._layout.exceptions].zero_()  # unwritten slots have no exceptions
        self._raw: dict[int, Tensor] = {}  # blocks that do not fit into their slots, by index

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def num_bytes(self) -> int:
        return self._slots.nbytes

    def at(self, index: int, count: int = 1) -> Source:
        if count > 1:
            return self._slots[index : index + count]
        return self._overflow.memory.source(self._raw[index] if index in self._raw else self._slots[index])

    def together(self, index: int, most: int) -> int:
        if self._overflow.memory.is_pageable(self._slots):
            return 1
        stop = index + min(most, MOST_TOGETHER - index % MOST_TOGETHER)
        return max(1, next((raw for raw in range(index, stop) if raw in self._raw), stop) - index)

    def leave(self, index: int, block: Tensor, buffer: Tensor) -> tuple[Tensor, Source]:
        return self._overflow.leave(self._raw, index, block, buffer), self.at(index)

    def read(self, first: int, stop: int) -> Tensor:
        found = self._slots.new_empty((stop - first, *self._shape), dtype=torch.bfloat16)
        unpack(self._slots[first:stop], found.flatten(1, 2))
        for index in range(first, stop):
            if index in self._raw:
                found[index - first] = self._raw[index]
        return found

    def room(self, count: int) -> Sequence[Tensor]:
        return list(self._slots.new_empty((count, *self._shape), dtype=torch.bfloat16))

    def write(self, blocks: Tensor | Sequence[Tensor]) -> None:
        for first in range(0, len(blocks), _PACKED_TOGETHER):
            several = torch.stack(tuple(blocks[first : first + _PACKED_TOGETHER]))
            _, fits = self._overflow.memory.host.pack(several.flatten(1, 2), self._slots[first : first + len(several)])
            for index, (block, fit) in enumerate(zip(several, fits.tolist(), strict=True), first):
                self._overflow.note(self._raw, index, fit)
                if not fit:
                    self._raw[index].copy_(block)

    def gather(self, chunks: Tensor, chunk_size: int) -> Tensor:
        tokens = (chunks.unsqueeze(2) * chunk_size + torch.arange(chunk_size)).flatten(1)
        found = gather_packed(self._slots, self._layout, 0, tokens.repeat(2, 1)).unflatten(0, (2, -1))
        for index, block in self._raw.items():
            here = tokens // self._layout.tokens == index
            head, place = here.nonzero(as_tuple=True)
            found[:, head, place] = block[:, head, tokens[here] % self._layout.tokens]
        return found


class Ring:
    """The device buffers through which blocks stream, in an order that is known in advance."""

    def __init__(
        self,
        link: Link,
        buffers: Sequence[Tensor],
        unpacked: Tensor | None = None,
        staging: Staging | None = None,
        together: int = 1,
    ) -> None:
        """Args:
        buffers: each `[2, num_kv_heads, together * block_size, head_dim]`. With two or more, one is filled while
            another is in use.
        unpacked: one more buffer, into which packed blocks are unpacked.
        staging: for blocks that the link cannot copy directly.
        together: maximum number of packed blocks in one copy.
        """
        self._link, self.buffers, self.unpacked, self._staging = link, list(buffers), unpacked, staging
        self._together = together
        self._coming: Iterator[Tensor | Staged] = iter(())
        self._under_way: deque[tuple[Tensor, Tensor, Arrival]] = deque()
        self._leaving: deque[tuple[Tensor, Arrival]] = deque()

    def send(self, block: Tensor, host: HostBlocks, index: int) -> None:
        """Copies `block`, on the device, to its place in host memory or on a disk. `block` may be overwritten
        immediately afterwards. All blocks of the last `begin` must have arrived.

        Raises:
            CapacityError: the block cannot be packed, and there is no memory to keep it raw.
            LinkError: an earlier copy failed. `wait_for_stores` must be called before the next block.
        """
        if len(self._leaving) < len(self.buffers):
            buffer = self.buffers[len(self._leaving)]
        else:
            buffer, departure = self._leaving[0]
            departure.wait()
        source, target = host.leave(index, block, self._one(buffer))
        if isinstance(target, Tensor):
            departure = self._link.store(source, target)
        else:
            assert self._staging
            departure = self._staging.store(source, target)
        if len(self._leaving) == len(self.buffers):  # not earlier, so that an error does not lose a buffer
            self._leaving.popleft()
        self._leaving.append((buffer, departure))

    def wait_for_stores(self) -> None:
        """Returns when all blocks that were sent are at their places.

        Raises:
            LinkError: a copy failed.
        """
        self._link.wait_for_stores()
        self._leaving.clear()  # after a pass that was broken off, it does not show which buffers are in use
        if self._staging:
            self._staging.wait_for_writes()

    @property
    def memory(self) -> list[Tensor]:
        """All buffers on the device."""
        return self.buffers if self.unpacked is None else [*self.buffers, self.unpacked]

    def bring(self, block: Source) -> Tensor:
        """Copies a single block to the device, where it stays until the next block is requested. No blocks of an
        earlier `begin` may be left: see `stop`.

        Args: `block` is a block that is not resident, or its slot.

        Raises:
            LinkError: the copy failed.
        """
        self.begin(iter((block,)))
        (found,) = self.next_blocks(1)  # the iterator must reach its end, so that it returns the staging buffer
        return found

    def stop(self) -> None:
        """Drops the remaining blocks of the last `begin`. Later computation waits for their copies. A copy that failed
        is no error, because its block is not needed."""
        under_way, self._under_way = self._under_way, deque()
        self._coming = iter(())
        for _, _, arrival in under_way:
            with suppress(LinkError):
                arrival.wait()
        if self._staging:
            self._staging.stop()

    def begin(self, blocks: Iterator[Source]) -> None:
        """Starts to copy `blocks` to the device, one or several at a time. No earlier blocks may be left: see `stop`.

        Earlier copies that are still in progress, in either direction, end before the new ones. So their buffers can be
        used again.

        Args: `blocks` are blocks that are not resident, or their slots.
        """
        self._under_way.clear()
        self._coming = self._staging.begin(blocks) if self._staging else cast(Iterator[Tensor], blocks)
        for buffer, block in zip(self.buffers, islice(self._coming, len(self.buffers)), strict=False):
            self._fetch(block, buffer)

    def _fetch(self, source: Tensor | Staged, buffer: Tensor) -> None:
        if isinstance(source, Staged) and self._link.direct:  # attention uses the block in its staging buffer
            self._under_way.append((buffer, source.place, source))
            return
        comes = source.place if isinstance(source, Staged) else source
        slots = comes.dtype != buffer.dtype
        place = _slot_in(buffer, comes.numel()).view(comes.shape) if slots else self._one(buffer)
        if isinstance(source, Staged):
            assert self._staging
            arrival: Arrival = StagedCopy(self._link, self._staging, source, place)
        else:
            arrival = self._link.fetch(source, place)
        self._under_way.append((buffer, place, arrival))

    def next_blocks(self, count: int) -> Iterator[Tensor]:
        """Yields the next `count` blocks, one or several at a time: `[2, num_kv_heads, tokens, head_dim]` on the
        device, valid until the next ones are requested.

        Raises:
            LinkError: a copy failed.
        """
        while count > 0:
            buffer, place, arrival = self._under_way.popleft()
            arrival.wait()
            if place.dtype == buffer.dtype:
                count -= 1
                yield place
                self._go_on(buffer, arrival)
            else:
                slots = place.view(-1, place.shape[-1])
                count -= len(slots)
                blocks = self._unpack(slots)
                self._go_on(buffer, arrival)
                yield blocks

    def _one(self, buffer: Tensor) -> Tensor:
        """The part of a buffer that has room for one block."""
        if self._together == 1:
            return buffer
        shape = (*buffer.shape[:2], buffer.shape[2] // self._together, buffer.shape[3])
        return buffer.view(-1)[: prod(shape)].view(shape)

    def _unpack(self, slots: Tensor) -> Tensor:
        """Unpacks the blocks in `slots` `[any, slot_bytes]`. Returns them with their tokens one after another."""
        assert self.unpacked is not None
        block_size = self.unpacked.shape[2] // self._together
        blocks = self.unpacked[:, :, : len(slots) * block_size]
        unpack(slots, blocks.flatten(0, 1).unflatten(1, (len(slots), block_size)).transpose(0, 1))
        return blocks

    def _go_on(self, buffer: Tensor, arrival: Arrival) -> None:
        """Fetches the next block into a buffer that is free again. If the last block came from staging, returns its
        staging buffer, too."""
        if isinstance(arrival, Staged):
            assert self._staging
            self._staging.give_back(arrival)
        following = next(self._coming, None)
        if following is not None:
            self._fetch(following, buffer)


def _slot_in(buffer: Tensor, slot_bytes: int) -> Tensor:
    """The first `slot_bytes` bytes of a larger buffer, uint8: room for one slot or several."""
    return buffer.view(torch.uint8).view(-1)[:slot_bytes]
