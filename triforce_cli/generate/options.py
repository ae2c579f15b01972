"""The options of `triforce generate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from ..options import (
    ASKED,
    CONTEXT,
    OUTPUT,
    PROMPT,
    SAMPLING,
    TEMPLATE_ARG,
    TRUNCATE,
    TextOptions,
    flag,
    new_tokens,
    option,
)
from ..parameters import FILE, NAME, TEXT, whole


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(TextOptions):
    """The options of `triforce generate`."""

    ask: Annotated[
        list[str] | None,
        option(
            PROMPT,
            TEXT,
            f"{ASKED} May be repeated: the text is prefilled once, and all questions are answered together.",
        ),
    ] = None
    asks: Annotated[
        Path | None,
        option(PROMPT, FILE, "A file with further questions, one per line; [bold]-[/] is stdin."),
    ] = None
    answers: Annotated[
        int,
        option(
            SAMPLING,
            whole(1),
            "Answers to each question, or continuations of the text; each is drawn separately. With --seed S, the "
            "first answer is that of --seed S without -n. Each further one has its own random numbers, made from S and "
            "its number.",
            "-n",
            "--answers",
        ),
    ] = 1
    truncate: Annotated[str, TRUNCATE] = "error"
    context: Annotated[str | None, CONTEXT] = None
    template_args: Annotated[list[Any] | None, TEMPLATE_ARG] = None
    save_context: Annotated[
        str | None,
        option(
            PROMPT,
            NAME,
            "Save the prefilled text as a context of this name, without the question. [bold]--context NAME[/] starts "
            "from it.",
        ),
    ] = None
    no_context: Annotated[
        bool, flag("--no-context", PROMPT, "Do not look for a saved context that begins like the prompt.")
    ] = False
    json_schema: Annotated[
        Path | None,
        option(SAMPLING, FILE, "A file with a JSON schema that every complete answer satisfies; [bold]-[/] is stdin."),
    ] = None
    regex: Annotated[
        str | None, option(SAMPLING, TEXT, "A regular expression that every complete answer matches as a whole.")
    ] = None
    grammar: Annotated[
        Path | None,
        option(SAMPLING, FILE, "A file with a grammar (Lark or GBNF) that every complete answer follows."),
    ] = None
    max_new_tokens: Annotated[int, new_tokens(1, "Maximum number of tokens to write.")] = 256
    ignore_eos: Annotated[
        bool, flag("--ignore-eos", SAMPLING, "Write all --max-new-tokens: do not stop at an end-of-sequence token.")
    ] = False
    live: Annotated[bool, flag("--live/--no-live", OUTPUT, "Live display, if stderr is a terminal.")] = True
