"""The commands that a user may type in place of a question."""

from __future__ import annotations

import re
from typing import NamedTuple


class Command(NamedTuple):
    """A command, without its name."""

    what: str
    """A description of what it does, for `/help`."""
    argument: bool = False
    """Whether an argument must follow it: the name of a context."""


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
"""The commands by name. The method `command_NAME` of `Talk` executes a command, except `quit`, which ends it."""

KEYS = (
    "Alt-Enter, or a backslash at a line's end, begins a new line; Ctrl-C ends an answer and keeps it, or clears what "
    "is typed; Ctrl-D leaves"
)


def parse(line: str) -> tuple[str, str] | None:
    """The command in a line, and its argument; `None` if the line is a question. A line that begins with a path is a
    question."""
    found = re.fullmatch(r"/([a-z]+)(?:\s+(.*))?", line.strip())
    return (found[1], (found[2] or "").strip()) if found else None
