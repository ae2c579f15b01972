"""The commands that may stand in place of a question."""

from __future__ import annotations

import re

COMMANDS = {
    "help": "lists these commands",
    "undo": "takes the last question and its answer back",
    "retry": "answers the last question again, with a new seed",
    "save": "saves the whole conversation as a context: /save NAME; triforce chat --context NAME goes on from there",
    "contexts": "lists the saved contexts",
    "stats": "statistics of the last answer",
    "quit": "leaves, as Ctrl-D does",
}

KEYS = (
    "Alt-Enter, or a backslash at a line's end, begins a new line; Ctrl-C ends an answer and keeps it, or clears what "
    "is typed; Ctrl-D leaves"
)


def parse(line: str) -> tuple[str, str] | None:
    """The command in a line and what follows it; `None` where the line is a question, as one that begins with a path
    is."""
    found = re.fullmatch(r"/([a-z]+)(?:\s+(.*))?", line.strip())
    return (found[1], (found[2] or "").strip()) if found else None
