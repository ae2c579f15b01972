"""`triforce plan`: what would live where and how fast it would be, without the hardware, the weights or a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...offload.planning.cards import CARDS, DEFAULT_CARD, Card
from ...tp.errors import UsageError
from ...tp.weights.registry import EMBEDDED, PRESETS
from .. import flags
from ..options import Dtype, Tiers, auto_or_whole, complete_model, gibibytes, real, whole
from ..terminal.output import JsonFile

if TYPE_CHECKING:
    from .measured import Measured

_HARDWARE, _ASSUMED = "Hardware", "Assumed"

EPILOG = """[bold]Examples[/]

  A 7B model with 128K tokens on two RTX 4090, whose host has 128 GiB:
  [cyan]triforce plan --model yarn-llama-2-7b-128k --gpus 2 --gpu rtx4090 --host-memory 128[/]

  Would one card do, and with which settings?
  [cyan]triforce plan --model yarn-llama-2-13b-128k --gpu rtx4090[/]

  A model of yours, on a card that is not in the table:
  [cyan]triforce plan --model DIR --draft none --gpu-memory 46 --memory-gbps 900 --link-gbps 12[/]

  What a higher acceptance would bring, for a script:
  [cyan]triforce plan --model qwen3-8b --context 40960 --acceptance 0.96 --json - | jq .modelled[/]

  From what this machine was measured to do, for a longer context:
  [cyan]triforce bench --contexts 4096,16384 --json bench.json[/]
  [cyan]triforce plan --measured bench.json --context 131072[/]

Exits 1 if something does not fit, and says what would make it fit.
"""


def plan(
    model: Annotated[
        str,
        flags.option(
            flags.MODEL,
            "A preset ([bold]triforce models[/] lists them), a directory with config.json, or a model of the hub "
            "that is on this machine. No weights are read.",
            metavar="M",
            complete=complete_model,
        ),
    ] = EMBEDDED,
    shape: Annotated[
        str | None,
        flags.option(flags.MODEL, "Instead of a model: a preset's shape.", metavar="NAME"),
    ] = None,
    draft: flags.DraftOption = None,
    dtype: flags.DtypeOption = Dtype.AUTO,
    context: Annotated[
        str,
        flags.option(flags.MODEL, "Tokens, prompt and answer; auto is all the model has.", metavar="N"),
    ] = "auto",
    gpus: Annotated[str, flags.option(_HARDWARE, "GPUs that share it.", metavar="N")] = "1",
    gpu: Annotated[
        str | None,
        flags.option(_HARDWARE, f"{', '.join(CARDS)}. Default: {DEFAULT_CARD}.", metavar="CARD"),
    ] = None,
    gpu_memory: Annotated[
        str, flags.option(_HARDWARE, "Memory of each GPU; auto is the card's.", metavar="GIB")
    ] = "auto",
    memory_gbps: Annotated[
        str, flags.option(_HARDWARE, "Its bandwidth, GB/s, by the data sheet.", metavar="X")
    ] = "auto",
    link_gbps: Annotated[
        str,
        flags.option(
            _HARDWARE,
            "What comes from host memory to each GPU while all read, GB/s in practice; auto is PCIe x16 of the "
            "card's generation, to itself.",
            metavar="X",
        ),
    ] = "auto",
    host_memory: Annotated[
        str,
        flags.option(_HARDWARE, "Free memory of the host; auto checks none.", metavar="GIB"),
    ] = "auto",
    measured: Annotated[
        Path | None,
        flags.option(
            _HARDWARE,
            "Instead of a card: what [bold]triforce bench --json[/] measured with this model. Bandwidths, the time of "
            "passes and acceptance are then measured ones.",
            metavar="FILE",
        ),
    ] = None,
    tiers: flags.TiersOption = Tiers.THREE,
    budget: flags.BudgetOption = "auto",
    chunk_size: flags.ChunkSizeOption = "auto",
    block_length: flags.BlockLengthOption = "auto",
    draft_length: flags.DraftLengthOption = "auto",
    resident: flags.ResidentOption = "auto",
    acceptance: Annotated[
        str,
        flags.option(
            _ASSUMED,
            "Assumed chance that a token drafted on the retrieval cache stands, given that those before it did. "
            "(accepted ÷ proposed, which a run reports, is lower.) auto is as measured, else 0.9.",
            metavar="P",
        ),
    ] = "auto",
    draft_acceptance: Annotated[
        str, flags.option(_ASSUMED, "The same of the small model; auto is as measured, else 2/3.", metavar="P")
    ] = "auto",
    json_path: Annotated[Path | None, flags.json_option("As JSON; [bold]-[/] is stdout.")] = None,
    debug: flags.DebugOption = False,
) -> None:
    """Says what would live where and how fast it would be, before anything is bought, downloaded or loaded.

    Bytes follow the rules of a run. Times are [bold]modelled[/], from bytes, bandwidths and an assumed acceptance; with
    --measured from what was measured, for other lengths of context or of drafts than were.
    """
    if shape is not None and model != EMBEDDED:
        raise UsageError("--model and --shape are both given; give one")
    if shape is not None and shape not in PRESETS:
        raise UsageError(f"--shape is {shape!r}; it is one of the presets: {', '.join(PRESETS)}")
    with JsonFile.prepare(json_path) as json_file:
        from .planning import make_plan

        source = _measured(measured, gpu, memory_gbps)
        made = make_plan(
            shape or model,
            draft,
            card=_card(_known_card(gpu), source, gpu_memory, memory_gbps, link_gbps),
            dtype=dtype.value,
            context=auto_or_whole("--context", context),
            gpus=whole("--gpus", gpus, 1),
            host_memory=gibibytes("--host-memory", host_memory),
            tiers=int(tiers.value),
            lengths=flags.lengths(budget, chunk_size, draft_length, block_length),
            resident=flags.resident(resident),
            acceptance=_chance("--acceptance", acceptance),
            draft_acceptance=_chance("--draft-acceptance", draft_acceptance),
            measured=source,
        )
        json_file.write(made.document())
        if not json_file.on_stdout:
            from .report import show

            show(made)
    if made.shortfalls:
        raise typer.Exit(1)


def _measured(path: Path | None, gpu: str | None, memory_gbps: str) -> Measured | None:
    """Raises:
    UsageError: what it would stand for is given too.
    TriforceError: it is no measurement.
    """
    if path is None:
        return None
    for option, given in (("--gpu", gpu is not None), ("--memory-gbps", memory_gbps != "auto")):
        if given:
            raise UsageError(f"{option} and --measured are both given; the hardware is what was measured: give one")
    from .measured import Measured

    return Measured.read(path)


def _known_card(word: str | None) -> Card:
    word = word or DEFAULT_CARD
    if word not in CARDS:
        raise UsageError(
            f"--gpu is {word!r}; it is one of {', '.join(CARDS)}; for another card give --gpu-memory, --memory-gbps "
            "and --link-gbps"
        )
    return CARDS[word]


def _card(card: Card, measured: Measured | None, memory: str, bandwidth: str, link: str) -> Card:
    """That card, or what was measured, with what is given in place of its own figures."""
    given = {
        "memory_gib": _positive("--gpu-memory", memory),
        "memory_gb_per_s": _positive("--memory-gbps", bandwidth),
        "link_gb_per_s": _positive("--link-gbps", link),
    }
    own = measured.card(card) if measured else card
    return replace(own, **{name: value for name, value in given.items() if value is not None})


def _positive(option: str, value: str) -> float | None:
    if value == "auto":
        return None
    number = real(option, value)
    if 0 < number < float("inf"):
        return number
    raise UsageError(f"{option} is {value!r}; it is auto or a number above 0")


def _chance(option: str, value: str) -> float | None:
    if value == "auto":
        return None
    number = real(option, value)
    if 0 <= number <= 1:
        return number
    raise UsageError(f"{option} is {value!r}; it is auto or a chance from 0 to 1")
