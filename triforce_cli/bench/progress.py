"""Progress of a bench and the time left: one changing line on a terminal, otherwise a line for each run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import fmean
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from ..terminal.streams import print_note
from .measure import Run, Step

DRAW_EVERY_S = 2.0
"""Minimum time between two updates on a terminal: drawing then takes about 0.1 % of a processor."""

PREFILL_POWER = 1.5
"""The time to read n tokens has parts that grow with n and with n²; the forecast assumes this power of n."""


class Forecast:
    """Estimates the seconds that the remaining runs will take, from those of the runs that were done."""

    def __init__(self, order: Sequence[Step], new_tokens: int) -> None:
        self._order, self._new_tokens = order, new_tokens
        self._prefill: tuple[int, float] | None = None
        self._runs: dict[tuple[int, int, int | None], list[float]] = {}

    def note(self, step: Step, decode_s: float, prefill_s: float) -> None:
        """Adds the times of a finished run, in seconds."""
        if step.repeat == 0:
            self._prefill = step.context, prefill_s
        self._runs.setdefault((step.context, step.tiers, step.sequences), []).append(decode_s)

    def prefill_s(self, context: int) -> float | None:
        """The estimated seconds for the prefill of `context` tokens; `None` before the first prefill is done."""
        if self._prefill is None:
            return None
        known, seconds = self._prefill
        return seconds * (context / known) ** PREFILL_POWER

    def run_s(self, step: Step) -> float | None:
        """The estimated seconds for an answer: the measured time at this context, otherwise that at another context, in
        proportion to the context."""
        here = self._runs.get((step.context, step.tiers, step.sequences))
        if here:
            return fmean(here)
        others = [known for known in self._runs if known[1] == step.tiers] or list(self._runs)
        if not others:
            return None
        nearest = min(others, key=lambda key: abs(key[0] - step.context))
        return fmean(self._runs[nearest]) * max(1.0, step.context / nearest[0])

    def left_s(self, done: int, prefill_left: float = 1.0, run_left: float = 1.0) -> float | None:
        """The estimated seconds left; `None` if unknown. They include the rest of step `done` (from 0), with the given
        shares of its prefill and its answer, and all later steps."""
        total = 0.0
        for index, step in enumerate(self._order[done:]):
            run_s, prefill_s = self.run_s(step), self.prefill_s(step.context) if step.repeat == 0 else 0.0
            if run_s is None or prefill_s is None:
                return None
            current = index == 0
            total += prefill_s * (prefill_left if current else 1.0) + run_s * (run_left if current else 1.0)
        return total


class Display:
    """Shows the progress of a bench; a `measure.Observer`."""

    def __init__(self, console: Console, order: Sequence[Step], new_tokens: int) -> None:
        self._order, self._new_tokens = order, new_tokens
        self._forecast = Forecast(order, new_tokens)
        self._index = -1
        self._began = time.monotonic()
        self._drawn_at = float("-inf")
        self._words = ""
        self._prefill_left = self._run_left = 1.0
        self._progress: Progress | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            columns = (BarColumn(24), TextColumn("{task.description}"), TextColumn("{task.fields[left]}"))
            self._progress = Progress(*columns, console=console, auto_refresh=False, transient=True)
            self._task = self._progress.add_task("", total=1.0, left="")

    def __enter__(self) -> Self:
        if self._progress:
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if self._progress:
            self._progress.stop()

    def begin(self, step: Step) -> None:
        self._index += 1
        tiers = f"{step.tiers} tier{'s' if step.tiers > 1 else ''}"
        repeats = max(other.repeat for other in self._order)
        together = f"{step.sequences} sequences, " if (step.sequences or 1) > 1 else ""
        what = f"{together}{tiers}, run {step.repeat} of {repeats}" if step.repeat else "prefill"
        self._words = f"{step.context:,} tokens: {what}"
        self._prefill_left = self._run_left = 1.0
        if not self._progress and not step.repeat:
            print_note(f"{self._words} ...")
        self._draw(now=True)

    def prefill(self, share: float) -> None:
        self._prefill_left = 1 - share
        self._draw(now=False)

    def round(self, tokens: int) -> None:
        self._prefill_left, self._run_left = 0.0, 1 - tokens / self._new_tokens
        self._draw(now=False)

    def end(self, run: Run) -> None:
        step, prefill_s = run.step, run.stats["prefill_s"]
        self._forecast.note(step, run.stats["decode_s"], prefill_s)
        if self._progress:
            return
        left = self._forecast.left_s(self._index + 1)
        speed = f"{run.tokens_per_s:.1f} tokens/s" if step.sequences else f"TBT {run.tbt_ms:.1f} ms"
        result = speed if step.repeat else f"{prefill_s:.1f} s"
        print_note(f"{self._words}: {result}" + (f"; about {_duration(left)} left" if left and left >= 1 else ""))

    def _draw(self, *, now: bool) -> None:
        if self._progress is None or (not now and time.monotonic() - self._drawn_at < DRAW_EVERY_S):
            return
        self._drawn_at = time.monotonic()
        left = self._forecast.left_s(self._index, self._prefill_left, self._run_left)
        spent = self._drawn_at - self._began
        share = spent / (spent + left) if left is not None else 0.0
        words = f"about {_duration(left)} left" if left is not None else ""
        self._progress.update(self._task, completed=share, description=self._words, left=words, refresh=True)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min"
