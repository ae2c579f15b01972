"""The options of `triforce compare`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from ...offload.settings import Settings
from ...offload.speculation.sampling import Sampling
from ..bench.request import REPEAT
from ..options import (
    ASK,
    CONTEXT,
    MEASURING,
    OUTPUT,
    PROMPT,
    SAMPLING,
    SAMPLING_OPTIONS,
    TRUNCATE,
    WITHOUT_TIERS,
    TextRequest,
    flag,
    new_tokens,
    option,
)
from ..parameters import MINUTES, real, whole, words
from .baselines.catalogue import BASELINES

DEFAULT = ("autoregressive", "transformers")
"""The baselines that are always installed."""


@dataclass(frozen=True, kw_only=True)
class Asked(TextRequest):
    """What `triforce compare` is asked for."""

    baseline: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"System to compare with; may be repeated: {', '.join(BASELINES)}. "
            f"Default: {' and '.join(DEFAULT)}, which are always there.",
            autocompletion=words(*BASELINES),
            show_default=False,
            rich_help_panel=MEASURING,
        ),
    ] = None
    gpus: int = 1  # no option here: each system runs in one process
    settings: Annotated[Settings, WITHOUT_TIERS] = Settings()  # noqa: RUF009 - frozen
    repeat: Annotated[int, REPEAT] = 3
    batch: Annotated[
        int | None,
        option(
            MEASURING,
            whole(1),
            "Sequences to decode together: one text, and for each sequence a question of its own about it (32 tokens "
            "from another place). Compares the tokens per second of all. transformers-prefix is for this only.",
        ),
    ] = None
    time_limit: Annotated[
        float,
        option(
            MEASURING,
            MINUTES,
            "Minutes that one system may take to load, warm up and run once; after that it is stopped, and its row "
            "says so.",
        ),
    ] = 60
    audit: Annotated[
        bool,
        flag(
            "--audit",
            MEASURING,
            "Compute every token of triforce's answer again, token by token, and report how many agree. For greedy "
            "text, or with --seed.",
        ),
    ] = False
    context: Annotated[str | None, CONTEXT] = None
    ask: Annotated[str | None, ASK] = None
    truncate: Annotated[str, TRUNCATE] = "error"
    prompt_tokens: Annotated[
        int | None, option(PROMPT, whole(1), "Use only the first N tokens of the prompt.")
    ] = None  # fmt: skip
    max_new_tokens: Annotated[int, new_tokens(1, "Tokens of each answer, which is written to the full length.")] = 128
    sampling: Annotated[
        Sampling,
        SAMPLING_OPTIONS
        | {
            "temperature": option(
                SAMPLING,
                real("T"),
                "Softmax temperature; 0 is greedy. Other systems' texts can be compared when greedy, this engine's own "
                "with --seed too.",
            )
        },
    ] = Sampling(temperature=0.0)  # noqa: RUF009 - frozen
    debug: Annotated[
        bool, flag("--debug", OUTPUT, "Show tracebacks of errors, and what failing systems printed.")
    ] = False  # fmt: skip
