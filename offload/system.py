"""The engine's interface to the machine, given to `Engine.load(system=...)`: clock, waits, links, host memory, sizes.

A test can give a substitute: a clock that stands still, links and waits of a simulated GPU, a smaller ring.
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
    """The machine, or a substitute for it in tests."""

    clock: Callable[[], float] = time.perf_counter
    """Returns the time in seconds. Passes, rounds and prefills are timed with it."""
    synchronize: Callable[[torch.device], None] = synchronize
    """Returns when a device has finished all work that was submitted to it."""
    make_link: Callable[[torch.device, float | None], Link] = make_link
    """Makes the link between host memory and a device. The second argument is the maximum bandwidth of a CPU's link, in
    gigabytes a second."""
    make_blocks: Callable[..., Blocks] = make_blocks
    """Allocates the memory for the blocks of a cache; see `transfer.make`."""
    device_memory: Callable[[torch.device], DeviceMemory | None] = device_memory
    """The memory of a device and how much of it is free; `None` if the device is a CPU."""
    host: Host = HOST
    """The host functions that streaming uses."""
    limits: Limits = LIMITS
    """The sizes that plans, caches and streaming blocks keep to."""
    wait_limit_s: float = WAIT_LIMIT_S
    """The maximum time in seconds that a rank waits for the others within a round or a slice of a prefill."""


THIS_MACHINE = System()
