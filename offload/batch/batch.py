"""Sequences that are decoded together: a run whose requests are given at the start or added by the caller."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from ..contexts.use import ContextUse
from ..graphs.passes import Graphs
from ..speculation.tiers import Tier
from ..system import THIS_MACHINE, System
from .request import Order, Request, RunOrder
from .run import Run, Tokens
from .sequence import BatchSequence, Round
from .sequence_setup import SequenceSetup


class Batch(Iterator[tuple[int, Round]]):
    """Sequences in progress. Iterating over the batch yields rounds, each with the index of its sequence. `sequences`
    has a `BatchSequence` for each request, in their order, with its state so far; of one that failed, `failure` is the
    error, and `error` its message. `stats()` returns the JSON. On several ranks, every rank iterates to the end."""

    def __init__(
        self,
        order: RunOrder,
        setup: SequenceSetup,
        graphs: Graphs,
        interrupted: Callable[[], bool] | None = None,
        on_prefill: Callable[[int, float], None] | None = None,
        on_memory: Callable[[float], None] | None = None,
        system: System = THIS_MACHINE,
    ) -> None:
        """Args:
        on_prefill: called with the index of a sequence and the finished share of its prefill, 0 to 1.
        order, setup, graphs, interrupted, on_memory, system: see `Run`.
        """

        sequences: list[BatchSequence] = []
        added: deque[BatchSequence] = deque()

        def report(sequence: BatchSequence, share: float) -> None:
            assert on_prefill
            self._take_in()
            on_prefill(sequences.index(sequence), share)

        def more(waits: bool) -> BatchSequence | None:
            return added.popleft() if added else None

        self.run = Run(order, setup, graphs, more, interrupted, on_prefill and report, on_memory, system)
        sequences += self.run.live
        self.sequences, self._added = sequences, added
        self._setup, self._clock = setup, system.clock

    def _take_in(self, *ended: BatchSequence) -> None:
        """On ranks above 0: adds the sequences that rank 0 has let join to `sequences`."""
        if self._setup.target.ranks.rank:
            self.sequences += [one for one in dict.fromkeys((*self.run.live, *ended)) if one not in self.sequences]

    def __next__(self) -> tuple[int, Round]:
        for event in self.run:
            self._take_in(event.sequence)
            if isinstance(event, Tokens):
                return self.sequences.index(event.sequence), event.round
        raise StopIteration

    def add(self, request: Request) -> int:
        """Adds a sequence that joins before the next round. Returns its index. For rank 0."""
        target = self._setup.target
        if target.ranks.rank == 0:
            order = Order.or_error(request, target.config, self._setup.contexts)
            self._added.append(BatchSequence(order, self._clock(), request))
            self.sequences.append(self._added[-1])
        return len(self.sequences) - 1

    def end(self, index: int) -> None:
        """Ends a sequence; see `Run.end`."""
        self.run.end(self.sequences[index])

    def end_all(self) -> None:
        """See `Run.end_all`."""
        self.run.end_all()

    def close(self) -> None:
        """See `Run.close`."""
        self.run.close()

    @property
    def tiers(self) -> list[Tier]:
        """See `Run.tiers`."""
        return self.run.tiers

    @property
    def lengths(self) -> dict[str, int]:
        """See `Run.lengths`."""
        return self.run.lengths

    @property
    def warnings(self) -> list[str]:
        """The warnings of the batch and its sequences so far, one line each."""
        return self.run.warnings + [line for sequence in self.sequences for line in sequence.warnings]

    def document(self, index: int) -> dict[str, Any]:
        """The JSON so far of the sequence with this index."""
        return self.sequences[index].document(self.lengths, self.warnings)

    def stats(self) -> dict[str, Any]:
        """The JSON of the batch so far."""
        return self.run.document(self.sequences)

    @property
    def saved(self) -> ContextUse | None:
        """What is done with saved contexts for the first sequence in progress that starts from one or saves one."""
        return next((one.saved for one in self.sequences if one.saved), None)
