"""Kinds of option values: how each is parsed, shown in `--help` and completed in a shell.

An invalid value is refused with the option's name, the value and what is valid (exit code 2).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import typer

from ..tp.units import parse_size
from ..tp.weights.registry import PRESETS


class InvalidValue(typer.BadParameter):
    """A value that its option cannot take. The option parser adds the name of the option."""

    def __init__(self, value: object, possible: str) -> None:
        super().__init__(f"is {value!r}; it is {possible}")

    def format_message(self) -> str:
        return f"{self.param.opts[0] if self.param else 'a value'} {self.message}"


@dataclass(frozen=True)
class Kind:
    """A kind of values. If its parser returns `None` for a word (`auto`), `None` is also the option's default."""

    metavar: str
    parse: Callable[[str], Any] | None = None
    """Returns the value, or raises `InvalidValue`. `None`: the type of the parameter is used."""
    complete: Callable[[str], list[str]] | None = None


class Numbers(tuple[Any, ...]):
    """The numbers of one option, which are separated by commas."""


def words(*possible: str) -> Callable[[str], list[str]]:
    """A function that completes one of these words."""
    return lambda incomplete: [word for word in possible if word.startswith(incomplete)]


def choice(*possible: str) -> Kind:
    """A kind with these words; words that are whole numbers become numbers."""

    def parse(value: str) -> str | int:
        if str(value) not in possible:
            raise InvalidValue(value, f"one of {', '.join(map(repr, possible))}")
        return int(value) if str(value).isdecimal() else value

    return Kind("|".join(possible), parse, words(*possible))


def _number(
    metavar: str, possible: str, convert: Callable[[str], Any], fits: Callable[[Any], bool], *, auto: bool = False
) -> Kind:
    """A kind with the numbers that `convert` reads and `fits` accepts. With `auto`, that word is also allowed, and
    becomes `None`."""

    def parse(value: str) -> Any:
        if auto and value == "auto":
            return None
        try:
            number = convert(value)
        except ValueError:
            raise InvalidValue(value, possible) from None
        if not fits(number):
            raise InvalidValue(value, possible)
        return number

    return Kind(f"auto|{metavar}" if auto else metavar, parse, words("auto") if auto else None)


def whole(least: int, metavar: str = "N") -> Kind:
    """A kind with whole numbers from `least` on."""
    return _number(metavar, f"a whole number from {least}", int, lambda number: number >= least)


def real(metavar: str) -> Kind:
    """A kind with any number. The code that uses the number checks its range."""
    return _number(metavar, "a number", float, lambda number: True)


SEED = _number("S", "a whole number from -2^63 to 2^63 - 1", int, lambda seed: -(2**63) <= seed < 2**63)
AUTO_OR_TOKENS = _number("N", "auto or a whole number of tokens from 1", int, lambda n: n >= 1, auto=True)
AUTO_OR_THREADS = _number("N", "auto or a whole number from 1", int, lambda n: n >= 1, auto=True)
AUTO_OR_GIB = _number("GIB", "auto or a number of GiB, 0 or more", float, lambda x: 0 <= x < inf, auto=True)
AUTO_OR_POSITIVE = _number("X", "auto or a number above 0", float, lambda x: 0 < x < inf, auto=True)
SECONDS = _number("SECONDS", "a number of seconds, 0 or more", float, lambda x: 0 <= x < inf)
PORT = _number("PORT", "a port from 0 to 65535", int, lambda port: 0 <= port < 2**16)
MINUTES = _number("MIN", "a number of minutes above 0", float, lambda x: 0 < x < inf)


def whole_numbers(least: int, most: float = inf, *, auto: bool = False) -> Kind:
    """A kind with whole numbers that are separated by commas. They become ascending, without duplicates. With `auto`,
    that word is also allowed."""
    possible = f"whole numbers from {least}, separated by commas" if most == inf else (
        f"whole numbers separated by commas; each is {', '.join(map(str, range(least, int(most))))} or {most}"
    )  # fmt: skip

    def convert(value: str) -> Numbers:
        return value if isinstance(value, Numbers) else Numbers(sorted({int(part) for part in value.split(",")}))

    return _number("N,N,...", possible, convert, lambda found: least <= found[0] and found[-1] <= most, auto=auto)


def _chances(value: str) -> Numbers:
    return Numbers() if value == "auto" else Numbers(float(part) for part in value.split(","))


CHANCES = _number(
    "A[,B]",
    "one or two chances from 0 to 1, separated by a comma",
    _chances,
    lambda found: len(found) <= 2 and all(0 <= chance <= 1 for chance in found),
)


def complete_model(incomplete: str) -> list[str]:
    """The presets and directories that begin with the typed text."""
    typed = Path(incomplete).expanduser()
    parent, start = (typed, "") if incomplete.endswith("/") else (typed.parent, typed.name)
    shown = incomplete[: len(incomplete) - len(start)]
    try:
        found = sorted(entry.name for entry in parent.iterdir() if entry.name.startswith(start) and entry.is_dir())
    except OSError:
        found = []
    directories = [f"{shown}{name}/" for name in found if start or not name.startswith(".")]
    return words(*PRESETS)(incomplete) + directories


def complete_context(incomplete: str) -> list[str]:
    """The saved contexts that begin with the typed text."""
    from ..offload.contexts.home import user_store
    from ..tp.errors import TriforceError

    with suppress(TriforceError, OSError):
        return words(*user_store().names())(incomplete)
    return []


def _key_and_value(given: str | tuple[str, Any]) -> tuple[str, Any]:
    """Splits a key and a value. The value is read as JSON; if it is not JSON, it is a text."""
    if isinstance(given, tuple):
        return given
    key, equals, value = given.partition("=")
    if not key or not equals:
        raise InvalidValue(given, "KEY=VALUE")
    try:
        return key, json.loads(value)
    except (ValueError, RecursionError):
        return key, value


KEY_VALUE = Kind("KEY=VALUE", _key_and_value)
SIZE = _number("SIZE", "a size such as 20GB or 500MiB", lambda value: parse_size(str(value)), lambda size: size >= 0)
NAME = Kind("NAME", complete=complete_context)
FILE = Kind("FILE")
JSON_FILE = Kind("PATH|-")
TEXT = Kind("TEXT")
MODEL = Kind("M", complete=complete_model)
DRAFT = Kind("D", complete=lambda incomplete: words("none", "lookup")(incomplete) + complete_model(incomplete))
EARLY_END = Kind("auto|off|P", complete=words("auto", "off"))
ROPE_SCALING = Kind("yarn:FACTOR")
REFRESH = Kind("auto|round|N|never", complete=words("auto", "round", "never"))
