"""The options that several commands take, each declared once: type, help, completion, and where `--help` shows it.

A command states defaults, and what it says differently; numbers come as text, as what the parser says of a bad one does
not name the option.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import (
    Device,
    Dtype,
    Tiers,
    Truncate,
    auto_or_whole,
    complete_auto,
    complete_draft,
    complete_model,
    complete_refresh,
    gibibytes,
    real,
    whole,
)

PROMPT, MODEL, SAMPLING, MEASURING, OUTPUT = "Prompt", "Model and machine", "Sampling", "Measuring", "Output"
SPECULATION = "Speculation (the preset's, or planned, then adapted; a number fixes it)"


def option(
    panel: str, help: str, *, metavar: str | None = None, complete: Callable[[str], list[str]] | None = None
) -> Any:
    """An option named after its parameter, shown by `--help` in `panel`."""
    return typer.Option(metavar=metavar, help=help, autocompletion=complete, rich_help_panel=panel)


def json_option(help: str) -> Any:
    """`--json`; the parameter is `json_path`."""
    return typer.Option("--json", metavar="FILE", help=help, rich_help_panel=OUTPUT)


def flag(name: str, panel: str, help: str) -> Any:
    """A switch: its own name, not its parameter's, and no `--no-` of it but where `name` says so."""
    return typer.Option(name, help=help, rich_help_panel=panel)


PromptFileOption = Annotated[
    Path | None,
    option(PROMPT, "Text to go on from; [bold]-[/] is stdin.", metavar="FILE"),
]
PromptOption = Annotated[str | None, option(PROMPT, "The same, given here.", metavar="TEXT")]
AskOption = Annotated[
    str | None,
    option(
        PROMPT,
        "A question or an instruction put after the text, through the model's chat template if it has one.",
        metavar="TEXT",
    ),
]
TruncateOption = Annotated[
    Truncate,
    option(PROMPT, "What of a text too long for the model is dropped; never the question."),
]

ModelOption = Annotated[
    str,
    option(
        MODEL,
        "A preset ([bold]triforce models[/] lists them), a directory, or a model of the Hugging Face hub "
        "(owner/name), which is downloaded once.",
        metavar="M",
        complete=complete_model,
    ),
]
DraftOption = Annotated[
    str | None,
    option(
        MODEL,
        "The small model that drafts, likewise; [bold]none[/] runs two tiers. Default: the preset's own, else none.",
        metavar="D",
        complete=complete_draft,
    ),
]
DeviceOption = Annotated[Device, option(MODEL, "Where it runs; auto is CUDA where there is one.")]
DtypeOption = Annotated[
    Dtype,
    option(
        MODEL,
        "Of weights and cache: float32, bfloat16, float16; auto is the checkpoint's. "
        "Only in float32 is greedy text the same for all lengths and tiers: 16 bits may turn near-ties.",
        metavar="TYPE",
    ),
]
GpusOption = Annotated[
    str,
    option(
        MODEL,
        "GPUs that share the model (tensor parallelism); with --device cpu, so many processes. "
        "Under torchrun, its ranks.",
        metavar="N",
    ),
]

TemperatureOption = Annotated[str, option(SAMPLING, "0 is greedy.", metavar="T")]
TopPOption = Annotated[
    str,
    option(SAMPLING, "Keep the likeliest tokens up to this mass; 1 is off.", metavar="P"),
]
TopKOption = Annotated[str, option(SAMPLING, "Keep the K likeliest tokens; 0 is off.", metavar="K")]
SeedOption = Annotated[
    str | None,
    option(
        SAMPLING,
        "Where random numbers start from: lengths then never depend on a clock, and the same text comes again. "
        "Default: drawn, and reported; such a run did depend on it.",
        metavar="S",
    ),
]

TiersOption = Annotated[
    Tiers,
    option(
        SPECULATION,
        "3: small model, then the model on chosen parts of the cache, then on all of it; "
        "2: without the small one; 1: plain decoding.",
    ),
]
BudgetOption = Annotated[
    str,
    option(SPECULATION, "Tokens of the cache that the middle tier sees.", metavar="auto|N", complete=complete_auto),
]
ChunkSizeOption = Annotated[
    str,
    option(SPECULATION, "Tokens that are chosen together.", metavar="auto|N", complete=complete_auto),
]
DraftLengthOption = Annotated[
    str,
    option(SPECULATION, "Tokens that the small model drafts at a time.", metavar="auto|N", complete=complete_auto),
]
BlockLengthOption = Annotated[
    str,
    option(SPECULATION, "Tokens that one pass over the full cache verifies.", metavar="auto|N", complete=complete_auto),
]
RefreshOption = Annotated[
    str,
    option(
        SPECULATION,
        "When the tokens that the middle tier sees are chosen anew: every round, every N rounds, never; "
        "auto: every round while that costs next to nothing, else when acceptance drops.",
        metavar="auto|round|N|never",
        complete=complete_refresh,
    ),
]
ResidentOption = Annotated[
    str,
    option(
        SPECULATION,
        "GiB of the cache kept on each GPU, the rest streams from host memory; auto is what fits. "
        "On a CPU all of it is kept; a number makes the rest flow through a thread, for trying.",
        metavar="auto|GIB",
        complete=complete_auto,
    ),
]

RepeatOption = Annotated[str, option(MEASURING, "Runs of each, of which medians are shown.", metavar="R")]
DebugOption = Annotated[bool, flag("--debug", OUTPUT, "Tracebacks of errors.")]


def lengths(budget: str, chunk_size: str, draft_length: str, block_length: str) -> dict[str, Any]:
    """The lengths among the engine's settings; `None` is auto.

    Raises:
        UsageError: one of them is no number of tokens.
    """
    return {
        "budget": auto_or_whole("--budget", budget),
        "chunk_size": auto_or_whole("--chunk-size", chunk_size),
        "draft_length": auto_or_whole("--draft-length", draft_length),
        "block_length": auto_or_whole("--block-length", block_length),
    }


def sampling(temperature: str, top_p: str, top_k: str, seed: str | None) -> dict[str, Any]:
    """The sampling parameters by name.

    Raises:
        UsageError: one of them is no number.
    """
    return {
        "temperature": real("--temperature", temperature),
        "top_p": real("--top-p", top_p),
        "top_k": whole("--top-k", top_k, 0),
        "seed": None if seed is None else whole("--seed", seed, 0),
    }


def resident(value: str) -> float | None:
    """GiB; `None` is auto.

    Raises:
        UsageError: anything else.
    """
    return gibibytes("--resident", value)
