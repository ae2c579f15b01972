"""The engine's loop: it reads prompts, then takes all running sequences through each round of speculation together.

Sequences join and leave between rounds. When a sequence ends, its keys and values stay while memory allows. The next
turn of its conversation can reuse them, beside other running sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ...kernels.selection import STEP_ROWS
from ...tp.errors import CapacityError, PeerError, TriforceError, without_frames
from ..contexts.manifest import ContextError
from ..graphs.passes import Graphs
from ..held import Held
from ..planning.memory import device_peak_bytes, host_peak_bytes, shortage_explained
from ..rank_agreement import RoundDecision, agree
from ..run_document import batch_document
from ..settings import MOST_SEQUENCES
from ..speculation.distribution import SequencesFailed
from ..speculation.refresh import RetrievalWork, end_round
from ..speculation.tiers import Tier
from ..statistics import Statistics
from ..system import THIS_MACHINE, System
from ..transfer.link import Traffic
from .kept import Shared
from .reading import Reading, ReadingError, on_all_ranks, slices_of, slices_together
from .request import RunOrder
from .sequence import BatchSequence, Round, kv_bytes_of
from .sequence_setup import SequenceSetup

_SOON_S = 2.0
"""For so many seconds a context that an ended sequence leaves to be written is waited for by sequences that could use
this sequence's text, and by all if nothing runs."""

_BETWEEN_ROUNDS = 32
"""Up to this number of unread tokens, a prompt is computed in one pass between two rounds of others. It takes about as
long as a verification of as many tokens. In slices it takes longer, and the first token comes some rounds later."""

_SHORTER = 2
"""A prompt is prefilled before the rest of a long prompt whose prefill has begun, if that rest has at least this many
times its unread tokens."""

_LEAST_OWED_S = 1e-9
"""What a prompt that was set aside is owed at least, so that some slices of it come before others go first again, even
if those that went first ended before they were read."""

_LOOKS_S = 0.05
"""Seconds between two looks for further sequences while contexts are written and nothing runs."""


@dataclass(frozen=True)
class Progress:
    """The event that some slices of a sequence's prefill are done, or that only its context must still be written."""

    sequence: BatchSequence


@dataclass(frozen=True)
class Tokens:
    """The event that a round of a sequence is done."""

    sequence: BatchSequence
    round: Round


@dataclass(frozen=True)
class Ended:
    """The event that a sequence has ended. If it failed, its `failure` says why."""

    sequence: BatchSequence


Event = Progress | Tokens | Ended

More = Callable[[bool], BatchSequence | None]
"""Called on rank 0 between rounds and between slices of a prefill, as long as another sequence may run. Returns the
next sequence, or `None` if there is none at the moment. It is called with `True` if nothing else is left to do: it may
wait then, and `None` ends the run."""


class Run(Iterator[Event]):
    """Sequences in progress. Iterating over the run yields its events. It lasts as long as further sequences come. It
    keeps nothing of sequences that have ended. On several ranks, every rank iterates to the end."""

    def __init__(
        self,
        order: RunOrder,
        setup: SequenceSetup,
        graphs: Graphs,
        more: More = lambda waits: None,
        interrupted: Callable[[], bool] | None = None,
        on_prefill: Callable[[BatchSequence, float], None] | None = None,
        on_memory: Callable[[float], None] | None = None,
        system: System = THIS_MACHINE,
    ) -> None:
        """Args:
        order: what the run is to do.
        setup: opens the sequences.
        graphs: captures passes.
        more: gives further sequences, beyond those of the order.
        interrupted: called on rank 0 after each round, and about ten times a second in a prefill; `True` ends it.
        on_prefill: called with a sequence and the finished share of its prefill, 0 to 1.
        on_memory: for the first sequence; see `SequenceSetup.open`.
        system: the machine, or a substitute for it in tests.
        """
        self._setup, self._graphs, self._alone = setup, graphs, order.alone
        self._target, self._in_slices, self._system = setup.target, order.in_slices, system
        self._most, self._reuse = min(order.most, MOST_SEQUENCES), order.reuse
        self._more, self._interrupted = more, interrupted or (lambda: False)
        self._on_prefill, self._on_memory = on_prefill, on_memory
        self._joining: list[BatchSequence] = []  # on rank 0
        self._short_of_memory = False  # since no sequence has left
        self._reading: Reading | None = None  # the prompt whose next slices come after the next round
        self._read_with_it: list[Reading] = []  # prompts that come next, already computed or to be in the same pass
        self._set_aside: Reading | None = None  # a long prompt, which is read on behind shorter ones
        self._gave_way = False  # whether no slice was read at the last call, as others had joined, who may go first
        self._stay_behind: set[BatchSequence] = set()  # waiting ones that do not go before that prompt
        self._read_until = self._system.clock()  # when the last prefill ended: prefill does not count as decoding
        self.live = [BatchSequence(one, self._read_until) for one in order.orders]
        """The sequences that have not ended, and perhaps some that have just ended."""
        self._broken = False  # `True` during a step, and after a step that did not finish
        self._asked_to_end = self._ended = False  # the second: all ranks agreed, after a round or slices of a prefill
        self.rounds_done = 0
        """The number of rounds so far."""
        self.decode_s = 0.0
        """Seconds of decoding so far."""
        self._most_kv_bytes = 0  # maximum bytes of keys and values on this rank, noted when a sequence leaves
        self._traffic_before = setup.traffic()
        self._described: list[dict[str, Any]] = []  # the JSON of the first sequence that has ended, without its tokens
        self._last_lengths: dict[str, int] | None = None  # after the end: a later run may change those of the tiers
        self._steps = self._run()

    @torch.inference_mode()
    def __next__(self) -> Event:
        broken, self._broken = self._broken, True
        with shortage_explained(self._target.device, self._system.device_memory):
            event = next(self._steps, None)
        self._broken = broken
        if event is None:
            raise StopIteration
        return event

    def end(self, sequence: BatchSequence) -> None:
        """Ends a sequence early: with the round in progress, during its prefill, or before it begins. Its statistics
        stay. For rank 0."""
        sequence.asked_to_end = True

    def end_all(self) -> None:
        """Ends the run early. For rank 0. Iteration stops, statistics stay. Later runs can reuse the tokens that were
        read. With several ranks, the others have already begun the next round. That round is computed when this rank
        iterates on, and all ranks end with it."""
        if self._target.ranks.size == 1:
            self.close()
        self._asked_to_end = True

    @torch.inference_mode()  # as in `__next__`, whose tensors are rolled back here
    def close(self) -> None:
        """Ends all sequences at once and frees their memory, except for the full cache, which the next run may reuse.
        Iteration stops, statistics stay."""
        try:
            self._steps.close()
        except BaseException:
            self._broken = True  # a cache may be rolled back in some layers only
            raise
        for sequence in self.live:
            if sequence.active_or_none:
                with suppress(RuntimeError):  # the device has failed, which was reported when it happened
                    self._give_back(sequence, self.warnings + sequence.warnings)

    @property
    def first_tokens_follow(self) -> bool:
        """Whether the next event is the first token of a prompt that was computed in the same pass as others."""
        return any(not one.sequence.unread for one in self._read_with_it)

    @property
    def broken(self) -> bool:
        """Whether a pass was in progress when the run was interrupted."""
        return self._broken

    @property
    def tiers(self) -> list[Tier]:
        """The tiers, the one on the full cache first; none before a sequence was opened."""
        return self._setup.tiers

    @property
    def lengths(self) -> dict[str, int]:
        """The current `draft_length` and `block_length`, in tokens; 0 means no draft. After the run, the last ones."""
        if self._last_lengths is not None:
            return self._last_lengths
        lengths = {tier.name: tier.control.draft_tokens if tier.drafter else 0 for tier in self.tiers}
        return {"draft_length": lengths.get("retrieval", 0), "block_length": lengths.get("verify", 0)}

    @property
    def warnings(self) -> list[str]:
        """The warnings of the run so far, one line each. Those of single sequences are in `BatchSequence.warnings`."""
        return [*self._graphs.warnings, *self._setup.warnings]

    def traffic(self) -> Traffic:
        """The traffic over this rank's link, and from and to a disk, since the engine was loaded."""
        return self._setup.traffic()

    def totals(self) -> Statistics:
        """The statistics of all sequences together so far, without their tokens."""
        return Statistics(
            decode_s=self.decode_s,
            rounds=self.rounds_done,
            link=self.traffic().since(self._traffic_before),
            device_peak_bytes=device_peak_bytes(self._target.device),
            host_peak_bytes=host_peak_bytes(),
            kv_bytes=max(self._most_kv_bytes, kv_bytes_of(self.live)) * self._target.ranks.size,
        )

    def document(self, sequences: Sequence[BatchSequence]) -> dict[str, Any]:
        """The JSON of the run so far, with that of each sequence. `sequences` must be all sequences of the run."""
        warnings = self.warnings + [line for one in sequences for line in one.warnings]
        statistics = [one.statistics for one in sequences]
        whole = replace(
            self.totals(),
            token_ids=[token for s in statistics for token in s.token_ids],
            token_s=[seconds for s in statistics for seconds in s.token_s],
            prefill_s=sum(s.prefill_s for s in statistics),
        )
        return batch_document(whole, [one.document(self.lengths, warnings) for one in sequences], warnings)

    def stats(self) -> dict[str, Any]:
        """The JSON of the run so far, without that of its sequences."""
        running = [one.document(self.lengths, []) for one in self.live if one.active_or_none]
        found = batch_document(self.totals(), (self._described + running)[:1], self.warnings)
        return {name: value for name, value in found.items() if name != "sequences"}

    def kv_memory_bytes(self) -> int:
        """Bytes of this rank's memory that full caches take at the moment: keys and values in whole blocks, and the
        buffers through which blocks stream. Includes running sequences and caches that are kept for later sequences."""
        return self._setup.kv_memory_bytes

    def held(self) -> Held:
        """See `offload.held`: the tensors of sequences that have not ended, and those of all captured passes."""
        yield from self._graphs.held()
        for sequence in self.live:
            if sequence.active_or_none:
                yield from sequence.active_or_none.held()
        if self.tiers:
            yield from self.tiers[0].held()

    @torch.inference_mode()  # the memory of a kept cache may have been allocated in this mode
    def open_first(self) -> None:
        """Allocates the memory of the first sequence, before its prefill.

        Raises:
            CapacityError, UsageError: the first sequence cannot be answered.
        """
        self._open(self.live[0])

    def _open(self, sequence: BatchSequence, known: Shared | None = None) -> None:
        waiting = self._waiting()[: self._most]
        opened = [one for one in self.live if one.active_or_none and one.state != "ended"]
        aside = self._set_aside and self._set_aside.sequence
        self._setup.open(
            sequence, opened, waiting, aside=aside, known=known, reuse=self._reuse, on_memory=self._on_memory
        )
        self._reuse = None  # `reuse` concerns earlier runs, so only the first sequence

    def _running(self) -> list[BatchSequence]:
        return [one for one in self.live if one.state == "running"]

    def _saving(self) -> list[BatchSequence]:
        return [one for one in self.live if one.state == "saving"]

    def _waiting(self) -> list[BatchSequence]:
        return [one for one in self.live if one.state == "waiting"]

    def _run(self) -> Generator[Event, None, None]:
        whole = False
        try:
            while not self._ends_now():
                yield from self._let_go()
                yield from self._admit()
                running = self._running()
                if self._ended or not (running or self._idle()):
                    break
                yield from self._decode(running) if running else map(Progress, self._saving())
            yield from self._let_go()  # an interrupted run yields no such events
            whole = True
        finally:
            self._last_lengths = self.lengths
            with ExitStack() as ending:  # runs every step, even if one fails
                for sequence in self.live:
                    ending.callback(self._finish_saving, sequence, together=whole)
                ending.callback(self._setup.drop_drafting)
                if self.tiers:  # passes that were captured for several sequences end with these
                    ending.callback(self.tiers[0].drop_joined)
                readings = [self._reading, *self._read_with_it, self._set_aside]
                self._reading, self._read_with_it, self._set_aside = None, [], None  # they refer to this run
                for reading in filter(None, readings):
                    ending.callback(reading.close, keeps=whole or not self.broken)

    def _decode(self, running: list[BatchSequence]) -> Generator[Event, None, None]:
        """Does a round of these sequences. Nothing of it is held while the run waits for the next sequence, which may
        be for a long time."""
        self._make_room(running)
        decoded_s = self.decode_s
        running = self._filled(running)
        try:
            with self._setup.threads.in_use():
                rounds = self._round(running) if running else []
        except SequencesFailed as error:
            if self._alone:
                raise
            self._fail_some(running, error)
            return
        for sequence, event in zip(running, rounds, strict=True):
            yield Tokens(sequence, event)
        for one in running:
            if not one.is_unfinished or one.ends:
                self._leave(one)
        self._finish_what_is_saved()
        self._grant(self.decode_s - decoded_s)

    def _ends_now(self) -> bool:
        """Whether the run ends here. Several ranks have agreed on it before."""
        self._note_interrupt()
        if self._target.ranks.size == 1:
            self._ended |= self._asked_to_end
        return self._ended

    def _note_interrupt(self) -> None:
        if self._target.ranks.rank == 0 and self._interrupted():
            self._asked_to_end = True

    def _let_go(self) -> Iterator[Event]:
        """Ends the sequences whose contexts are written, yields those that have ended, and forgets them."""
        if self._alone:
            return
        for sequence in self._saving():
            self._leave(sequence)
        for sequence in [one for one in self.live if one.state == "ended"]:
            self.live.remove(sequence)
            yield Ended(sequence)

    def _idle(self) -> bool:
        """Waits for further sequences if there are no others, as long as it takes. If contexts of others must still be
        written, waits a moment for these. Returns whether there are any sequences."""
        if self._alone:
            return False
        if not self.live:
            self._ask(waits=True)
            self._join(patiently=True)
        elif working := [one.active.saved.work for one in self._saving() if one.active.saved]:
            wait(working, _LOOKS_S, FIRST_COMPLETED)
            self._agree([], [])
        return bool(self.live)

    def _ask(self, *, waits: bool = False) -> None:
        """Asks for further sequences, as many as may run."""
        if self._target.ranks.rank or self._asked_to_end or self._short_of_memory:
            return
        while len(self.live) + len(self._joining) < self._most:
            sequence = self._more(waits and not self._joining)
            if sequence is None:
                return
            self._joining.append(sequence)

    def _join(self, *, patiently: bool = False) -> None:
        """Adds the sequences that rank 0 has accepted, on all ranks."""
        joining, self._joining = self._joining, []
        orders = self._target.ranks.share([one.order for one in joining], patiently=patiently)
        now = self._system.clock()
        self.live += joining or [BatchSequence(order, now) for order in orders]

    def _admit(self) -> Generator[Event, None, None]:
        """Opens and reads the waiting sequences, in their order, as long as they fit. If a prompt is read in slices,
        reads the slices that may come before the next round. That round also comes before the prompts of sequences that
        have joined meanwhile; otherwise these could keep the running sequences from their rounds."""
        expected = set(self.live)
        while not self._ends_now() and (self._reading or self._begins_next()):
            self._let_shorter_go_first(expected if self._running() else self.live)
            reading = self._in_turn()
            assert reading
            sequence, event = reading.sequence, self._read_on(reading)
            del reading  # else it would hold its logits during rounds
            if event is None:
                if self._reading and not self._gave_way:
                    yield Progress(sequence)
                yield from self._let_go()
                if self._reading and self._in_slices and self._running():
                    return
                continue
            yield Tokens(sequence, event)
            sequence.since = self._system.clock()
            if not sequence.is_unfinished or sequence.ends:
                self._leave(sequence)
                yield from self._let_go()
            more = self._reading or self._read_with_it or not expected.isdisjoint(self._waiting())
            if self._in_slices and self._running() and not more:
                return

    def _begins_next(self) -> bool:
        """Begins the next prompt, or goes on with the one that was set aside. Returns whether there is a prompt to read
        now."""
        if self._read_with_it:
            self._reading = self._read_with_it.pop(0)
        elif self._set_aside:
            self._reading, self._set_aside = self._set_aside, None
            self._reading.sequence.active.full.is_set_aside = False
            self._reading.owed_s = max(self._reading.owed_s, _LEAST_OWED_S)
        else:
            self._stay_behind.clear()
            self._open_waiting()
        return self._reading is not None

    def _in_turn(self) -> Reading | None:
        """The prompt to read on. If one was set aside, it is in turn as long as saved tokens of the other are being
        restored; but not on several ranks, where these may be there at different times."""
        waits = self._reading is None or (self._target.ranks.size == 1 and self._reading.is_waiting)
        return self._set_aside if self._set_aside and waits else self._reading

    def _end_reading(self, reading: Reading) -> None:
        """Notes that a prompt has been read, or will not be read on."""
        if reading is self._set_aside:
            self._set_aside = None
            reading.sequence.active.full.is_set_aside = False
        else:
            self._reading = None

    def _let_shorter_go_first(self, among: Container[BatchSequence]) -> None:
        """Sets the prompt that is being read aside, if it is long and sequences of `among` wait with much shorter ones.
        Afterwards it gets as much time as these took, before others go first again."""
        reading = self._reading
        if reading is None or not self._in_slices or self._set_aside or self._read_with_it or self._short_of_memory:
            return
        waits = any(one in among and one not in self._stay_behind for one in self._waiting())
        if not waits or self._left_of(reading) <= STEP_ROWS:
            return
        if not self._target.ranks.least([int(reading.owed_s <= 0)])[0]:
            return
        self._reading, self._set_aside = None, reading
        reading.sequence.active.full.is_set_aside = True
        self._open_waiting()
        if self._reading is None:
            self._begins_next()

    def _left_of(self, reading: Reading) -> int:
        """How many tokens of the prompt that is being read are still to be computed, approximately."""
        return int(self._setup.to_compute(reading.sequence) * (1 - reading.sequence.read_share))

    def _goes_first(self, sequence: BatchSequence, aside: Reading) -> bool:
        """Whether a waiting sequence's prompt is read before the rest of the prompt that was set aside: if it is much
        shorter than this rest, and is not to be saved. A sequence for which this is not so is remembered."""
        first = (
            sequence not in self._stay_behind
            and sequence.order.contexts.save is None
            and not self._setup.rotates_otherwise(sequence)
            and _SHORTER * self._setup.to_compute(sequence) <= self._left_of(aside)
        )
        if not first:
            self._stay_behind.add(sequence)
        return first

    def _open_waiting(self) -> None:
        """Opens the next waiting sequence, if it fits. Its prompt is the one to read now. If it can be read in one
        pass, later sequences are read in the same pass, as many as fit into it."""
        together: list[BatchSequence] = []
        behind: list[BatchSequence] = []  # the sequence that is read after them, in slices
        while not behind and (sequence := self._next_opened(beside=together)):
            self._make_room(self._running(), sequence)
            sequence.state, sequence.waits_for = "reading", None
            fits = self._setup.reads_in_one_pass([*together, sequence])
            (together if fits else behind).append(sequence)
        if len(together) == 1 and not self._comes_between_rounds(together[0]):
            together, behind = [], together + behind
        slices = []
        if together:
            slices = slices_together(self.tiers[0].read, self._target, together, self._read, self._system)
        slices += [
            slices_of(self._target, one, partial(self._read, one), self._system, short=self._in_slices)
            for one in behind
        ]
        both = zip(together + behind, slices, strict=True)
        self._read_with_it = [Reading(*one, self._system, timed=self._target.is_on_one_cpu) for one in both]
        self._reading = self._read_with_it.pop(0) if self._read_with_it else None

    def _grant(self, seconds: float) -> None:
        """See `Reading.grant`."""
        if reading := self._in_turn():
            reading.grant(seconds)

    def _make_room(self, running: Sequence[BatchSequence], opened: BatchSequence | None = None) -> None:
        """See `SequenceSetup.make_room`.

        Args: `opened` is a sequence whose prompt is to be read next; default: the one whose prompt is being read.
        """
        begun = dict.fromkeys((self._in_turn(), self._reading, self._set_aside))
        readings = [one.sequence for one in begun if one]
        self._setup.make_room(running, [opened, *readings] if opened else readings)

    def _comes_between_rounds(self, sequence: BatchSequence) -> bool:
        """Whether a prompt is better read in one pass between two rounds of others than in slices. With experts, a pass
        over several tokens takes much longer than a round, because it reads more experts."""
        return bool(self._running()) and sequence.unread <= _BETWEEN_ROUNDS and not self._target.config.experts

    def _next_opened(self, beside: Sequence[BatchSequence]) -> BatchSequence | None:
        """Opens and returns the next waiting sequence; `None` if none fits.

        Args: `beside`: the sequences whose prompts are read in the same pass, if there are any.
        """
        aside = self._set_aside
        for sequence in self._waiting():
            if aside and not self._goes_first(sequence, aside):
                continue
            running = len(self._running()) + len(beside) + (aside is not None)
            others = running + len(self._saving())
            known = self._setup.shared_beside(beside, sequence) if beside else None
            if beside and not known:
                return None
            if others >= self._most:
                remedy = "--max-sequences raises this" if self._most < MOST_SEQUENCES else "this is the maximum"
                sequence.waits_for = f"{others} sequences are decoded together; {remedy}"
                continue
            if self._short_of_memory and others:
                return None
            if (not running or sequence.order.contexts.save) and self._waits_for_saving(sequence, running=running > 0):
                sequence.waits_for = "a context that is being written to the disk"
                return None
            if others and self._setup.rotates_otherwise(sequence):
                sequence.waits_for = (
                    "dynamic RoPE: a prompt of this length needs other rotation angles than the running sequences; it "
                    "begins when these have ended"
                )
                return None
            if sequence.active_or_none is None and not self._opens(sequence, others, known):
                if sequence.state == "waiting":
                    return None  # later sequences wait too, else this one might never begin
                continue
            return sequence
        return None

    def _waits_for_saving(self, sequence: BatchSequence, *, running: bool) -> bool:
        """Whether a sequence waits for others, which have just ended but for their contexts. All ranks call it, and get
        the same.

        Args: `running` is whether other sequences run. Then only a text that it could use is waited for.
        """
        saving, now = self._saving(), self._system.clock()
        if not saving:
            return False
        new = [one for one in saving if now - one.since < _SOON_S]
        waits = bool(new) and (not running or self._setup.could_use(sequence, new))
        return bool(self._target.ranks.least([int(waits)])[0])

    def _read(self, sequence: BatchSequence, share: float) -> None:
        """Records the share of a prompt that is read, and reports it."""
        sequence.read_share = share
        if self._on_prefill:
            self._on_prefill(sequence, share)

    def _opens(self, sequence: BatchSequence, others: int, known: Shared | None) -> bool:
        """Opens a sequence. Returns whether it is open. If memory is too short while `others` run, the sequence waits;
        otherwise it fails. A sequence that was asked to end has ended. All ranks decide alike.

        Raises:
            TriforceError: the sequence cannot be opened, in a run that no other sequence may join (`RunOrder.alone`).
        """
        ranks = self._target.ranks
        if not ranks.least([int(not sequence.asked_to_end)])[0]:
            self._end_unopened(sequence)
            return False
        found: Exception | None = None
        try:
            with shortage_explained(self._target.device, self._system.device_memory):
                self._open(sequence, known)
        except PeerError:
            raise
        except Exception as error:
            if self._alone and not isinstance(error, TriforceError):
                raise
            found = without_frames(error)  # else this frame would hold the error, and the error this frame
        none_failed, none_opened = ranks.least([int(found is None), int(found is not None)])
        if none_failed:
            return True
        sequence.active_or_none = None
        self._setup.withdraw(sequence, alike=bool(none_opened))
        found = found or CapacityError("another rank has too little memory")
        try:
            if self._alone:
                raise found
            if isinstance(found, CapacityError) and others:
                sequence.waits_for = f"memory: {found}"
                if self._set_aside:  # there may be enough when this prompt has been read
                    self._stay_behind.add(sequence)
                else:
                    self._short_of_memory = True
            else:
                self._fail(sequence, found)
        finally:
            found = None  # as in `_read_on`
        return False

    def _end_unwanted(self, waiting: Sequence[BatchSequence], unwanted: Sequence[int]) -> None:
        """Ends the `waiting` sequences that are `unwanted`, according to rank 0."""
        for sequence in (one for one, ends in zip(waiting, unwanted, strict=True) if ends):
            self._end_unopened(sequence)

    def _end_unopened(self, sequence: BatchSequence) -> None:
        sequence.state, self._short_of_memory = "ended", False
        self._stay_behind.discard(sequence)

    def _read_on(self, reading: Reading) -> Round | None:
        """Reads some slices of a prompt. If other sequences join, reads none, but never twice in a row. Returns the
        sequence's first round if the prompt is read to its end, else `None`. If the sequence was asked to end, memory
        was too short, or the prompt could not be saved, only this sequence ends."""
        beside = bool(self._in_slices and self._running())
        due = reading.due if beside else reading.due_alone
        waiting = self._waiting()
        if self._in_slices and not beside:  # otherwise sequences join after rounds
            self._ask()
        asked = due, self._asked_to_end, len(self._joining), *(x.asked_to_end for x in (reading.sequence, *waiting))
        due, ends_run, joining, ends, *unwanted = self._target.ranks.share_numbers([*map(int, asked)], len(asked))
        self._end_unwanted(waiting, unwanted)
        if joining:
            self._join()
        self._ended = bool(ends_run)
        if ends_run:
            return None
        if ends:
            return self._drop(reading, keeps=True)
        self._gave_way = bool(joining) and not self._gave_way
        if self._gave_way:
            return None
        event = failure = None
        before_s = reading.seconds
        alike = False  # whether the failure is the same on all ranks
        try:
            with shortage_explained(self._target.device, self._system.device_memory):
                event = self._first_round(reading) if reading.go_on(due, waits=not beside) else None
        except ReadingError as error:
            failure, alike = error.failure, True
        except Exception as error:
            failure, alike = error, isinstance(error, ContextError)
        if self._set_aside and reading is not self._set_aside:
            self._set_aside.owed_s += reading.seconds - before_s
        if failure is None:
            self._read_until = self._system.clock()
            return event
        try:
            if self._alone or (self._target.ranks.size > 1 and not alike) or isinstance(failure, PeerError):
                raise failure
            if isinstance(failure, SequencesFailed):
                failure = failure.alone(reading.sequence.active)
            self._fail(reading.sequence, failure)
        finally:
            failure = None  # else the error and this frame would hold each other, and all that its frames hold
        return self._drop(reading, keeps=False)

    def _drop(self, reading: Reading, *, keeps: bool) -> None:
        """Ends a sequence before its prompt is read to its end.

        Args: `keeps`: see `Reading.close`.
        """
        reading.close(keeps=keeps)
        self._end_reading(reading)
        self._leave(reading.sequence)
        self._read_until = self._system.clock()

    def _leave(self, sequence: BatchSequence) -> None:
        """Ends a sequence. If a context of it must still be written, it ends when that is done, so that no other waits
        for the disk. No other shares what a failed one has computed."""
        saved = sequence.saved
        if saved and not (self._alone or saved.settled()):
            if sequence.state != "saving":
                sequence.state, sequence.since = "saving", self._system.clock()
            if sequence.failure:
                self._setup.forget(sequence)
            return
        sequence.state, self._short_of_memory = "ended", False
        self._stay_behind.clear()
        self._finish_saving(sequence)
        if not self._alone and sequence.active_or_none:
            others = any(one.active_or_none for one in self.live if one is not sequence)
            self._setup.leave(sequence, last=not others)
            sequence.failure = sequence.failure or sequence.check_failure
            self._give_back(sequence, sequence.warnings)
            self.tiers[0].drop_joined()
            sequence.forget_prompt()

    def _give_back(self, sequence: BatchSequence, warnings: list[str]) -> None:
        self._most_kv_bytes = max(self._most_kv_bytes, kv_bytes_of(self.live))  # they only grow until one leaves
        sequence.give_back(self.lengths, warnings, self._system.synchronize)
        self._described = self._described or [sequence.document(self.lengths, []) | {"token_ids": []}]

    def _finish_what_is_saved(self) -> None:
        """Finishes contexts that are completely saved, so that others can use them while answers are decoded."""
        for sequence in self._running():
            saved = sequence.saved
            if saved and saved.saves and saved.settled():
                self._finish_saving(sequence)
                if sequence.failure:
                    self._leave(sequence)

    def _finish_saving(self, sequence: BatchSequence, *, together: bool = True) -> None:
        """Waits until the context that a sequence saves is on the disk. If saving is required and failed, the sequence
        ends.

        Args: `together`: see `ContextUse.finish`.

        Raises:
            ContextError: saving is required and failed, in a run that no other sequence may join (`RunOrder.alone`).
        """
        try:
            if sequence.saved:
                sequence.saved.finish(together=together)
        except ContextError as error:
            if self._alone:
                raise
            self._fail(sequence, error)

    def _fail_some(self, running: Sequence[BatchSequence], error: SequencesFailed) -> None:
        """Ends the sequences that failed in a round, and sets the others back to their state before it. All ranks do
        the same, as they have the same logits."""
        for tier in self.tiers:
            tier.control.pays.postpone()
        for sequence in running:
            written = len(sequence.order.prompt) + len(sequence.statistics.token_ids)
            del sequence.context[written:]
            self.tiers[0].rollback(sequence.active, written - 1)
            if sequence.active in error.whose:
                self._fail(sequence, error.alone(sequence.active))
                self._leave(sequence)

    def _fail(self, sequence: BatchSequence, error: Exception) -> None:
        sequence.state, sequence.failure = "ended", without_frames(error)

    def _first_round(self, reading: Reading) -> Round:
        """Draws the first token of a sequence whose prompt is read, and returns its round 0."""
        began, sequence = self._system.clock(), reading.sequence
        self._end_reading(reading)
        token = on_all_ranks(self._target, self._system, reading.first_token)
        self._stay_behind.clear()  # these sequences may share what has been read
        aside = self._set_aside and self._set_aside.sequence
        together = [one for one in self.live if one.state in ("running", "reading") and one is not aside]
        self._setup.use_measured_link()
        self.tiers[0].control.choose_lengths(len(together), *self._setup.filling(together))
        self._agree([sequence], [RoundDecision([token], ends=sequence.is_to_end([token]))])
        sequence.context.append(token)
        now, opened = self._system.clock(), sequence.active
        opened.read_before = opened.full.read_so_far()
        opened.traffic_before = opened.full.traffic()
        seconds = reading.seconds + now - began
        waited_s = now - (reading.began if self._alone else sequence.asked_at)
        sequence.record(sequence.statistics.after_prefill(token, seconds, waited_s))
        sequence.state = "running"
        return Round(0, [token], seconds, 0, 0, False)

    def _filled(self, running: Sequence[BatchSequence]) -> list[BatchSequence]:
        """Fills the caches of the drafting tiers for sequences that have joined, before a round that may have drafts. A
        sequence without any drafts does not get these caches. Returns the sequences that can go on; the others have
        failed."""
        work = self.tiers[0].control.retrieval_work
        if work is RetrievalWork.NONE:
            return [*running]
        chooses = work is not RetrievalWork.REBUILD
        for sequence in [one for one in running if not one.active.drafting_filled]:
            opened = sequence.active
            fill = partial(opened.fill_drafting_caches, looks_up=self._setup.looks_up, chooses=chooses)
            began = self._system.clock()
            try:
                on_all_ranks(self._target, self._system, fill)
                seconds = self._system.clock() - began
                self._setup.note_filling(seconds)
                self.tiers[0].control.pays.note_filling(seconds)
            except ReadingError as error:
                if self._alone:
                    raise error.failure from None
                self._fail(sequence, error.failure)
                self._leave(sequence)
                continue
            if not sequence.statistics.rounds:  # it has not decoded yet
                opened.read_before, opened.traffic_before = opened.full.read_so_far(), opened.full.traffic()
        return [sequence for sequence in running if sequence.state == "running"]

    def _round(self, running: Sequence[BatchSequence]) -> list[Round]:
        """Computes a round of all running sequences. The time of a sequence's round begins with the end of its previous
        round. So all time between rounds is counted, including the prefill of others."""
        began = max(self._read_until, min(sequence.since for sequence in running))
        top, opened = self.tiers[0], [sequence.active for sequence in running]
        control, work, refreshes = top.control, top.control.retrieval_work, [one.refresh for one in opened]
        before = [(counts.proposed, counts.accepted) for counts in (one.counts["verify"] for one in opened)]
        for refresh in filter(None, refreshes):
            refresh.begin_round(work)
        emitted = [tokens for tokens, _ in top.step(opened, [sequence.missing for sequence in running])]
        control.last_retrieval_work = work
        control.choose_lengths(len(running), *self._setup.filling(running))
        drafts = control.draft_tokens > 0 or control.retrieval_work is RetrievalWork.FULL
        drawn, tested = [], []
        for sequence, refresh, tokens, (proposed, accepted) in zip(running, refreshes, emitted, before, strict=True):
            sequence.context.extend(tokens)
            counts = sequence.active.counts["verify"]
            tested.append((counts.proposed - proposed, counts.accepted - accepted))
            due = refresh is not None and refresh.is_due(work, *tested[-1], drafts=drafts)
            drawn.append(RoundDecision(tokens, due, sequence.is_to_end(tokens)))
        drawn = self._agree(running, drawn)
        device = opened[0].full.blocks.device
        refresh_s = control.after_round = end_round(
            work,
            [refresh for refresh in refreshes if refresh],
            [one.refresh for one in drawn],
            lambda: self._system.clock() - began,
            (lambda: self._system.synchronize(device)) if control.adapts_to_time else None,
        )
        now = self._system.clock()
        self.rounds_done += 1
        self.decode_s += now - began
        rounds = []
        for sequence, one, (proposed, accepted) in zip(running, drawn, tested, strict=True):
            seconds = now - sequence.since
            sequence.record(sequence.statistics.after_round(one.tokens, seconds, refresh_s, drafted=proposed > 0))
            sequence.since = now
            number = sequence.statistics.rounds
            rounds.append(Round(number, one.tokens, seconds, proposed, accepted, one.refresh))
        return rounds

    def _agree(self, sequences: Sequence[BatchSequence], drawn: list[RoundDecision]) -> list[RoundDecision]:
        """Replaces the decisions of this rank's tiers by those of rank 0, and adds the sequences that join. Returns the
        decisions that all ranks follow for these sequences. See `rank_agreement`."""
        self._note_interrupt()
        self._ask()
        decisions, waiting = [number for tier in self.tiers for number in tier.control.decisions], self._waiting()
        drawn, decisions, unwanted, joining, self._ended = agree(
            self._target.ranks,
            drawn,
            decisions,
            [one.asked_to_end for one in waiting],
            joining=len(self._joining),
            ends=self._asked_to_end,
        )
        self._end_unwanted(waiting, unwanted)
        each = len(decisions) // max(1, len(self.tiers))  # there are no tiers before a sequence was opened
        for i, tier in enumerate(self.tiers):
            tier.control.decisions = decisions[i * each : (i + 1) * each]
        for sequence, one in zip(sequences, drawn, strict=True):
            sequence.ends = one.ends
        if joining:
            self._join()
        return drawn
