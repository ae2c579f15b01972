"""What the options of commands have in common: their words, their checks, their completion in a shell."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from ..tp.errors import UsageError
from ..tp.registry import PRESETS


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


def whole_number(option: str, value: str, unit: str) -> int | None:
    """The value of an option that takes `auto` (`None`) or a number of `unit` from 1.

    Raises:
        UsageError: anything else.
    """
    if value == "auto":
        return None
    if value.isascii() and value.isdecimal() and int(value) >= 1:
        return int(value)
    raise UsageError(f"{option} is {value!r}; it is auto or a whole number of {unit} from 1")


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
