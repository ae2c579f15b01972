"""The JSON of `triforce bench --shape`: measured steps of a shape, and times that are derived from these steps and from
an assumed acceptance."""

from __future__ import annotations

from statistics import median
from typing import Any

from ...offload.planning.cost_model import Assumptions
from ...offload.shape_steps import ROOM, ShapeSteps, StepTimes
from ...offload.speculation.lengths import expected_tokens
from ..measurement import spread
from .report import derived_floor


def shape_document(steps: ShapeSteps, assumed: Assumptions) -> dict[str, Any]:
    """How steps were measured, and what was assumed."""
    return {
        "assumed_acceptance": {"retrieval": assumed.acceptance, "draft": assumed.draft_acceptance},
        "room_tokens": ROOM,
        "graphs_failed": steps.graphs.failure,
    }


def context_document(
    times: StepTimes, tiers: tuple[int, ...], assumed: Assumptions, head: dict[str, Any]
) -> dict[str, Any]:
    """The measured and the derived times at one context.

    Args:
        tiers: numbers of tiers, ascending.
        head: see `report.as_document`.
    """
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
    """The times for a number of tiers. With one tier, the time between tokens is the measured time of a step; with more
    tiers, it is modelled."""
    plain = median(times.plain)
    accepted: dict[str, float | None] = dict.fromkeys(("draft_per_token", "retrieval_per_token", "tokens_per_round"))
    if count == 1:
        tbt = spread([1e3 * seconds for seconds in times.plain])
    else:
        tbt = spread([1e3 * times.tbt_s(assumed)])
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
