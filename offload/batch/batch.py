"""Sequences that are decoded together: each is read, then all take the rounds of speculation in step.

A run alone is a batch of one. Sequences join and leave between rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ...tp.errors import CapacityError, TriforceError
from ..contexts.manifest import ContextError
from ..contexts.use import ContextUse
from ..graphs.passes import Graphs
from ..held import Held
from ..planning.memory import device_peak_bytes, host_peak_bytes, shortage_explained
from ..rank_agreement import Drawn, RankAgreement
from ..run_document import batch_document
from ..settings import MOST_SEQUENCES
from ..speculation.sampling import Sampling
from ..speculation.switch import Upkeep
from ..speculation.tiers import Tier
from ..statistics import Statistics
from ..system import THIS_MACHINE, System
from ..transfer.link import Traffic
from .opening import Opening
from .reading import Reading, slices_of
from .request import BatchOrder, Order, Request
from .sequence import BatchSequence, Round, held_bytes
from .upkeep import begin_round, end_round

_FORGOTTEN = BatchSequence(
    Order([], Sampling(0.0), 1, False, 0, error=TriforceError("it has ended and was forgotten")), 0.0
)
"""Stands for all sequences that are forgotten."""


class Batch(Iterator[tuple[int, Round]]):
    """Sequences in progress. Iterate over it for rounds, each with the index of its sequence; `sequences` are current
    at any time, `stats()` gives the JSON. Of several ranks all iterate to its end."""

    def __init__(
        self,
        order: BatchOrder,
        opening: Opening,
        graphs: Graphs,
        on_prefill: Callable[[int, float], None] | None = None,
        on_memory: Callable[[float], None] | None = None,
        system: System = THIS_MACHINE,
        *,
        forgets: bool = False,
    ) -> None:
        """Args:
        graphs: what captures passes.
        on_prefill: called with a sequence's index and the share of its prefill that is done, 0 to 1.
        on_memory: of the first sequence, see `Opening.open`.
        forgets: whether sequences are forgotten as soon as they have ended.
        """
        self._opening, self._graphs, self._alone = opening, graphs, order.alone
        self._target, self._in_slices, self._system = opening.target, order.in_slices, system
        self._most, self._reuse, self._contexts = min(order.most, MOST_SEQUENCES), order.reuse, order.contexts
        self._on_prefill, self._on_memory = on_prefill, on_memory
        self._agreement = RankAgreement(self._target.ranks)
        self._joining: list[Order] = []
        self._short_of_memory = False  # since no sequence has left
        self._reading: Reading | None = None  # the prompt whose next slices come after the next round
        now = self._system.clock()
        self.sequences = [BatchSequence(one, now) for one in order.orders]
        self._live = dict(enumerate(self.sequences))  # those that have not ended, and perhaps some that just have
        self._forgets, self._forgotten = forgets and not order.alone, set[int]()  # the second have not ended yet
        self._planned = next((one for one in self.sequences if one.order.error is None), None)
        """Whom the batch's saved contexts are for."""
        self.broken = False
        """Whether a pass was under way when the batch was broken off."""
        self._asked_to_end = self._ended = False  # the second by all ranks, after a round
        self._rounds_done, self._decode_s = 0, 0.0
        self._read_until = now  # when a prompt was read last: that is no time of decoding
        self._kv_bytes = 0  # the most that was held
        self._traffic_before = opening.traffic()
        self._steps = self._run()

    @torch.inference_mode()
    def __next__(self) -> tuple[int, Round]:
        self.broken = True
        with shortage_explained(self._target.device, self._system.device_memory):
            event = next(self._steps, None)
        self.broken = False
        if event is None:
            raise StopIteration
        return event

    def add(self, request: Request) -> int:
        """Has a further sequence join before the next round; its index. For rank 0."""
        self._joining.append(Order.or_error(request, self._target.config, self._opening.saved))
        return len(self.sequences) + len(self._joining) - 1

    def end(self, index: int) -> None:
        """Ends a sequence with the round that is under way, or before it begins; in a batch in slices also while its
        prompt is read. Its statistics stay. For rank 0."""
        joining = index - len(self.sequences)
        if joining < 0:
            self.sequences[index].asked_to_end = True
        else:
            ended = TriforceError("it was ended before it began")
            self._joining[joining] = replace(self._joining[joining], error=ended)

    def forget(self, index: int) -> None:
        """Is told that nobody asks any more what a sequence brought: once it has ended, nothing is kept of it but its
        place in `sequences`, where then something stands that says it has ended. So a batch may last for ever. Its
        tokens and seconds are not in `stats()` any more. For rank 0."""
        joining = index - len(self.sequences)
        if joining >= 0 and self._joining[joining].error is not None:
            self._joining[joining] = replace(self._joining[joining], prompt=[])
        self._forgotten.add(index)

    def _forget_ended(self) -> None:
        """Keeps of sequences that have ended only what may still be asked for."""
        if self._alone:
            return
        for index, sequence in list(self._live.items()):
            if sequence.state == "ended":
                del self._live[index]
                if self._forgets:
                    self._forgotten.add(index)
        for index in [index for index in self._forgotten if index < len(self.sequences)]:
            if self.sequences[index].state == "ended":
                self.sequences[index] = _FORGOTTEN
                self._forgotten.remove(index)

    def end_all(self) -> None:
        """Ends the batch early, on rank 0: iteration stops, statistics stay. Other ranks, if any, have begun the next
        round by then: it is computed when this rank iterates on, and all end with it."""
        if self._target.ranks.size == 1:
            self.close()
        self._asked_to_end = True

    def close(self) -> None:
        """Ends all sequences where they are; iteration stops, statistics stay."""
        self._steps.close()

    @property
    def tiers(self) -> list[Tier]:
        """The full cache's tier first, then those below it; none before a sequence was opened."""
        return self._opening.tiers

    @property
    def lengths(self) -> dict[str, int]:
        """The lengths in force: `draft_length` and `block_length`; 0 where there is no such level."""
        lengths = {tier.name: tier.draft_tokens if tier.drafter else 0 for tier in self.tiers}
        return {"draft_length": lengths.get("retrieval", 0), "block_length": lengths.get("verify", 0)}

    @property
    def warnings(self) -> list[str]:
        """What the batch had to do without so far, a line each."""
        found = [*self._graphs.warnings, *self._opening.warnings]
        for sequence in self.sequences:
            found += sequence.warnings
        return found

    def document(self, index: int) -> dict[str, Any]:
        """The JSON of a sequence so far."""
        return self.sequences[index].document(self.lengths, self.warnings)

    def stats(self) -> dict[str, Any]:
        """The JSON of the batch so far."""
        statistics = [sequence.statistics for sequence in self.sequences]
        whole = Statistics(
            token_ids=[token for s in statistics for token in s.token_ids],
            token_s=[seconds for s in statistics for seconds in s.token_s],
            prefill_s=sum(s.prefill_s for s in statistics),
            decode_s=self._decode_s,
            rounds=self._rounds_done,
            link=self.traffic().since(self._traffic_before),
            device_peak_bytes=device_peak_bytes(self._target.device),
            host_peak_bytes=host_peak_bytes(),
            kv_bytes=self._kv_bytes * self._target.ranks.size,
        )
        return batch_document(whole, [self.document(i) for i in range(len(self.sequences))], self.warnings)

    def traffic(self) -> Traffic:
        """What crossed this rank's link, or was read from a disk, so far, since the engine was loaded."""
        return self._opening.traffic()

    def kv_bytes(self) -> int:
        """Keys and values that this rank holds now: of sequences that run, and what is kept for the next batch."""
        return held_bytes(self._live.values(), self._opening.kept)

    def held(self) -> Held:
        """See `offload.held`: of the sequences that have not ended."""
        for sequence in self._live.values():
            if sequence.caches:
                yield from sequence.caches.held()
        if self.tiers:
            yield from self.tiers[0].held()

    @property
    def saved(self) -> ContextUse | None:
        """The saved contexts that the first sequence starts from and saves, if any."""
        return next((one.saved for one in self.sequences if one.saved), None)

    @torch.inference_mode()  # in which the memory of a cache that is kept may have been made
    def open_first(self) -> None:
        """Takes the memory of the first sequence, before anything is read.

        Raises:
            CapacityError, UsageError: it cannot be answered.
        """
        self._open(self.sequences[0])

    def _open(self, sequence: BatchSequence) -> None:
        running = [one for one in self._live.values() if one.state == "running"]
        contexts = self._contexts if sequence is self._planned else sequence.order.contexts
        self._opening.open(sequence, running, reuse=self._reuse, contexts=contexts, on_memory=self._on_memory)

    def _run(self) -> Generator[tuple[int, Round], None, None]:
        whole = False
        try:
            while not self._ended:
                self._forget_ended()
                yield from self._admit()
                running = [i for i, one in self._live.items() if one.state == "running"]
                if not running:
                    known = len(self.sequences)
                    if not self._alone:
                        self._agree([], [])  # some may have been added since
                    if len(self.sequences) == known:
                        break
                    continue
                reading = self._reading and self._reading.sequence
                self._opening.make_room([self.sequences[i] for i in running], reading)
                decoded_s = self._decode_s
                with self._opening.threads.in_use():
                    rounds = self._round([self.sequences[i] for i in running])
                yield from zip(running, rounds, strict=True)
                for i in running:
                    one = self.sequences[i]
                    if not one.goes_on or one.ends:
                        self._leave(one)
                if self._reading:
                    self._reading.grant(self._decode_s - decoded_s)
            whole = True
        finally:
            if self.tiers:
                self.tiers[0].part_with()  # a tier that looks up refers to the one above it: both would last longer
            for sequence in self.sequences:
                if sequence.saved:
                    sequence.saved.finish(together=whole)

    def _admit(self) -> Generator[tuple[int, Round], None, None]:
        """Opens and reads the sequences that wait, in their order, as long as they fit; of a prompt that is read in
        slices, those that may come before the next round."""
        while self._reading or self._begins_next():
            assert self._reading
            sequence, index = self._reading.sequence, self._reading.index
            event = self._read_on(self._reading)
            if event is None:
                if self._reading and self._any_runs():
                    return
                continue
            yield index, event
            sequence.since = self._system.clock()
            if not sequence.goes_on:
                self._leave(sequence)
                self._forget_ended()

    def _begins_next(self) -> bool:
        """Opens the next sequence that waits, if one fits; whether its prompt is to be read now."""
        for i, sequence in list(self._live.items()):
            if sequence.state != "waiting" or self._ended:
                continue
            others = sum(one.state == "running" for one in self._live.values())
            if sequence.asked_to_end and self._target.ranks.size == 1:
                sequence.state = "ended"
                continue
            if others >= self._most:
                sequence.waits_for = f"{others} sequences are decoded together; --max-sequences raises that"
                continue
            if self._short_of_memory and others:
                return False
            if sequence.caches is None and not self._opens(sequence, others):
                if sequence.state == "waiting":
                    return False  # those behind it wait too, or it might wait for ever
                continue
            running = [one for one in self._live.values() if one.state == "running"]
            self._opening.make_room(running, sequence)
            sequence.state, sequence.waits_for = "reading", None
            report = self._on_prefill and partial(self._on_prefill, i)
            self._reading = Reading(i, sequence, slices_of(self._target, sequence, report), self._system)
            return True
        return False

    def _opens(self, sequence: BatchSequence, others: int) -> bool:
        """Opens a sequence; if that cannot be done it waits, while `others` run, or has failed; one that was to end has
        ended. All ranks decide alike.

        Raises:
            TriforceError: it cannot be done, of a run alone.
        """
        ranks = self._target.ranks
        if not ranks.least([int(not sequence.asked_to_end)])[0]:
            sequence.state = "ended"
            return False
        while True:
            found: TriforceError | None = None
            try:
                with shortage_explained(self._target.device, self._system.device_memory):
                    self._open(sequence)
            except TriforceError as error:
                found = _without_frames(error)  # this one would hold the error, and it the frame
            none_failed, none_opened = ranks.least([int(found is None), int(found is not None)])
            if none_failed:
                return True
            sequence.caches = None
            self._opening.withdraw(sequence, alike=bool(none_opened))
            found = found or CapacityError("another rank has not so much memory")
            if self._alone:
                raise found
            if not isinstance(found, CapacityError):
                self._fail(sequence, found)
                return False
            if others:
                sequence.waits_for, self._short_of_memory = f"memory: {found}", True
                return False
            if not self._opening.begin_anew():  # what the first one left is given back for it
                self._fail(sequence, found)
                return False

    def _read_on(self, reading: Reading) -> Round | None:
        """Reads a prompt, or some slices of it; its sequence's first round. `None` where it is not read to its end, and
        where it was asked to end, memory did not suffice, or it could not be saved: then it alone has ended."""
        count = None
        if self._in_slices:
            due = reading.due if self._any_runs() else reading.due_alone
            count, ends = self._target.ranks.share_numbers([due, int(reading.sequence.asked_to_end)], 2)
            if ends:
                return self._drop(reading)
        try:
            with shortage_explained(self._target.device, self._system.device_memory):
                event = self._first_round(reading) if reading.go_on(count) else None
        except (CapacityError, ContextError) as error:
            if self._alone or (self._target.ranks.size > 1 and isinstance(error, CapacityError)):
                raise
            self._fail(reading.sequence, error)
            return self._drop(reading)
        self._read_until = self._system.clock()
        return event

    def _drop(self, reading: Reading) -> None:
        """Ends a sequence whose prompt is not read to its end."""
        reading.close()
        self._leave(reading.sequence)
        self._opening.forget(reading.sequence)
        self._reading, self._read_until = None, self._system.clock()

    def _any_runs(self) -> bool:
        return any(one.state == "running" for one in self._live.values())

    def _leave(self, sequence: BatchSequence) -> None:
        sequence.state, self._short_of_memory = "ended", False
        if sequence.saved:
            try:
                sequence.saved.finish(together=True)
            except ContextError as error:
                if self._alone:
                    raise
                self._fail(sequence, error)
        if not self._alone:
            sequence.give_back(self.lengths, self._system.synchronize)
            self.tiers[0].part_with()
            if not self._opening.is_kept(sequence):
                sequence.forget_prompt()

    def _fail(self, sequence: BatchSequence, error: TriforceError) -> None:
        sequence.state, sequence.failure = "ended", _without_frames(error)

    def _first_round(self, reading: Reading) -> Round:
        """What a sequence begins with, once its prompt is read."""
        began, sequence, self._reading = self._system.clock(), reading.sequence, None
        token = reading.first_token(self._opening.looks_up)
        running = sum(one.state in ("running", "reading") for one in self._live.values())
        self._opening.use_measured_link()
        self.tiers[0].choose_lengths(running)
        self._agree([sequence], [Drawn([token])])
        sequence.context.append(token)
        now, caches = self._system.clock(), sequence.opened
        caches.read_before = caches.full.read_so_far()
        caches.traffic_before = caches.full.traffic()
        seconds = reading.seconds + now - began
        statistics = sequence.statistics.after_prefill(token, seconds)
        self._kv_bytes = max(self._kv_bytes, held_bytes(self._live.values()))
        sequence.record(replace(statistics, ttft_s=now - (reading.began if self._alone else sequence.joined)))
        sequence.state = "running"
        return Round(0, [token], seconds, 0, 0, False)

    def _round(self, running: Sequence[BatchSequence]) -> list[Round]:
        """One round of all that run. Each is timed from the end of its last one to the end of this, so that nothing
        between rounds goes uncounted, reading included."""
        began = max(self._read_until, min(sequence.since for sequence in running))
        top, tokens_of = self.tiers[0], [sequence.opened.tokens for sequence in running]
        before = [(counts.proposed, counts.accepted) for counts in (one.counts["verify"] for one in tokens_of)]
        upkeep = top.upkeep
        begin_round(top, running)
        emitted = top.step(tokens_of, [sequence.missing for sequence in running])
        drawn, tested = [], []
        for sequence, (tokens, _), (proposed, accepted) in zip(running, emitted, before, strict=True):
            sequence.context += tokens
            counts = sequence.opened.tokens.counts["verify"]
            tested.append((counts.proposed - proposed, counts.accepted - accepted))
            retrieval, due = sequence.opened.retrieval, False
            if upkeep is Upkeep.FULL and retrieval is not None:
                due = sequence.opened.refresh.due(tested[-1][1], tested[-1][0]) or retrieval.is_full
            drawn.append(Drawn(tokens, due, sequence.asked_to_end))
        top.choose_lengths(len(running))
        drawn = self._agree(running, drawn)
        refresh_s = end_round(top, upkeep, running, drawn, began, self._system)
        now = self._system.clock()
        self._rounds_done += 1
        self._decode_s += now - began
        rounds = []
        for sequence, one, (proposed, accepted) in zip(running, drawn, tested, strict=True):
            seconds = now - sequence.since
            sequence.record(sequence.statistics.after_round(one.tokens, seconds, refresh_s, drafted=proposed > 0))
            sequence.since = now
            number = sequence.statistics.rounds
            rounds.append(Round(number, one.tokens, seconds, proposed, accepted, one.refresh))
        return rounds

    def _agree(self, sequences: Sequence[BatchSequence], drawn: list[Drawn]) -> list[Drawn]:
        """Sets what every tier decided to what rank 0's did; what all ranks do with these sequences. See
        `RankAgreement`."""
        decisions = [number for tier in self.tiers for number in tier.decisions]
        drawn, decisions, joining, self._ended = self._agreement.agree(
            drawn, decisions, joining=len(self._joining), ends=self._asked_to_end
        )
        each = len(decisions) // max(1, len(self.tiers))  # there are none before one was opened
        for i, tier in enumerate(self.tiers):
            tier.decisions = decisions[i * each : (i + 1) * each]
        for sequence, one in zip(sequences, drawn, strict=True):
            sequence.ends = one.ends
        if joining:
            self._join(joining)
        return drawn

    def _join(self, count: int) -> None:
        """Takes in the sequences that were added."""
        orders, self._joining = self._joining[:count], self._joining[count:]
        now = self._system.clock()
        joined = [BatchSequence(order, now) for order in self._target.ranks.share(orders)]
        self._live |= dict(enumerate(joined, len(self.sequences)))
        self.sequences += joined


def _without_frames(error: TriforceError) -> TriforceError:
    """An error that is kept, without the frames it came through: they hold caches and activations."""
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error
