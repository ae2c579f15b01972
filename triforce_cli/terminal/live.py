"""The live display of a run: its text and statistics on stderr, drawn several times a second."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable

from rich.console import Console

from ...offload import Round
from ...offload.batch.sequence import BatchSequence
from ...offload.statistics import ratio
from .frame import Snapshot, draw
from .live_screen import LiveScreen
from .segments import Line
from .wrapping import WrappedText

_NOW_S = 1.0
"""The length of time that "now" is averaged over."""


class LiveDisplay(LiveScreen):
    """The text of a run as it grows, and its figures."""

    def __init__(
        self, console: Console, sequence: BatchSequence, lengths: Callable[[], dict[str, int]], model: str
    ) -> None:
        """Args:
        sequence: the one that is written.
        lengths: `draft_length` and `block_length` in force.
        model: its name.
        """
        super().__init__(console)
        self._sequence, self._lengths = sequence, lengths
        self._max_new_tokens = sequence.order.max_new_tokens
        stats = sequence.document(lengths(), [])
        self._budget: int = stats["settings"]["budget"]
        self._title = (
            f"triforce · {model} · {stats['prompt_tokens']:,} tokens read · {stats['device']} {stats['dtype']}"
        )
        self._text = WrappedText()
        self._history: deque[tuple[float, int]] = deque(maxlen=512)
        self._sorted_tbt: list[float] = []
        self._seen = 0

    def note(self, piece: str, event: Round | None) -> None:
        """Adds the text of a round, and the round; draws if a picture is due."""
        self._text.add(piece)
        if event is not None and event.index:
            self._history.append((event.seconds, len(event.tokens)))
        self.draw_if_due()

    def picture(self, width: int, height: int) -> list[Line]:
        return draw(self.snapshot(), self._text, width, height)

    def snapshot(self) -> Snapshot:
        """The state of the run now."""
        s, lengths = self._sequence.statistics, self._lengths()
        for seconds in s.token_s[self._seen :]:
            insort(self._sorted_tbt, seconds)
        self._seen = count = len(self._sorted_tbt)
        history = tuple(self._history)
        process_bytes, available_bytes = self.memory()
        return Snapshot(
            title=self._title,
            new_tokens=len(s.token_ids),
            max_new_tokens=self._max_new_tokens,
            context_tokens=s.prompt_tokens + len(s.token_ids),
            elapsed_s=self.elapsed_s,
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
            process_bytes=process_bytes,
            available_bytes=available_bytes,
            device_bytes=s.device_peak_bytes,
        )


def _recent(history: tuple[tuple[float, int], ...]) -> float:
    """Time per token over the last rounds, as many as `_NOW_S` holds but at least one; 0 before there is any."""
    seconds, tokens = 0.0, 0
    for round_s, round_tokens in reversed(history):
        seconds, tokens = seconds + round_s, tokens + round_tokens
        if seconds >= _NOW_S:
            break
    return seconds / tokens if tokens else 0.0
