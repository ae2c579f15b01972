"""The live display of a run on stderr, drawn several times a second."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Self

import psutil
import torch
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment

from ...offload import Round
from ...offload.planning.memory import device_peak_bytes
from .live_picture import AnswerRow, Figures, Snapshot, draw
from .wrapping import WrappedText

PICTURES_PER_S = 4

QUIET_S = 0.5
"""If no round ends for this number of seconds, a thread draws, so that the display of a slow model also follows a
resize. Otherwise pictures are drawn between rounds, because a thread that draws while the model runs takes a core from
it."""

LARGEST_SHARE = 0.01
"""The maximum share of time for drawing. Slower drawing means fewer pictures, not slower decoding."""

_MEMORY_EVERY_S = 1.0

_NOW_S = 1.0
"""The number of seconds over which present speeds are averaged."""


class LiveDisplay:
    """Shows the answers of a run while they are written, and figures. It fills the terminal within the context, and
    then restores it. A single answer is shown as text; several answers have one line each.

    It draws on the terminal's alternate screen, so that a resize or a scroll leaves nothing behind.
    """

    def __init__(
        self,
        console: Console,
        title: str,
        rows: Callable[[], Sequence[AnswerRow]],
        lengths: Callable[[], dict[str, int]],
        *,
        single: bool = False,
        device: torch.device,
        others: Callable[[], tuple[int, Figures, int]] = lambda: (0, Figures(), 0),
    ) -> None:
        """Args:
        rows: returns the present state of the answers.
        lengths: returns the present `draft_length` and `block_length`.
        single: whether there is a single answer, whose text `note` receives.
        others: returns data about answers without a line: how many have ended, their figures, and how many are to come.
        """
        self._title, self._rows, self._lengths, self._others = title, rows, lengths, others
        self._device = device
        self._text = WrappedText() if single else None
        self._history: deque[tuple[float, int]] = deque(maxlen=512)  # seconds and tokens of an answer's rounds
        self._sorted_tbt: list[float] = []  # of each token of a single answer
        self._process = psutil.Process()
        self._memory = (0, 0)
        self._memory_at = float("-inf")
        self._began = time.perf_counter()
        self._live = Live(
            self,
            console=console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )
        self._closing = threading.Event()
        self._drawing = threading.Lock()
        self._drawn_at = self._began
        self._pause = 1 / PICTURES_PER_S
        self._thread = threading.Thread(target=self._keep_drawing, name="live display", daemon=True)
        self.drawing_s = 0.0
        """Processor time spent on drawing so far."""

    @staticmethod
    def possible(console: Console) -> bool:
        """Whether `console` is a terminal that can show the display."""
        return console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._closing.set()
        try:
            self._thread.join()
        finally:
            self._live.stop()

    def draw_if_due(self) -> None:
        """Draws a picture if one is due. To be called between rounds."""
        if time.perf_counter() - self._drawn_at >= self._pause and not self._closing.is_set():
            self._draw()

    def note(self, piece: str, event: Round) -> None:
        """Adds the text of a round to an answer, and draws if a picture is due."""
        if event.index:
            self._history.append((event.seconds, len(event.tokens)))
        if self._text:
            self._text.add(piece)
            self._sorted_tbt += _tbt([self._history[-1]] if event.index else [])
        self.draw_if_due()

    def snapshot(self) -> Snapshot:
        """The present state of the run."""
        history, lengths = tuple(self._history), self._lengths()
        tbt = self._sorted_tbt if self._text else _tbt(history)  # of many answers lately: a list of all might be long
        tbt.sort()  # only the end of it is new
        done, done_figures, to_come = self._others()
        process_bytes, available_bytes = self._memory_now()
        rows = self._rows()
        running = sum(row.state == "running" for row in rows)
        return Snapshot(
            title=self._title,
            rows=rows,
            text=self._text,
            elapsed_s=time.perf_counter() - self._began,
            tbt_now_s=_recent(history, max(1, running)),
            tbt_p95_s=tbt[-(-95 * len(tbt) // 100) - 1] if tbt else 0.0,
            tbt_history_s=tuple(seconds / tokens for seconds, tokens in history),
            draft_length=lengths["draft_length"],
            block_length=lengths["block_length"],
            process_bytes=process_bytes,
            available_bytes=available_bytes,
            device_bytes=device_peak_bytes(self._device),
            done=done,
            done_figures=done_figures,
            to_come=to_come,
        )

    def _memory_now(self) -> tuple[int, int]:
        """The bytes of memory that this process uses, and that are still available. They are updated once a second."""
        now = time.perf_counter()
        if now - self._memory_at > _MEMORY_EVERY_S:
            self._memory = (self._process.memory_info().rss, psutil.virtual_memory().available)
            self._memory_at = now
        return self._memory

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.size
        for index, line in enumerate(draw(self.snapshot(), width, height)):
            if index:
                yield Segment.line()
            yield from line

    def _keep_drawing(self) -> None:
        while not self._closing.wait(max(QUIET_S, self._pause) / 2):
            if time.perf_counter() - self._drawn_at >= max(QUIET_S, self._pause):
                self._draw()

    def _draw(self) -> None:
        with self._drawing:
            began = time.thread_time()
            try:
                self._live.refresh()
            except OSError:
                self._closing.set()  # the terminal is gone; the run goes on
            took = time.thread_time() - began
            self.drawing_s += took
            self._drawn_at = time.perf_counter()
            self._pause = max(1 / PICTURES_PER_S, took / LARGEST_SHARE)


def _tbt(history: Iterable[tuple[float, int]]) -> list[float]:
    """For each token of these rounds, its share of the seconds of its round."""
    return [seconds / tokens for seconds, tokens in history for _ in range(tokens)]


def _recent(history: tuple[tuple[float, int], ...], together: int) -> float:
    """The time per token over the last rounds within `_NOW_S`, at least one round; 0 if there is no round.

    Args:
        together: the number of answers whose rounds are in `history`.
    """
    seconds, tokens = 0.0, 0
    for round_s, round_tokens in reversed(history):
        seconds, tokens = seconds + round_s, tokens + round_tokens
        if seconds >= _NOW_S * together:
            break
    return seconds / tokens if tokens else 0.0
