"""Wraps a growing text as it arrives: only its last line is wrapped again."""

from __future__ import annotations

import re

from rich.cells import cell_len, chop_cells

from .output import printable

_WORDS = re.compile(r"\s+|\S+")


class WrappedText:
    """A growing text that returns its last lines. If the width changes, the whole text is wrapped again."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._taken = 0
        self._width = 0
        self._lines = [""]

    def add(self, piece: str) -> None:
        """Adds text. This is fast enough to be called after every round; `last_lines` does the wrapping."""
        if piece:
            self._pieces.append(piece)

    def last_lines(self, width: int, height: int) -> list[str]:
        """The last lines: at most `height`, none wider than `width` cells (1 or more)."""
        if width != self._width:
            self._width, self._taken, self._lines = width, 0, [""]
        new = self._pieces[self._taken :]
        self._taken += len(new)
        if new:
            _extend(self._lines, printable("".join(new)).replace("\t", "    "), width)
        return [line.rstrip() for line in self._lines[-height:]] if height > 0 else []


def _extend(lines: list[str], text: str, width: int) -> None:
    """Appends `text` to the last of `lines`. Lines break before words, and inside words that are too long.

    White space stays at the end of the line before it, even beyond the width, and is cut off only when lines are shown.
    So the breaks do not depend on the pieces in which a text arrives.
    """
    for paragraph in (lines.pop() + text).split("\n"):
        line, used = "", 0
        for word in _WORDS.findall(paragraph):
            cells = len(word) if word.isascii() else cell_len(word)
            if used + cells <= width or word.isspace():
                line, used = line + word, used + cells
                continue
            if line.strip():
                lines.append(line)
            if cells > width:
                *full, word = filter(None, chop_cells(word, width))
                lines += full
                cells = cell_len(word)
            line, used = word, cells
        lines.append(line)
