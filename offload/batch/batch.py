"""Sequences that are decoded together: each is read, then all take the rounds of speculation in step.

A run alone is a batch of one. Sequences join and leave between rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...tp.devices import synchronize
from ...tp.errors import CapacityError, TriforceError
from ..caches.streaming import prefill_streaming
from ..contexts.model import ContextPlan
from ..contexts.use import ContextUse
from ..graphs.passes import Graphs
from ..planning.memory import device_peak_bytes, host_peak_bytes, shortage_explained
from ..rank_agreement import Drawn, RankAgreement
from ..run_document import link_document, memory_document
from ..settings import MOST_SEQUENCES
from ..speculation.sampler import distributions, draw
from ..speculation.sampling import read
from ..speculation.tiers import Tier
from .opening import Opening
from .reading import read_prompt
from .request import Order, Request
from .sequence import BatchSequence, Round


class Batch(Iterator[tuple[int, Round]]):
    """Sequences in progress. Iterate over it for rounds, each with the index of its sequence; `sequences` are current
    at any time, `stats()` gives the JSON."""

    def __init__(
        self,
        orders: Sequence[Order],
        opening: Opening,
        graphs: Graphs,
        *,
        alone: bool = False,
        most: int = MOST_SEQUENCES,
        reuse: int | None = None,
        contexts: ContextPlan | None = None,
        on_prefill: Callable[[int, float], None] | None = None,
        on_memory: Callable[[float], None] | None = None,
    ) -> None:
        """Args:
        graphs: what captures passes.
        alone: whether it is a run of one sequence: an error of it is raised, and it keeps its caches when it ends.
        most: sequences that are decoded together; further ones wait.
        reuse, contexts, on_memory: of the first sequence, see `Opening.open`.
        on_prefill: called with a sequence's index and the share of its prefill that is done, 0 to 1.
        """
        self._opening, self._graphs, self._alone = opening, graphs, alone
        self._target = opening.target
        self._most, self._reuse, self._contexts = min(most, MOST_SEQUENCES), reuse, contexts
        self._on_prefill, self._on_memory = on_prefill, on_memory
        self._agreement = RankAgreement(self._target.ranks)
        self._joining: list[Order] = []
        self._short_of_memory = False  # since no sequence has left
        now = time.perf_counter()
        self.sequences = [BatchSequence(order, now) for order in orders]
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
        with shortage_explained(self._target.device):
            event = next(self._steps, None)
        self.broken = False
        if event is None:
            raise StopIteration
        return event

    def add(self, request: Request) -> int:
        """Has a further sequence join before the next round; its index. For rank 0."""
        order = Order.or_error(request, self._target.config)
        self._joining.append(order)
        return len(self.sequences) + len(self._joining) - 1

    def end(self, index: int) -> None:
        """Ends a sequence with the round that is under way, or before it begins; its statistics stay. For rank 0."""
        joining = index - len(self.sequences)
        if joining < 0:
            self.sequences[index].asked_to_end = True
        else:
            self._joining[joining] = replace(self._joining[joining], error="it was ended before it began")

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
        failure = self._graphs.failure
        found = [f"drafting goes without CUDA graphs, and slower: {failure}"] if failure else []
        found += self._opening.threads.warnings
        for sequence in self.sequences:
            found += sequence.warnings
        return found

    def document(self, index: int) -> dict[str, Any]:
        """The JSON of a sequence so far."""
        return self.sequences[index].document(self.lengths, self.warnings)

    def stats(self) -> dict[str, Any]:
        """The JSON of the batch so far."""
        documents = [self.document(i) for i in range(len(self.sequences))]
        begun = [document for document in documents if "version" in document]
        shared = ("version", "model", "draft", "device", "device_name", "world_size", "kernels", "dtype")
        traffic = self._opening.traffic().since(self._traffic_before)
        statistics = [sequence.statistics for sequence in self.sequences]
        decoded = sum(len(s.token_s) for s in statistics)
        return {
            **{name: begun[0][name] for name in shared if begun},
            "new_tokens": sum(len(s.token_ids) for s in statistics),
            "prefill_s": sum(s.prefill_s for s in statistics),
            "decode_s": self._decode_s,
            "tokens_per_s": decoded / self._decode_s if self._decode_s else 0.0,
            "rounds": self._rounds_done,
            "link": link_document(traffic),
            "memory": memory_document(
                device_peak_bytes(self._target.device), host_peak_bytes(), self._kv_bytes * self._target.ranks.size
            ),
            "settings": begun[0]["settings"] if begun else {},
            "warnings": self.warnings,
            "sequences": documents,
        }

    @property
    def saved(self) -> ContextUse | None:
        """The saved contexts that the first sequence starts from and saves, if any."""
        return next((one.saved for one in self.sequences if one.saved), None)

    def _held_bytes(self) -> int:
        """Keys and values of all sequences, on one rank; what several share counts once."""
        opened = [one.caches.full for one in self.sequences if one.caches]
        holders = {holder for full in opened for holder in full.holders}
        return sum((holder.length - holder.start) * holder.token_bytes for holder in holders)

    def open_first(self) -> None:
        """Takes the memory of the first sequence, before anything is read.

        Raises:
            CapacityError, UsageError: it cannot be answered.
        """
        self._open(self.sequences[0])

    def _open(self, sequence: BatchSequence) -> None:
        running = [one for one in self.sequences if one.state == "running"]
        first = next(one for one in self.sequences if one.order.error is None)  # whom the plan was made for
        contexts = self._contexts if sequence is first else None
        self._opening.open(sequence, running, reuse=self._reuse, contexts=contexts, on_memory=self._on_memory)

    def _run(self) -> Generator[tuple[int, Round], None, None]:
        whole = False
        try:
            while not self._ended:
                yield from self._admit()
                running = [i for i, one in enumerate(self.sequences) if one.state == "running"]
                if not running:
                    known = len(self.sequences)
                    if not self._alone:
                        self._agree([], [])  # some may have been added since
                    if len(self.sequences) == known:
                        break
                    continue
                with self._opening.threads.in_use():
                    rounds = self._round([self.sequences[i] for i in running])
                yield from zip(running, rounds, strict=True)
                for i in running:
                    one = self.sequences[i]
                    if not one.goes_on or one.ends:
                        self._leave(one)
            whole = True
        finally:
            for sequence in self.sequences:
                if sequence.saved:
                    sequence.saved.finish(together=whole)

    def _admit(self) -> Generator[tuple[int, Round], None, None]:
        """Opens and reads the sequences that wait, in their order, as long as they fit."""
        for i, sequence in enumerate(self.sequences):
            if sequence.state != "waiting" or self._ended:
                continue
            others = sum(one.state == "running" for one in self.sequences)
            if sequence.asked_to_end and self._target.ranks.size == 1:
                sequence.state = "ended"
                continue
            if others >= self._most:
                sequence.waits_for = f"{others} sequences are decoded together; --max-sequences raises that"
                continue
            if self._short_of_memory and others:
                return
            if sequence.caches is None and not self._opens(sequence, others):
                if sequence.state == "waiting":
                    return  # those behind it wait too, or it might wait for ever
                continue
            sequence.state, sequence.waits_for = "reading", None
            event = self._first_round(i, sequence)
            if event is None:
                continue
            yield i, event
            sequence.since = time.perf_counter()
            if not sequence.goes_on:
                self._leave(sequence)

    def _opens(self, sequence: BatchSequence, others: int) -> bool:
        """Opens a sequence; if that cannot be done it waits, while `others` run, or has failed; one that was to end has
        ended. All ranks decide alike.

        Raises:
            TriforceError: it cannot be done, of a run alone.
        """
        ranks = self._target.ranks
        while True:
            found: TriforceError | None = None
            try:
                self._open(sequence)
            except TriforceError as error:
                found = error
            fits, wanted = ranks.least([int(found is None), int(not sequence.asked_to_end)])
            if fits and wanted:
                return True
            sequence.caches = None
            self._opening.withdraw(sequence)
            if not wanted:
                sequence.state = "ended"
                return False
            found = found or CapacityError("another rank has not so much memory")
            if self._alone:
                raise found
            if not isinstance(found, CapacityError):
                self._fail(sequence, str(found))
                return False
            if others:
                sequence.waits_for, self._short_of_memory = f"memory: {found}", True
                return False
            if not self._opening.begin_anew():  # what the first one left is given back for it
                self._fail(sequence, str(found))
                return False

    def _first_round(self, index: int, sequence: BatchSequence) -> Round | None:
        """Reads a prompt; `None` where memory did not suffice for that, and the sequence alone has failed."""
        try:
            with shortage_explained(self._target.device):
                return self._prefill(index, sequence)
        except CapacityError as error:
            if self._alone or self._target.ranks.size > 1:
                raise
            sequence.give_back(self.lengths)
            self._fail(sequence, str(error))
            return None

    def _leave(self, sequence: BatchSequence) -> None:
        sequence.state, self._short_of_memory = "ended", False
        if sequence.saved:
            sequence.saved.finish(together=True)
        if not self._alone:
            sequence.give_back(self.lengths)
            self.tiers[0].part_with()
            if not self._opening.is_kept(sequence):
                sequence.forget_prompt()

    def _fail(self, sequence: BatchSequence, error: str) -> None:
        sequence.state, sequence.error = "ended", error

    def _prefill(self, index: int, sequence: BatchSequence) -> Round:
        began = time.perf_counter()
        caches, samplers = sequence.opened, [sequence.sampler]
        report = self._on_prefill
        logits = read_prompt(self._target, sequence, report and (lambda share: report(index, share)))
        weights = distributions(logits, samplers, [1])
        token = read(draw(weights, samplers, [1], [len(sequence.context)]))[0]
        if caches.retrieval:
            caches.retrieval.refresh()
        if caches.streaming:
            prefill_streaming(caches.tokens.passes["draft"].decoder, caches.streaming, sequence.context)
        if self._opening.looks_up:
            caches.tokens.lookup.occurrences.follow(sequence.context)
        running = sum(one.state in ("running", "reading") for one in self.sequences)
        self.tiers[0].choose_lengths(running)
        self._agree([sequence], [Drawn([token])])
        sequence.context.append(token)
        now = time.perf_counter()
        caches.read_before = caches.full.read_so_far()
        caches.traffic_before = caches.full.traffic()
        statistics = sequence.statistics.after_prefill(token, now - began)
        waited = 0.0 if self._alone else began - sequence.joined
        self._read_until = now
        self._kv_bytes = max(self._kv_bytes, self._held_bytes())
        sequence.record(replace(statistics, ttft_s=now - began + waited))
        sequence.state = "running"
        return Round(0, [token], now - began, 0, 0, False)

    def _round(self, running: Sequence[BatchSequence]) -> list[Round]:
        """One round of all that run, each timed from the end of its last one to the end of this, so that nothing
        between rounds goes uncounted."""
        began = min(sequence.since for sequence in running)
        top, tokens_of = self.tiers[0], [sequence.opened.tokens for sequence in running]
        before = [(counts.proposed, counts.accepted) for counts in (one.counts["verify"] for one in tokens_of)]
        emitted = top.step(tokens_of, [sequence.missing for sequence in running])
        drawn, tested = [], []
        for sequence, (tokens, _), (proposed, accepted) in zip(running, emitted, before, strict=True):
            sequence.context += tokens
            counts = sequence.opened.tokens.counts["verify"]
            tested.append((counts.proposed - proposed, counts.accepted - accepted))
            due = sequence.opened.refresh.due(tested[-1][1], tested[-1][0])
            drawn.append(Drawn(tokens, due and sequence.opened.retrieval is not None, sequence.asked_to_end))
        top.choose_lengths(len(running))
        drawn = self._agree(running, drawn)
        refresh_s = self._update_retrieval(running, drawn, time.perf_counter() - began)
        now = time.perf_counter()
        self._rounds_done += 1
        self._decode_s += now - max(began, self._read_until)
        rounds = []
        for sequence, one, (proposed, accepted) in zip(running, drawn, tested, strict=True):
            seconds = now - sequence.since
            sequence.record(sequence.statistics.after_round(one.tokens, seconds, refresh_s))
            sequence.since = now
            number = sequence.statistics.rounds
            rounds.append(Round(number, one.tokens, seconds, proposed, accepted, one.refresh))
        return rounds

    def _update_retrieval(
        self, running: Sequence[BatchSequence], drawn: Sequence[Drawn], round_seconds: float
    ) -> float:
        """Brings the retrieval caches up to what was verified, with their chunks chosen anew or not; the seconds."""
        began = time.perf_counter()
        top, refreshed = self.tiers[0], []
        for sequence, one in zip(running, drawn, strict=True):
            retrieval = sequence.opened.retrieval
            if retrieval is None:
                return 0.0
            if one.refresh:
                retrieval.refresh()
                refreshed.append(sequence.opened.refresh)
            else:
                retrieval.update_tail()
        if refreshed and top.adapts_to_time and refreshed[0].mode == "auto":
            synchronize(self._target.device)  # its cost decides when the next one comes
        seconds = time.perf_counter() - began
        for policy in refreshed:
            policy.done(seconds if top.adapts_to_time else 0.0, round_seconds)
        return seconds

    def _agree(self, sequences: Sequence[BatchSequence], drawn: list[Drawn]) -> list[Drawn]:
        """Sets every tier's draft tokens to rank 0's; what all ranks do with these sequences. See `RankAgreement`."""
        lengths = [tier.draft_tokens for tier in self.tiers]
        joining = len(self._joining)
        drawn, lengths, joining, self._ended = self._agreement.agree(
            drawn, lengths, joining=joining, ends=self._asked_to_end
        )
        for tier, number in zip(self.tiers, lengths, strict=True):
            tier.draft_tokens = number
        for sequence, one in zip(sequences, drawn, strict=True):
            sequence.ends = one.ends
        if joining:
            self._join(joining)
        return drawn

    def _join(self, count: int) -> None:
        """Takes in the sequences that were added."""
        orders, self._joining = self._joining[:count], self._joining[count:]
        orders = self._target.ranks.share(orders)
        now = time.perf_counter()
        self.sequences += [BatchSequence(order, now) for order in orders]
