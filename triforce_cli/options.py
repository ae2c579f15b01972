"""What options take (words, numbers), checked into a `Request`, and completed in a shell."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ..tp.errors import UsageError
from ..tp.weights.registry import PRESETS


class Device(StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Dtype(StrEnum):
    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Tiers(StrEnum):
    ONE = "1"
    TWO = "2"
    THREE = "3"


class Truncate(StrEnum):
    ERROR = "error"
    HEAD = "head"
    TAIL = "tail"
    MIDDLE = "middle"


@dataclass(frozen=True)
class Request:
    """What was asked for, in the words of the options; `None` is `auto`."""

    ask: str | None
    truncate: str
    model: str
    draft: str | None
    device: str
    dtype: str
    gpus: int
    resident: float | None
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    ignore_eos: bool
    tiers: int
    budget: int | None
    chunk_size: int | None
    draft_length: int | None
    block_length: int | None
    refresh: str
    live: bool

    @property
    def wanted_draft(self) -> str | None:
        """What stands for the draft: none is looked for where fewer than three tiers run."""
        return self.draft if self.tiers == 3 else "none"


def whole(option: str, value: str, least: int) -> int:
    """The value of an option that takes whole numbers. Options come as text: what the parser says of a bad number
    does not name it.

    Raises:
        UsageError: anything else, or less than `least`.
    """
    try:
        number = int(value)
    except ValueError:
        number = least - 1
    if number >= least:
        return number
    raise UsageError(f"{option} is {value!r}; it is a whole number from {least}")


def real(option: str, value: str) -> float:
    """The value of an option that takes numbers.

    Raises:
        UsageError: anything else.
    """
    try:
        return float(value)
    except ValueError as error:
        raise UsageError(f"{option} is {value!r}; it is a number") from error


def auto_or_whole(option: str, value: str) -> int | None:
    """The value of an option that takes `auto` (`None`) or a number of tokens from 1.

    Raises:
        UsageError: anything else.
    """
    if value == "auto":
        return None
    try:
        return whole(option, value, 1)
    except UsageError as error:
        raise UsageError(f"{option} is {value!r}; it is auto or a whole number of tokens from 1") from error


def gibibytes(option: str, value: str) -> float | None:
    """The value of an option that takes `auto` (`None`) or GiB, 0 or more.

    Raises:
        UsageError: anything else.
    """
    if value == "auto":
        return None
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if 0 <= number < float("inf"):
        return number
    raise UsageError(f"{option} is {value!r}; it is auto or a number of GiB, 0 or more")


def complete_model(incomplete: str) -> list[str]:
    """Presets and directories that begin with what is typed."""
    return [name for name in PRESETS if name.startswith(incomplete)] + _directories(incomplete)


def complete_draft(incomplete: str) -> list[str]:
    return [word for word in ("none",) if word.startswith(incomplete)] + complete_model(incomplete)


def complete_auto(incomplete: str) -> list[str]:
    return [word for word in ("auto",) if word.startswith(incomplete)]


def complete_refresh(incomplete: str) -> list[str]:
    return [word for word in ("auto", "round", "never") if word.startswith(incomplete)]


def _directories(incomplete: str) -> list[str]:
    typed = Path(incomplete).expanduser()
    parent, start = (typed, "") if incomplete.endswith("/") else (typed.parent, typed.name)
    shown = incomplete[: len(incomplete) - len(start)]
    try:
        found = sorted(entry.name for entry in parent.iterdir() if entry.name.startswith(start) and entry.is_dir())
    except OSError:
        return []
    return [f"{shown}{name}/" for name in found if start or not name.startswith(".")]
