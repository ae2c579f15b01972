"""The options of `triforce chat`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from ..options import CONTEXT, PROMPT, TEMPLATE_ARG, RunOptions, flag, new_tokens, option
from ..parameters import FILE, TEXT


@dataclass(frozen=True, kw_only=True)
class ChatOptions(RunOptions):
    """The options of `triforce chat`."""

    prompt_file: Annotated[Path | None, option(PROMPT, FILE, "A text file to talk about. Default: none.")] = None
    context: Annotated[str | None, CONTEXT] = None
    system: Annotated[
        str | None,
        option(
            PROMPT, TEXT, "A system message before the first question, put there through the model's chat template."
        ),
    ] = None
    template_args: Annotated[list[Any] | None, TEMPLATE_ARG] = None
    trim: Annotated[
        bool,
        flag(
            "--trim",
            PROMPT,
            "Drop the oldest turns if a question would not fit. The text and the system message are never dropped.",
        ),
    ] = False
    max_new_tokens: Annotated[int, new_tokens(1, "Maximum number of tokens of an answer.")] = 256
