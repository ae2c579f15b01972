"""The functions of the host that streaming needs besides the link: memory, threads, packing."""

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
    """The functions of the host. Tests replace them."""

    memory: Callable[[Sequence[int], torch.dtype], Tensor] = aligned_memory
    """Makes memory that is not page-locked, and into which a disk can be read: uninitialised, beginning at the border
    of a page."""
    make_pool: Callable[[], Any] = make_pool
    """Makes an executor, whose threads fill and empty buffers."""
    pack: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = pack
    """Packs blocks into slots. Returns also which blocks fit into their slots. See `kernels.packing`."""


HOST = Host()
