"""The live display of a run: its text and statistics on stderr, drawn several times a second."""

from __future__ import annotations

import threading
import time
from bisect import insort
from collections import deque
from types import TracebackType
from typing import Self

import psutil
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment

from ...offload import Generation, Round
from ...offload.statistics import ratio
from .frame import Snapshot, draw
from .wrapping import WrappedText

PICTURES_PER_S = 4

QUIET_S = 0.5
"""Where no round ends for so long, a thread draws, so that the display of a slow model follows a resize too. Otherwise
pictures are drawn between rounds, as a thread that draws while the model runs takes a core from it."""

MOST_OF_TIME = 0.01
"""The largest share of time for drawing: slower drawing means fewer pictures, not slower decoding."""

_NOW_S = 1.0
"""The length of time that "now" is averaged over."""

_MEMORY_EVERY_S = 1.0


class LiveDisplay:
    """Fills the terminal while the block runs, and gives it back as it was.

    It draws on the terminal's alternate screen, so that a resize or a scroll leaves nothing behind.
    """

    def __init__(self, console: Console, generation: Generation, model: str, max_new_tokens: int) -> None:
        self._generation = generation
        self._max_new_tokens = max_new_tokens
        stats = generation.stats()
        self._budget: int = stats["settings"]["budget"]
        self._title = (
            f"triforce · {model} · {stats['prompt_tokens']:,} tokens read · {stats['device']} {stats['dtype']}"
        )
        self._text = WrappedText()
        self._history: deque[tuple[float, int]] = deque(maxlen=512)
        self._sorted_tbt: list[float] = []
        self._seen = 0
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

    def note(self, piece: str, event: Round | None) -> None:
        """Adds the text of a round, and the round; draws if a picture is due."""
        self._text.add(piece)
        if event is not None and event.index:
            self._history.append((event.seconds, len(event.tokens)))
        if time.perf_counter() - self._drawn_at >= self._pause and not self._closing.is_set():
            self._draw()

    def snapshot(self) -> Snapshot:
        """The state of the run now."""
        s, lengths = self._generation.statistics, self._generation.lengths
        for seconds in s.token_s[self._seen :]:
            insort(self._sorted_tbt, seconds)
        self._seen = count = len(self._sorted_tbt)
        history = tuple(self._history)
        now = time.perf_counter()
        if now - self._memory_at > _MEMORY_EVERY_S:
            self._memory = (self._process.memory_info().rss, psutil.virtual_memory().available)
            self._memory_at = now
        return Snapshot(
            title=self._title,
            new_tokens=len(s.token_ids),
            max_new_tokens=self._max_new_tokens,
            context_tokens=s.prompt_tokens + len(s.token_ids),
            elapsed_s=now - self._began,
            tbt_now_s=_recent(history),
            tbt_mean_s=s.tbt_s,
            tbt_p95_s=self._sorted_tbt[-(-95 * count // 100) - 1] if count else 0.0,
            tbt_history_s=tuple(seconds / tokens for seconds, tokens in history),
            tokens_per_s=s.tokens_per_s,
            tokens_per_round=s.tokens_per_round,
            accepted_draft=ratio(s.draft_accepted, s.draft_tested),
            accepted_retrieval=ratio(s.retrieval_accepted, s.retrieval_tested),
            draft_length=lengths["draft_length"],
            block_length=lengths["block_length"],
            budget=self._budget,
            time_s={
                "draft": s.draft_s,
                "retrieval": s.retrieval_s,
                "verify": s.verify_s,
                "refresh": s.refresh_s,
                "other": s.other_s,
            },
            bytes_read=s.kv_read_bytes,
            gb_per_s=s.kv_read_bytes / s.kv_read_s / 1e9 if s.kv_read_s else None,
            process_bytes=self._memory[0],
            available_bytes=self._memory[1],
            device_bytes=s.device_peak_bytes,
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.size
        for index, line in enumerate(draw(self.snapshot(), self._text, width, height)):
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
            self._pause = max(1 / PICTURES_PER_S, took / MOST_OF_TIME)


def _recent(history: tuple[tuple[float, int], ...]) -> float:
    """Time per token over the last rounds, as many as `_NOW_S` holds but at least one; 0 before there is any."""
    seconds, tokens = 0.0, 0
    for round_s, round_tokens in reversed(history):
        seconds, tokens = seconds + round_s, tokens + round_tokens
        if seconds >= _NOW_S:
            break
    return seconds / tokens if tokens else 0.0
