"""Standard streams whose reader may end: messages are then dropped, and do not stop a run."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TextIO


def print_note(note: str) -> None:
    """Prints a line for people on stderr."""
    stream = BestEffortStream(sys.stderr)
    stream.write(note + "\n")
    stream.flush()


class BestEffortStream:
    """The methods of a text stream that messages need. Once `stream` cannot be written (its reader has ended, its
    terminal was closed), everything written is dropped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:
        return self._stream.encoding

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError:
            abandon(self._stream)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            abandon(self._stream)


def abandon(stream: TextIO) -> None:
    """Drops the buffered text of `stream` and everything written later. Otherwise the interpreter would fail on it, or
    wait for it, when it exits."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
