"""One run: prefill, then rounds of speculation, as an iterator over what each round brought. A batch of one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .batch.batch import Batch
from .batch.sequence import BatchSequence, Round
from .contexts.use import ContextUse
from .statistics import Statistics

__all__ = ["Generation", "Result", "Round"]


@dataclass(frozen=True)
class Result:
    """A finished run: its tokens and the JSON described in docs/json.md."""

    token_ids: list[int]
    stats: dict[str, Any]


class Generation(Iterator[Round]):
    """A run in progress. Iterate over it for rounds; `statistics` is current at any time (a new object a
    round), `stats()` gives the JSON."""

    def __init__(self, batch: Batch) -> None:
        """Args: `batch` is of one sequence."""
        self.batch = batch

    def __next__(self) -> Round:
        return next(self.batch)[1]

    @property
    def sequence(self) -> BatchSequence:
        return self.batch.sequences[0]

    @property
    def statistics(self) -> Statistics:
        return self.sequence.statistics

    @property
    def saved(self) -> ContextUse | None:
        """The saved contexts that the run starts from and saves, if any."""
        return self.sequence.saved

    @property
    def lengths(self) -> dict[str, int]:
        """The lengths in force: `draft_length` and `block_length`; 0 where there is no such level."""
        return self.batch.lengths

    @property
    def warnings(self) -> list[str]:
        """What the run had to do without so far, a line each."""
        return self.batch.warnings

    def stats(self) -> dict[str, Any]:
        """The JSON of the run so far."""
        return self.batch.document(0)

    def close(self) -> None:
        """Ends the run where it is, and gives back its memory, but for the keys and values that a next run may go on
        from; iteration stops, statistics and JSON stay."""
        self.batch.close()

    def end(self) -> None:
        """Ends the run early, on rank 0; see `Batch.end_all`."""
        self.batch.end_all()

    def replace_last(self, token: int) -> None:
        """Goes on as if the newest token were another one; statistics keep the one that was drawn."""
        self.sequence.context[-1] = token
