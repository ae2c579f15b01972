"""What an engine is handed to run on the simulator's GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from cuda_simulator import Simulator
from triforce.kernels import use_kernels
from triforce.offload.limits import LIMITS, Limits
from triforce.offload.system import System
from triforce.offload.transfer.cuda_link import CudaLink
from triforce.offload.transfer.host import HOST, Host
from triforce.tp.devices import DeviceMemory


def as_on_a_gpu() -> AbstractContextManager[None]:
    """Within, what a GPU would run, in PyTorch's operations: what is compiled is not seen here."""
    return use_kernels(attention="plain", as_gpu=())


def simulated_system(
    simulator: Simulator, limits: Limits = LIMITS, host: Host = HOST, device_bytes: int | None = None
) -> System:
    """A simulator's link and its waits.

    Args: `device_bytes` is the memory that the GPU is said to have; `None`: runs are planned as on a CPU.
    """
    cpu = torch.device("cpu")

    def memory(_: torch.device) -> DeviceMemory | None:
        if device_bytes is None:
            return None
        taken = simulator.taken + simulator.workspaces
        return DeviceMemory(device_bytes - taken - simulator.others - simulator.outside, device_bytes, taken)

    return System(
        device_memory=memory,
        synchronize=simulator.synchronize,
        make_link=lambda *_: CudaLink(cpu, runtime=simulator.runtime()),
        host=host,
        limits=limits,
    )
