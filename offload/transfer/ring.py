"""The ring: a few device buffers through which blocks of host memory flow, each used once and overwritten.

It keeps as many copies under way as it has buffers, so that the link is busy while a block is attended, and between
layers too. Between passes, blocks that become whole on the device leave through the same buffers. It knows neither CUDA
nor what a block means.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice

from torch import Tensor

from .link import Arrival, Link


class Ring:
    """Buffers that blocks pass through in an order known beforehand."""

    def __init__(self, link: Link, buffers: Sequence[Tensor]) -> None:
        """Args: `buffers` have a block's shape; with two or more, one is filled while another is in use."""
        self._link, self.buffers = link, list(buffers)
        self._coming: Iterator[Tensor] = iter(())
        self._under_way: deque[tuple[Tensor, Arrival]] = deque()
        self._leaving: deque[tuple[Tensor, Arrival]] = deque()

    def send(self, block: Tensor, target: Tensor) -> None:
        """Copies `block`, on the device, to `target`, in host memory. It may be overwritten at once. All blocks that
        were begun have come."""
        if len(self._leaving) < len(self.buffers):
            buffer = self.buffers[len(self._leaving)]
        else:
            buffer, departure = self._leaving.popleft()
            departure.wait()
        buffer.copy_(block)
        self._leaving.append((buffer, self._link.store(buffer, target)))

    def stop(self) -> None:
        """Drops what is left of the blocks that were begun; what is computed from here on comes after their copies.

        Raises:
            LinkError: a copy failed.
        """
        under_way, self._under_way = self._under_way, deque()
        self._coming = iter(())
        for _, arrival in under_way:
            arrival.wait()

    def begin(self, blocks: Iterator[Tensor]) -> None:
        """Starts on `blocks`, in host memory; what is left of earlier ones is dropped.

        A copy that is still under way, either way, ends before any that is asked for now, so its buffer is safe to use
        again.
        """
        self._coming = blocks
        self._under_way.clear()
        for buffer, block in zip(self.buffers, islice(blocks, len(self.buffers)), strict=False):
            self._under_way.append((buffer, self._link.fetch(block, buffer)))

    def next_blocks(self, count: int) -> Iterator[Tensor]:
        """The next `count` blocks, each on the device and there until the next one is asked for.

        Raises:
            LinkError: a copy failed.
        """
        for _ in range(count):
            buffer, arrival = self._under_way.popleft()
            arrival.wait()
            yield buffer
            following = next(self._coming, None)
            if following is not None:
                self._under_way.append((buffer, self._link.fetch(following, buffer)))
