"""Draws one picture of the live display from a snapshot. It is a pure function, so tests need no terminal.

It builds rich segments directly instead of nesting tables and panels. This takes a fraction of the time, which matters
because the process that computes draws several times a second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, fields
from functools import cached_property
from typing import Self

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style

from ...offload.batch.sequence import BatchSequence
from ...offload.statistics import Statistics, ratio
from .output import printable
from .segments import DIM, LABEL, PLAIN, Line, bar, fit, framed, labelled, memory_line, padded, spans
from .wrapping import WrappedText

SIDE_BY_SIDE = 144
"""From this number of columns on, the numbers are beside a text instead of below it."""

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
"""The glyph and the style of each part of a round. The glyphs differ, too, for terminals without colours."""

_LEAST_NAME = 8
"""With fewer cells than this, a name is left out, because figures are more important."""

_WIDE = 64
"""From this number of cells of a line on, the limit of tokens is shown beside their number."""

_LEAST_TEXT = 4
"""Minimum number of lines of a text, or of a list of answers, however many numbers there are."""

_NUMBERS = 6
"""Minimum number of lines of numbers, however long the list of answers is, if there are enough lines."""

_STATES = {
    "reading": Style.parse("cyan"),
    "running": Style.parse("green"),
    "waiting": Style.parse("yellow"),
    "failed": Style.parse("red"),
    "saving": DIM,
    "ended": DIM,
}
"""The style of each state. If there are more answers than lines, answers keep their line in this order of states."""


@dataclass(frozen=True)
class AnswerRow:
    """The contents of the line of an answer."""

    name: str
    state: str
    """`waiting`, `reading`, `running`, `saving`, `ended` or `failed`."""
    max_new_tokens: int
    statistics: Statistics = field(default_factory=Statistics)
    read: float = 0.0
    """The share of its prompt whose prefill is done."""
    note: str = ""
    """The reason why it waits or has failed."""
    text: str = ""
    """The text so far, or the end of it."""
    budget: int = 0
    """Size of its retrieval cache in tokens; 0 if it has none."""

    @staticmethod
    def of(name: str, sequence: BatchSequence, max_new_tokens: int, *, ended: bool, text: str = "") -> AnswerRow:
        """The line of a sequence.

        Args:
            ended: whether its answer is complete.
        """
        state = "failed" if sequence.error is not None else "ended" if ended else sequence.state
        note = sequence.error or sequence.waits_for or ""
        opened, shown = sequence.active_or_none, (sequence.statistics, sequence.read_share, note, text)
        budget = opened.plan.budget if opened and opened.retrieval else 0
        return AnswerRow(name, state, max_new_tokens, *shown, budget)


@dataclass(frozen=True)
class Figures:
    """Counts and times of several answers, added up. Tokens, seconds and bytes, as in `Statistics`."""

    new_tokens: int = 0
    later_tokens: int = 0
    """Tokens after the first token of each answer."""
    rounds: int = 0
    decode_s: float = 0.0
    draft_s: float = 0.0
    retrieval_s: float = 0.0
    verify_s: float = 0.0
    refresh_s: float = 0.0
    draft_accepted: int = 0
    draft_tested: int = 0
    retrieval_accepted: int = 0
    retrieval_tested: int = 0
    kv_read_bytes: int = 0
    kv_read_s: float = 0.0

    @classmethod
    def of(cls, s: Statistics) -> Self:
        """The figures of one answer."""
        same = {one.name: getattr(s, one.name) for one in fields(cls) if not one.name.endswith("_tokens")}
        return cls(len(s.token_ids), len(s.token_s), **same)

    def __add__(self, other: Figures) -> Figures:
        return Figures(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    @property
    def time_s(self) -> dict[str, float]:
        """Seconds since decoding began, by part of a round."""
        parts = self.draft_s, self.retrieval_s, self.verify_s, self.refresh_s
        return dict(zip(_PARTS, (*parts, max(0.0, self.decode_s - sum(parts))), strict=True))


@dataclass(frozen=True)
class Snapshot:
    """The data of the display. Units are seconds, bytes and tokens."""

    title: str
    rows: Sequence[AnswerRow]
    text: WrappedText | None
    """The text of a single answer, which then has no line; `None` if there are several answers."""
    elapsed_s: float
    tbt_now_s: float
    tbt_p95_s: float
    tbt_history_s: tuple[float, ...]
    """The time between tokens in each of the last rounds of each answer, the oldest first."""
    draft_length: int
    block_length: int
    process_bytes: int
    available_bytes: int
    device_bytes: int = 0
    """Peak memory on a GPU so far; 0 on a CPU."""
    done: int = 0
    """Number of answers that ended and have no line any more."""
    done_figures: Figures = Figures()
    """The figures of these answers."""
    to_come: int = 0
    """Number of answers that have no line yet."""

    @cached_property
    def figures(self) -> Figures:
        """The figures of all answers so far."""
        return sum((Figures.of(row.statistics) for row in self.rows), self.done_figures)


def draw(snapshot: Snapshot, width: int, height: int) -> list[Line]:
    """The display as `height` lines of exactly `width` cells."""
    text = snapshot.text
    if width < 20 or height < 4:
        small = [_state_words(snapshot)] if text is None else text.last_lines(max(1, width), height)
        return [fit([Segment(line)], width) for line in padded(small, height)[:height]]
    inner, rows = width - 4, height - 2
    if text is not None and width >= SIDE_BY_SIDE:
        body = _side_by_side(snapshot, text, inner, rows)
    else:
        body = _stacked(snapshot, inner, rows)
    what = "answers" if text is None else "text"
    return framed(snapshot.title, body, f"Ctrl-C stops and keeps the {what}", width)


def _stacked(snapshot: Snapshot, width: int, height: int) -> list[Line]:
    """Text or answers above, numbers below. If the terminal is too low, the last numbers are left out."""
    numbers = [
        _with_spark(_tbt(snapshot), snapshot, width),
        _speed(snapshot),
        *_states(snapshot),
        _accepted(snapshot),
        _lengths(snapshot),
        labelled("a round", _time_bar(snapshot, width - LABEL)),
        *_time_legend(snapshot, width),
        _read(snapshot),
    ]
    # A list of answers leaves room for few numbers, of which memory is one.
    numbers.insert(len(numbers) if snapshot.text else 3, _memory(snapshot, width))
    above = _LEAST_TEXT
    if snapshot.text is None:
        above = min(len(snapshot.rows) + 1, max(_LEAST_TEXT, height - 1 - _NUMBERS))
    numbers = numbers[: max(0, height - 1 - above)]
    room = height - 1 - len(numbers)
    if snapshot.text is None:
        lines = [_titles(snapshot, width), *_answer_lines(snapshot, width, room - 1)]
    else:
        lines = [[Segment(line)] for line in snapshot.text.last_lines(width, room)]
    lines += [[]] * (room - len(lines))
    return [*lines[:room], [Segment("─" * width, DIM)], *numbers]


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
    mean_s = _ratio(s.figures.decode_s, s.figures.later_tokens)
    now, mean, p95 = (f"{seconds * 1e3:.1f}" for seconds in (s.tbt_now_s, mean_s, s.tbt_p95_s))
    return labelled("TBT", spans("now ", now, "  mean ", mean, "  p95 ", p95, " ms"))


def _with_spark(line: Line, snapshot: Snapshot, width: int) -> Line:
    used = sum(segment.cell_length for segment in line) + 2
    return [*line, Segment("  "), *_sparkline(snapshot.tbt_history_s, max(0, width - used), 1)[0]]


def _speed(s: Snapshot) -> Line:
    """The speed: for one answer, that of decoding; for several together, including everything that takes time."""
    f = s.figures
    if s.text is None:
        speed, most = _ratio(f.new_tokens, s.elapsed_s), ""
    else:
        speed, most = _ratio(f.later_tokens, f.decode_s), f" of {_max_new_tokens(s):,}"
    done = f"  ·  {f.new_tokens:,}{most} tokens in {s.elapsed_s:.0f} s"
    return labelled("speed", spans("", f"{speed:.1f}", f" tokens/s{done}"))


def _ratio(part: float, whole: float) -> float:
    """`part / whole`; 0 if `whole` is not above 0."""
    return part / whole if whole > 0 else 0.0


def _max_new_tokens(s: Snapshot) -> int:
    return sum(row.max_new_tokens for row in s.rows)


def _progress(s: Snapshot, width: int) -> Line:
    return labelled("", bar(_ratio(s.figures.new_tokens, _max_new_tokens(s)), width - LABEL))


def _states(s: Snapshot) -> list[Line]:
    """The number of answers in each state, and the reason why an answer waits, if there are several answers."""
    if s.text is not None:
        return []
    waits = next((row.note for row in s.rows if row.state == "waiting" and row.note), "")
    words = labelled("answers", [Segment(_state_words(s))])
    return [words, labelled("waits for", [Segment(printable(waits))])] if waits else [words]


def _accepted(s: Snapshot) -> Line:
    f = s.figures
    shares = ratio(f.draft_accepted, f.draft_tested), ratio(f.retrieval_accepted, f.retrieval_tested)
    draft, retrieval = ("-" if share is None else f"{share:.0%}" for share in shares)
    tokens = f"{_ratio(f.later_tokens, f.rounds):.1f}"
    found = spans("draft ", draft, "  retrieval ", retrieval, " of tested  ·  ", tokens, " tokens/round")
    return labelled("accepted", found)


def _lengths(s: Snapshot) -> Line:
    context = max((row.statistics.prompt_tokens + len(row.statistics.token_ids) for row in s.rows), default=0)
    budget = max((row.budget for row in s.rows), default=0)
    seen = f"  ·  budget {budget:,} of {context:,}" if budget else f"  ·  context {context:,}"
    if budget and not s.block_length:
        return labelled("lengths", spans("", "no draft", ": plain decoding is faster now"))
    return labelled("lengths", spans("draft ", f"{s.draft_length}", "  block ", f"{s.block_length}", seen))


def _read(s: Snapshot) -> Line:
    """The line about the keys and values that decoding reads. For several answers, only the speed: shared tokens are
    read once, but counted with each answer."""
    gb, seconds = s.figures.kv_read_bytes / 1e9, s.figures.kv_read_s
    speed = f"{gb / seconds:.1f} GB/s" if seconds else ""
    if s.text is None:
        return labelled("KV read", spans("", speed or "-"))
    return labelled("KV read", spans("", f"{gb:.2f} GB", " at " if speed else "", speed))


def _memory(s: Snapshot, width: int) -> Line:
    return memory_line(s.process_bytes, s.available_bytes, s.device_bytes, width)


def _time_bar(s: Snapshot, width: int) -> Line:
    """One bar of `width` cells, divided like the time of a round. The ends of parts are rounded, so that the parts add
    up."""
    line: Line = []
    passed, drawn = 0.0, 0
    for name, share in _shares(s):
        glyph, style = _PARTS[name]
        passed += share
        end = round(passed * width)
        line.append(Segment(glyph * (end - drawn), style))
        drawn = end
    return line


def _time_legend(s: Snapshot, width: int) -> list[Line]:
    """The legend of the bar, in as many lines as it needs. One line of 76 cells has room for any shares."""
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
    rows: list[Line] = []
    for name, share in _shares(s):
        glyph, style = _PARTS[name]
        each = s.figures.time_s[name] / max(1, s.figures.rounds) * 1e3
        rows.append(labelled("", [Segment(f"{glyph} ", style), Segment(f"{name:<10}{share:>5.0%}{each:>9.1f} ms")]))
    return rows


def _shares(s: Snapshot) -> list[tuple[str, float]]:
    """The share of each part in the time of a round, 0 to 1."""
    times = s.figures.time_s
    return [(name, _ratio(seconds, sum(times.values()))) for name, seconds in times.items()]


def _sparkline(values: tuple[float, ...], width: int, height: int) -> list[Line]:
    """The last `width` values as columns of up to `height` lines, from 0 to the largest of them."""
    shown = values[-width:] if width > 0 else ()
    top = max(shown, default=0.0)
    levels = [max(1, round(value / top * 8 * height)) if top > 0 else 0 for value in shown]
    return [
        [Segment("".join(_BLOCKS[min(8, max(0, level - 8 * row))] for level in levels), _SPARK)]
        for row in reversed(range(height))
    ]


def _state_words(s: Snapshot) -> str:
    """The number of answers in each state, as text."""
    counts = Counter(row.state for row in s.rows)
    counts["ended"] += s.done
    counts["waiting"] += s.to_come
    return ", ".join(f"{counts[state]:,} {_shown(state)}" for state in _STATES if counts[state]) or "none"


def _shown(state: str) -> str:
    """The word for a state."""
    return "prefill" if state == "reading" else state


def _answer_lines(s: Snapshot, width: int, room: int) -> list[Line]:
    """A line for each answer. If there are more than `room` answers, those that are being computed keep their line."""
    if room <= 0:
        return []
    shown = range(len(s.rows))
    rest: list[Line] = []
    if len(s.rows) > room:
        ranks = {state: rank for rank, state in enumerate(_STATES)}
        likely = sorted(shown, key=lambda i: (ranks[s.rows[i].state], i))
        shown = sorted(likely[: room - 1])
        rest = [[Segment(f"and {len(s.rows) - len(shown):,} more", DIM)]]
    return [_answer_line(i, s.rows[i], _digits(s), width) for i in shown] + rest


def _digits(s: Snapshot) -> int:
    return max(2, len(str(len(s.rows))))


def _titles(s: Snapshot, width: int) -> Line:
    digits, tokens = _digits(s), _tokens_width(width)
    words = f"{'':>{digits}} {'state':<7} {'tokens':>{tokens}} {'TBT ms':>6} {'accepted':>8}"
    return [Segment(words + ("  request" if _name_width(digits, width) else ""), DIM)]


def _answer_line(index: int, row: AnswerRow, digits: int, width: int) -> Line:
    statistics = row.statistics
    tokens, share = f"{len(statistics.token_ids):,}", statistics.retrieval_acceptance
    if row.state == "reading":
        tokens = f"{row.read:.0%}"
    elif width >= _WIDE and row.max_new_tokens:
        tokens += f"/{row.max_new_tokens:,}"
    tbt = f"{statistics.tbt_s * 1e3:.1f}" if statistics.tbt_s else "-"
    accepted = "-" if share is None else f"{share:.0%}"
    line = [
        Segment(f"{index + 1:>{digits}} ", DIM),
        Segment(f"{_shown(row.state):<7} ", _STATES[row.state]),
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
    """The text, or its end if it does not fit."""
    if cell_len(text) <= room:
        return text
    text = text[-room:]
    while cell_len(text) > room - 1:
        text = text[1:]
    return "…" + text


def _tokens_width(width: int) -> int:
    return 13 if width >= _WIDE else 6


def _name_width(digits: int, width: int) -> int:
    """The number of cells that are left for a name; 0 if there are too few."""
    left = width - (digits + 1 + 8 + _tokens_width(width) + 1 + 6 + 1 + 8 + 2)
    return left if left >= _LEAST_NAME else 0
