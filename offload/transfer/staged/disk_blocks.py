"""The blocks of one layer, if the first ones are on a disk and the others in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

from ....kernels.packing import gather_packed, unpack
from ..host_blocks import HostBlocks, Overflow
from ..placement import block_slot
from ..staging import THREADS, Source
from .block_file import BlockFile

Found = TypeVar("Found")


class DiskBlocks(HostBlocks):
    """`count` blocks in slots of a file, raw or packed, and the other blocks after them. Blocks that do not fit into
    packed slots are kept in host memory."""

    def __init__(
        self,
        file: BlockFile,
        first_slot: int,
        count: int,
        rest: HostBlocks,
        shape: Sequence[int],
        dtype: torch.dtype,
        overflow: Overflow | None,
    ) -> None:
        """Args:
        file: the file for the first blocks.
        first_slot: the slot of the file that holds the first block.
        count: number of blocks in the file.
        rest: the blocks after these.
        shape, dtype: of a block.
        overflow: memory for blocks that do not fit into packed slots; `None`: blocks are raw.
        """
        self._file, self._first, self._count, self._rest = file, first_slot, count, rest
        self._shape, self._dtype, self._overflow = tuple(shape), dtype, overflow
        self._block_bytes = prod(shape) * dtype.itemsize
        self._layout = None if overflow is None else block_slot(*self._shape[1:])
        self._raw: dict[int, Tensor] = {}  # blocks that do not fit into their slots, by index

    def __len__(self) -> int:
        return self._count + len(self._rest)

    @property
    def num_bytes(self) -> int:
        return self._rest.num_bytes

    def at(self, index: int, count: int = 1) -> Source:
        if index >= self._count:
            return self._rest.at(index - self._count, count)
        if index in self._raw and self._overflow is not None:
            return self._overflow.memory.source(self._raw[index])
        return _Slot(self, index)

    def together(self, index: int, most: int) -> int:
        return self._rest.together(index - self._count, most) if index >= self._count else 1

    def leave(self, index: int, block: Tensor, buffer: Tensor) -> tuple[Tensor, Source]:
        if index >= self._count:
            return self._rest.leave(index - self._count, block, buffer)
        if self._overflow is None:
            return buffer.copy_(block), self.at(index)
        return self._overflow.leave(self._raw, index, block, buffer), self.at(index)

    def read(self, first: int, stop: int) -> Tensor:
        edge = min(max(first, self._count), stop)
        parts = [torch.stack(list(self._each(self._read_one, range(first, edge))))] if first < edge else []
        if edge < stop or not parts:
            parts.append(self._rest.read(max(edge - self._count, 0), max(stop - self._count, 0)))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read_one(self, index: int) -> Tensor:
        """A block from the file in new memory; or the block in host memory, if it did not fit into its slot."""
        if index in self._raw:
            return self._raw[index]
        place = self._read_slot(index)
        if self._layout is None:
            return place
        block = torch.empty(self._shape, dtype=self._dtype)
        unpack(place, block.flatten(0, 1))
        return block

    def _read_slot(self, index: int) -> Tensor:
        """A block, or its slot, as it is in the file, in new memory."""
        memory = self._file.space.host.memory((self._file.slot_bytes,), torch.uint8)
        self._file.read(self._first + index, memory)
        return self.place(memory)

    def place(self, memory: Tensor) -> Tensor:
        """A view of memory for a slot of the file, with the shape and dtype of the block or its slot."""
        if self._layout is not None:
            return memory[: self._layout.slot_bytes]
        return memory[: self._block_bytes].view(self._dtype).view(self._shape)

    def read_slot(self, index: int, memory: Tensor) -> None:
        """Reads the slot of a block into `memory`, uint8.

        Raises:
            DiskError: the system could not read it.
        """
        self._file.read(self._first + index, memory[: self._file.slot_bytes])

    def write_slot(self, index: int, memory: Tensor) -> None:
        """Writes the slot of a block from `memory`, uint8.

        Raises:
            DiskError: the system could not write it.
        """
        self._file.write(self._first + index, memory[: self._file.slot_bytes])

    def room(self, count: int) -> Sequence[Tensor]:
        here = min(count, self._count)
        on_disk = list(self._file.space.host.memory((here, *self._shape), self._dtype))
        return [*on_disk, *self._rest.room(count - here)]

    def write(self, blocks: Tensor | Sequence[Tensor]) -> None:
        here = min(len(blocks), self._count)
        list(self._each(lambda index: self._write_one(index, blocks[index]), range(here)))
        if here < len(blocks):
            self._rest.write(blocks[here:])

    def _write_one(self, index: int, block: Tensor) -> None:
        memory = self._file.space.host.memory((self._file.slot_bytes,), torch.uint8)
        place = self.place(memory)
        if self._overflow is None:
            place.copy_(block)
        else:
            _, fits = self._overflow.memory.host.pack(block.flatten(0, 1), place)
            self._overflow.note(self._raw, index, bool(fits))
            if index in self._raw:
                self._raw[index].copy_(block)
        if index not in self._raw:
            self._file.write(self._first + index, memory)

    def gather(self, chunks: Tensor, chunk_size: int) -> Tensor:
        """See `HostBlocks`. Each block of the file is read at most once, and only if it has some of the chunks."""
        num_heads, size, head_dim = self._shape[1:]
        per_block = size // chunk_size
        blocks = chunks // per_block
        if len(self._rest):
            found = self._rest.gather((chunks - self._count * per_block).clamp(min=0), chunk_size)
        else:
            found = torch.empty((2, num_heads, chunks.shape[1] * chunk_size, head_dim), dtype=self._dtype)
        by_chunk = found.view(2, num_heads, -1, chunk_size, head_dim)
        wanted = [index for index in blocks.unique().tolist() if index < self._count]

        def rows_of(index: int) -> tuple[Tensor, Tensor, Tensor]:
            head, place = (blocks == index).nonzero(as_tuple=True)
            return head, place, self._chunks_of(index, head, chunks[head, place] % per_block, chunk_size)

        for head, place, rows in self._each(rows_of, wanted):
            by_chunk[:, head, place] = rows
        return found

    def _chunks_of(self, index: int, head: Tensor, chunk: Tensor, chunk_size: int) -> Tensor:
        """Chunks of one block: chunk `chunk[i]` of head `head[i]`, `[2, count, chunk_size, head_dim]`. From a packed
        block, only these chunks are unpacked."""
        num_heads, _, head_dim = self._shape[1:]
        if index in self._raw or self._layout is None:
            block = self._read_one(index).view(2, num_heads, -1, chunk_size, head_dim)
            return block[:, head, chunk]
        tokens = (chunk.unsqueeze(1) * chunk_size + torch.arange(chunk_size)).flatten()
        slot = self._read_slot(index).unsqueeze(0)
        picked = gather_packed(slot, self._layout, 0, tokens.repeat(2 * num_heads, 1))
        picked = picked.view(2, num_heads, -1, chunk_size, head_dim)
        return picked[:, head, torch.arange(len(head))]

    def _each(self, work: Callable[[int], Found], indices: Sequence[int]) -> Iterator[Found]:
        """Calls `work` for each index in several threads. Yields the results in order. Few results are in memory at a
        time."""
        with_mode = partial(_in_inference_mode, work)
        for first in range(0, len(indices), THREADS):
            yield from self._file.space.pool.map(with_mode, indices[first : first + THREADS])


@dataclass(frozen=True)
class _Slot:
    """A block on the disk. See `staging.IndirectSource`."""

    blocks: DiskBlocks
    index: int

    def place(self, memory: Tensor) -> Tensor:
        return self.blocks.place(memory)

    def read(self, memory: Tensor) -> None:
        self.blocks.read_slot(self.index, memory)

    def write(self, memory: Tensor) -> None:
        self.blocks.write_slot(self.index, memory)


@torch.inference_mode()  # the mode is set for each thread separately
def _in_inference_mode(work: Callable[[int], Found], index: int) -> Found:
    return work(index)
