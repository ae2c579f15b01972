"""What of a run does not fit, and for each thing that could be changed, the smallest change that makes it fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ...tp.errors import UsageError
from ...tp.units import gib
from .layout import Setup, lay_out

_MOST_GPUS = 64
_GRANULE = 256
"""Tokens that a remedy's context is a multiple of."""


@dataclass(frozen=True)
class Remedy:
    """A change that is enough by itself."""

    option: str
    """The option to change, without dashes."""
    value: int | float | str
    text: str


def shortfalls(setup: Setup) -> list[str]:
    """What does not fit, one line each, with the numbers; none if all does."""
    found = []
    limit = setup.target.max_position_embeddings
    if setup.context > limit:
        found.append(f"{setup.target.name} has {limit:,} positions, not {setup.context:,}")
    layout = lay_out(setup)
    if layout.device_total > setup.gpu_bytes:
        resident = gib(layout.resident_kv) if layout.resident_kv else "none"
        found.append(
            f"each GPU needs {gib(layout.device_total)} and has {gib(setup.gpu_bytes)}, "
            f"with {resident} of the KV cache resident"
        )
    needed = layout.host_total * setup.gpus
    if setup.host_bytes is not None and needed > setup.host_bytes:
        found.append(f"the host needs {gib(needed)} and has {gib(setup.host_bytes)}")
    return found


def remedies(setup: Setup) -> list[Remedy]:
    """For each thing that could be changed, the smallest change by which all fits; nothing for a setup that fits."""
    return list(_remedies(setup)) if shortfalls(setup) else []


def _remedies(setup: Setup) -> Iterator[Remedy]:
    settings = setup.settings
    if settings.resident is not None:
        free = replace(setup, settings=replace(settings, resident=None))
        if _fits(free):
            yield Remedy("resident", "auto", "leave what is resident to the planner")
    budget, chunk = setup.budget, settings.planned_chunk_size
    if budget:
        count = _largest(budget // chunk, lambda n: _fits(_with_budget(setup, n * chunk)))
        if count:
            yield Remedy("budget", count * chunk, f"a budget of {count * chunk:,} tokens instead of {budget:,}")
    count = _largest(setup.context // _GRANULE, lambda n: _fits(replace(setup, context=n * _GRANULE)))
    if count:
        context = count * _GRANULE
        yield Remedy("context", context, f"a context of {context:,} tokens instead of {setup.context:,}")
    for tiers in range(settings.tiers - 1, 0, -1):
        if _fits(replace(setup, settings=replace(settings, tiers=tiers))):
            yield Remedy("tiers", tiers, f"{tiers} instead of {settings.tiers} tiers")
            break
    for gpus in range(setup.gpus + 1, _MOST_GPUS + 1):
        if _fits(replace(setup, gpus=gpus)):
            yield Remedy("gpus", gpus, f"{gpus} instead of {setup.gpus} such GPUs")
            break
    yield from _more_memory(setup)


def _more_memory(setup: Setup) -> Iterator[Remedy]:
    """More memory of one kind, in whole GiB."""
    most = 4096  # GiB
    if setup.host_bytes is not None:
        need = -(-lay_out(setup).host_total * setup.gpus // 2**30)
        if _fits(replace(setup, host_bytes=need * 2**30)):
            yield Remedy("host-memory", need, f"{need} GiB of free host memory")
    have = setup.gpu_bytes // 2**30
    spare = _largest(most - have, lambda n: _fits(replace(setup, gpu_bytes=(most - n) * 2**30)))
    if spare:
        yield Remedy("gpu-memory", most - spare, f"GPUs of {most - spare} GiB")


def _with_budget(setup: Setup, budget: int) -> Setup:
    return replace(setup, settings=replace(setup.settings, budget=budget))


def _fits(setup: Setup) -> bool:
    try:
        return not shortfalls(setup)
    except UsageError:  # heads that so many GPUs cannot share
        return False


def _largest(most: int, works: Callable[[int], bool]) -> int:
    """The largest number from 1 to `most` that works, if every smaller one does too; 0 for none."""
    least = 0
    while least < most:
        middle = (least + most + 1) // 2
        if works(middle):
            least = middle
        else:
            most = middle - 1
    return least
