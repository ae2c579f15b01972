"""What the engine asks of the machine, handed in at `Engine.load(system=...)`: clock, waits, links, host memory, sizes.

A test hands in another one: a clock that stands still, links and waits of a simulated GPU, a smaller ring.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..tp.devices import DeviceMemory, device_memory, synchronize
from ..tp.parallel.ranks import WAIT_LIMIT_S
from .limits import LIMITS, Limits
from .transfer.device_blocks import Blocks
from .transfer.host import HOST, Host
from .transfer.link import Link, make_link
from .transfer.make import make_blocks


@dataclass(frozen=True)
class System:
    """The machine, or what stands for it."""

    clock: Callable[[], float] = time.perf_counter
    """Seconds; what passes, rounds and readings are timed with."""
    synchronize: Callable[[torch.device], None] = synchronize
    """Returns when a device has finished all work that was submitted to it."""
    make_link: Callable[[torch.device, float | None], Link] = make_link
    """The link between host memory and a device, and on a CPU what it may carry, in gigabytes a second."""
    make_blocks: Callable[..., Blocks] = make_blocks
    """Takes the memory for the blocks of a cache; see `transfer.make`."""
    device_memory: Callable[[torch.device], DeviceMemory | None] = device_memory
    """What is free on a device; `None` where the CPU computes."""
    host: Host = HOST
    """What streaming asks of the host."""
    limits: Limits = LIMITS
    wait_limit_s: float = WAIT_LIMIT_S
    """How long a rank waits for the others inside a round or a slice of a prefill."""


THIS_MACHINE = System()
