"""One run: prefill, then rounds of speculation, as an iterator over the rounds. It is a batch of one sequence."""

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
    """A finished run: the tokens of its answer, and its JSON (docs/json.md)."""

    token_ids: list[int]
    """The tokens of the answer, without the prompt."""
    stats: dict[str, Any]
    """The JSON of the run."""


class Generation(Iterator[Round]):
    """A run in progress. Iterating over it yields its rounds. `statistics` is current at any time (each round makes a
    new object). `stats()` returns the JSON."""

    def __init__(self, batch: Batch) -> None:
        """Args: `batch` has one sequence."""
        self.batch = batch

    def __next__(self) -> Round:
        return next(self.batch)[1]

    @property
    def sequence(self) -> BatchSequence:
        """The run's only sequence."""
        return self.batch.sequences[0]

    @property
    def statistics(self) -> Statistics:
        """The counts and times of the run so far."""
        return self.sequence.statistics

    @property
    def saved(self) -> ContextUse | None:
        """The saved contexts that the run starts from and saves, if any."""
        return self.sequence.saved

    @property
    def lengths(self) -> dict[str, int]:
        """The current `draft_length` and `block_length`, in tokens; 0 means no draft."""
        return self.batch.lengths

    @property
    def warnings(self) -> list[str]:
        """The warnings of the run so far, one line each."""
        return self.batch.warnings

    def stats(self) -> dict[str, Any]:
        """The JSON of the run so far."""
        return self.batch.document(0)

    def close(self) -> None:
        """Ends the run at once and frees its memory, except for the keys and values that a later run may reuse.
        Iteration stops; statistics and JSON stay."""
        self.batch.close()

    def end(self) -> None:
        """Ends the run early, on rank 0; see `Batch.end_all`."""
        self.batch.end_all()

    def replace_last(self, token: int) -> None:
        """Puts `token` in place of the newest token, and goes on from there. Statistics keep the token that was
        drawn."""
        self.sequence.context[-1] = token
