"""Blocks of keys and values, of which as many as fit are resident on the device. The others stream from host memory.

Blocks for which host memory has no room are on a disk: the first of the blocks that are not resident, so that the
newest blocks are in memory.

The newest tokens of each layer stay on the device in an *open stretch*. So the tokens of a verification cross the link
only when their block is full. Between two passes nothing else crosses the link. Exceptions: chunks are gathered, blocks
are moved off the device, tokens of a whole block are taken back, or the cache is saved or restored.

A pass over a few tokens reads every block once. It reads the resident blocks while the first of the others crosses the
link. A pass over many tokens (a prefill) collects one layer at a time in a *workspace* on the device, where the layer's
keys are in one piece for attention. Meanwhile each new block is written through the ring to its place. So a prompt's
keys and values leave the device once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from math import prod

import torch
from torch import Tensor

from ...kernels.chunks import copy_chunks
from ...tp.errors import CapacityError
from ...tp.model.config import ModelConfig
from ..held import Held
from .device_blocks import Blocks, Footprint, PausedPass, on_host, pieces_of, read_tokens, write_tokens
from .host import HOST, Host
from .host_blocks import RawBlocks, Ring
from .link import Link, Traffic
from .placement import Placement
from .staged.block_file import DiskSpace
from .staged.block_homes import BlockHomes
from .staging import Source


class StreamedBlocks:
    """Blocks in host memory, or on a disk, except for the first `num_resident` blocks of each layer. For the last of
    these, host memory has room, too: they can be moved there when the device needs memory. See `device_blocks.Blocks`.
    """

    all_on_device = False

    def __init__(
        self,
        config: ModelConfig,
        link: Link,
        placement: Placement,
        *,
        dtype: torch.dtype,
        device: torch.device,
        on_memory: Callable[[float], None] | None = None,
        disk: DiskSpace | None = None,
        host: Host = HOST,
    ) -> None:
        """Takes the memory for the blocks of `placement`.

        Args:
            config: the configuration of the rank's part of the model.
            link: the link over which blocks stream.
            on_memory: called with the share of the host memory that is taken so far, 0 to 1. Page-locking takes
                seconds.
            disk: the folder for blocks for which host memory has no room; needed if `placement` has such blocks.
            host: makes ordinary memory and threads, and packs blocks.

        Raises:
            CapacityError: the system does not page-lock the minimum of host memory, or the disk has no room.
        """
        block_size, num_resident = placement.block_size, placement.num_resident
        self.block_size, self.dtype, self.device = block_size, dtype, device
        self.num_resident = num_resident
        self._first_on_host = placement.first_on_host
        self._link, self._placement = link, placement
        self.capacity, self._step_rows = placement.capacity, placement.limits.step_rows
        self._block = (2, config.num_kv_heads, block_size, config.head_dim)

        def on_device(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        layers = range(config.num_layers)
        self._disk = disk
        self._homes = BlockHomes(config, link, placement, dtype, on_memory, disk, host)
        self._host, self._overflow, self._staging = self._homes.host, self._homes.overflow, self._homes.staging
        # The blocks that stay are in one tensor, so that attention can take them as one piece. Each block that can be
        # moved to host memory has its own memory.
        tokens, alone = self._first_on_host * block_size, range(placement.num_spare)
        self._staying = [on_device(2, config.num_kv_heads, tokens, config.head_dim) for _ in layers]
        self._resident = [
            [*(area.split(block_size, dim=2) if tokens else ()), *(on_device(*self._block) for _ in alone)]
            for area in self._staying
        ]
        self._open = [on_device(2, config.num_kv_heads, placement.open_tokens, config.head_dim) for _ in layers]
        self._windows = [config.sliding_window(layer) for layer in layers]
        # For each layer, the position of the first token in the open stretch. All tokens before it are in whole blocks.
        # The positions differ during a pass over many tokens, and after one that was broken off.
        self._bases = [0] * config.num_layers
        buffer = 2, config.num_kv_heads, placement.together * block_size, config.head_dim
        unpacked = on_device(*buffer) if placement.packed else None
        buffers = [on_device(*buffer) for _ in range(placement.ring_buffers)]
        self._ring = Ring(link, buffers, unpacked, self._staging, placement.together)
        self._workspace: Tensor | None = None  # [2, num_kv_heads, tokens, head_dim]
        self._worked = -1  # the layer in the workspace
        self._start = self._stop = 0  # positions of the current pass
        self._first_row = 0  # position of its first row
        self._seen = 0  # position of the last token to which its rows attend, plus 1

    @property
    def placement(self) -> Placement:
        spare = self.num_resident - self._first_on_host
        return replace(self._placement, num_resident=self.num_resident, num_spare=spare)

    @property
    def _base(self) -> int:
        """The position at which the open stretch of every layer begins; during a pass over many tokens, the position
        before the pass. It is that of the last layer."""
        return self._bases[-1]

    def held(self) -> Held:
        yield from (("resident_kv", area) for area in self._staying)
        yield from (("resident_kv", block) for blocks in self._resident for block in blocks[self._first_on_host :])
        yield from (("open_stretches", stretch) for stretch in self._open)
        yield from (("ring", buffer) for buffer in self._ring.memory)
        if self._workspace is not None:
            yield "prefill", self._workspace

    @property
    def footprint(self) -> Footprint:
        disk = self._homes.file.num_bytes if self._homes.file else 0
        return Footprint(self._homes.host_bytes, disk, self._spare_bytes)

    @property
    def _spare_bytes(self) -> int:
        return (self.num_resident - self._first_on_host) * len(self._resident) * prod(self._block) * self.dtype.itemsize

    def offload(self, num_bytes: int) -> int:
        before = self._spare_bytes
        self.drain()
        while self._spare_bytes and before - self._spare_bytes < num_bytes:
            last = self.num_resident - 1
            try:
                for host, blocks in zip(self._host, self._resident, strict=True):
                    # Even if the block seems to be unused: a paused prefill may already have filled it in some layers.
                    self._ring.send(blocks[last], host, last - self._first_on_host)
            except CapacityError:  # a block cannot be packed, and there is no memory to keep it raw
                break
            self.num_resident = last
            for blocks in self._resident:
                blocks.pop()
        return before - self._spare_bytes

    def _sources(self, layer: int, first: int, stop: int) -> Iterator[Source]:
        """Yields the sources of blocks `first` to `stop`, which are not resident, for the link."""
        host, index, stop = self._host[layer], first - self._first_on_host, stop - self._first_on_host
        while index < stop:
            count = host.together(index, min(self._placement.together, stop - index))
            yield host.at(index, count)
            index += count

    def _send_home(self, layer: int, index: int, block: Tensor) -> None:
        """Copies a block, which is on the device, to its place: resident memory, host memory or a disk. `block` may be
        overwritten immediately afterwards."""
        if index < self.num_resident:
            self._resident[layer][index].copy_(block)
        else:
            self._ring.send(block, self._host[layer], index - self._first_on_host)

    def move_from(self, other: Blocks, length: int) -> bool:
        if not isinstance(other, StreamedBlocks):
            return False
        other.rollback(length)
        other.drain()  # copies from memory that is freed here may be in progress
        whole = length // self.block_size
        for layer, stretch in enumerate(self._open):
            k, v = other._on_host(layer, length)
            blocks = k.new_zeros(whole + 1, *self._block)
            write_tokens(blocks, 0, k, v, clean=whole + 1)
            for place, block in zip(self._resident[layer], blocks[:whole], strict=False):
                place.copy_(block)
            self._host[layer].write(blocks[self._first_on_host : whole])
            stretch[:, :, : self.block_size] = blocks[whole]
            other._resident[layer], other._host[layer] = [], RawBlocks(blocks.new_empty(0))
            other._staying[layer] = blocks.new_empty(0)
        self._bases = [whole * self.block_size] * len(self._open)
        return True

    def _on_host(self, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """Copies the keys and values of a layer's first `length` tokens to host memory. `length` must be within the
        open stretch."""
        whole = self._base // self.block_size
        rest = self._open[layer][:, :, : length - self._base].cpu()
        if not whole:
            return rest[0], rest[1]
        here, first = self._resident[layer][:whole], self._first_on_host
        below = self._host[layer].read(len(here) - first, whole - first) if whole > len(here) else ()
        k, v = read_tokens(torch.stack([*(block.cpu() for block in here), *below]), 0, self._base)
        return torch.cat((k, rest[0]), dim=1), torch.cat((v, rest[1]), dim=1)

    def drain(self) -> None:
        self._stop_ring()
        self._ring.wait_for_stores()

    def export(self, layer: int, start: int, stop: int) -> Callable[[], list[Tensor]]:
        edge, size, base = self.num_resident * self.block_size, self.block_size, self._base
        before = pieces_of(self._resident[layer], start, min(stop, edge, base))
        before = [place.cpu() for place in before]
        # A copy, because the open stretch changes with later tokens.
        after = [self._open[layer][:, :, max(start - base, 0) : stop - base].clone().cpu()] if stop > base else []
        first, last, host = max(start, edge), min(stop, base), self._host[layer]
        shift = self._first_on_host * size

        def pieces() -> list[Tensor]:
            if first >= last:
                return before + after
            whole = first // size * size
            blocks = host.read((whole - shift) // size, -(-(last - shift) // size))
            return [*before, *pieces_of(blocks, first - whole, last - whole), *after]

        return pieces

    def restore(self, layer: int, stop: int, read: Callable[[list[Tensor]], None]) -> None:
        whole, first, host = stop // self.block_size, self._first_on_host, self._host[layer]
        here, both = self._resident[layer][: min(first, whole)], self._resident[layer][first:whole]
        after = [self._open[layer][:, :, :rest]] if (rest := stop % self.block_size) else []
        self._open[layer][:, :, rest:].zero_()  # it may have damaged data of an earlier attempt
        below = host.room(max(0, whole - first))
        places = [*here, *after]
        pieces = [on_host(place) for place in places]
        read([*pieces[: len(here)], *below, *pieces[len(here) :]])
        host.write(below)
        for place, piece in zip([*places, *both], [*pieces, *below[: len(both)]], strict=True):
            if piece is not place:
                place.copy_(piece)
        self._bases[layer], self._workspace = whole * self.block_size, None

    def traffic(self) -> Traffic:
        return self._link.traffic() + (self._disk.traffic() if self._disk else Traffic())

    def prepare(
        self, start: int, n: int, *, rows: int | None = None, first_row: int | None = None, stop: int | None = None
    ) -> None:
        self._stop_ring()
        self._ring.wait_for_stores()  # a failed store raises an error before its target is read
        self._start, self._stop = start, start + n
        self._first_row = start if first_row is None else first_row
        self._seen = self._stop if stop is None else stop
        self._workspace = None
        while start - self._base >= self.block_size:
            self._close_block(start - self._base)
        if (n if rows is None else rows) > self._step_rows:
            _, num_kv_heads, size, head_dim = self._block
            self._workspace = self._open[0].new_zeros(2, num_kv_heads, -(-self._seen // size) * size, head_dim)
            self._worked = -1
            return
        self._ring.begin(chain.from_iterable(self._sources(i, *self._range(i)) for i in range(len(self._host))))

    def pause(self) -> PausedPass:
        state = self._start, self._stop, self._first_row, self._seen, self._worked
        paused, self._workspace = PausedPass(state, self._workspace), None
        return paused

    def resume(self, paused: PausedPass | None) -> None:
        assert paused
        self._start, self._stop, self._first_row, self._seen, self._worked = paused.state
        self._workspace = paused.workspace

    def _range(self, layer: int) -> tuple[int, int]:
        """The first block that a pass over few tokens streams, and the last plus 1: those to which any row attends."""
        whole = max(min(self._base // self.block_size, -(-self._seen // self.block_size)), self.num_resident)
        window = self._windows[layer]
        if window is None:
            return self.num_resident, whole
        return min(max(self.num_resident, (self._first_row + 1 - window) // self.block_size), whole), whole

    def _close_block(self, filled: int) -> None:
        """Moves the first block of every layer's open stretch to its place.

        Args: `filled` is the number of tokens in the open stretches.
        """
        index = self._base // self.block_size
        for layer, stretch in enumerate(self._open):
            self._send_home(layer, index, stretch[:, :, : self.block_size])
            stretch[:, :, : filled - self.block_size] = stretch[:, :, self.block_size : filled].clone()
            self._bases[layer] += self.block_size

    def release(self) -> None:
        self._workspace = None

    def append(self, layer: int, start: int, k: Tensor, v: Tensor) -> None:
        stop = start + k.shape[1]
        if stop > self.capacity:
            raise ValueError(f"the cache has room for {self.capacity} tokens, not for {stop}")
        if self._workspace is None:
            place = slice(start - self._base, stop - self._base)
            self._open[layer][0, :, place] = k
            self._open[layer][1, :, place] = v
            return
        if layer != self._worked:
            self._take_up(layer, start)
        self._workspace[0, :, start:stop] = k
        self._workspace[1, :, start:stop] = v
        if stop == self._stop:
            self._hand_back(layer)

    def _take_up(self, layer: int, length: int) -> None:
        """Copies the first `length` tokens of a layer, those that it has already, to the workspace."""
        assert self._workspace is not None
        self._worked = layer
        whole = min(self._base // self.block_size, -(-length // self.block_size))
        resident = min(whole, self.num_resident)
        staying = min(resident, self._first_on_host)
        tokens = staying * self.block_size
        self._workspace[:, :, :tokens] = self._staying[layer][:, :, :tokens]
        for index, block in enumerate(self._resident[layer][staying:resident], staying):
            self._worked_block(index).copy_(block)
        self._ring.begin(self._sources(layer, resident, whole))
        position = resident * self.block_size
        for blocks in self._ring.next_blocks(whole - resident):
            self._workspace[:, :, position : position + blocks.shape[2]] = blocks
            position += blocks.shape[2]
        if length > self._base:
            self._workspace[:, :, self._base : length] = self._open[layer][:, :, : length - self._base]

    def _worked_block(self, index: int) -> Tensor:
        """A view of a block `[2, num_kv_heads, block_size, head_dim]` of the layer in the workspace."""
        assert self._workspace is not None
        return self._workspace[:, :, index * self.block_size : (index + 1) * self.block_size]

    def _hand_back(self, layer: int) -> None:
        """Copies a layer's new blocks from the workspace to their places, and its last tokens to the open stretch."""
        assert self._workspace is not None
        whole = self._stop // self.block_size
        for index in range(self._base // self.block_size, whole):
            self._send_home(layer, index, self._worked_block(index))
        rest = self._workspace[:, :, whole * self.block_size : self._stop]
        self._open[layer][:, :, : rest.shape[2]] = rest
        self._bases[layer] = whole * self.block_size

    def pieces(self, layer: int, first: int, stop: int, *, joined: bool = False) -> Iterator[tuple[int, Tensor]]:
        size = self.block_size
        if self._workspace is not None:
            if layer != self._worked:  # the pass adds no tokens to this cache
                self._take_up(layer, self._seen)
            begin, end = first // size * size, -(-stop // size) * size
            # Flash kernels get one piece. They do not support float32, for which memory grows with the keys of a piece.
            step = max(size, end - begin) if self.dtype.itemsize == 2 else size
            for position in range(begin, end, step):
                yield position, self._workspace[:, :, position : position + step]
            if layer == len(self._open) - 1 and stop == self._stop > self._start:
                self.release()  # the choice of chunks and drafting, which follow, need the memory
            return
        resident = min(self._base // size, -(-stop // size), self.num_resident)
        begin, staying = first // size, min(resident, self._first_on_host)
        if joined and begin < staying:
            yield begin * size, self._staying[layer][:, :, begin * size : staying * size]
            begin = staying
        for index in range(begin, resident):
            yield index * size, self._resident[layer][index]
        streamed, end = self._range(layer)
        wanted, position = first // size * size, streamed * size
        for blocks in self._ring.next_blocks(end - streamed):
            hidden = max(0, wanted - position)
            if hidden < blocks.shape[2]:
                yield position + hidden, blocks[:, :, hidden:] if hidden else blocks
            position += blocks.shape[2]
        if stop > self._base:
            yield self._base, self._open[layer]

    def at_once(self, layer: int) -> Tensor | None:
        return None

    def slice(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        if start < self._base:
            raise ValueError(f"tokens from {start} are not on the device, only those from {self._base}")
        k, v = self._open[layer][:, :, start - self._base : stop - self._base]
        return k, v

    def gather(self, layer: int, chunks: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
        """See `Blocks`. Chunks of streamed blocks are gathered in host memory, and cross the link."""
        self._ring.wait_for_stores()  # blocks may still be on their way to host memory
        per_block = self.block_size // chunk_size
        below = self._host[layer]
        there = (chunks.cpu() - self._first_on_host * per_block).clamp_(0, len(below) * per_block - 1)
        picked = below.gather(there, chunk_size)
        k, v = picks = torch.empty(picked.shape, dtype=picked.dtype, device=self.device)
        self._link.fetch(picked, picks).wait()
        if self._first_on_host:
            copy_chunks(self._staying[layer], 0, chunks, k, v, chunk_size)
        for index, block in enumerate(self._resident[layer][self._first_on_host :], self._first_on_host):
            copy_chunks(block, index * per_block, chunks, k, v, chunk_size)
        copy_chunks(self._open[layer], self._base // chunk_size, chunks, k, v, chunk_size)
        return k, v

    def _stop_ring(self) -> None:
        """Ends the copies that a pass left in progress when it was broken off. Their buffers are used next."""
        self._ring.stop()

    def rollback(self, length: int) -> None:
        if length >= max(self._bases):
            return
        self._workspace = None
        self._stop_ring()
        if not length:  # no tokens are left
            self._bases = [0] * len(self._bases)
            return
        index = length // self.block_size
        for layer, stretch in enumerate(self._open):
            if length >= self._bases[layer]:
                continue  # a pass that was broken off did not reach this layer, so its stretch begins with this block
            if index < self.num_resident:
                stretch[:, :, : self.block_size] = self._resident[layer][index]
            else:
                (source,) = self._sources(layer, index, index + 1)
                stretch[:, :, : self.block_size] = self._ring.bring(source)
            self._bases[layer] = index * self.block_size
