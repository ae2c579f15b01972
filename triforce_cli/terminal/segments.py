"""Parts of the lines of live displays, as rich segments."""

from __future__ import annotations

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style

from ...tp.units import gib

Line = list[Segment]

LABEL = 10
"""The number of cells of a label at the beginning of a line."""

PLAIN = Style.null()
DIM = Style.parse("dim")
STRONG = Style.parse("bold")
FRAME = Style.parse("cyan")
_TITLE = Style.parse("bold cyan")
_BAR = Style.parse("cyan")


def framed(title: str, body: list[Line], below: str, width: int) -> list[Line]:
    """Puts lines of exactly `width` cells into a frame, with text in its upper and its lower edge."""
    edge = Segment("│ ", FRAME), Segment(" │", FRAME)
    return [
        _border("╭", title, "╮", width),
        *([edge[0], *fit(line, width - 4), edge[1]] for line in body),
        _border("╰", below, "╯", width),
    ]


def labelled(label: str, line: Line) -> Line:
    """A line after its label."""
    return [Segment(f"{label:<{LABEL}}", DIM), *line]


def spans(*parts: str) -> Line:
    """A line of alternating words and values; values are bold."""
    return [Segment(part, STRONG if index % 2 else PLAIN) for index, part in enumerate(parts) if part]


def bar(share: float, width: int) -> Line:
    """A bar of `width` cells, filled up to `share`, 0 to 1."""
    full = round(min(1.0, max(0.0, share)) * width)
    return [Segment("━" * full, _BAR), Segment("─" * (width - full), DIM)]


def memory_line(process_bytes: int, available_bytes: int, device_bytes: int, width: int) -> Line:
    """The memory that this process uses, and the memory that it could have, in `width` cells."""
    limit = process_bytes + available_bytes
    line = labelled("memory", spans("", gib(process_bytes), " of ", gib(limit)))
    if device_bytes:
        line += spans("  ·  device peak ", gib(device_bytes))
    room = width - sum(segment.cell_length for segment in line) - 2
    return [*line, Segment("  "), *bar(process_bytes / max(1, limit), min(40, room))] if room >= 8 else line


def padded(lines: list[str], height: int) -> list[str]:
    """The lines with empty lines after them, `height` lines in all."""
    return lines + [""] * (height - len(lines))


def fit(line: Line, width: int) -> Line:
    """A line cut or filled to exactly `width` cells."""
    return Segment.adjust_line_length(line, width)


def _border(left: str, title: str, right: str, width: int) -> Line:
    room = width - 6
    title = title if cell_len(title) <= room else title[: max(0, room - 1)] + "…"
    rest = max(0, width - 5 - cell_len(title))
    return [Segment(f"{left}─ ", FRAME), Segment(title, _TITLE), Segment(f" {'─' * rest}{right}", FRAME)]
