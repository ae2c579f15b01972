"""The live display of a batch: a line a sequence on stderr, drawn several times a second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from rich.console import Console

from ...offload.speculation.sampling import TokenLogprobs
from ...offload.statistics import Statistics
from .batch_frame import BatchSnapshot, SequenceRow, draw_batch
from .live_screen import LiveScreen
from .segments import Line


class ShownSequence(Protocol):
    """A sequence of a batch, as far as it is shown."""

    @property
    def statistics(self) -> Statistics: ...
    @property
    def logprobs(self) -> Sequence[TokenLogprobs]: ...
    @property
    def state(self) -> str: ...
    @property
    def error(self) -> str | None: ...
    @property
    def read_share(self) -> float: ...
    @property
    def waits_for(self) -> str | None: ...


def row_of(name: str, sequence: ShownSequence, max_new_tokens: int, *, ended: bool) -> SequenceRow:
    """The line of a sequence.

    Args: `ended` is whether its answer is complete.
    """
    s, read = sequence.statistics, sequence.read_share
    state = "failed" if sequence.error is not None else "ended" if ended else sequence.state
    note = sequence.error or sequence.waits_for or ""
    return SequenceRow(name, state, len(s.token_ids), max_new_tokens, s.tbt_s, s.retrieval_acceptance, read, note)


class BatchDisplay(LiveScreen):
    """The sequences of a batch as they are when a picture is drawn."""

    def __init__(
        self,
        console: Console,
        title: str,
        rows: Callable[[], Sequence[SequenceRow]],
        lengths: Callable[[], dict[str, int]],
        others: Callable[[], tuple[int, int, int]] = lambda: (0, 0, 0),
    ) -> None:
        """Args:
        lengths: `draft_length` and `block_length` in force.
        others: sequences without a line: how many have ended, their tokens, and how many are to come.
        """
        super().__init__(console)
        self._title, self._rows, self._lengths, self._others = title, rows, lengths, others

    def picture(self, width: int, height: int) -> list[Line]:
        return draw_batch(self.snapshot(), width, height)

    def snapshot(self) -> BatchSnapshot:
        """The state of the batch now."""
        rows, lengths = self._rows(), self._lengths()
        done, tokens, to_come = self._others()
        process_bytes, available_bytes = self.memory()
        return BatchSnapshot(
            title=self._title,
            rows=rows,
            elapsed_s=self.elapsed_s,
            new_tokens=tokens + sum(row.new_tokens for row in rows),
            draft_length=lengths["draft_length"],
            block_length=lengths["block_length"],
            process_bytes=process_bytes,
            available_bytes=available_bytes,
            done=done,
            to_come=to_come,
        )
