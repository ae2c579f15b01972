"""Says what does not fit of a run, and for each option the smallest change that makes the run fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...tp.errors import UsageError
from ...tp.units import gib
from .request import RunRequest
from .run_plan import largest_whole, make_plan

_MOST_GPUS = 64
_GRANULE = 256
"""The context of a remedy is a multiple of this many tokens."""


@dataclass(frozen=True)
class Remedy:
    """A change that is enough by itself."""

    option: str
    """The option to change, without leading dashes."""
    value: int | float | str
    """The new value of the option."""
    text: str
    """The change as text for the user."""


def shortfalls(request: RunRequest) -> list[str]:
    """One line, with the numbers, for each thing that does not fit; empty if all fits."""
    found = []
    limit = request.target.max_position_embeddings
    if request.context > limit:
        found.append(
            f"{request.target.name} has {limit:,} positions{request.target.positions_note}, not {request.context:,}"
        )
    plan = make_plan(request)
    for shortage in plan.shortages():
        if shortage.where == "GPU memory":
            resident = gib(plan.resident_kv) if plan.resident_kv else "none"
            found.append(
                f"each GPU needs {gib(shortage.needed)} and has {gib(shortage.available)}, "
                f"with {resident} of the KV cache resident"
            )
        else:
            ranks = request.ranks_per_host
            found.append(f"the host needs {gib(shortage.needed * ranks)} and has {gib(request.host_bytes or 0)}")
    return found


def remedies(request: RunRequest) -> list[Remedy]:
    """For each option that can be changed, the smallest change by which all fits; empty if all fits already."""
    return list(_remedies(request)) if shortfalls(request) else []


def _remedies(request: RunRequest) -> Iterator[Remedy]:
    settings = request.settings
    if settings.resident is not None:
        free = replace(request, settings=replace(settings, resident=None))
        if _fits(free):
            yield Remedy("resident", "auto", "let the planner choose the resident part")
    target = request.target
    if request.context > target.max_position_embeddings and target.rope.type == "default":
        asked = f"yarn:{math.ceil(10 * request.context / target.max_position_embeddings) / 10:g}"
        if _fits(replace(request, target=target.with_rope_scaling(asked))):
            yield Remedy(
                "rope-scaling", asked, f"RoPE scaled by {asked}, if the model is made for that (its card says)"
            )
    plan = make_plan(request)
    budget, chunk = plan.budget, plan.chunk_size
    if budget:
        count = largest_whole(budget // chunk, lambda n: _fits(_with_budget(request, n * chunk)))
        if count:
            yield Remedy("budget", count * chunk, f"a budget of {count * chunk:,} tokens instead of {budget:,}")
    count = largest_whole(request.context // _GRANULE, lambda n: _fits(replace(request, context=n * _GRANULE)))
    if count:
        context = count * _GRANULE
        yield Remedy("context", context, f"a context of {context:,} tokens instead of {request.context:,}")
    for tiers in range(settings.tiers - 1, 0, -1):
        if _fits(replace(request, settings=replace(settings, tiers=tiers))):
            yield Remedy("tiers", tiers, f"{tiers} instead of {settings.tiers} tiers")
            break
    for gpus in range(request.gpus + 1, _MOST_GPUS + 1):
        if _fits(replace(request, gpus=gpus)):
            yield Remedy("gpus", gpus, f"{gpus} instead of {request.gpus} such GPUs")
            break
    yield from _more_memory(request)


def _more_memory(request: RunRequest) -> Iterator[Remedy]:
    """Remedies of more memory of one kind, in whole GiB."""
    most = 4096  # GiB
    if request.host_bytes is not None:
        need = -(-make_plan(request).host_total * request.ranks_per_host // 2**30)
        if _fits(replace(request, host_bytes=need * 2**30)):
            yield Remedy("host-memory", need, f"{need} GiB of free host memory")
    if request.gpu_bytes is None:
        return
    have = request.gpu_bytes // 2**30
    spare = largest_whole(most - have, lambda n: _fits(replace(request, gpu_bytes=(most - n) * 2**30)))
    if spare:
        yield Remedy("gpu-memory", most - spare, f"GPUs of {most - spare} GiB")


def _with_budget(request: RunRequest, budget: int) -> RunRequest:
    return replace(request, settings=replace(request.settings, budget=budget))


def _fits(request: RunRequest) -> bool:
    try:
        return not shortfalls(request)
    except UsageError:  # heads that so many GPUs cannot share
        return False
