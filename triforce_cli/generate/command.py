"""`triforce generate`: its options, and everything about them that can be checked before PyTorch is imported."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...tp.weights.registry import EMBEDDED, find_pair
from .. import flags
from ..options import Device, Dtype, Request, Tiers, Truncate, whole

if TYPE_CHECKING:
    from ..app import Call

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
    prompt_file: flags.PromptFileOption = None,
    prompt: flags.PromptOption = None,
    ask: flags.AskOption = None,
    truncate: flags.TruncateOption = Truncate.ERROR,
    model: flags.ModelOption = EMBEDDED,
    draft: flags.DraftOption = None,
    device: flags.DeviceOption = Device.AUTO,
    dtype: flags.DtypeOption = Dtype.AUTO,
    gpus: flags.GpusOption = "1",
    max_new_tokens: Annotated[str, flags.option(flags.SAMPLING, "Length of what is written.", metavar="N")] = "256",
    temperature: flags.TemperatureOption = "0.6",
    top_p: flags.TopPOption = "0.9",
    top_k: flags.TopKOption = "0",
    seed: flags.SeedOption = None,
    ignore_eos: Annotated[bool, flags.flag("--ignore-eos", flags.SAMPLING, "Write to the full length.")] = False,
    tiers: flags.TiersOption = Tiers.THREE,
    budget: flags.BudgetOption = "auto",
    chunk_size: flags.ChunkSizeOption = "auto",
    draft_length: flags.DraftLengthOption = "auto",
    block_length: flags.BlockLengthOption = "auto",
    refresh: flags.RefreshOption = "auto",
    resident: flags.ResidentOption = "auto",
    live: Annotated[bool, flags.flag("--live/--no-live", flags.OUTPUT, "Live display, on a terminal.")] = True,
    json_path: Annotated[
        Path | None,
        flags.json_option(
            "Statistics, token ids and text as JSON; [bold]-[/] is stdout, which then holds nothing else."
        ),
    ] = None,
    debug: flags.DebugOption = False,
) -> None:
    """Goes on with a text, or answers a question about it.

    The text goes to stdout as it is accepted, everything else to stderr.
    [bold]Ctrl-C[/] stops; what was written by then is kept.
    """
    from ..ranks import leads
    from ..terminal.output import JsonFile
    from ..terminal.streams import tell
    from .prompt import read_ask, read_source

    request = Request(
        ask=read_ask(ask, tell),
        truncate=truncate.value,
        model=model,
        draft=draft,
        device=device.value,
        dtype=dtype.value,
        gpus=whole("--gpus", gpus, 1),
        resident=flags.resident(resident),
        max_new_tokens=whole("--max-new-tokens", max_new_tokens, 1),
        **flags.sampling(temperature, top_p, top_k, seed),
        ignore_eos=ignore_eos,
        tiers=int(tiers.value),
        **flags.lengths(budget, chunk_size, draft_length, block_length),
        refresh=refresh,
        live=live,
    )
    call: Call = context.obj
    if not leads(request, call):
        return
    with JsonFile.prepare(json_path) as json_file:
        source = read_source(prompt_file, prompt, tell)
        # What may be a download of gigabytes comes after all that can be checked without it.
        directories = find_pair(model, request.wanted_draft, tell)

        call.signals.hold()  # importing PyTorch may swallow what a signal raises
        from .run import run

        run(request, source, directories, json_file, call.signals)
