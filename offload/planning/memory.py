"""What memory there is here and what this process has taken. What a run needs is the plan's business (`run_plan`)."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from ...tp.errors import CapacityError
from ...tp.parallel.ranks import Ranks
from ...tp.units import gib
from .request import RunRequest
from .run_plan import CUDA_CONTEXT, RUNTIME_BYTES, RunPlan, make_plan


@dataclass(frozen=True)
class Available:
    """Memory that a run may take, in bytes: what is free, with what the run holds already."""

    gpu_bytes: int | None
    """On each GPU; `None` where the CPU computes."""
    gpu_total_bytes: int | None
    host_bytes: int
    """Of host memory, for each rank."""

    @classmethod
    def here(cls, device: torch.device, ranks: Ranks, *, held: int = 0, held_on_gpu: int = 0) -> Available:
        """What there is on this rank's machine, agreed: of what the ranks find, the least counts for all, so that every
        rank makes the same plan. A collective call.

        Args:
            held: bytes of host memory that each rank of this host holds already.
            held_on_gpu: bytes that this run holds on each GPU.
        """
        host = psutil.virtual_memory().available // ranks.local_size + held
        if device.type != "cuda":
            return cls(None, None, ranks.least([host])[0])
        free, total = available_bytes(device) + held_on_gpu, torch.cuda.mem_get_info(device)[1]
        return cls(*ranks.least([free, total, host]))

    def to(self, request: RunRequest) -> RunRequest:
        """`request` with this memory."""
        return replace(
            request,
            gpu_bytes=self.gpu_bytes,
            gpu_total_bytes=self.gpu_total_bytes,
            host_bytes=self.host_bytes,
            local_ranks=1,
        )


def plan_loaded(request: RunRequest, device: torch.device, ranks: Ranks, *, given_back: int = 0) -> RunPlan:
    """The plan of a run whose weights are loaded, in the memory that is free now. A collective call.

    Args:
        given_back: bytes on the device that the run will not need any more.
    """
    bare = make_plan(request)
    if device.type == "cuda":
        on_gpu = bare.weights + CUDA_CONTEXT + given_back
        available = Available.here(device, ranks, held=RUNTIME_BYTES, held_on_gpu=on_gpu)
    else:
        available = Available.here(device, ranks, held=bare.weights + RUNTIME_BYTES + given_back)
    return make_plan(available.to(request))


@contextmanager
def shortage_explained(device: torch.device) -> Iterator[None]:
    """Turns PyTorch's failure to allocate, within, into an error that says what is taken and what helps.

    Raises:
        CapacityError: memory ran out.
    """
    try:
        yield
    except RuntimeError as error:  # a CPU's allocator has no class of its own for it
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            raise CapacityError(
                f"GPU memory ran out: {gib(total - free)} of {gib(total)} are taken, "
                f"{gib(device_peak_bytes(device))} at most by this run; keep less of the KV cache there (--resident), "
                "lower --budget, shorten the prompt (--truncate), or free memory"
            ) from error
        raise CapacityError(
            f"memory ran out: this process takes {gib(host_peak_bytes())} and {gib(available_bytes(device))} are "
            "available in all; shorten the prompt (--truncate), lower --budget, or free memory"
        ) from error


def available_bytes(device: torch.device) -> int:
    """Free memory where tensors of `device` live; on a GPU with what PyTorch keeps of tensors that are gone."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    return psutil.virtual_memory().available


def host_peak_bytes() -> int:
    """The largest resident set of this process so far."""
    try:  # Linux; what getrusage says there includes the process that started this one
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def device_peak_bytes(device: torch.device) -> int:
    """The most memory tensors took on an accelerator; 0 on a CPU, where it is part of the host's."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
