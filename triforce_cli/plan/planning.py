"""Makes a plan of what was asked for: shapes, layout, estimates, and what does not fit. `plan` reads the options."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...offload.planning.cost_model import Assumptions, Estimate, Hardware, Machine, estimate
from ...offload.planning.layout import Layout, Setup, lay_out
from ...offload.planning.remedies import Remedy, remedies, shortfalls
from ...offload.settings import Settings
from ...offload.speculation.vocabulary import check_draft
from ...tp.devices import resolve_dtype
from ...tp.errors import ModelError
from ...tp.model.config import ModelConfig
from ...tp.weights.hub import find_cached, is_hub_name
from ...tp.weights.registry import find_model, find_preset, published_settings
from .cards import Card

if TYPE_CHECKING:
    from .measured import Calibration, Measured


@dataclass(frozen=True)
class Plan:
    """Everything that is shown, for people or in JSON."""

    model: str
    draft: str | None
    """As given; a preset stands for its draft."""
    card: Card
    setup: Setup
    layout: Layout
    machine: Hardware
    assumed: Assumptions
    estimates: dict[int, Estimate | None]
    """By tiers; `None` where it does not fit."""
    shortfalls: list[str]
    remedies: list[Remedy]
    calibration: Calibration | None
    """What was measured in place of the card's figures, if anything was."""

    def document(self) -> dict[str, Any]:
        """The JSON; docs/plan.md says what its keys mean."""
        setup, layout, card = self.setup, self.layout, self.card
        settings, placement = setup.settings, layout.placement
        own = self.estimates[settings.tiers]
        return {
            "version": version("triforce-cli"),
            "model": self.model,
            "draft": self.draft,
            "dtype": str(setup.dtype).removeprefix("torch."),
            "context": setup.context,
            "gpus": setup.gpus,
            "gpu": {
                "name": card.name,
                "memory_bytes": setup.gpu_bytes,
                "memory_gb_per_s": card.memory_gb_per_s,
                "tflops": None if self.calibration else card.tflops,
                "link_gb_per_s": card.link_gb_per_s,
            },
            "host_memory_bytes": setup.host_bytes,
            "settings": {
                "tiers": settings.tiers,
                "budget": setup.budget,
                "chunk_size": settings.planned_chunk_size,
                "draft_length": own.draft_length if own else settings.draft_length,
                "block_length": own.block_length if own else settings.block_length,
            },
            "fits": not self.shortfalls,
            "problems": self.shortfalls,
            "remedies": [asdict(remedy) for remedy in self.remedies],
            "per_gpu_bytes": {
                "weights": layout.weights,
                "resident_kv": layout.resident_kv,
                "retrieval": layout.retrieval,
                "ring": layout.ring,
                "open_stretches": layout.open_stretches,
                "prefill": layout.prefill,
                "cuda_context": layout.cuda_context,
                "reserve": layout.reserve,
                "total": layout.device_total,
            },
            "host_bytes": {
                "streamed_kv": layout.streamed_kv * setup.gpus,
                "runtime": layout.runtime * setup.gpus,
                "total": layout.host_total * setup.gpus,
            },
            "blocks": {
                "tokens": placement.block_size,
                "count": placement.num_blocks,
                "resident": placement.num_resident,
            },
            "verification": {
                "streamed_bytes_per_gpu": layout.streamed_per_pass,
                "floor_ms": layout.streamed_per_pass / self.machine.link_bandwidth * 1e3,
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


def make_plan(
    model: str,
    draft: str | None,
    *,
    card: Card,
    dtype: str,
    context: int | None,
    gpus: int,
    host_memory: float | None,
    tiers: int,
    lengths: dict[str, int | None],
    resident: float | None,
    acceptance: float | None,
    draft_acceptance: float | None,
    measured: Measured | None = None,
) -> Plan:
    """Args: in the words of the options; `None` is auto. `measured` is what times are taken from, in place of `card`.

    Raises:
        ModelError: no shape of that name is here.
        UsageError: settings or a number of GPUs that cannot be.
    """
    target, small = shapes(model, draft)
    settings = Settings(
        tiers=min(tiers, 3 if small else 2),
        budget=lengths["budget"],
        chunk_size=lengths["chunk_size"],
        draft_length=lengths["draft_length"],
        block_length=lengths["block_length"],
        resident=resident,
    )
    setup = Setup(
        target=target,
        draft=small,
        dtype=resolve_dtype(dtype, target),
        context=context or target.max_position_embeddings,
        settings=settings.with_defaults(published_settings(model, gpus)),
        gpus=gpus,
        gpu_bytes=int(card.memory_gib * 2**30),
        host_bytes=None if host_memory is None else int(host_memory * 2**30),
    )
    calibration = None
    if measured is None:
        machine: Hardware = Machine(card.memory_gb_per_s * 1e9, card.tflops * 1e12, card.link_gb_per_s * 1e9)
        assumed = Assumptions.of(acceptance, draft_acceptance)
    else:
        measured.check(setup, model)
        calibration = measured.machine(setup, card.link_gb_per_s * 1e9)
        machine, assumed = calibration.machine, calibration.assumptions(acceptance, draft_acceptance)
    estimates = {}
    for count in range(1, setup.settings.tiers + 1):
        lesser = replace(setup, settings=replace(setup.settings, tiers=count))
        fits = not shortfalls(lesser)
        estimates[count] = estimate(lesser, lay_out(lesser), machine, assumed) if fits else None
    return Plan(
        model=model,
        draft=(draft or model) if setup.settings.tiers == 3 else None,
        card=card,
        setup=setup,
        layout=lay_out(setup),
        machine=machine,
        assumed=assumed,
        estimates=estimates,
        shortfalls=shortfalls(setup),
        remedies=remedies(setup),
        calibration=calibration,
    )


def shapes(model: str, draft: str | None) -> tuple[ModelConfig, ModelConfig | None]:
    """The shapes of target and draft, from presets and `config.json` files that are here.

    Raises:
        ModelError: there is no such model, or its shape is not known without a download.
    """
    preset = find_preset(model)
    target, own = preset.configs() if preset else (_shape(model), None)
    if draft == "none":
        return target, None
    if draft is None:
        return target, own
    draft_preset = find_preset(draft)
    small = draft_preset.configs()[1] if draft_preset else _shape(draft)
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
