"""The commands that may stand in place of a question."""

from __future__ import annotations

import re
from typing import NamedTuple


class Command(NamedTuple):
    """A command, without its name."""

    what: str
    """What it does, for `/help`."""
    argument: bool = False
    """Whether something must follow it: the name of a context."""


COMMANDS = {
    "help": Command("lists these commands"),
    "undo": Command("takes the last question and its answer back"),
    "retry": Command("answers the last question again, with a new seed"),
    "save": Command(
        "saves the whole conversation as a context: /save NAME; triforce chat --context NAME goes on from there",
        argument=True,
    ),
    "contexts": Command("lists the saved contexts"),
    "stats": Command("statistics of the last answer"),
    "quit": Command("leaves, as Ctrl-D does"),
}
"""By name. What each does is the method `command_NAME` of `Talk`, but for `quit`, which ends it."""

KEYS = (
    "Alt-Enter, or a backslash at a line's end, begins a new line; Ctrl-C ends an answer and keeps it, or clears what "
    "is typed; Ctrl-D leaves"
)


def parse(line: str) -> tuple[str, str] | None:
    """The command in a line and what follows it; `None` where the line is a question, as one that begins with a path
    is."""
    found = re.fullmatch(r"/([a-z]+)(?:\s+(.*))?", line.strip())
    return (found[1], (found[2] or "").strip()) if found else None
