"""Finds the optional packages that can be used on a device. Nothing is imported for a CPU."""

from __future__ import annotations

import functools
import importlib

import torch

from .selection import selected

OLDEST_GPU = (8, 0)
"""The lowest compute capability that Triton's bfloat16 and flash attention support."""


def usable_packages(device: torch.device) -> frozenset[str]:
    """Those of `flash_attn` and `triton` that are installed, were built for this PyTorch, and run on `device`."""
    chosen = selected().as_gpu
    return _found(device) if chosen is None else chosen


@functools.cache
def _found(device: torch.device) -> frozenset[str]:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < OLDEST_GPU:
        return frozenset()
    return frozenset(name for name in ("flash_attn", "triton") if _importable(name))


def _importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True
