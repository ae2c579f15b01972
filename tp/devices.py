"""The device and the number format to run in, from the words a user gives, and numbers on their way to a device."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from .errors import UsageError
from .model.config import ModelConfig


def resolve_device(name: str, local_rank: int = 0) -> torch.device:
    """The device for `auto`, `cpu` or `cuda`: of several GPUs, that of this machine's rank `local_rank`.

    Raises:
        UsageError: another word, no CUDA device where one was asked for, or fewer than ranks.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise UsageError(f"device is {name!r}; it is auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            "device is cuda, but PyTorch sees no CUDA device here; use --device cpu, or see triforce doctor"
        )
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise UsageError(
            f"rank {local_rank} of this machine has no GPU of its own: PyTorch sees {torch.cuda.device_count()} here; "
            "lower --gpus, or use --device cpu"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def resolve_dtype(name: str, config: ModelConfig) -> torch.dtype:
    """The dtype for `auto` (the checkpoint's), `float32`, `bfloat16` or `float16`.

    Raises:
        UsageError: another word.
    """
    dtypes = {"auto": config.dtype, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in dtypes:
        raise UsageError(f"dtype is {name!r}; it is {', '.join(dtypes)}")
    return dtypes[name]


def to_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """`numbers` as an int64 tensor on `device`, which the host does not wait for."""
    return torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def synchronize(device: torch.device) -> None:
    """Returns when `device` has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str:
    """The device's name as its maker gives it, as far as the system tells."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return model or platform.processor() or platform.machine()
