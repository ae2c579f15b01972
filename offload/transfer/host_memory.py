"""Host memory for blocks: page-locked as far as the system does that, ordinary memory from there on.

Systems that lock little (WSL2, containers, Windows) would otherwise not stream at all. A link cannot copy from ordinary
memory beside computation: such blocks go through `staging`, which costs one more copy of each within host memory.
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
    """Takes host memory for the blocks of one cache, and knows which of it the link copies from."""

    def __init__(self, link: Link, host: Host = HOST) -> None:
        self._link, self.host = link, host
        self._pageable: list[tuple[int, int]] = []  # addresses
        self.refused = False
        """Whether the system has refused to lock some."""
        self.staged = False
        """Whether there is staging for what is not locked. What is taken from then on is not: the rest of what the
        system locks is for the staging of others."""

    def take(self, shape: Sequence[int], dtype: torch.dtype, *, must_be_locked: bool = False) -> Tensor:
        """Memory for `shape[0]` blocks; see `Link.host_memory`. Once the system has refused to lock some, it is not
        asked again.

        Raises:
            CapacityError: it refuses now, and the memory must be locked.
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
        """Whether the link cannot copy from it."""
        address = block.data_ptr()
        return any(first <= address < stop for first, stop in self._pageable)

    def source(self, block: Tensor) -> Source:
        """What the ring is given of a block, or a slot, in this memory."""
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
