"""A terminal on which the state of a run is drawn several times a second."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

import psutil
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment

from .segments import Line

PICTURES_PER_S = 4

QUIET_S = 0.5
"""Where no round ends for so long, a thread draws, so that the display of a slow model follows a resize too. Otherwise
pictures are drawn between rounds, as a thread that draws while the model runs takes a core from it."""

LARGEST_SHARE = 0.01
"""The largest share of time for drawing: slower drawing means fewer pictures, not slower decoding."""

_MEMORY_EVERY_S = 1.0


class LiveScreen:
    """Fills the terminal while the block runs, and gives it back as it was. What is drawn is a subclass's `picture`.

    It draws on the terminal's alternate screen, so that a resize or a scroll leaves nothing behind.
    """

    def __init__(self, console: Console) -> None:
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
        """Whether `console` is a terminal that can show it."""
        return console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")

    def picture(self, width: int, height: int) -> list[Line]:
        """What is to be seen now: `height` lines of exactly `width` cells."""
        raise NotImplementedError

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
        """To be called between rounds."""
        if time.perf_counter() - self._drawn_at >= self._pause and not self._closing.is_set():
            self._draw()

    @property
    def elapsed_s(self) -> float:
        """Since it was made."""
        return time.perf_counter() - self._began

    def memory(self) -> tuple[int, int]:
        """Bytes that this process holds, and that are available beside them; looked up once a second."""
        now = time.perf_counter()
        if now - self._memory_at > _MEMORY_EVERY_S:
            self._memory = (self._process.memory_info().rss, psutil.virtual_memory().available)
            self._memory_at = now
        return self._memory

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.size
        for index, line in enumerate(self.picture(width, height)):
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
