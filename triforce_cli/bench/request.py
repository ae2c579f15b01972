"""The options of `triforce bench`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ...offload.settings import Settings
from ..options import CONTEXT, MEASURING, OUTPUT, WITHOUT_TIERS, TextRequest, new_tokens, option
from ..parameters import CHANCES, FILE, Kind, Numbers, whole, whole_numbers

AUTO_CONTEXTS = (4096, 16384, 65536)

QUESTION_TOKENS = 32
"""Tokens at the end of the prompt that each sequence of a batch has for itself: another place of the text."""

REPEAT = option(MEASURING, whole(1, "R"), "Runs of each kind; medians are shown.")


@dataclass(frozen=True, kw_only=True)
class Asked(TextRequest):
    """What `triforce bench` is asked for."""

    contexts: Annotated[
        Numbers | None,
        option(
            MEASURING,
            whole_numbers(2, auto=True),
            "Context lengths to measure, in tokens of prompt and answer together. auto is "
            f"{', '.join(f'{n:,}' for n in AUTO_CONTEXTS)}, as far as the model goes.",
        ),
    ] = None
    """Ascending; `None` is `AUTO_CONTEXTS`, as far as the model goes."""
    tiers: Annotated[
        Numbers,
        option(
            MEASURING,
            whole_numbers(1, 3),
            "What to measure. 1: plain decoding; 2: speculation without the small model; 3: with it.",
        ),
    ] = Numbers((1, 3))  # noqa: RUF009 - a tuple
    """Ascending."""
    batch: Annotated[
        Numbers | None,
        option(
            MEASURING,
            whole_numbers(1),
            "Numbers of sequences to decode together, each with a question of its own about the same text: measures "
            "tokens per second, as in 1,2,4,8.",
        ),
    ] = None
    """Ascending; `None` measures runs alone."""
    settings: Annotated[Settings, WITHOUT_TIERS] = Settings()  # noqa: RUF009 - frozen
    repeat: Annotated[int, REPEAT] = 3
    context: Annotated[str | None, CONTEXT] = None
    shape: Annotated[
        str | None,
        option(
            MEASURING,
            Kind("NAME"),
            "Instead of a model: the shape of a preset, or of a directory with config.json. Its steps are measured "
            "with random weights and synthetic keys and values; what depends on acceptance is modelled.",
        ),
    ] = None
    assume_acceptance: Annotated[
        Numbers | None,
        option(
            MEASURING,
            CHANCES,
            "With --shape: the assumed acceptance, accepted ÷ tested, of tokens drafted on the retrieval cache, and of "
            "those drafted by the small model. Default: 0.9,0.67.",
        ),
    ] = None
    max_new_tokens: Annotated[int, new_tokens(2, "Tokens of each answer, which is written to the full length.")] = 128
    plot: Annotated[
        Path | None,
        option(OUTPUT, FILE, "Draw a picture for a talk (.png, .svg, .pdf); needs the extra [bold]plot[/]."),
    ] = None
