"""`triforce plan`: what would live where and how fast it would be, without the hardware, the weights or a run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..tp.errors import ModelError, UsageError
from ..tp.registry import EMBEDDED, PRESETS, find_model, find_preset, published_settings
from .cards import CARDS, Card
from .options import Dtype, Tiers, auto_or_whole, complete_draft, complete_model, gibibytes, real, whole
from .output import JsonFile

if TYPE_CHECKING:
    from ..offload.cost_model import Assumptions, Estimate, Machine
    from ..offload.layout import Layout, Setup
    from ..offload.remedies import Remedy
    from ..tp.config import ModelConfig

_MODEL, _HARDWARE, _RUN = "Model", "Hardware", "Run (as of triforce generate; auto is what it would take)"

EPILOG = """[bold]Examples[/]

  A 7B model with 128K tokens on two RTX 4090, whose host has 128 GiB:
  [cyan]triforce plan --model yarn-llama-2-7b-128k --gpus 2 --gpu rtx4090 --host-memory 128[/]

  Would one card do, and with which settings?
  [cyan]triforce plan --model yarn-llama-2-13b-128k --gpu rtx4090[/]

  A model of yours, on a card that is not in the table:
  [cyan]triforce plan --model DIR --draft none --gpu-memory 46 --memory-gbps 900 --link-gbps 12[/]

  What a higher acceptance would bring, for a script:
  [cyan]triforce plan --model qwen3-8b --context 40960 --acceptance 0.96 --json - | jq .modelled[/]

Exits 1 if something does not fit, and says what would make it fit.
"""


@dataclass(frozen=True)
class Plan:
    """Everything that is shown, for people or in JSON."""

    model: str
    draft: str | None
    """As given; a preset stands for its draft."""
    card: Card
    setup: Setup
    layout: Layout
    machine: Machine
    assumed: Assumptions
    estimates: dict[int, Estimate | None]
    """By tiers; `None` where it does not fit."""
    shortfalls: list[str]
    remedies: list[Remedy]

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
                "tflops": card.tflops,
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
        }


def _modelled(tiers: int, estimate: Estimate | None) -> dict[str, Any]:
    if estimate is None:
        return {"tiers": tiers, "fits": False}
    times = {f"{name[:-2]}_ms": value * 1e3 for name, value in asdict(estimate).items() if name.endswith("_s")}
    counts = {name: value for name, value in asdict(estimate).items() if not name.endswith("_s")}
    return {**counts, "fits": True, **times}


def plan(
    model: Annotated[
        str,
        typer.Option(
            metavar="M",
            help="A preset ([bold]triforce models[/] lists them), a directory with config.json, or a model of the hub "
            "that is on this machine. No weights are read.",
            autocompletion=complete_model,
            rich_help_panel=_MODEL,
        ),
    ] = EMBEDDED,
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Instead of a model: a preset's shape.", rich_help_panel=_MODEL, show_default=False
        ),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="D",
            help="The small model, likewise, or [bold]none[/]. Default: the preset's own, else none.",
            autocompletion=complete_draft,
            rich_help_panel=_MODEL,
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        Dtype, typer.Option(metavar="TYPE", help="Of weights and cache.", rich_help_panel=_MODEL)
    ] = Dtype.AUTO,
    context: Annotated[
        str,
        typer.Option(metavar="N", help="Tokens, prompt and answer; auto is all the model has.", rich_help_panel=_MODEL),
    ] = "auto",
    gpus: Annotated[str, typer.Option(metavar="N", help="GPUs that share it.", rich_help_panel=_HARDWARE)] = "1",
    gpu: Annotated[str, typer.Option(metavar="CARD", help=f"{', '.join(CARDS)}.", rich_help_panel=_HARDWARE)] = (
        "rtx4090"
    ),
    gpu_memory: Annotated[
        str, typer.Option(metavar="GIB", help="Memory of each GPU; auto is the card's.", rich_help_panel=_HARDWARE)
    ] = "auto",
    memory_gbps: Annotated[
        str, typer.Option(metavar="X", help="Its bandwidth, GB/s, by the data sheet.", rich_help_panel=_HARDWARE)
    ] = "auto",
    link_gbps: Annotated[
        str,
        typer.Option(
            metavar="X",
            help="What comes from host memory to each GPU while all read, GB/s in practice; auto is PCIe x16 of the "
            "card's generation, to itself.",
            rich_help_panel=_HARDWARE,
        ),
    ] = "auto",
    host_memory: Annotated[
        str,
        typer.Option(metavar="GIB", help="Free memory of the host; auto checks none.", rich_help_panel=_HARDWARE),
    ] = "auto",
    tiers: Annotated[Tiers, typer.Option(help="The most to plan for.", rich_help_panel=_RUN)] = Tiers.THREE,
    budget: Annotated[
        str, typer.Option(metavar="N", help="Tokens of the retrieval cache.", rich_help_panel=_RUN)
    ] = "auto",
    chunk_size: Annotated[str, typer.Option(metavar="N", help="Tokens of a chunk.", rich_help_panel=_RUN)] = "auto",
    block_length: Annotated[
        str, typer.Option(metavar="N", help="Tokens drafted for a verification.", rich_help_panel=_RUN)
    ] = "auto",
    draft_length: Annotated[
        str, typer.Option(metavar="N", help="Tokens drafted by the small model at a time.", rich_help_panel=_RUN)
    ] = "auto",
    resident: Annotated[
        str, typer.Option(metavar="GIB", help="KV kept on each GPU; auto is what fits.", rich_help_panel=_RUN)
    ] = "auto",
    acceptance: Annotated[
        str,
        typer.Option(
            metavar="P",
            help="Assumed chance that a token drafted on the retrieval cache stands, given that those before it did. "
            "(accepted ÷ proposed, which a run reports, is lower.)",
            rich_help_panel=_RUN,
        ),
    ] = "0.9",
    draft_acceptance: Annotated[
        str, typer.Option(metavar="P", help="The same of the small model; auto is 2/3.", rich_help_panel=_RUN)
    ] = "auto",
    json_path: Annotated[
        Path | None,
        typer.Option("--json", metavar="PATH", help="As JSON; [bold]-[/] is stdout.", show_default=False),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks of errors.")] = False,
) -> None:
    """Says what would live where and how fast it would be, before anything is bought, downloaded or loaded.

    Bytes follow the rules of a run. Times are [bold]modelled[/], from bytes, bandwidths and an assumed acceptance.
    """
    if shape is not None and model != EMBEDDED:
        raise UsageError("--model and --shape are both given; give one")
    if shape is not None and shape not in PRESETS:
        raise UsageError(f"--shape is {shape!r}; it is one of the presets: {', '.join(PRESETS)}")
    with JsonFile.prepare(json_path) as json_file:
        made = _plan(
            shape or model,
            draft,
            card=_card(gpu, gpu_memory, memory_gbps, link_gbps),
            dtype=dtype.value,
            context=auto_or_whole("--context", context),
            gpus=whole("--gpus", gpus, 1),
            host_memory=gibibytes("--host-memory", host_memory),
            tiers=int(tiers.value),
            lengths={
                "budget": auto_or_whole("--budget", budget),
                "chunk_size": auto_or_whole("--chunk-size", chunk_size),
                "draft_length": auto_or_whole("--draft-length", draft_length),
                "block_length": auto_or_whole("--block-length", block_length),
            },
            resident=gibibytes("--resident", resident),
            acceptance=_chance("--acceptance", acceptance),
            draft_acceptance=None if draft_acceptance == "auto" else _chance("--draft-acceptance", draft_acceptance),
        )
        json_file.write(made.document())
        if not json_file.on_stdout:
            from .plan_report import show

            show(made)
    if made.shortfalls:
        raise typer.Exit(1)


def _plan(
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
    acceptance: float,
    draft_acceptance: float | None,
) -> Plan:
    from ..offload.cost_model import Assumptions, Machine, estimate
    from ..offload.layout import Setup, lay_out
    from ..offload.remedies import remedies, shortfalls
    from ..offload.settings import Settings
    from ..tp.devices import resolve_dtype

    target, small = _shapes(model, draft)
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
    machine = Machine(card.memory_gb_per_s * 1e9, card.tflops * 1e12, card.link_gb_per_s * 1e9)
    assumed = Assumptions(acceptance)
    if draft_acceptance is not None:
        assumed = replace(assumed, draft_acceptance=draft_acceptance)
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
    )


def _shapes(model: str, draft: str | None) -> tuple[ModelConfig, ModelConfig | None]:
    """The shapes of target and draft, from presets and `config.json` files that are here.

    Raises:
        ModelError: there is no such model, or its shape is not known without a download.
    """
    from ..offload.vocabulary import check_draft

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
    from ..tp.config import ModelConfig
    from ..tp.hub import find_cached, is_hub_name

    if is_hub_name(model) and not Path(model).expanduser().exists():
        cached = find_cached(model)
        if cached is None:
            raise ModelError(
                f"{model} is not on this machine, and plan downloads nothing; its shape is enough: "
                f"hf download {model} config.json --local-dir DIR, then give DIR"
            )
        return ModelConfig.load(cached)
    return ModelConfig.load(find_model(model))


def _card(word: str, memory: str, bandwidth: str, link: str) -> Card:
    """The card of that name, with what is given in place of its own figures."""
    if word not in CARDS:
        raise UsageError(
            f"--gpu is {word!r}; it is one of {', '.join(CARDS)}; for another card give --gpu-memory, --memory-gbps "
            "and --link-gbps"
        )
    given = {
        "memory_gib": _positive("--gpu-memory", memory),
        "memory_gb_per_s": _positive("--memory-gbps", bandwidth),
        "link_gb_per_s": _positive("--link-gbps", link),
    }
    return replace(CARDS[word], **{name: value for name, value in given.items() if value is not None})


def _positive(option: str, value: str) -> float | None:
    if value == "auto":
        return None
    number = real(option, value)
    if 0 < number < float("inf"):
        return number
    raise UsageError(f"{option} is {value!r}; it is auto or a number above 0")


def _chance(option: str, value: str) -> float:
    number = real(option, value)
    if 0 <= number <= 1:
        return number
    raise UsageError(f"{option} is {value!r}; it is a chance from 0 to 1")
