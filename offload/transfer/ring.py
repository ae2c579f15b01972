"""The ring: a few device buffers through which blocks of host memory flow, each used once and overwritten.

It keeps as many copies under way as it has buffers (but for the one whose block is attended to as it came), so that the
link is busy while a block is attended to, and between layers too. What comes packed is unpacked into one more buffer,
several blocks at once where they are small. Between passes, blocks that become whole on the device leave through the
same buffers. Blocks that the link cannot copy from where they lie go through `staging` as well. It knows neither CUDA
nor what a block means.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from math import prod
from typing import cast

from torch import Tensor

from ...kernels.packing import unpack
from .host_blocks import HostBlocks, slot_in
from .link import Arrival, Link
from .staging import Source, Staged, StagedCopy, Staging


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
        were begun have come."""
        if len(self._leaving) < len(self.buffers):
            buffer = self.buffers[len(self._leaving)]
        else:
            buffer, departure = self._leaving.popleft()
            departure.wait()
        source, target = host.leave(index, block, self._one(buffer))
        if isinstance(target, Tensor):
            self._leaving.append((buffer, self._link.store(source, target)))
        else:
            assert self._staging
            self._leaving.append((buffer, self._staging.store(source, target)))

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
        """Drops what is left of the blocks that were begun; what is computed from here on comes after their copies.

        Raises:
            LinkError: a copy failed.
        """
        under_way, self._under_way = self._under_way, deque()
        self._coming = iter(())
        for _, _, arrival in under_way:
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
        place = slot_in(buffer, comes.numel()).view(comes.shape) if slots else self._one(buffer)
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
