"""The picture of a bench's JSON: time between tokens against context, and the acceptance beside it. For sequences that
are decoded together: tokens per second, and time between tokens, against the number of sequences."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from ..measurement import machine_in_words, sampling_in_words
from .report import bandwidths, conditions

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {1: "#D55E00", 2: "#009E73", 3: "#0072B2"}
"""The colour for each number of tiers, from Okabe and Ito's palette, which colour-blind people can distinguish."""

NAMES = {1: "plain decoding", 2: "two tiers", 3: "three tiers"}
MARKERS = {1: "o", 2: "s", 3: "D"}
GREY = "#666666"

LOG_RATIO = 20.0
"""The axis of times is logarithmic if the longest time is more than this many times the shortest."""

_CAPTION_WIDTH = 190
"""The number of characters of small print that fit into a line of the picture."""

_GAP = 0.055
"""Half the minimum distance of two labels, as a share of the panel's height."""


def draw(document: dict[str, Any], kind: str) -> bytes:
    """The picture as a file of `kind`: png, svg or pdf."""
    style: dict[Any, Any] = {
        "font.family": "DejaVu Sans",
        "font.size": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.hashsalt": "triforce",
        "text.parse_math": False,  # a command may hold dollar signs
    }
    with matplotlib.rc_context(style):
        layout = ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.1, wspace=0.02)
        figure = Figure(figsize=(12, 5.6), dpi=150, layout=layout)
        left, right = figure.subplots(1, 2, width_ratios=(1.6, 1))
        if document.get("batches"):
            _draw_throughput(left, right, document)
        else:
            _draw_times(left, document)
            _draw_acceptance(right, document)
        figure.suptitle(_title(document), x=0.012, ha="left", fontsize=14, fontweight="bold")
        figure.supxlabel(_caption(document), x=0.012, ha="left", fontsize=8.5, color=GREY)
        stream = io.BytesIO()
        figure.savefig(stream, format=kind, metadata={} if kind == "png" else {"Date": None} if kind == "svg" else None)
    return stream.getvalue()


def _title(document: dict[str, Any]) -> str:
    million = document["parameters"] / 1e6
    size = f"{million / 1e3:.1f} B" if million >= 1e3 else f"{million:.1f} M"
    how = "random weights" if document["shape"] else sampling_in_words(document["sampling"])
    where = machine_in_words(document["machine"])
    return f"{document['model']} ({size} parameters), {document['dtype']}, {how}, on {where}"


def _caption(document: dict[str, Any]) -> str:
    measured = bandwidths(document, 0)
    lines = (
        f"{conditions(document)}. Floor: derived, the bytes that one pass over the full cache "
        f"reads ÷ measured bandwidth ({measured}).",
        f"triforce {document['version']}, PyTorch {document['machine']['torch']}, {document['date']}: "
        f"{shorten(document['command'], 170)}",
    )
    return "\n".join(textwrap.fill(line, _CAPTION_WIDTH) for line in lines)


def thousands(tokens: float) -> str:
    """A short form: 4K is 4,096 tokens."""
    return f"{tokens / 1024:g}K" if tokens % 1024 == 0 else f"{tokens:,.0f}"


def _panel(axes: Axes, title: str, label: str, values: list[int], words: Callable[[float], str]) -> None:
    """Prepares a panel.

    Args:
        label: that of the horizontal axis, which is logarithmic.
        values: the places of its ticks. Each is labelled with its `words`.
    """
    axes.set_title(title, loc="left", fontsize=12, pad=10)
    axes.set_xlabel(label)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(values))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: words(value)))
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)


def _context_panel(axes: Axes, title: str, document: dict[str, Any], room: float) -> None:
    """A panel over contexts.

    Args:
        room: the space for labels at its right, as a share of its length.
    """
    contexts = [at["context"] for at in document["contexts"]]
    _panel(axes, title, "context, tokens", contexts, thousands)
    span = max(2.0, contexts[-1] / contexts[0])
    axes.set_xlim(contexts[0] / span**0.06, contexts[-1] * span**room)


def _line(axes: Axes, x: list[int], spreads: list[dict[str, float]], tiers: int, **style: Any) -> None:
    """A line through medians, with bars from the minimum to the maximum if these differ.

    Args:
        spreads: for each of `x`, the `median`, `min` and `max`.
    """
    y = [one["median"] for one in spreads]
    error = [[one["median"] - one["min"] for one in spreads], [one["max"] - one["median"] for one in spreads]]
    axes.errorbar(
        x, y, error if any(map(any, error)) else None, color=COLOURS[tiers], marker=MARKERS[tiers], markersize=7,
        linewidth=2.4, capsize=4, elinewidth=1.3, **style,
    )  # fmt: skip


def _draw_times(axes: Axes, document: dict[str, Any]) -> None:
    contexts = document["contexts"]
    labels: list[tuple[float, str, str]] = []
    values: list[float] = []
    for tiers in sorted({row["tiers"] for at in contexts for row in at["tiers"]}):
        there = [(at["context"], row) for at in contexts for row in at["tiers"] if row["tiers"] == tiers]
        times = [row["tbt_ms"] for _, row in there]
        is_modelled = any(row["modelled"] for _, row in there)
        _line(
            axes, [context for context, _ in there], times, tiers, markeredgewidth=1.8,
            markerfacecolor="white" if is_modelled else COLOURS[tiers],
        )  # fmt: skip
        last, tbt = there[-1][1], times[-1]["median"]
        speedup = f", {last['speedup']:.2g}× as fast" if last["speedup"] and tiers > 1 else ""
        name = NAMES[tiers] + (" (modelled)" if is_modelled else "")
        labels.append((tbt, f"{name}\n{tbt:.3g} ms{speedup}", COLOURS[tiers]))
        values += [time[part] for time in times for part in ("min", "max")]
    floors = [(at["context"], at["floor"]["ms"]) for at in contexts if at["floor"]]
    if floors:
        axes.plot(*zip(*floors, strict=True), color=GREY, linestyle=(0, (5, 3)), linewidth=1.6)
        bound = contexts[-1]["floor"]["bound_by"] if contexts[-1]["floor"] else "memory"
        labels.append((floors[-1][1], f"{bound} floor of a pass\n{floors[-1][1]:.3g} ms (derived)", GREY))
    _context_panel(axes, "time between tokens, ms", document, room=0.46)
    if max(values) > LOG_RATIO * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    else:
        axes.set_ylim(0, 1.05 * max(values))
    _label(axes, contexts[-1]["context"], labels)


def _draw_throughput(left: Axes, right: Axes, document: dict[str, Any]) -> None:
    """Tokens per second of all sequences, and the time between tokens of each, against their number."""
    for axes, name, title in (
        (left, "tokens_per_s", "tokens per second, all sequences"),
        (right, "tbt_ms", "time between tokens of each, ms"),
    ):
        for at in document["contexts"]:
            shade = 1.0 if at is document["contexts"][-1] else 0.45
            for tiers in sorted({row["tiers"] for row in at["tiers"]}):
                rows = [row for row in at["tiers"] if row["tiers"] == tiers]
                label = f"{NAMES[tiers]}, {thousands(at['context'])}"
                sequences = [row["sequences"] for row in rows]
                _line(axes, sequences, [row[name] for row in rows], tiers, alpha=shade, label=label)
        _panel(axes, title, "sequences decoded together", document["batches"], lambda value: f"{value:g}")
        axes.set_ylim(bottom=0)
    left.legend(frameon=False, fontsize=10)


def _draw_acceptance(axes: Axes, document: dict[str, Any]) -> None:
    contexts = document["contexts"]
    tiers = max(row["tiers"] for at in contexts for row in at["tiers"])
    labels: list[tuple[float, str, str]] = []
    rows = [(at["context"], row) for at in contexts for row in at["tiers"] if row["tiers"] == tiers]
    for name, words, colour, marker in (
        ("retrieval_per_token", "retrieval cache,\nby the full cache", "#0072B2", "D"),
        ("draft_per_token", "small model,\nby the retrieval cache", "#CC79A7", "v"),
    ):
        there = [(context, row["acceptance"][name]) for context, row in rows if row["acceptance"][name] is not None]
        if not there:
            continue
        axes.plot(
            *zip(*there, strict=True), color=colour, marker=marker, markersize=7, linewidth=2.4, markeredgewidth=1.8,
            markerfacecolor="white" if document["shape"] else colour,
        )  # fmt: skip
        labels.append((there[-1][1], f"{words}: {there[-1][1]:.2f}", colour))
    what = "assumed acceptance" if document["shape"] else "acceptance"
    _context_panel(axes, f"{what}, per tested token", document, room=0.9)
    axes.set_ylim(0, 1.02)
    if labels:
        _label(axes, contexts[-1]["context"], labels)
    else:
        axes.text(0.5, 0.5, "nothing was drafted", transform=axes.transAxes, ha="center", color=GREY)


def _label(axes: Axes, x: float, labels: list[tuple[float, str, str]]) -> None:
    """Labels lines at their ends. Labels that would overlap are moved apart.

    Args:
        x: the x of the ends.
        labels: for each line, the y of its end, the label and its colour.
    """
    to_share = axes.transData + axes.transAxes.inverted()
    placed: list[float] = []
    shares = sorted(((to_share.transform((x, y))[1], y, words, colour) for y, words, colour in labels), reverse=True)
    previous = float("inf")
    for share, _, _, _ in shares:
        previous = min(share, previous - 2 * _GAP)
        placed.append(previous)
    lift = max(0.0, 0.03 - placed[-1])
    start = to_share.transform((x, 1))[0] + 0.03
    for (share, _, words, colour), at in zip(shares, placed, strict=True):
        axes.annotate(
            words, xy=(start - 0.015, share), xytext=(start, at + lift), xycoords="axes fraction", color=colour,
            textcoords="axes fraction", va="center", fontsize=10, linespacing=1.15, annotation_clip=False,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
        )  # fmt: skip
