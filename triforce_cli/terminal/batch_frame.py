"""One picture of the live display of a batch, a line a sequence: a pure function of a snapshot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style

from .output import printable
from .segments import DIM, PLAIN, Line, fit, framed, labelled, memory_line, spans

_LEAST_NAME = 8
"""Cells below which a name is left out: figures come first."""

_WIDE = 64
"""Cells of a line from which on the limit of tokens stands beside their number."""

_STATES = {
    "reading": Style.parse("cyan"),
    "running": Style.parse("green"),
    "waiting": Style.parse("yellow"),
    "failed": Style.parse("red"),
    "ended": DIM,
}
"""In the order in which sequences keep their line where there are more of them than lines."""


@dataclass(frozen=True)
class SequenceRow:
    """A sequence, as one line shows it."""

    name: str
    state: str
    """`waiting`, `reading`, `running`, `ended` or `failed`."""
    new_tokens: int = 0
    max_new_tokens: int = 0
    tbt_s: float = 0.0
    accepted: float | None = None
    """Accepted ÷ tested tokens of what the full cache's passes were given."""
    read: float = 0.0
    """The share of its prompt that is read."""
    note: str = ""
    """Why it waits, or has failed."""
    text: str = ""
    """What it has written, or the end of that."""


@dataclass(frozen=True)
class BatchSnapshot:
    """What the display shows. Seconds, bytes, tokens."""

    title: str
    rows: Sequence[SequenceRow]
    elapsed_s: float
    new_tokens: int
    draft_length: int
    block_length: int
    process_bytes: int
    available_bytes: int
    done: int = 0
    """Sequences that ended and have no row any more."""
    to_come: int = 0
    """Sequences that have no row yet."""


def draw_batch(snapshot: BatchSnapshot, width: int, height: int) -> list[Line]:
    """The display as `height` lines of exactly `width` cells."""
    if width < 20 or height < 4:
        lines: list[Line] = [[Segment(_state_words(snapshot))], *([] for _ in range(height - 1))]
        return [fit(line, width) for line in lines[:height]]
    inner, rows = width - 4, height - 2
    numbers = _numbers(snapshot, inner)[: max(0, rows - 3)]
    room = rows - len(numbers) - 1
    body = [_titles(snapshot, inner), *_sequences(snapshot, inner, room)]
    body += [[] for _ in range(rows - len(body) - len(numbers))]
    return framed(snapshot.title, [*body, *numbers], "Ctrl-C stops and keeps the answers", width)


def _numbers(s: BatchSnapshot, width: int) -> list[Line]:
    """Figures of the whole batch, the most wanted first; a low terminal loses them from the end."""
    speed = s.new_tokens / s.elapsed_s if s.elapsed_s > 0 else 0.0
    waits = next((row.note for row in s.rows if row.state == "waiting" and row.note), "")
    return [
        [Segment("─" * width, DIM)],
        labelled("together", spans("", f"{speed:.1f}", f" tokens/s  ·  {s.new_tokens:,} in {s.elapsed_s:.0f} s")),
        labelled("sequences", [Segment(_state_words(s))]),
        labelled("lengths", spans("draft ", f"{s.draft_length}", "  block ", f"{s.block_length}")),
        memory_line(s.process_bytes, s.available_bytes, 0, width),
        *([labelled("waits for", [Segment(printable(waits))])] if waits else []),
    ]


def _state_words(s: BatchSnapshot) -> str:
    """How many sequences are in each state."""
    counts = Counter(row.state for row in s.rows)
    counts["ended"] += s.done
    counts["waiting"] += s.to_come
    return ", ".join(f"{counts[state]:,} {state}" for state in _STATES if counts[state]) or "none"


def _sequences(s: BatchSnapshot, width: int, room: int) -> list[Line]:
    """A line for each sequence; where there are more than `room`, those that are at work keep theirs."""
    if room <= 0:
        return []
    shown = range(len(s.rows))
    rest: list[Line] = []
    if len(s.rows) > room:
        ranks = {state: rank for rank, state in enumerate(_STATES)}
        likely = sorted(shown, key=lambda i: (ranks[s.rows[i].state], i))
        shown = sorted(likely[: room - 1])
        rest = [[Segment(f"and {len(s.rows) - len(shown):,} more", DIM)]]
    return [_sequence(i, s.rows[i], _digits(s), width) for i in shown] + rest


def _digits(s: BatchSnapshot) -> int:
    return max(2, len(str(len(s.rows))))


def _titles(s: BatchSnapshot, width: int) -> Line:
    digits, tokens = _digits(s), _tokens_width(width)
    words = f"{'':>{digits}} {'state':<7} {'tokens':>{tokens}} {'TBT ms':>6} {'accepted':>8}"
    return [Segment(words + ("  request" if _name_width(digits, width) else ""), DIM)]


def _sequence(index: int, row: SequenceRow, digits: int, width: int) -> Line:
    tokens = f"{row.new_tokens:,}"
    if row.state == "reading":
        tokens = f"{row.read:.0%}"
    elif width >= _WIDE and row.max_new_tokens:
        tokens += f"/{row.max_new_tokens:,}"
    tbt = f"{row.tbt_s * 1e3:.1f}" if row.tbt_s else "-"
    accepted = "-" if row.accepted is None else f"{row.accepted:.0%}"
    line = [
        Segment(f"{index + 1:>{digits}} ", DIM),
        Segment(f"{row.state:<7} ", _STATES[row.state]),
        Segment(f"{tokens:>{_tokens_width(width)}} {tbt:>6} {accepted:>8}", PLAIN),
    ]
    room = _name_width(digits, width)
    if room:
        name = printable(" ".join(row.name.split()) + (f": {row.note}" if row.state == "failed" and row.note else ""))
        text = printable(" ".join(row.text.split()))
        name_room = room - min(cell_len(text) + 1, room // 2) if text else room
        name = name if cell_len(name) <= name_room else set_cell_size(name, name_room - 1) + "…"
        line.append(Segment(f"  {name}"))
        if text:
            line.append(Segment(f" {_end(text, room - cell_len(name) - 1)}", DIM))
    return line


def _end(text: str, room: int) -> str:
    """The end of a text, where it does not fit as a whole."""
    if cell_len(text) <= room:
        return text
    text = text[-room:]
    while cell_len(text) > room - 1:
        text = text[1:]
    return "…" + text


def _tokens_width(width: int) -> int:
    return 13 if width >= _WIDE else 6


def _name_width(digits: int, width: int) -> int:
    """Cells that are left for a name; 0 where there are too few."""
    left = width - (digits + 1 + 8 + _tokens_width(width) + 1 + 6 + 1 + 8 + 2)
    return left if left >= _LEAST_NAME else 0
