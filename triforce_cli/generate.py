"""`triforce generate`: its options, and everything about them that can be checked before PyTorch is imported."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..tp.errors import UsageError
from ..tp.registry import EMBEDDED, find_pair
from .options import (
    Device,
    Dtype,
    Request,
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

if TYPE_CHECKING:
    from .app import Call

_PROMPT, _MODEL, _SAMPLING = "Prompt", "Model and machine", "Sampling"
_SPECULATION, _OUTPUT = "Speculation (the preset's, or planned, then adapted; a number fixes it)", "Output"

EPILOG = """[bold]Examples[/]

  The embedded model goes on with a built-in text:
  [cyan]triforce generate[/]

  A book, and what might follow it:
  [cyan]triforce generate --prompt-file book.txt --truncate head > more.txt[/]

  A question about a book, to a larger model, downloaded where it is not there yet:
  [cyan]triforce generate --model llama-3.1-8b-instruct --prompt-file book.txt --ask "Who is Levin?"[/]

  From a pipe:
  [cyan]man bash | triforce generate --prompt-file - --max-new-tokens 64[/]

  For a script, one JSON document, with the same tokens every time:
  [cyan]triforce generate --prompt-file book.txt --seed 1 --json - | jq .token_ids[/]

  With lengths fixed by hand, against plain decoding:
  [cyan]triforce generate --draft-length 4 --block-length 12 --budget 1024[/]
  [cyan]triforce generate --tiers 1[/]
"""


def generate(
    context: typer.Context,
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
            metavar="TEXT",
            help="A question or an instruction put after the text, through the model's chat template if it has one.",
            rich_help_panel=_PROMPT,
            show_default=False,
        ),
    ] = None,
    truncate: Annotated[
        Truncate,
        typer.Option(
            help="What of a text too long for the model is dropped; never the question.", rich_help_panel=_PROMPT
        ),
    ] = Truncate.ERROR,
    model: Annotated[
        str,
        typer.Option(
            metavar="M",
            help="A preset ([bold]triforce models[/] lists them), a directory, or a model of the Hugging Face hub "
            "(owner/name), which is downloaded once.",
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
            "Only in float32 is greedy text the same for all lengths and tiers: 16 bits may turn near-ties.",
            rich_help_panel=_MODEL,
        ),
    ] = Dtype.AUTO,
    gpus: Annotated[
        str,
        typer.Option(
            metavar="N",
            help="GPUs that share the model (tensor parallelism); with --device cpu, so many processes. "
            "Under torchrun, its ranks.",
            rich_help_panel=_MODEL,
        ),
    ] = "1",
    max_new_tokens: Annotated[
        str, typer.Option(metavar="N", help="Length of what is written.", rich_help_panel=_SAMPLING)
    ] = "256",
    temperature: Annotated[str, typer.Option(metavar="T", help="0 is greedy.", rich_help_panel=_SAMPLING)] = "0.6",
    top_p: Annotated[
        str,
        typer.Option(
            metavar="P",
            help="Keep the likeliest tokens up to this mass; 1 is off.",
            rich_help_panel=_SAMPLING,
        ),
    ] = "0.9",
    top_k: Annotated[
        str, typer.Option(metavar="K", help="Keep the K likeliest tokens; 0 is off.", rich_help_panel=_SAMPLING)
    ] = "0",
    seed: Annotated[
        str | None,
        typer.Option(
            metavar="S",
            help="Gives the same text again: lengths then never depend on a clock. "
            "Default: drawn, and reported; such a run did depend on it.",
            rich_help_panel=_SAMPLING,
            show_default=False,
        ),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Write to the full length.", rich_help_panel=_SAMPLING)
    ] = False,
    tiers: Annotated[
        Tiers,
        typer.Option(
            help="3: small model, then the model on chosen parts of the cache, then on all of it; "
            "2: without the small one; 1: plain decoding.",
            rich_help_panel=_SPECULATION,
        ),
    ] = Tiers.THREE,
    budget: Annotated[
        str,
        typer.Option(
            metavar="auto|N",
            help="Tokens of the cache that the middle tier sees.",
            autocompletion=complete_auto,
            rich_help_panel=_SPECULATION,
        ),
    ] = "auto",
    chunk_size: Annotated[
        str,
        typer.Option(
            metavar="auto|N",
            help="Tokens that are chosen together.",
            autocompletion=complete_auto,
            rich_help_panel=_SPECULATION,
        ),
    ] = "auto",
    draft_length: Annotated[
        str,
        typer.Option(
            metavar="auto|N",
            help="Tokens that the small model drafts at a time.",
            autocompletion=complete_auto,
            rich_help_panel=_SPECULATION,
        ),
    ] = "auto",
    block_length: Annotated[
        str,
        typer.Option(
            metavar="auto|N",
            help="Tokens that one pass over the full cache verifies.",
            autocompletion=complete_auto,
            rich_help_panel=_SPECULATION,
        ),
    ] = "auto",
    refresh: Annotated[
        str,
        typer.Option(
            metavar="auto|round|N|never",
            help="When those are chosen anew: every round, every N rounds, never; "
            "auto: every round while that costs next to nothing, else when acceptance drops.",
            autocompletion=complete_refresh,
            rich_help_panel=_SPECULATION,
        ),
    ] = "auto",
    resident: Annotated[
        str,
        typer.Option(
            metavar="auto|GIB",
            help="GiB of the cache kept on each GPU, the rest streams from host memory; auto is what fits. "
            "On a CPU all of it is kept; a number makes the rest flow through a thread, for trying.",
            autocompletion=complete_auto,
            rich_help_panel=_SPECULATION,
        ),
    ] = "auto",
    live: Annotated[
        bool, typer.Option("--live/--no-live", help="Live display, on a terminal.", rich_help_panel=_OUTPUT)
    ] = True,
    json_path: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="FILE",
            help="Statistics, token ids and text as JSON; [bold]-[/] is stdout, which then holds nothing else.",
            rich_help_panel=_OUTPUT,
            show_default=False,
        ),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks of errors.", rich_help_panel=_OUTPUT)] = False,
) -> None:
    """Goes on with a text, or answers a question about it.

    The text goes to stdout as it is accepted, everything else to stderr.
    [bold]Ctrl-C[/] stops; what was written by then is kept.
    """
    import sys

    from ..tp.launch import GRACE_S, RANK_0_GRACE_S, Guard, launch
    from ..tp.place import Place
    from .output import JsonFile
    from .prompt import read_option, read_source
    from .streams import tell

    if ask is not None:
        if not ask.strip():
            raise UsageError("--ask is empty; give a question or an instruction")
        ask = read_option("--ask", ask, tell)
    request = Request(
        ask=ask,
        truncate=truncate.value,
        model=model,
        draft=draft,
        device=device.value,
        dtype=dtype.value,
        gpus=whole("--gpus", gpus, 1),
        resident=gibibytes("--resident", resident),
        max_new_tokens=whole("--max-new-tokens", max_new_tokens, 1),
        temperature=real("--temperature", temperature),
        top_p=real("--top-p", top_p),
        top_k=whole("--top-k", top_k, 0),
        seed=None if seed is None else whole("--seed", seed, 0),
        ignore_eos=ignore_eos,
        tiers=int(tiers.value),
        budget=auto_or_whole("--budget", budget),
        chunk_size=auto_or_whole("--chunk-size", chunk_size),
        draft_length=auto_or_whole("--draft-length", draft_length),
        block_length=auto_or_whole("--block-length", block_length),
        refresh=refresh,
        live=live,
    )
    call: Call = context.obj
    wanted_draft = draft if request.tiers == 3 else "none"
    place = Place.from_environment()
    if place is None and request.gpus > 1:
        target, _ = find_pair(model, wanted_draft, tell)  # one download for all ranks
        call.signals.hold()  # importing PyTorch may swallow what a signal raises
        from ..tp.config import ModelConfig
        from ..tp.split import check_split

        check_split(ModelConfig.load(target), request.gpus)  # before so many processes are started
        command = [sys.executable, "-P", "-m", "triforce.cli", *call.arguments]
        raise typer.Exit(launch(command, request.gpus, ready=call.signals.allow))
    if place and place.size > 1:
        Guard(GRACE_S if place.rank else RANK_0_GRACE_S)
    if place and place.rank:
        call.signals.disregard()
        from .run import follow

        follow(request)
        return
    with JsonFile.prepare(json_path) as json_file:
        source = read_source(prompt_file, prompt, tell)
        # What may be a download of gigabytes comes after all that can be checked without it.
        directories = find_pair(model, wanted_draft, tell)

        call.signals.hold()  # importing PyTorch may swallow what a signal raises
        from .run import run

        run(request, source, directories, json_file, call.signals)
