"""Questions from a pipe or a file: each line is one."""

from __future__ import annotations

import sys

from ...tp.errors import TriforceError
from ..terminal.stopping import Signals


class Lines:
    """The lines of standard input."""

    interactive = False

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        self._number = 0

    def next(self, status: str) -> str | None:
        """The next line; `None` at the end.

        Raises:
            TriforceError: it is not UTF-8.
            Stop: a signal came.
        """
        with self._signals.allowed():
            line = sys.stdin.buffer.readline()
        self._number += 1
        try:
            return line.decode("utf-8-sig" if self._number == 1 else "utf-8") if line else None
        except UnicodeDecodeError as error:
            raise TriforceError(f"line {self._number:,} of standard input is not UTF-8, so it is left out") from error
