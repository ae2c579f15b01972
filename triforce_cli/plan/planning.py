"""Makes a plan of what was asked for: shapes, layout, estimates, and what does not fit. `plan` reads the options."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...offload.planning.calibration import MeasuredMachine
from ...offload.planning.cards import Card
from ...offload.planning.cost_model import Assumptions, Estimate, Hardware, Machine, PassTimes, estimate
from ...offload.planning.remedies import Remedy, remedies, shortfalls
from ...offload.planning.request import RunRequest
from ...offload.planning.run_plan import RunPlan
from ...offload.planning.run_plan import make_plan as make_run_plan
from ...offload.speculation.vocabulary import check_draft
from ...tp.devices import resolve_dtype
from ...tp.errors import ModelError
from ...tp.model.config import ModelConfig
from ...tp.weights.hub import find_cached, is_hub_name
from ...tp.weights.registry import find_model, find_preset, parse_draft, published_cache

if TYPE_CHECKING:
    from ...offload.planning.measured import Calibration, Measured
    from .request import PlanRequest


@dataclass(frozen=True)
class Plan:
    """Everything that is shown, for people or in JSON."""

    model: str
    draft: str | None
    """As given; a preset stands for its draft."""
    card: Card
    run: RunPlan
    hardware: Hardware
    assumed: Assumptions
    estimates: dict[int, Estimate | None]
    """By tiers; `None` where it does not fit."""
    shortfalls: list[str]
    remedies: list[Remedy]
    calibration: Calibration | None
    """What was measured in place of the card's figures, if anything was."""
    disk_speed_is: str
    """Where the bandwidth of the disk is from: `assumed`, `given` or `measured`."""

    def document(self) -> dict[str, Any]:
        """The JSON; docs/plan.md says what its keys mean."""
        run, request, card = self.run, self.run.request, self.card
        settings, placement = request.settings, run.placement
        own = self.estimates[settings.tiers]
        return {
            "version": version("triforce-cli"),
            "model": self.model,
            "draft": self.draft,
            "dtype": str(request.dtype).removeprefix("torch."),
            "context": request.context,
            "batch": request.sequences,
            "gpus": request.gpus,
            "gpu": {
                "name": card.name,
                "memory_bytes": request.gpu_bytes,
                "memory_gb_per_s": card.memory_gb_per_s,
                "tflops": None if self.calibration else card.tflops,
                "link_gb_per_s": card.link_gb_per_s,
            },
            "host_memory_bytes": request.host_bytes,
            "settings": {
                "tiers": settings.tiers,
                "budget": run.budget,
                "chunk_size": run.chunk_size,
                "draft_length": own.draft_length if own else settings.draft_length,
                "block_length": own.block_length if own else settings.block_length,
            },
            "fits": not self.shortfalls,
            "problems": self.shortfalls,
            "remedies": [asdict(remedy) for remedy in self.remedies],
            "per_gpu_bytes": {
                "weights": run.weights,
                "resident_kv": run.resident_kv,
                "retrieval": run.retrieval,
                "mass": run.mass,
                "step": run.step,
                "ring": run.ring,
                "open_stretches": run.open_stretches,
                "prefill": run.prefill,
                "draft_kv": run.draft_kv,
                "rope": run.rope,
                "scratch": run.scratch,
                "cuda_context": run.cuda_context,
                "reserve": run.reserve,
                "reserve_parts": run.reserve_parts,
                "total": run.device_total,
            },
            "host_bytes": {
                "streamed_kv": run.streamed_kv * request.gpus,
                "spare": run.spare * request.gpus,
                "runtime": request.limits.runtime_bytes * request.gpus,
                "index": run.index * request.gpus,
                "staging": run.staging * request.gpus,
                "total": run.host_total * request.gpus,
            },
            "disk": {
                "kv_bytes": run.disk_kv * request.gpus,
                "gb_per_s": self.hardware.disk_bandwidth / 1e9,
                "assumed": self.disk_speed_is == "assumed",
            },
            "blocks": {
                "tokens": placement.block_size,
                "count": placement.num_blocks,
                "resident": placement.num_resident,
                "on_disk": placement.num_disk,
                "packed": placement.packed,
            },
            "verification": {
                "streamed_bytes_per_gpu": run.streamed_per_pass,
                "disk_bytes_per_gpu": run.disk_per_pass,
                "floor_ms": PassTimes(run, self.hardware).floor * 1e3,
            },
            "modelled": [_modelled(tiers, estimate) for tiers, estimate in self.estimates.items()],
            "assumed": asdict(self.assumed),
            "measured": self.calibration.terms() if self.calibration else None,
        }


def _modelled(tiers: int, estimate: Estimate | None) -> dict[str, Any]:
    if estimate is None:
        return {"tiers": tiers, "fits": False}
    times = {f"{name[:-2]}_ms": value * 1e3 for name, value in asdict(estimate).items() if name.endswith("_s")}
    counts = {name: value for name, value in asdict(estimate).items() if not name.endswith("_s")}
    return {**counts, "fits": True, **times}


def make_plan(request: PlanRequest, card: Card, measured: Measured | None = None) -> Plan:
    """Args: `measured` is what times are taken from, in place of `card`.

    Raises:
        ModelError: no shape of that name is here.
        UsageError: settings or a number of GPUs that cannot be.
    """
    model, draft = request.model, request.draft
    target, small = shapes(model, draft)
    settings = request.settings
    lookup = settings.tiers == 3 and parse_draft(draft)[1]
    settings = replace(settings, tiers=min(settings.tiers, 3 if small or lookup else 2), lookup=lookup)
    run = RunRequest(
        target=target,
        draft=small,
        dtype=resolve_dtype(request.dtype, target),
        context=request.context or target.max_position_embeddings,
        settings=settings.with_defaults(published_cache(model, request.gpus)),
        gpus=request.gpus,
        gpu_bytes=int(card.memory_gib * 2**30),
        host_bytes=None if settings.host_memory is None else int(settings.host_memory * 2**30),
        disk_bytes=sys.maxsize,  # what exceeds host memory is on one, as in a run
        sequences=request.batch,
    )
    calibration = None
    if measured is None:
        hardware: Machine | MeasuredMachine = Machine.of(card)
        assumed = Assumptions.of(*request.acceptance)
    else:
        measured.check(run, model)
        calibration = measured.machine(run, card.link_gb_per_s * 1e9)
        hardware, assumed = calibration.machine, calibration.assumptions(*request.acceptance)
    disk_gbps = {"given": request.disk_gbps, "measured": measured.disk_gb_per_s if measured else None}
    disk_speed_is, speed = next(((where, s) for where, s in disk_gbps.items() if s is not None), ("assumed", None))
    if speed is not None:
        hardware = replace(hardware, disk_bandwidth=speed * 1e9)
    estimates = {}
    for count in range(1, run.settings.tiers + 1):
        lesser = replace(run, settings=replace(run.settings, tiers=count))
        estimates[count] = None if shortfalls(lesser) else estimate(make_run_plan(lesser), hardware, assumed)
    return Plan(
        model=model,
        draft=(draft or model) if run.settings.tiers == 3 else None,
        card=card,
        run=make_run_plan(run),
        hardware=hardware,
        assumed=assumed,
        estimates=estimates,
        shortfalls=shortfalls(run),
        remedies=remedies(run),
        calibration=calibration,
        disk_speed_is=disk_speed_is,
    )


def shapes(model: str, draft: str | None) -> tuple[ModelConfig, ModelConfig | None]:
    """The shapes of target and draft, from presets and `config.json` files that are here.

    Raises:
        ModelError: there is no such model, or its shape is not known without a download.
    """
    preset = find_preset(model)
    target, own = preset.configs() if preset else (_shape(model), None)
    wanted, _ = parse_draft(draft)
    if wanted == "none":
        return target, None
    if wanted is None:
        return target, own
    draft_preset = find_preset(wanted)
    small = draft_preset.configs()[1] if draft_preset else _shape(str(wanted))
    check_draft(target, small)
    return target, small


def _shape(model: str) -> ModelConfig:
    if is_hub_name(model) and not Path(model).expanduser().exists():
        cached = find_cached(model)
        if cached is None:
            raise ModelError(
                f"{model} is not on this machine, and plan downloads nothing; its shape is enough: "
                f"hf download {model} config.json --local-dir DIR, then give DIR"
            )
        return ModelConfig.load(cached)
    return ModelConfig.load(find_model(model))
