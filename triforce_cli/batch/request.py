"""The options of `triforce batch`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ..options import CONTEXT, MACHINE, OUTPUT, Request, argument, flag, new_tokens, option
from ..parameters import FILE, whole


@dataclass(frozen=True, kw_only=True)
class BatchRequest(Request):
    """What `triforce batch` is asked for. Sampling options and lengths are for requests that do not say."""

    requests: Annotated[
        Path, argument("REQUESTS", "The file of requests, a JSON object a line (JSONL); [bold]-[/] is stdin.")
    ]
    output: Annotated[
        Path,
        option(
            OUTPUT,
            FILE,
            "The file of answers. Those that are in it already are not computed again; others are added as each is "
            "complete.",
            "--output",
            "-o",
        ),
    ]
    context: Annotated[str | None, CONTEXT] = None
    max_sequences: Annotated[
        int,
        option(MACHINE, whole(1), "Answers that are written at a time, at most; as many as memory holds."),
    ] = 8
    max_new_tokens: Annotated[int, new_tokens(1, "Maximum number of tokens of an answer.")] = 256
    live: Annotated[bool, flag("--live/--no-live", OUTPUT, "Live display, if stderr is a terminal.")] = True
