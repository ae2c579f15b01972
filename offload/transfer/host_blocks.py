"""Blocks in host memory, as they are or packed, and the ring of device buffers by which they cross the link.

A packed block is a slot of `kernels.packing`, keys and values of all heads in one, in three quarters of the bytes. That
is what crosses the link; it is packed on the device as it leaves and unpacked there as it arrives. A block that does
not fit into its slot is kept as it is, in memory that is taken a block at a time and used again (`Overflow`).

The ring has a few buffers: blocks flow through them, each used once and overwritten. The ring knows neither CUDA nor
what a block means. It keeps as many copies under way as it has buffers (but for the one whose block is attended to as
it came), so that the link is busy while a block is attended to, and between layers too. What comes packed is unpacked
into one more buffer, several blocks at once where they are small. Blocks that leave the device go through the same
buffers. Blocks that the link cannot copy from where they lie go through `staging` as well.
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

import psutil
import torch
from torch import Tensor

from ...kernels.chunks import gather_chunks
from ...kernels.packing import gather_packed, unpack
from ...tp.errors import CapacityError
from ..limits import MOST_TOGETHER
from .host_memory import HostMemory
from .link import Arrival, Link, LinkError
from .placement import block_slot
from .staging import Source, Staged, StagedCopy, Staging

_LEFT_FREE = 2**29
"""Bytes of host memory that blocks which do not pack leave to everybody else."""

_PACKED_TOGETHER = 4
"""Blocks that are packed in one call, as plain PyTorch needs several times their memory for it."""


class HostBlocks(ABC):
    """Blocks `[2, num_kv_heads, block_size, head_dim]` of one layer in host memory."""

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Host memory that was taken for all of them, but for those that do not fit into their slots."""

    @abstractmethod
    def at(self, index: int, count: int = 1) -> Source:
        """What crosses the link of a block: the block, or its slot, `[slot_bytes]` uint8. Of `count` blocks that go
        `together`: their slots, `[count, slot_bytes]`."""

    def together(self, index: int, most: int) -> int:
        """How many blocks from `index` on, of `most`, can cross the link in one copy."""
        return 1

    @abstractmethod
    def leave(self, index: int, block: Tensor, buffer: Tensor) -> tuple[Tensor, Source]:
        """Puts `block`, on the device, into `buffer` there, as it will lie in host memory: what to copy from there, and
        where to. A block of this index has no copies under way."""

    @abstractmethod
    def read(self, first: int, stop: int) -> Tensor:
        """Blocks `first` to `stop` in host memory: themselves, or copies."""

    @abstractmethod
    def room(self, count: int) -> Sequence[Tensor]:
        """Host memory in which `count` blocks can be put together for `write`."""

    @abstractmethod
    def write(self, blocks: Tensor | Sequence[Tensor]) -> None:
        """Takes over the first blocks, from host memory: of `room`, or others."""

    @abstractmethod
    def gather(self, chunks: Tensor, chunk_size: int) -> Tensor:
        """Keys and values of `chunks` `[num_kv_heads, count]` of blocks that are written, in host memory: `[2,
        num_kv_heads, count * chunk_size, head_dim]`."""


class RawBlocks(HostBlocks):
    """Blocks as they are."""

    def __init__(self, blocks: Tensor, memory: HostMemory | None = None) -> None:
        """Args:
        blocks: `[num_blocks, 2, num_kv_heads, block_size, head_dim]`.
        memory: what they are in; `None`: the link copies from them.
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
    """Blocks that did not fit into their slots, of all layers. Memory for them is taken a block at a time, and kept."""

    def __init__(self, memory: HostMemory, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Args: `memory` is what is taken from, for blocks of this shape and dtype."""
        self.memory, self._shape, self._dtype = memory, shape, dtype
        self._free: list[Tensor] = []
        self._lock = Lock()
        self.blocks = 0
        """That there is memory for."""

    @property
    def num_bytes(self) -> int:
        """Of that memory."""
        return self.blocks * prod(self._shape) * self._dtype.itemsize

    def take(self) -> Tensor:
        """Memory for a block.

        Raises:
            CapacityError: there is none.
        """
        with self._lock:  # layers are restored by several threads
            if self._free:
                return self._free.pop()
        size = prod(self._shape) * self._dtype.itemsize
        if psutil.virtual_memory().available < size + _LEFT_FREE:
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
        """Whether the block of this index is in its slot; if not, there is memory for it in `raw` afterwards.

        Raises:
            CapacityError: see `take`.
        """
        if fits and index in raw:
            self.give_back(raw.pop(index))
        elif not fits and index not in raw:
            raw[index] = self.take()

    def leave(self, raw: dict[int, Tensor], index: int, block: Tensor, buffer: Tensor) -> Tensor:
        """Packs `block` into a slot in `buffer`, or puts it there as it is where it does not fit: what to copy from.

        Raises:
            CapacityError: see `take`.
        """
        slot = _slot_in(buffer, block_slot(*self._shape[1:]).slot_bytes)
        _, fits = self.memory.host.pack(block.flatten(0, 1), slot)
        self.note(raw, index, bool(fits))
        return buffer.copy_(block) if index in raw else slot


class PackedBlocks(HostBlocks):
    """Blocks in slots, but for those that do not fit into them."""

    def __init__(self, slots: Tensor, overflow: Overflow, shape: Sequence[int]) -> None:
        """Args:
        slots: `[num_blocks, slot_bytes]` uint8, of the overflow's memory.
        shape: of a block.
        """
        self._slots, self._overflow, self._shape = slots, overflow, shape
        self._layout = block_slot(*shape[1:])
        slots[:, self._layout.starts : self._layout.exceptions].zero_()  # unwritten ones have no exceptions
        self._raw: dict[int, Tensor] = {}  # those that do not fit into their slots

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
    """Buffers that blocks pass through in an order known beforehand."""

    def __init__(
        self,
        link: Link,
        buffers: Sequence[Tensor],
        unpacked: Tensor | None = None,
        staging: Staging | None = None,
        together: int = 1,
    ) -> None:
        """Args:
        buffers: `[2, num_kv_heads, together * block_size, head_dim]`; with two or more, one is filled while another is
            in use.
        unpacked: another one, for blocks that come packed.
        staging: what blocks pass through that the link cannot copy from where they lie.
        together: packed blocks that come at once, at most.
        """
        self._link, self.buffers, self.unpacked, self._staging = link, list(buffers), unpacked, staging
        self._together = together
        self._coming: Iterator[Tensor | Staged] = iter(())
        self._under_way: deque[tuple[Tensor, Tensor, Arrival]] = deque()
        self._leaving: deque[tuple[Tensor, Arrival]] = deque()

    def send(self, block: Tensor, host: HostBlocks, index: int) -> None:
        """Copies `block`, on the device, to its place in host memory. It may be overwritten at once. All blocks that
        were begun have come.

        Raises:
            CapacityError: the block does not pack, and there is no memory to keep it as it is.
            LinkError: an earlier copy failed; `wait_for_stores` comes before the next block.
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
        if len(self._leaving) == len(self.buffers):  # only now: an error leaves the buffers as they were
            self._leaving.popleft()
        self._leaving.append((buffer, departure))

    def wait_for_stores(self) -> None:
        """Returns when all blocks that were sent are in their places.

        Raises:
            LinkError: a copy failed.
        """
        self._link.wait_for_stores()
        self._leaving.clear()  # where a pass was broken off, it does not say which buffers are in use
        if self._staging:
            self._staging.wait_for_writes()

    @property
    def memory(self) -> list[Tensor]:
        """All that it takes on the device."""
        return self.buffers if self.unpacked is None else [*self.buffers, self.unpacked]

    def bring(self, block: Source) -> Tensor:
        """A block that is not resident, or its slot, on the device: there until the next one is asked for. Of those
        that were begun nothing is left: see `stop`.

        Raises:
            LinkError: the copy failed.
        """
        self.begin(iter((block,)))
        (found,) = self.next_blocks(1)  # to its end, or what it passed through would not be given back
        return found

    def stop(self) -> None:
        """Drops what is left of the blocks that were begun; what is computed from here on comes after their copies. One
        that failed is no error: nobody wants its block."""
        under_way, self._under_way = self._under_way, deque()
        self._coming = iter(())
        for _, _, arrival in under_way:
            with suppress(LinkError):
                arrival.wait()
        if self._staging:
            self._staging.stop()

    def begin(self, blocks: Iterator[Source]) -> None:
        """Starts on `blocks` that are not resident, or their slots, one or several at a time. Of earlier ones nothing
        is left: see `stop`.

        A copy that is still under way, either way, ends before any that is asked for now, so its buffer is safe to use
        again.
        """
        self._under_way.clear()
        self._coming = self._staging.begin(blocks) if self._staging else cast(Iterator[Tensor], blocks)
        for buffer, block in zip(self.buffers, islice(self._coming, len(self.buffers)), strict=False):
            self._fetch(block, buffer)

    def _fetch(self, source: Tensor | Staged, buffer: Tensor) -> None:
        if isinstance(source, Staged) and self._link.direct:  # it is used where it was read
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
        """The next `count` blocks, one or several at a time: `[2, num_kv_heads, tokens, head_dim]`, on the device and
        there until the next ones are asked for.

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
        """Room for one block in a buffer."""
        if self._together == 1:
            return buffer
        shape = (*buffer.shape[:2], buffer.shape[2] // self._together, buffer.shape[3])
        return buffer.view(-1)[: prod(shape)].view(shape)

    def _unpack(self, slots: Tensor) -> Tensor:
        """The blocks in `slots` `[any, slot_bytes]`, their tokens one after another."""
        assert self.unpacked is not None
        block_size = self.unpacked.shape[2] // self._together
        blocks = self.unpacked[:, :, : len(slots) * block_size]
        unpack(slots, blocks.flatten(0, 1).unflatten(1, (len(slots), block_size)).transpose(0, 1))
        return blocks

    def _go_on(self, buffer: Tensor, arrival: Arrival) -> None:
        """Fetches the next block into a buffer that is done with, as is that of staging if it came from there."""
        if isinstance(arrival, Staged):
            assert self._staging
            self._staging.give_back(arrival)
        following = next(self._coming, None)
        if following is not None:
            self._fetch(following, buffer)


def _slot_in(buffer: Tensor, slot_bytes: int) -> Tensor:
    """Room for a slot, or several, `[slot_bytes]` uint8 in a buffer that is larger."""
    return buffer.view(torch.uint8).view(-1)[:slot_bytes]
