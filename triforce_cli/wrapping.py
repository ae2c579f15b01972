"""Growing text, wrapped to a width as it comes: only the last line is ever wrapped again."""

from __future__ import annotations

import re

from rich.cells import cell_len, chop_cells

from .output import harmless

_WORDS = re.compile(r"\s+|\S+")


class WrappedText:
    """Text that grows and is asked for its last lines. A new width wraps all of it once."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._taken = 0
        self._width = 0
        self._lines = [""]

    def add(self, piece: str) -> None:
        """Cheap enough to call after every round; wrapping is left to `last_lines`."""
        if piece:
            self._pieces.append(piece)

    def last_lines(self, width: int, height: int) -> list[str]:
        """At most `height` lines, none wider than `width` cells (1 or more)."""
        if width != self._width:
            self._width, self._taken, self._lines = width, 0, [""]
        new = self._pieces[self._taken :]
        self._taken += len(new)
        if new:
            _extend(self._lines, harmless("".join(new)).replace("\t", "    "), width)
        return self._lines[-height:] if height > 0 else []


def _extend(lines: list[str], text: str, width: int) -> None:
    """Appends `text` to the last of `lines`, breaking at white space, which a break swallows, or inside long words."""
    for index, paragraph in enumerate((lines.pop() + text).split("\n")):
        if index:
            lines[-1] = lines[-1].rstrip()
        line, used = "", 0
        for word in _WORDS.findall(paragraph):
            cells = len(word) if word.isascii() else cell_len(word)
            if used + cells <= width:
                line, used = line + word, used + cells
                continue
            if word.isspace():
                word, cells = "", 0
            if line.strip():
                lines.append(line.rstrip())
            if cells > width:
                *full, word = chop_cells(word, width)
                lines += full
                cells = cell_len(word)
            line, used = word, cells
        lines.append(line)
