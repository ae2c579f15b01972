"""One picture of the live display, drawn from a snapshot: a pure function, so that tests need no terminal.

It builds rich segments by hand instead of nesting tables and panels, which takes a fraction of the time: it is drawn
several times a second by the process that computes.
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.segment import Segment
from rich.style import Style

from .segments import DIM, LABEL, Line, bar, fit, framed, labelled, memory_line, padded, spans
from .wrapping import WrappedText

SIDE_BY_SIDE = 144
"""Columns from which the numbers stand beside the text instead of below it."""

_SIDE_WIDTH = 66
_BLOCKS = " ▁▂▃▄▅▆▇█"

_SPARK = Style.parse("green")
_PARTS = {
    "draft": ("░", Style.parse("magenta")),
    "retrieval": ("▒", Style.parse("blue")),
    "verify": ("▓", Style.parse("green")),
    "refresh": ("█", Style.parse("yellow")),
    "other": ("·", Style.parse("white")),
}
"""How each part of a round looks; the glyphs differ as well, for terminals without colours."""


@dataclass(frozen=True)
class Snapshot:
    """What the display shows besides the text. Seconds, bytes, tokens; `None` where there is nothing to say."""

    title: str
    new_tokens: int
    max_new_tokens: int
    context_tokens: int
    elapsed_s: float
    tbt_now_s: float
    tbt_mean_s: float
    tbt_p95_s: float
    tbt_history_s: tuple[float, ...]
    """Of each round lately, the oldest first."""
    tokens_per_s: float
    tokens_per_round: float
    accepted_draft: float | None
    """Accepted ÷ tested, as is the next."""
    accepted_retrieval: float | None
    draft_length: int
    block_length: int
    budget: int
    time_s: dict[str, float]
    """Since decoding began, by part of a round: `draft, retrieval, verify, refresh, other`."""
    bytes_read: int
    gb_per_s: float | None
    process_bytes: int
    available_bytes: int
    device_bytes: int = 0


def draw(snapshot: Snapshot, text: WrappedText, width: int, height: int) -> list[Line]:
    """The display as `height` lines of exactly `width` cells."""
    if width < 20 or height < 4:
        return [fit([Segment(line)], width) for line in padded(text.last_lines(max(1, width), height), height)]
    inner, rows = width - 4, height - 2
    if width >= SIDE_BY_SIDE:
        body = _side_by_side(snapshot, text, inner, rows)
    else:
        body = _stacked(snapshot, text, inner, rows)
    return framed(snapshot.title, body, "Ctrl-C stops and keeps the text", width)


def _stacked(snapshot: Snapshot, text: WrappedText, width: int, height: int) -> list[Line]:
    """Text above, numbers below; a low terminal loses numbers from the end."""
    numbers = [
        _with_spark(_tbt(snapshot), snapshot, width),
        _speed(snapshot),
        _accepted(snapshot),
        _lengths(snapshot),
        labelled("a round", _time_bar(snapshot, width - LABEL)),
        *_time_legend(snapshot, width),
        _read(snapshot),
        _memory(snapshot, width),
    ]
    numbers = numbers[: max(0, height - 5)]
    lines: list[Line] = [[Segment(line)] for line in padded(text.last_lines(width, height - len(numbers) - 1), height)]
    return [*lines[: height - len(numbers) - 1], [Segment("─" * width, DIM)], *numbers]


def _side_by_side(snapshot: Snapshot, text: WrappedText, width: int, height: int) -> list[Line]:
    side = _SIDE_WIDTH
    left = width - side - 3
    groups: list[list[Line]] = [
        [_tbt(snapshot)],
        [_speed(snapshot), _progress(snapshot, side)],
        [_accepted(snapshot), _lengths(snapshot)],
        [labelled("a round", _time_bar(snapshot, side - LABEL)), *_time_rows(snapshot, side)],
        [_read(snapshot)],
        [_memory(snapshot, side)],
    ]
    spare = height - sum(map(len, groups)) - len(groups) + 1
    groups[0] += _sparkline(snapshot.tbt_history_s, side, max(1, min(8, spare)))
    numbers: list[Line] = []
    for group in groups:
        numbers += [*group, []] if spare > 0 else group
    numbers = (numbers + [[]] * height)[:height]
    divider = Segment(" │ ", DIM)
    return [
        [*fit([Segment(line)], left), divider, *fit(row, side)]
        for line, row in zip(padded(text.last_lines(left, height), height), numbers, strict=True)
    ]


def _tbt(s: Snapshot) -> Line:
    now, mean, p95 = (f"{seconds * 1e3:.1f}" for seconds in (s.tbt_now_s, s.tbt_mean_s, s.tbt_p95_s))
    return labelled("TBT", spans("now ", now, "  mean ", mean, "  p95 ", p95, " ms"))


def _with_spark(line: Line, snapshot: Snapshot, width: int) -> Line:
    used = sum(segment.cell_length for segment in line) + 2
    return [*line, Segment("  "), *_sparkline(snapshot.tbt_history_s, max(0, width - used), 1)[0]]


def _speed(s: Snapshot) -> Line:
    done = f"  ·  {s.new_tokens:,} of {s.max_new_tokens:,} tokens in {s.elapsed_s:.0f} s"
    return labelled("speed", spans("", f"{s.tokens_per_s:.1f}", f" tokens/s{done}"))


def _progress(s: Snapshot, width: int) -> Line:
    return labelled("", bar(s.new_tokens / max(1, s.max_new_tokens), width - LABEL))


def _accepted(s: Snapshot) -> Line:
    draft, retrieval = ("-" if share is None else f"{share:.0%}" for share in (s.accepted_draft, s.accepted_retrieval))
    found = spans(
        "draft ", draft, "  retrieval ", retrieval, " of tested  ·  ", f"{s.tokens_per_round:.1f}", " tokens/round"
    )
    return labelled("accepted", found)


def _lengths(s: Snapshot) -> Line:
    seen = f"  ·  budget {s.budget:,} of {s.context_tokens:,}" if s.budget else f"  ·  context {s.context_tokens:,}"
    if s.budget and not s.block_length:
        return labelled("lengths", spans("", "no draft", ": plain decoding is faster now"))
    return labelled("lengths", spans("draft ", f"{s.draft_length}", "  block ", f"{s.block_length}", seen))


def _read(s: Snapshot) -> Line:
    rate = () if s.gb_per_s is None else (" at ", f"{s.gb_per_s:.1f} GB/s")
    return labelled("KV read", spans("", f"{s.bytes_read / 1e9:.2f} GB", *rate))


def _memory(s: Snapshot, width: int) -> Line:
    return memory_line(s.process_bytes, s.available_bytes, s.device_bytes, width)


def _time_bar(s: Snapshot, width: int) -> Line:
    """One bar of `width` cells, divided like the time of a round; ends are rounded, so that the parts add up."""
    total = sum(s.time_s.values())
    if total <= 0:
        return []
    line: Line = []
    passed, drawn = 0.0, 0
    for name, (glyph, style) in _PARTS.items():
        passed += s.time_s.get(name, 0.0)
        end = round(passed / total * width)
        line.append(Segment(glyph * (end - drawn), style))
        drawn = end
    return line


def _time_legend(s: Snapshot, width: int) -> list[Line]:
    """What the parts of the bar are, in as many lines as they need: one line of 76 cells holds any shares."""
    lines: list[Line] = [labelled("", [])]
    used = LABEL
    for name, share in _shares(s):
        glyph, style = _PARTS[name]
        entry = f" {name} {share:.0%} "
        if used + len(entry) > width and used > LABEL:  # the blank at the end of a line may be cut
            lines.append(labelled("", []))
            used = LABEL
        lines[-1] += [Segment(glyph, style), Segment(entry)]
        used += len(entry) + 1
    return lines


def _time_rows(s: Snapshot, width: int) -> list[Line]:
    rounds = max(1.0, (s.new_tokens - 1) / s.tokens_per_round) if s.tokens_per_round else 1.0
    rows: list[Line] = []
    for name, share in _shares(s):
        glyph, style = _PARTS[name]
        each = s.time_s.get(name, 0.0) / rounds * 1e3
        rows.append(labelled("", [Segment(f"{glyph} ", style), Segment(f"{name:<10}{share:>5.0%}{each:>9.1f} ms")]))
    return rows


def _shares(s: Snapshot) -> list[tuple[str, float]]:
    total = sum(s.time_s.values())
    return [(name, s.time_s.get(name, 0.0) / total if total > 0 else 0.0) for name in _PARTS]


def _sparkline(values: tuple[float, ...], width: int, height: int) -> list[Line]:
    """The last `width` values as columns of up to `height` lines, from 0 to the largest of them."""
    shown = values[-width:] if width > 0 else ()
    top = max(shown, default=0.0)
    levels = [max(1, round(value / top * 8 * height)) if top > 0 else 0 for value in shown]
    return [
        [Segment("".join(_BLOCKS[min(8, max(0, level - 8 * row))] for level in levels), _SPARK)]
        for row in reversed(range(height))
    ]
