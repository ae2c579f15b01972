"""Host memory for blocks: page-locked memory up to the system's limit, and ordinary memory beyond it.

With page-locked memory alone, blocks could not stream on systems with a low limit (WSL2, containers, Windows). A link
cannot copy from ordinary memory during computation. Blocks in ordinary memory pass through `staging`, which costs one
more copy of each block within host memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...tp.errors import CapacityError
from .host import HOST, Host
from .link import Link
from .staging import Source


class HostMemory:
    """Takes host memory for the blocks of one cache, and knows from which of it the link can copy."""

    def __init__(self, link: Link, host: Host = HOST) -> None:
        self._link, self.host = link, host
        self._pageable: list[tuple[int, int]] = []  # first and last address (plus 1) of ordinary memory
        self.refused = False
        """Whether the system has refused to page-lock memory."""
        self.staged = False
        """Whether there is staging for memory that is not page-locked. From then on, no more memory is page-locked: the
        rest of the system's limit is for the staging of other caches."""

    def take(self, shape: Sequence[int], dtype: torch.dtype, *, must_be_locked: bool = False) -> Tensor:
        """Memory for `shape[0]` blocks; see `Link.host_memory`. After the system has refused to page-lock memory once,
        or once there is staging, all memory is ordinary, even with `must_be_locked`.

        Raises:
            CapacityError: the system refuses to page-lock this memory, and `must_be_locked` is set.
        """
        if not (self.refused or self.staged):
            try:
                return self._link.host_memory(shape, dtype)
            except CapacityError:
                if must_be_locked:
                    raise
                self.refused = True
        memory = self.host.memory(shape, dtype)
        self._pageable.append((memory.data_ptr(), memory.data_ptr() + memory.nbytes))
        return memory

    def is_pageable(self, block: Tensor) -> bool:
        """Whether a block is in ordinary memory, from which the link cannot copy."""
        address = block.data_ptr()
        return any(first <= address < stop for first, stop in self._pageable)

    def source(self, block: Tensor) -> Source:
        """The source with which the ring copies a block, or a slot, in this memory."""
        return _Pageable(block) if self.is_pageable(block) else block


class _Pageable:
    """A block in ordinary memory. See `staging.IndirectSource`."""

    def __init__(self, block: Tensor) -> None:
        self._block = block

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Pageable) and self._block.data_ptr() == other._block.data_ptr()

    def __hash__(self) -> int:
        return hash(self._block.data_ptr())

    def place(self, memory: Tensor) -> Tensor:
        return memory[: self._block.nbytes].view(self._block.dtype).view(self._block.shape)

    def read(self, memory: Tensor) -> None:
        self.place(memory).copy_(self._block)

    def write(self, memory: Tensor) -> None:
        self._block.copy_(self.place(memory))
