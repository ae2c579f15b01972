"""Standard streams that nobody reads any more: what is meant for people then goes nowhere, and stops no run."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TextIO


def tell(note: str) -> None:
    """One line for people, on stderr."""
    stream = Unfailing(sys.stderr)
    stream.write(note + "\n")
    stream.flush()


class Unfailing:
    """As much of a text stream as messages need. Once `stream` cannot be written (its reader left, its terminal was
    closed), it takes everything and writes nothing."""

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
    """Sends what `stream` still buffers nowhere, and all that follows: else the interpreter fails on it, or waits for
    it, when it exits."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
