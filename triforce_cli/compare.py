"""`triforce compare`: its options, and from them to a job that every system is given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..tp.errors import TriforceError, UsageError
from ..tp.registry import EMBEDDED, find_pair
from .baselines.catalogue import BASELINES, Entry
from .options import (
    Device,
    Dtype,
    Truncate,
    auto_or_whole,
    complete_draft,
    complete_model,
    gibibytes,
    real,
    whole,
)

if TYPE_CHECKING:
    from .app import Call

_PROMPT, _MODEL, _SAMPLING = "Prompt", "Model and machine", "Sampling"
_OURS, _MEASURING = "Triforce's own settings (the preset's, or planned, then adapted)", "Measuring"

_DEFAULT = ["autoregressive", "transformers"]

EPILOG = """[bold]Examples[/]

  This engine against itself without speculation, and against transformers:
  [cyan]triforce compare[/]

  A book, in float32, where greedy texts must be the same:
  [cyan]triforce compare --prompt-file book.txt --dtype float32 --baseline transformers[/]

  The first 8,192 tokens of it, with every run in a file:
  [cyan]triforce compare --prompt-file book.txt --prompt-tokens 8192 --json runs.json[/]
"""


def complete_baseline(incomplete: str) -> list[str]:
    return [name for name in BASELINES if name.startswith(incomplete)]


def compare(
    context: typer.Context,
    baseline: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"What to compare with; may be repeated: {', '.join(BASELINES)}. "
            f"Default: {' and '.join(_DEFAULT)}, which are always there.",
            autocompletion=complete_baseline,
            show_default=False,
        ),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Text to go on from; [bold]-[/] is stdin.", rich_help_panel=_PROMPT, show_default=False
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="The same, given here.", rich_help_panel=_PROMPT, show_default=False),
    ] = None,
    ask: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="A question put after the text.", rich_help_panel=_PROMPT, show_default=False
        ),
    ] = None,
    truncate: Annotated[
        Truncate,
        typer.Option(
            help="What of a text too long for the model is dropped; never the question.", rich_help_panel=_PROMPT
        ),
    ] = Truncate.ERROR,
    prompt_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="N", help="Of the prompt, only the first N tokens.", rich_help_panel=_PROMPT, show_default=False
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            metavar="M",
            help="A preset, a directory, or a model of the hub.",
            autocompletion=complete_model,
            rich_help_panel=_MODEL,
        ),
    ] = EMBEDDED,
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="D",
            help="The small model that drafts, likewise; [bold]none[/] runs two tiers. "
            "Default: the preset's own, else none.",
            autocompletion=complete_draft,
            rich_help_panel=_MODEL,
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        Device, typer.Option(help="Where it runs; auto is CUDA where there is one.", rich_help_panel=_MODEL)
    ] = Device.AUTO,
    dtype: Annotated[
        Dtype,
        typer.Option(
            metavar="TYPE",
            help="Of weights and cache: float32, bfloat16, float16; auto is the checkpoint's. "
            "Only in float32 greedy texts must be the same: 16 bits may turn near-ties.",
            rich_help_panel=_MODEL,
        ),
    ] = Dtype.AUTO,
    max_new_tokens: Annotated[
        str,
        typer.Option(metavar="N", help="Tokens that everyone writes, to the full length.", rich_help_panel=_SAMPLING),
    ] = "128",
    temperature: Annotated[
        str,
        typer.Option(metavar="T", help="0 is greedy; only then texts can be compared.", rich_help_panel=_SAMPLING),
    ] = "0",
    top_p: Annotated[
        str,
        typer.Option(
            metavar="P", help="Keep the likeliest tokens up to this mass; 1 is off.", rich_help_panel=_SAMPLING
        ),
    ] = "0.9",
    top_k: Annotated[
        str, typer.Option(metavar="K", help="Keep the K likeliest tokens; 0 is off.", rich_help_panel=_SAMPLING)
    ] = "0",
    seed: Annotated[
        str | None,
        typer.Option(
            metavar="S",
            help="Each system's own random numbers start from it. Triforce's lengths then never depend on a clock.",
            rich_help_panel=_SAMPLING,
            show_default=False,
        ),
    ] = None,
    budget: Annotated[
        str,
        typer.Option(metavar="auto|N", help="Tokens of the cache that the middle tier sees.", rich_help_panel=_OURS),
    ] = "auto",
    chunk_size: Annotated[
        str, typer.Option(metavar="auto|N", help="Tokens that are chosen together.", rich_help_panel=_OURS)
    ] = "auto",
    draft_length: Annotated[
        str, typer.Option(metavar="auto|N", help="Tokens drafted at a time.", rich_help_panel=_OURS)
    ] = "auto",
    block_length: Annotated[
        str,
        typer.Option(
            metavar="auto|N", help="Tokens that one pass over the full cache verifies.", rich_help_panel=_OURS
        ),
    ] = "auto",
    refresh: Annotated[
        str,
        typer.Option(metavar="auto|round|N|never", help="When chunks are chosen anew.", rich_help_panel=_OURS),
    ] = "auto",
    resident: Annotated[
        str, typer.Option(metavar="auto|GIB", help="GiB of the cache kept on the GPU.", rich_help_panel=_OURS)
    ] = "auto",
    repeat: Annotated[
        str,
        typer.Option(metavar="R", help="Runs of each system, of which medians are shown.", rich_help_panel=_MEASURING),
    ] = "3",
    time_limit: Annotated[
        str,
        typer.Option(
            metavar="MIN",
            help="Minutes that one system may take to load, warm up and run once; then it is stopped, "
            "and its row says so.",
            rich_help_panel=_MEASURING,
        ),
    ] = "60",
    json_path: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="FILE",
            help="Every run as JSON; [bold]-[/] is stdout, which then holds nothing else.",
            rich_help_panel=_MEASURING,
            show_default=False,
        ),
    ] = None,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug", help="Tracebacks of errors, and what failing systems printed.", rich_help_panel=_MEASURING
        ),
    ] = False,
) -> None:
    """Measures this engine and what one would use instead: same weights, same prompt, same sampling.

    Each run is a process of its own, with one warm-up, in an order that rotates; one system is in memory at a time.
    [bold]Ctrl-C[/] stops; what was measured by then is shown. Exits 1 if there is nothing to compare.
    """
    from ..tp.place import Place
    from .output import JsonFile
    from .prompt import read_option, read_source
    from .streams import tell

    call: Call = context.obj
    chosen = _chosen(baseline or _DEFAULT)
    place = Place.from_environment()
    if place and place.size > 1:
        raise UsageError("compare runs every system in one process; start it without torchrun")
    if ask is not None:
        if not ask.strip():
            raise UsageError("--ask is empty; give a question or an instruction")
        ask = read_option("--ask", ask, tell)
    asked = Asked(
        ask=ask,
        truncate=truncate.value,
        prompt_tokens=None if prompt_tokens is None else whole("--prompt-tokens", prompt_tokens, 1),
        model=model,
        draft=draft,
        device=device.value,
        dtype=dtype.value,
        max_new_tokens=whole("--max-new-tokens", max_new_tokens, 1),
        temperature=real("--temperature", temperature),
        top_p=real("--top-p", top_p),
        top_k=whole("--top-k", top_k, 0),
        seed=None if seed is None else whole("--seed", seed, 0),
        settings={
            "budget": auto_or_whole("--budget", budget),
            "chunk_size": auto_or_whole("--chunk-size", chunk_size),
            "draft_length": auto_or_whole("--draft-length", draft_length),
            "block_length": auto_or_whole("--block-length", block_length),
            "refresh": refresh,
            "resident": gibibytes("--resident", resident),
        },
        repeats=whole("--repeat", repeat, 1),
        limit_s=60 * real("--time-limit", time_limit),
        debug=debug,
    )
    if not 0 < asked.limit_s < float("inf"):
        raise UsageError(f"--time-limit is {time_limit!r}; it is a number of minutes above 0")
    if all(entry.missing() for entry in chosen):
        raise TriforceError("; ".join(f"{entry.name} is {entry.missing()}" for entry in chosen))
    with JsonFile.prepare(json_path) as json_file:
        source = read_source(prompt_file, prompt, tell)
        directories = find_pair(model, draft, tell)
        call.signals.hold()  # importing PyTorch may swallow what a signal raises
        from .compare_run import run

        run(asked, chosen, source, directories, json_file, call.signals)


@dataclass(frozen=True)
class Asked:
    """What was asked for, in the words of the options."""

    ask: str | None
    truncate: str
    prompt_tokens: int | None
    model: str
    draft: str | None
    device: str
    dtype: str
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    settings: dict[str, Any]
    """Of triforce, as `Engine.load` names them."""
    repeats: int
    limit_s: float
    debug: bool


def _chosen(names: list[str]) -> list[Entry]:
    """The baselines of those names, each once.

    Raises:
        UsageError: there is none of that name.
    """
    for name in names:
        if name not in BASELINES:
            raise UsageError(f"--baseline is {name!r}; it is one of {', '.join(BASELINES)}")
    return [BASELINES[name] for name in dict.fromkeys(names)]
