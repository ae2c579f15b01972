"""What `bench` and `compare` share: a measurement is one JSON document, from which the table for people is made."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib.metadata import version
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

import psutil
import torch

from ..offload.speculation.sampling import OFF
from .terminal.output import JsonFile, result_console

if TYPE_CHECKING:
    from rich.console import Console


def provenance(kind: str, command: str) -> dict[str, Any]:
    """The head of a measurement's JSON: what sort of document, from which version, when, by which command."""
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    return {"kind": kind, "version": version("triforce-cli"), "date": date, "command": command}


def machine(device: str, device_name: str, world_size: int, threads: int) -> dict[str, Any]:
    """Where it ran; each rank computes with `threads` threads."""
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
    """The temperature and the filters that are not off, in words. `sampling`: see `Sampling.filters`; documents of
    older versions have fewer."""
    if sampling["temperature"] == 0:
        return "greedy"
    words = [f"temperature {sampling['temperature']:g}"]
    filters = {name: value for name, value in sampling.items() if value != OFF.get(name, value)}
    words += [f"{name.replace('_', '-')} {value}" for name, value in filters.items()]
    return ", ".join(words)


def spread(values: list[float]) -> dict[str, float]:
    return {"median": median(values), "min": min(values), "max": max(values)}


class Answer(Protocol):
    """A run's answer."""

    @property
    def token_ids(self) -> list[int]: ...


def first_difference(answers: Iterable[Answer], reference: Answer) -> int | None:
    """The first index at which one of `answers`, all of one length, differs from `reference`; `None` if none does."""
    places = [differs_at(answer.token_ids, reference.token_ids) for answer in answers]
    return min((place for place in places if place is not None), default=None)


def differs_at(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first index at which two answers of one length differ; `None` if they are the same."""
    return next((index for index, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)


def publish(
    document: dict[str, Any],
    json_file: JsonFile,
    report: Callable[[Console, dict[str, Any]], None],
    *others: Callable[[], None],
) -> None:
    """Writes the JSON where it was asked for, what `others` write, and the table: to stdout, or to stderr where stdout
    is the JSON's.

    Each is written even if another cannot be, and the table last: a pipe that nobody reads further ends it.
    """
    with ExitStack() as last_first:
        last_first.callback(report, result_console(json_file), document)
        for other in others:
            last_first.callback(other)
        last_first.callback(json_file.write, document)
