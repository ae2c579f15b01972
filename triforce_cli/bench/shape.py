"""`triforce bench --shape`: the steps of a model that is not here, measured; what depends on its weights, assumed."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

from ...offload.planning.cost_model import Assumptions
from ...offload.planning.shape_steps import ROOM, ShapeSteps, StepTimes
from ...offload.speculation.lengths import expected_tokens
from ...tp.devices import resolve_device, resolve_dtype
from ...tp.weights.registry import published_cache
from ..call import Call
from ..measurement import spread
from ..plan.planning import shapes
from ..terminal.output import JsonFile, ResultFile
from ..terminal.streams import tell
from .report import as_document, derived_floor
from .request import Asked
from .run import describe, fitting_contexts, published


def run(asked: Asked, files: tuple[JsonFile, ResultFile], call: Call) -> None:
    """Measures and reports. Of the model that is asked for only the shape is used.

    Raises:
        TriforceError: the request cannot be met.
        Stop: it was interrupted; what was measured by then is out.
    """
    target, draft = shapes(asked.model, asked.wanted_draft)
    most = 3 if draft else 2
    tiers = tuple(sorted({min(count, most) for count in asked.tiers}))
    settings = replace(asked.settings, tiers=tiers[-1]).with_defaults(published_cache(asked.model, 1))
    contexts = fitting_contexts(asked, target, 0)
    device, dtype = resolve_device(asked.device), resolve_dtype(asked.dtype, target)
    tell(f"making random weights of the shape of {asked.model} ...")
    small = draft if tiers[-1] == 3 else None
    with call.signals.allowed():
        steps = ShapeSteps(target, small, settings, dtype=dtype, device=device, context=contexts[-1])
        streams = settings.resident is not None
        head = describe(asked, steps.target, steps.draft is not None, call, streams=streams)
    assumed = Assumptions(*(asked.assume_acceptance or ()))
    found: list[dict[str, Any]] = []

    def document(interrupted: bool) -> dict[str, Any]:
        return as_document(head, [], interrupted) | {
            "shape": {
                "assumed_acceptance": {"retrieval": assumed.acceptance, "draft": assumed.draft_acceptance},
                "room_tokens": ROOM,
                "graphs_failed": steps.graphs.failure,
            },
            "contexts": found,
        }

    with published(document, files):
        for context in contexts:
            tell(f"{context:,} tokens: steps ...")
            with call.signals.allowed():
                times = steps.at(context, assumed)
            found.append(_context(times, tiers, assumed, head))
            tell(f"{context:,} tokens: a pass over all of them takes {1e3 * median(times.plain):.1f} ms")


def _context(times: StepTimes, tiers: tuple[int, ...], assumed: Assumptions, head: dict[str, Any]) -> dict[str, Any]:
    return {
        "context": times.context,
        "prompt_tokens": times.context,
        "prefill_s": None,
        "restored_tokens": 0,
        "resident_bytes": times.resident_bytes,
        "floor": derived_floor(head["weight_bytes"] + times.read_bytes, times.streamed_bytes, times.disk_bytes, head),
        "steps_ms": {
            name: spread([1e3 * seconds for seconds in getattr(times, name)]) if getattr(times, name) else None
            for name in ("plain", "verify", "retrieval", "draft", "refresh")
        },
        "lengths": {"budget": times.budget, "block_length": times.block_length, "draft_length": times.draft_length},
        "tiers": [_tiers(count, times, assumed) for count in tiers],
    }


def _tiers(count: int, times: StepTimes, assumed: Assumptions) -> dict[str, Any]:
    """One tier's time between tokens is a step's, as measured; more tiers' is modelled."""
    plain = median(times.plain)
    accepted: dict[str, float | None] = dict.fromkeys(("draft_per_token", "retrieval_per_token", "tokens_per_round"))
    if count == 1:
        tbt = spread([1e3 * seconds for seconds in times.plain])
    else:
        derived = 1e3 * times.tbt_s(assumed)
        tbt = {"median": derived, "min": derived, "max": derived}
        accepted["retrieval_per_token"] = assumed.acceptance
        accepted["draft_per_token"] = assumed.draft_acceptance if times.draft else None
        accepted["tokens_per_round"] = expected_tokens(assumed.acceptance, times.block_length)
    return {
        "tiers": count,
        "modelled": count > 1,
        "tbt_ms": tbt,
        "speedup": 1e3 * plain / tbt["median"],
        "acceptance": accepted,
        "first_difference": None,
        "runs": [],
    }
