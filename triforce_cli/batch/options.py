"""The options of `triforce batch`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ..options import OUTPUT, AnsweringOptions, argument, flag, option
from ..parameters import FILE


@dataclass(frozen=True, kw_only=True)
class BatchOptions(AnsweringOptions):
    """The options of `triforce batch`."""

    requests: Annotated[
        Path, argument("REQUESTS", "The file of requests: one JSON object per line (JSONL); [bold]-[/] is stdin.")
    ]
    output: Annotated[
        Path,
        option(
            OUTPUT,
            FILE,
            "The file of answers. Answers that it already has are not computed again. Each new answer is added when it "
            "is complete.",
            "--output",
            "-o",
        ),
    ]
    live: Annotated[bool, flag("--live/--no-live", OUTPUT, "Live display, if stderr is a terminal.")] = True
