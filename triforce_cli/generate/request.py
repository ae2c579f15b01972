"""The options of `triforce generate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ..options import GPUS, OUTPUT, PROMPT, SAMPLING, TIERS, Request, flag, new_tokens, option
from ..parameters import TEXT, choice

ASK = option(
    PROMPT, TEXT, "A question or an instruction, put after the text through the model's chat template if it has one."
)
TRUNCATE = option(
    PROMPT,
    choice("error", "head", "tail", "middle"),
    "Which part of a text that is too long for the model to drop (never the question); error refuses it.",
)


@dataclass(frozen=True, kw_only=True)
class GenerateRequest(Request):
    """What `triforce generate` is asked for."""

    ask: Annotated[str | None, ASK] = None
    truncate: Annotated[str, TRUNCATE] = "error"
    gpus: Annotated[int, GPUS] = 1
    max_new_tokens: Annotated[int, new_tokens(1, "Most tokens to write.")] = 256
    ignore_eos: Annotated[
        bool, flag("--ignore-eos", SAMPLING, "Write all --max-new-tokens: do not stop at an end-of-sequence token.")
    ] = False
    tiers: Annotated[int, TIERS] = 3
    live: Annotated[bool, flag("--live/--no-live", OUTPUT, "Live display, if stderr is a terminal.")] = True

    @property
    def most_tiers(self) -> int:
        return self.tiers
