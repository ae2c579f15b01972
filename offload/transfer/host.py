"""What streaming asks of the host besides its link: memory, threads, packing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...kernels.packing import pack
from ...tp.pages import aligned_memory
from .staging import make_pool


@dataclass(frozen=True)
class Host:
    """The host, or what stands for it in tests."""

    memory: Callable[[Sequence[int], torch.dtype], Tensor] = aligned_memory
    """Makes memory that is not page-locked, and that a disk is read into: uninitialised, from the border of a page on.
    """
    make_pool: Callable[[], Any] = make_pool
    """Makes an executor, whose threads fill and empty buffers."""
    pack: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = pack
    """Packs blocks into slots; which of them are in theirs. See `kernels.packing`."""


HOST = Host()
