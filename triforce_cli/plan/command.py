"""`triforce plan`: shows where data would be placed and how fast a run would be, without the hardware, the weights or a
run."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...offload.planning.cards import CARDS, DEFAULT_CARD, DISK_BANDWIDTH, Card
from ...offload.settings import Settings
from ...tp.errors import UsageError
from ...tp.weights.registry import EMBEDDED, PRESETS, parse_draft, published_cache
from ..call import Call, import_pytorch
from ..options import ASSUMED, HARDWARE, MACHINE, ModelOptions, option, some_settings
from ..parameters import AUTO_OR_GIB, AUTO_OR_POSITIVE, AUTO_OR_TOKENS, CHANCES, FILE, MODEL, Kind, Numbers, whole
from ..terminal.output import JsonFile

if TYPE_CHECKING:
    from ...offload.planning.request import RunRequest

EPILOG = """[bold]Examples[/]

  A 7B model with 128K tokens on two RTX 4090, whose host has 128 GiB:
  [cyan]triforce plan --model yarn-llama-2-7b-128k --gpus 2 --gpu rtx4090 --host-memory 128[/]

  Would one card do, and with which settings?
  [cyan]triforce plan --model yarn-llama-2-13b-128k --gpu rtx4090[/]

  A model of yours, on a card that --gpu does not know:
  [cyan]triforce plan --model DIR --draft none --gpu-memory 46 --memory-gbps 900 --link-gbps 12[/]

  The effect of a higher acceptance rate, as JSON for a script:
  [cyan]triforce plan --model qwen3-8b --context 40960 --assume-acceptance 0.96 --json - | jq .modelled[/]

  For a longer context than was measured on this machine:
  [cyan]triforce bench --contexts 4096,16384 --json bench.json[/]
  [cyan]triforce plan --measured bench.json --context 131072[/]

Exits 1 if something does not fit, and names changes that would make it fit.
"""


@dataclass(frozen=True, kw_only=True)
class PlanOptions(ModelOptions):
    """The options of `triforce plan`; `None` is `auto`, or not given."""

    model: Annotated[
        str,
        option(
            MACHINE,
            MODEL,
            "A preset ([bold]triforce models[/] lists them), a directory with config.json, or a model of the Hugging "
            "Face hub that is on this machine. No weights are read.",
        ),
    ] = EMBEDDED
    shape: Annotated[str | None, typer.Option(hidden=True, rich_help_panel=MACHINE)] = None
    """The older name of `--model` for presets."""
    context: Annotated[
        int | None,
        option(
            MACHINE,
            AUTO_OR_TOKENS,
            "Context length in tokens, prompt and answer together; auto is all positions of the model.",
        ),
    ] = None
    batch: Annotated[
        int,
        option(
            MACHINE,
            whole(1),
            "Number of sequences that are decoded together. All have the same text; each has its own question and "
            "answer.",
        ),
    ] = 1
    gpus: Annotated[int, option(HARDWARE, whole(1), "Number of GPUs that share the model (tensor parallelism).")] = 1
    gpu: Annotated[
        str | None, option(HARDWARE, Kind("CARD"), f"The GPU: {', '.join(CARDS)}. Default: {DEFAULT_CARD}.")
    ] = None  # fmt: skip
    gpu_memory: Annotated[
        float | None, option(HARDWARE, AUTO_OR_POSITIVE, "Memory of each GPU, in GiB; auto is the card's.")
    ] = None
    memory_gbps: Annotated[
        float | None,
        option(
            HARDWARE,
            AUTO_OR_POSITIVE,
            "Memory bandwidth of each GPU according to its data sheet, in GB/s; auto is the card's.",
        ),
    ] = None
    link_gbps: Annotated[
        float | None,
        option(
            HARDWARE,
            AUTO_OR_POSITIVE,
            "Bandwidth from host memory to each GPU, in practice and while all GPUs read, in GB/s. auto: a PCIe x16 "
            "link of the card's generation for each GPU.",
        ),
    ] = None
    settings: Annotated[
        Settings,
        some_settings(
            "pack", "budget", "chunk_size", "draft_length", "block_length", "resident", "tiers", "rope_scaling"
        )
        | {
            "host_memory": option(
                HARDWARE,
                AUTO_OR_GIB,
                "Free memory of the host, in GiB; auto does not check it. The part of the KV cache that exceeds it is "
                "read from a disk in every pass.",
            )
        },
    ] = Settings()  # noqa: RUF009 - frozen
    disk_gbps: Annotated[
        float | None,
        option(
            HARDWARE,
            AUTO_OR_POSITIVE,
            "Bandwidth of large reads from the disk for the part of the KV cache that exceeds host memory, in GB/s; "
            f"auto assumes an NVMe disk with {DISK_BANDWIDTH / 1e9:g}.",
        ),
    ] = None
    measured: Annotated[
        Path | None,
        option(
            HARDWARE,
            FILE,
            "Instead of a card: a file of [bold]triforce bench --json[/] with this model. The plan then uses the "
            "measured bandwidths, times of passes and acceptance rates.",
        ),
    ] = None
    assume_acceptance: Annotated[
        Numbers | None,
        option(
            ASSUMED,
            CHANCES,
            "Assumed acceptance rates (accepted ÷ tested). A: of tokens drafted on the retrieval cache. B: of tokens "
            "drafted by the small model. Default: as measured, else 0.9,0.67.",
        ),
    ] = None
    draft_acceptance: Annotated[
        Numbers | None, typer.Option(hidden=True, rich_help_panel=ASSUMED, parser=CHANCES.parse)
    ] = None
    """The older option for the second of `--assume-acceptance`."""

    @property
    def acceptance(self) -> tuple[float | None, float | None]:
        """The assumed acceptance: on the retrieval cache, and of the small model."""
        large, small = (*(self.assume_acceptance or ()), None, None)[:2]
        return large, self.draft_acceptance[0] if self.draft_acceptance else small


def plan(options: PlanOptions, call: Call) -> None:
    """Estimates where weights and KV cache would be placed and how fast a model would run. Downloads and loads nothing.

    It needs neither the weights nor the GPUs. Memory is planned by the same rules as for a run.
    Times are [bold]modelled[/] from bytes, bandwidths and an assumed acceptance rate.
    With --measured, they are computed from measurements, also for contexts and draft lengths that were not measured.
    """
    shape = options.shape
    if shape is not None and options.model != EMBEDDED:
        raise UsageError("--model and --shape are both given; give --model only")
    if shape is not None and shape not in PRESETS:
        raise UsageError(f"--shape is {shape!r}; it is one of the presets: {', '.join(PRESETS)}")
    with JsonFile.prepare(options.json) as json_file:
        import_pytorch()
        from ...offload.planning.measured import Measured
        from .planning import Plan
        from .report import show

        card, measured = _card(options.gpu), None
        if options.measured is not None:
            _check_measured(options)
            measured = Measured.read(options.measured)
            card = measured.card(card)
        card = _with_given_figures(card, options)
        options = replace(options, model=shape or options.model)
        made = Plan.make(
            options.model,
            options.draft,
            _run_request(options, card),
            card,
            acceptance=options.acceptance,
            disk_gbps=options.disk_gbps,
            measured=measured,
        )
        json_file.write(made.document())
        if not json_file.on_stdout:
            show(made)
    if made.shortfalls:
        raise typer.Exit(1)


def _run_request(options: PlanOptions, card: Card) -> RunRequest:
    """The run that is planned.

    Raises:
        ModelError: the shape of the model is not known on this machine.
    """
    from ...offload.planning.request import RunRequest
    from ...tp.devices import resolve_dtype
    from .planning import shapes

    target, draft = shapes(options.model, options.draft, options.settings.rope_scaling)
    settings = options.settings
    lookup = settings.tiers == 3 and parse_draft(options.draft)[1]
    settings = replace(settings, tiers=min(settings.tiers, 3 if draft or lookup else 2), lookup=lookup)
    return RunRequest(
        target=target,
        draft=draft,
        dtype=resolve_dtype(options.dtype, target),
        context=options.context or target.max_position_embeddings,
        settings=settings.with_defaults(published_cache(options.model, options.gpus)),
        gpus=options.gpus,
        gpu_bytes=int(card.memory_gib * 2**30),
        host_bytes=None if settings.host_memory is None else int(settings.host_memory * 2**30),
        disk_bytes=sys.maxsize,  # what exceeds host memory is on one, as in a run
        sequences=options.batch,
    )


def _check_measured(options: PlanOptions) -> None:
    """Checks that `--measured` is not combined with options that it replaces.

    Raises:
        UsageError: `--measured` and an option for the hardware that it describes are both given.
    """
    for name, given in (("--gpu", options.gpu), ("--memory-gbps", options.memory_gbps)):
        if given is not None:
            raise UsageError(f"{name} and --measured are both given, but --measured describes the hardware; give one")


def _card(name: str | None) -> Card:
    """The card of `--gpu`.

    Raises:
        UsageError: no card in the table has this name.
    """
    name = name or DEFAULT_CARD
    if name not in CARDS:
        raise UsageError(
            f"--gpu is {name!r}; it is one of {', '.join(CARDS)}; for another card give --gpu-memory, --memory-gbps "
            "and --link-gbps"
        )
    return CARDS[name]


def _with_given_figures(card: Card, options: PlanOptions) -> Card:
    """`card` with the figures that options give in place of its own."""
    given = {
        "memory_gib": options.gpu_memory,
        "memory_gb_per_s": options.memory_gbps,
        "link_gb_per_s": options.link_gbps,
    }
    return replace(card, **{name: value for name, value in given.items() if value is not None})
