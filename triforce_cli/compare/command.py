"""`triforce compare`: its options, and from them to a job that every system is given."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...tp.errors import TriforceError, UsageError
from ...tp.weights.registry import EMBEDDED, find_pair
from .. import flags
from ..options import Device, Dtype, Truncate, real, whole
from .baselines.catalogue import BASELINES, Entry

if TYPE_CHECKING:
    from ..app import Call

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
    prompt_file: flags.PromptFileOption = None,
    prompt: flags.PromptOption = None,
    ask: flags.AskOption = None,
    truncate: flags.TruncateOption = Truncate.ERROR,
    prompt_tokens: Annotated[
        str | None,
        flags.option(flags.PROMPT, "Of the prompt, only the first N tokens.", metavar="N"),
    ] = None,
    model: flags.ModelOption = EMBEDDED,
    draft: flags.DraftOption = None,
    device: flags.DeviceOption = Device.AUTO,
    dtype: flags.DtypeOption = Dtype.AUTO,
    max_new_tokens: Annotated[
        str,
        flags.option(flags.SAMPLING, "Tokens that everyone writes, to the full length.", metavar="N"),
    ] = "128",
    temperature: Annotated[
        str,
        flags.option(flags.SAMPLING, "0 is greedy; only then texts can be compared.", metavar="T"),
    ] = "0",
    top_p: flags.TopPOption = "0.9",
    top_k: flags.TopKOption = "0",
    seed: flags.SeedOption = None,
    budget: flags.BudgetOption = "auto",
    chunk_size: flags.ChunkSizeOption = "auto",
    draft_length: flags.DraftLengthOption = "auto",
    block_length: flags.BlockLengthOption = "auto",
    refresh: flags.RefreshOption = "auto",
    resident: flags.ResidentOption = "auto",
    repeat: flags.RepeatOption = "3",
    time_limit: Annotated[
        str,
        flags.option(
            flags.MEASURING,
            "Minutes that one system may take to load, warm up and run once; then it is stopped, and its row says so.",
            metavar="MIN",
        ),
    ] = "60",
    json_path: Annotated[
        Path | None,
        flags.json_option("Every run as JSON; [bold]-[/] is stdout, which then holds nothing else."),
    ] = None,
    debug: Annotated[
        bool,
        flags.flag("--debug", flags.OUTPUT, "Tracebacks of errors, and what failing systems printed."),
    ] = False,
) -> None:
    """Measures this engine and what one would use instead: same weights, same prompt, same sampling.

    Each run is a process of its own, with one warm-up, in an order that rotates; one system is in memory at a time.
    [bold]Ctrl-C[/] stops; what was measured by then is shown. Exits 1 if there is nothing to compare.
    """
    from ...tp.parallel.place import Place
    from ..generate.prompt import read_ask, read_source
    from ..terminal.output import JsonFile
    from ..terminal.streams import tell

    call: Call = context.obj
    chosen = _chosen(baseline or _DEFAULT)
    place = Place.from_environment()
    if place and place.size > 1:
        raise UsageError("compare runs every system in one process; start it without torchrun")
    asked = Asked(
        command=shlex.join(["triforce", *call.arguments]),
        ask=read_ask(ask, tell),
        truncate=truncate.value,
        prompt_tokens=None if prompt_tokens is None else whole("--prompt-tokens", prompt_tokens, 1),
        model=model,
        draft=draft,
        device=device.value,
        dtype=dtype.value,
        max_new_tokens=whole("--max-new-tokens", max_new_tokens, 1),
        **flags.sampling(temperature, top_p, top_k, seed),
        settings=flags.lengths(budget, chunk_size, draft_length, block_length)
        | {"refresh": refresh, "resident": flags.resident(resident)},
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
        from .run import run

        run(asked, chosen, source, directories, json_file, call.signals)


@dataclass(frozen=True)
class Asked:
    """What was asked for, in the words of the options."""

    command: str
    """As it was typed."""
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
