"""The available memory of this machine, and the memory of this process. `run_plan` computes what a run needs."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from ...kernels.host_rows import reads_host_memory
from ...kernels.layers import steps_make_numbers
from ...kernels.packing import packs_fast
from ...tp.devices import DeviceMemory, device_memory
from ...tp.errors import CapacityError
from ...tp.pages import available_memory, free_reserve
from ...tp.parallel.ranks import ALONE, Ranks
from ...tp.units import gib
from .request import RunRequest
from .run_plan import CUDA_CONTEXT, RunPlan, left_free, make_plan, weight_bytes


def plan_here(
    request: RunRequest,
    device: torch.device,
    ranks: Ranks = ALONE,
    *,
    held: Mapping[str, int] | None = None,
    given_back: int = 0,
    given_back_on_host: int = 0,
    given_back_on_disk: int = 0,
    held_on_host: int = 0,
    promised: int = 0,
    free_disk: Callable[[], int] | None = None,
    device_memory: Callable[[torch.device], DeviceMemory | None] = device_memory,
) -> RunPlan:
    """The plan of a run in the free memory of all ranks' machines. A collective call: the minimum over the ranks
    counts, so every rank makes the same plan.

    Args:
        request: its memory is filled in here.
        held: bytes on the device by part (`Engine.held`), of an engine that has loaded the weights; `None`: nothing is
            loaded. The parts that last from run to run are counted again by the plan, so they are available to the run.
        given_back, given_back_on_host, given_back_on_disk: bytes on the device, in other host memory, and on the disk
            that will be free when the run begins, or that its plan counts again.
        held_on_host: bytes of host memory that other caches of this process hold. They count against `--host-memory`.
        promised: bytes that other caches of this process will still take, if the CPU computes. They seem to be free.
        free_disk: returns the free bytes on the disk for blocks that exceed host memory; `None`: no blocks on a disk.
        device_memory: see `System`.
    """
    kernels, found = packs_fast(device), device_memory(device)
    request = replace(
        request,
        kernels=kernels,
        gpu_bytes=found and found.free,
        gpu_total_bytes=found and found.total,
        locks_embedding=request.locks_embedding and reads_host_memory(device),
        held_rope_bytes=request.held_rope_bytes if held is None else held.get("rope", 0),
    )
    host, own = psutil.virtual_memory().available // ranks.local_size + given_back_on_host, given_back
    if reserved := free_reserve():  # only caches can use it, and what they give back is a part of it
        own = min(reserved + given_back, make_plan(request).caches)
    if held is not None:
        weights, embedding = weight_bytes(request)
        host += request.process_bytes + embedding
        own += weights + request.held_rope_bytes
    most = sys.maxsize
    if request.settings.host_memory is not None:
        most = max(0, int(request.settings.host_memory * 2**30) // ranks.local_size - held_on_host)
    if found:
        reserve = left_free(found.total, request.gpus)
        outside = CUDA_CONTEXT + (reserve["nccl"] if ranks.on_device else 0)  # memory that PyTorch does not count
        if held is not None:
            own += max(0, min(found.taken - sum(held.values()), reserve["workspaces"]))
        for_others = max(0, found.taken - own)
        numbers = found.free + own + outside, found.total, for_others, min(host, most), int(kernels)
        free, total, for_others, host, everywhere = ranks.least([*numbers])
        more = {"gpu_bytes": free, "gpu_total_bytes": total, "gpu_bytes_beside": for_others}
    else:
        makes_numbers = steps_make_numbers(device, request.dtype)
        here = max(0, min(host + own - promised, most)), int(kernels), int(makes_numbers)
        host, everywhere, made = ranks.least([*here])
        more = {"makes_numbers": bool(made)}
    plan = make_plan(replace(request, kernels=bool(everywhere), host_bytes=host, local_ranks=1, **more))
    if free_disk is None or plan.host_total <= host:
        return plan
    (disk,) = ranks.least([free_disk() // ranks.local_size + given_back_on_disk])  # all ranks come here, or none does
    return make_plan(replace(plan.request, disk_bytes=disk))


@contextmanager
def shortage_explained(
    device: torch.device, device_memory: Callable[[torch.device], DeviceMemory | None] = device_memory
) -> Iterator[None]:
    """A context that turns out-of-memory errors of PyTorch and each `MemoryError`, which kernels raise, into an error
    with the memory taken and the remedies.

    Args: `device_memory`: see `System`.

    Raises:
        CapacityError: memory ran out.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        of_host = isinstance(error, MemoryError)
        # PyTorch's allocator for a CPU has no class of its own for it.
        if not (of_host or isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)):
            raise
        found = None if of_host else device_memory(device)
        if found:
            peak = device_peak_bytes(device)
            of_these = f", up to {gib(peak)} by this run" if peak else ""
            raise CapacityError(
                f"GPU memory ran out: {gib(found.total - found.free)} of {gib(found.total)} are taken{of_these}; keep "
                "less of the KV cache there (--resident), lower --budget, shorten the prompt (triforce generate: "
                "--truncate), or free memory"
            ) from error
        raise CapacityError(
            f"memory ran out: this process took up to {gib(host_peak_bytes())}, and {gib(available_memory())} is free "
            "now; shorten the prompt (triforce generate: --truncate), lower --budget, or free memory"
        ) from error


def available_bytes(device: torch.device) -> int:
    """Free bytes of the memory for tensors of `device`. On a GPU, this includes memory that PyTorch keeps for reuse."""
    found = device_memory(device)
    return found.free if found else available_memory()


def host_peak_bytes() -> int:
    """The maximum resident set of this process so far, in bytes."""
    try:  # Linux; getrusage there includes the process that started this one
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def device_peak_bytes(device: torch.device) -> int:
    """The maximum bytes of tensors on a GPU so far; 0 on a CPU, where they are a part of the host's."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
