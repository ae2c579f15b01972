"""What a measurement is worth nothing without: on which machine, with which versions, when."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import psutil
import torch


def provenance(kind: str, command: str) -> dict[str, Any]:
    """The head of a measurement's JSON.

    Args:
        kind: what sort of document it is.
        command: as it was typed.
    """
    return {
        "kind": kind,
        "version": version("triforce-cli"),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": command,
    }


def machine(device: str, device_name: str, world_size: int, threads: int) -> dict[str, Any]:
    """Where it ran: `threads` are those that each rank computes with."""
    return {
        "device": device,
        "device_name": device_name,
        "world_size": world_size,
        "threads": threads,
        "cores": psutil.cpu_count(logical=True) or os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "device_memory_bytes": torch.cuda.get_device_properties(0).total_memory if device == "cuda" else None,
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def on(where: dict[str, Any]) -> str:
    """A `machine` in words."""
    ranks = where["world_size"]
    if where["device"] == "cpu":
        threads = f"{where['threads']} thread{'s' if where['threads'] > 1 else ''}"
        return f"{where['device_name']}, " + (f"{ranks} ranks of {threads}" if ranks > 1 else threads)
    return f"{ranks} × {where['device_name']}" if ranks > 1 else where["device_name"]


def sampling_words(sampling: dict[str, Any]) -> str:
    """`temperature`, `top_p` and `top_k` in words."""
    if sampling["temperature"] == 0:
        return "greedy"
    words = [f"temperature {sampling['temperature']:g}"]
    words += [f"top-p {sampling['top_p']:g}"] if sampling["top_p"] < 1 else []
    words += [f"top-k {sampling['top_k']}"] if sampling["top_k"] else []
    return ", ".join(words)
