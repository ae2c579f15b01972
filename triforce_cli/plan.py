"""`triforce plan`: what would live where and how fast it would be, without the hardware, the weights or a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ..tp.errors import UsageError
from ..tp.registry import EMBEDDED, PRESETS
from . import flags
from .cards import CARDS, Card
from .options import Dtype, Tiers, auto_or_whole, complete_model, gibibytes, real, whole
from .output import JsonFile

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
    gpu: Annotated[str, flags.option(_HARDWARE, f"{', '.join(CARDS)}.", metavar="CARD")] = ("rtx4090"),
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
            "(accepted ÷ proposed, which a run reports, is lower.)",
            metavar="P",
        ),
    ] = "0.9",
    draft_acceptance: Annotated[
        str, flags.option(_ASSUMED, "The same of the small model; auto is 2/3.", metavar="P")
    ] = "auto",
    json_path: Annotated[Path | None, flags.json_option("As JSON; [bold]-[/] is stdout.")] = None,
    debug: flags.DebugOption = False,
) -> None:
    """Says what would live where and how fast it would be, before anything is bought, downloaded or loaded.

    Bytes follow the rules of a run. Times are [bold]modelled[/], from bytes, bandwidths and an assumed acceptance.
    """
    if shape is not None and model != EMBEDDED:
        raise UsageError("--model and --shape are both given; give one")
    if shape is not None and shape not in PRESETS:
        raise UsageError(f"--shape is {shape!r}; it is one of the presets: {', '.join(PRESETS)}")
    with JsonFile.prepare(json_path) as json_file:
        from .planning import make_plan

        made = make_plan(
            shape or model,
            draft,
            card=_card(gpu, gpu_memory, memory_gbps, link_gbps),
            dtype=dtype.value,
            context=auto_or_whole("--context", context),
            gpus=whole("--gpus", gpus, 1),
            host_memory=gibibytes("--host-memory", host_memory),
            tiers=int(tiers.value),
            lengths=flags.lengths(budget, chunk_size, draft_length, block_length),
            resident=flags.resident(resident),
            acceptance=_chance("--acceptance", acceptance),
            draft_acceptance=None if draft_acceptance == "auto" else _chance("--draft-acceptance", draft_acceptance),
        )
        json_file.write(made.document())
        if not json_file.on_stdout:
            from .plan_report import show

            show(made)
    if made.shortfalls:
        raise typer.Exit(1)


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
