"""The compute device: chooses device, dtype and threads from what a user asks for, and copies numbers to a device."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.cpu.library import cpu_level
from .errors import UsageError
from .model.config import ModelConfig


def resolve_device(name: str, local_rank: int = 0) -> torch.device:
    """The device for the name `auto`, `cpu` or `cuda`.

    Args:
        name: `auto` is a GPU if PyTorch sees one, otherwise the CPU.
        local_rank: the number of this rank on this machine. It is also the number of its GPU.

    Raises:
        UsageError: `name` is another name, or `cuda` without a CUDA device; this machine has fewer GPUs than ranks; or
            see `check_cpu_level`.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise UsageError(f"device is {name!r}; it is auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            "device is cuda, but PyTorch sees no CUDA device here; use --device cpu, or see triforce doctor"
        )
    check_cpu_level()  # also for a GPU: kernels for CPUs pack the blocks that cross its link
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise UsageError(
            f"rank {local_rank} of this machine has no GPU of its own: PyTorch sees {torch.cuda.device_count()} here; "
            "lower --gpus, or use --device cpu"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


class DeviceMemory(NamedTuple):
    """The memory of a GPU, in bytes."""

    free: int
    """Free memory, including the memory of deleted tensors that PyTorch keeps."""
    total: int
    taken: int
    """Memory of this process's tensors, and of libraries that allocate their workspace through PyTorch, as cuBLAS
    does."""


def device_memory(device: torch.device) -> DeviceMemory | None:
    """The memory of a GPU; `None` for a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    taken = torch.cuda.memory_allocated(device)
    return DeviceMemory(free + torch.cuda.memory_reserved(device) - taken, total, taken)


def check_cpu_level() -> None:
    """Checks the environment variable `TRIFORCE_CPU_LEVEL`.

    Raises:
        UsageError: it does not name a level of the compiled kernels, or names a level that is not supported here.
    """
    try:
        cpu_level()
    except ValueError as error:
        raise UsageError(str(error)) from error


def resolve_dtype(name: str, config: ModelConfig) -> torch.dtype:
    """The dtype for `auto` (the checkpoint's), `float32`, `bfloat16` or `float16`.

    Raises:
        UsageError: any other name.
    """
    dtypes = {"auto": config.dtype, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in dtypes:
        raise UsageError(f"dtype is {name!r}; it is {', '.join(dtypes)}")
    return dtypes[name]


def to_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """`numbers` as an int64 tensor on `device`; on a GPU the copy is asynchronous."""
    return torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def set_threads(count: int | None) -> None:
    """Sets the number of CPU threads with which this process computes.

    It applies to PyTorch's operations and to the compiled kernels, which read `torch.get_num_threads()` at each call
    and whose results do not depend on it.

    Args:
        count: the number of threads; `None` leaves PyTorch's default (`OMP_NUM_THREADS`, or the number of cores).

    Raises:
        UsageError: `count` is less than 1.
    """
    if count is None:
        return
    if count < 1:
        raise UsageError(f"threads is {count}; it must be 1 or more")
    torch.set_num_threads(count)


def synchronize(device: torch.device) -> None:
    """Waits until `device` has finished all work that was submitted to it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@lru_cache(maxsize=16)
def device_name(device: torch.device) -> str:
    """The manufacturer's name of the device; the machine's architecture if the system does not give the name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return model or platform.processor() or platform.machine()
