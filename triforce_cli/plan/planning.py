"""Makes the plan of a run: shapes, layout, estimates, and what does not fit. It does not use the options of the
command."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...offload.planning.calibration import MeasuredMachine
from ...offload.planning.cards import Card
from ...offload.planning.cost_model import Assumptions, Estimate, Hardware, Machine, PassTimes, estimate
from ...offload.planning.remedies import Remedy, remedies, shortfalls
from ...offload.planning.request import RunRequest
from ...offload.planning.run_plan import RunPlan, make_plan
from ...offload.vocabulary import check_draft
from ...tp.errors import ModelError
from ...tp.model.config import ModelConfig
from ...tp.weights.hub import is_hub_name
from ...tp.weights.registry import MTP, find_downloaded, find_model, find_preset, parse_draft

if TYPE_CHECKING:
    from ...offload.planning.measured import Calibration, Measured


@dataclass(frozen=True)
class Plan:
    """The results of `triforce plan`, which are shown as tables or as JSON."""

    model: str
    draft: str | None
    """The draft as given; the name of a preset means its draft."""
    card: Card
    run: RunPlan
    hardware: Hardware
    assumed: Assumptions
    estimates: dict[int, Estimate | None]
    """The estimate for each number of tiers; `None` if the run does not fit."""
    shortfalls: list[str]
    remedies: list[Remedy]
    calibration: Calibration | None
    """The measured figures that replace those of the card, if there are any."""
    disk_speed_is: str
    """The source of the bandwidth of the disk: `assumed`, `given` or `measured`."""

    @classmethod
    def make(
        cls,
        model: str,
        draft: str | None,
        run: RunRequest,
        card: Card,
        *,
        acceptance: tuple[float | None, float | None],
        disk_gbps: float | None,
        measured: Measured | None,
    ) -> Plan:
        """Plans `run` for every number of tiers up to its own.

        Args:
            model, draft: as given.
            acceptance: the assumed acceptance on the retrieval cache, and of the small model, each 0 to 1; `None` is
                the default.
            disk_gbps: bandwidth of the disk in GB/s; `None`: as measured, or else assumed.
            measured: the measurements from which times are computed, instead of from `card`.

        Raises:
            UsageError: settings or the number of GPUs are not possible, or the model is not the measured one.
        """
        calibration = None
        if measured is None:
            hardware: Machine | MeasuredMachine = Machine.of(card)
            assumed = Assumptions.of(*acceptance)
        else:
            measured.check(run, model)
            calibration = measured.machine(run, card.link_gb_per_s * 1e9)
            hardware, assumed = calibration.machine, calibration.assumptions(*acceptance)
        speeds = {"given": disk_gbps, "measured": measured.disk_gb_per_s if measured else None}
        disk_speed_is, speed = next(((source, s) for source, s in speeds.items() if s is not None), ("assumed", None))
        if speed is not None:
            hardware = replace(hardware, disk_bandwidth=speed * 1e9)
        estimates = {}
        for tiers in range(1, run.settings.tiers + 1):
            fewer = replace(run, settings=replace(run.settings, tiers=tiers))
            estimates[tiers] = None if shortfalls(fewer) else estimate(make_plan(fewer), hardware, assumed)
        return cls(
            model=model,
            draft=(draft or model) if run.settings.tiers == 3 else None,
            card=card,
            run=make_plan(run),
            hardware=hardware,
            assumed=assumed,
            estimates=estimates,
            shortfalls=shortfalls(run),
            remedies=remedies(run),
            calibration=calibration,
            disk_speed_is=disk_speed_is,
        )

    def document(self) -> dict[str, Any]:
        """The JSON; docs/plan.md documents its keys."""
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
                "windows": run.windows,
                "states": run.states,
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
                "embedding": run.embedding * request.gpus,
                "streamed_kv": run.streamed_kv * request.gpus,
                "spare": run.spare * request.gpus,
                "runtime": request.process_bytes * request.gpus,
                "runtime_parts": {part: size * request.gpus for part, size in request.process_parts.items()},
                "kept_states": run.kept_states * request.gpus,
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


def shapes(model: str, draft: str | None, rope_scaling: str | None = None) -> tuple[ModelConfig, ModelConfig | None]:
    """The shapes of target and draft, from presets and from `config.json` files on this machine.

    Raises:
        ModelError: a model does not exist, or its shape is not known without a download.
    """
    preset = find_preset(model)
    target, own = preset.configs() if preset else (_shape(model), None)
    target = target.with_rope_scaling(rope_scaling)
    wanted, _ = parse_draft(draft)
    if wanted == "none":
        return target, None
    if wanted is None:
        return target, own
    if wanted == MTP:
        return target, target.mtp_head
    draft_preset = find_preset(wanted)
    small = draft_preset.configs()[1] if draft_preset else _shape(str(wanted))
    check_draft(target, small)
    return target, small


def _shape(model: str) -> ModelConfig:
    name, _, form = model.partition(":")
    if is_hub_name(name) and not Path(model).expanduser().exists():
        cached = find_downloaded(model)
        if cached is None:
            wanted = f"its shape is enough: hf download {name} config.json --local-dir DIR, then give DIR"
            wanted = f"download its GGUF file first: hf download {name} FILE --local-dir DIR" if form else wanted
            raise ModelError(f"{model} is not on this machine, and plan downloads nothing; {wanted}")
        return ModelConfig.load(cached)
    return ModelConfig.load(find_model(model))
