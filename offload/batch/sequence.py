"""A sequence of a batch: its order, its caches, and its results so far."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from ..caches.full import FullCache, ReadCounter
from ..caches.retrieval import RetrievalCache
from ..caches.streaming import StreamingCache, prefill_streaming
from ..contexts.use import ContextUse
from ..held import Held, bytes_by_part
from ..planning.memory import device_peak_bytes, host_peak_bytes
from ..planning.run_plan import RunPlan
from ..run_document import run_document
from ..speculation.refresh import RetrievalRefresh
from ..speculation.sampling import TokenLogprobs
from ..speculation.sequence import Counts, TokenSequence
from ..statistics import Statistics
from ..transfer.link import LinkError, Traffic
from .drafting_caches import DraftingCaches
from .request import Order, Request

State = Literal["waiting", "reading", "running", "saving", "ended"]
"""`reading` is the prefill, `running` the decoding. In the state `saving`, only a context of the sequence must still be
written to the disk."""


@dataclass(frozen=True)
class Round:
    """The result of one round of a sequence. Round 0 is the prefill and its first token."""

    index: int
    """The number of the round in its sequence, from 0."""
    tokens: list[int]
    """1 or more tokens of the text."""
    seconds: float
    """The time of the round, from the end of the previous round; of round 0, the time of the prefill."""
    proposed: int
    """The number of draft tokens in the verification."""
    accepted: int
    """The number of draft tokens that were accepted."""
    refreshed: bool
    """Whether the retrieval cache was refreshed after the round, because of `--refresh` or because its tail was full.
    `False` if chunks are chosen again because drafting begins again."""


@dataclass(eq=False, kw_only=True)
class ActiveSequence(TokenSequence):
    """A sequence with its caches, while it is decoded. When it ends, it gives the caches back."""

    plan: RunPlan
    full: FullCache
    drafting: DraftingCaches | None
    """The caches of the drafting tiers; `None` if nothing is ever drafted."""
    refresh: RetrievalRefresh | None
    """Refreshes the retrieval cache, if there is one."""
    saved: ContextUse | None
    """The saved contexts that the sequence starts from and saves, if any."""
    identity: Callable[[], dict[str, Any]]
    """Returns the part of the sequence's JSON (`BatchSequence.document`) that is not measured; see `run_identity`."""
    traffic_before: Traffic = field(default_factory=Traffic)
    """The traffic over the link and the disk when decoding began."""
    read_before: ReadCounter = field(default_factory=ReadCounter)
    """What attention had read when decoding began."""
    drafting_filled: bool = False
    """Whether the caches of the drafting tiers are filled. They are filled before the first round that may have
    drafts."""
    _unallocated: tuple[tuple[int, bool], int] | None = None

    @property
    def retrieval(self) -> RetrievalCache | None:
        """The retrieval cache, if there is one."""
        return self.drafting and self.drafting.retrieval

    @property
    def streaming(self) -> StreamingCache | None:
        """The draft's streaming cache, if there is one."""
        return self.drafting and self.drafting.streaming

    def fill_drafting_caches(self, *, looks_up: bool, chooses: bool) -> None:
        """Fills the caches of the drafting tiers from the context.

        Args:
            looks_up: whether tokens are drafted by lookup.
            chooses: whether to choose chunks here, by the attention of the last pass over the full cache. Otherwise the
                next round chooses them.
        """
        if self.streaming:  # before the retrieval cache allocates memory
            prefill_streaming(self.passes["draft"].decoder, self.streaming, self.context[:-1])
        if self.retrieval:
            self.retrieval.refresh(at_once=True) if chooses else self.retrieval.reserve()
        if looks_up:
            self.lookup.occurrences.follow(self.context)
        self.drafting_filled = True

    def held(self) -> Held:
        """See `offload.held`."""
        for holder in self.full.holders:
            yield from holder.held()
        if self.drafting:
            yield from self.drafting.held()
        yield from self.passes["verify"].held()

    @property
    def unallocated_bytes(self) -> int:
        """Planned bytes that the sequence has not allocated on the device yet. It may allocate them in its first rounds
        and then keeps them."""
        if self.full.under_way:
            return self._find_unallocated()
        then = self.full.length, self.drafting_filled  # between two passes, nothing is allocated
        if self._unallocated is None or self._unallocated[0] != then:
            self._unallocated = then, self._find_unallocated()
        return self._unallocated[1]

    def _find_unallocated(self) -> int:
        plan = self.plan
        parts = {"retrieval": plan.retrieval, "mass": plan.mass, "scratch": plan.scratch}
        own = (self.full, *([self.drafting] if self.drafting else []), self.passes["verify"])  # no shared caches
        held = bytes_by_part(one for holder in own for one in holder.held() if one[0] in parts)
        found = sum(max(0, size // plan.request.sequences - held.get(part, 0)) for part, size in parts.items())
        streaming = self.drafting.streaming if self.drafting else None
        return found + (streaming.untouched_bytes if streaming else 0)


class BatchSequence:
    """One of the sequences that are decoded together."""

    def __init__(self, order: Order, asked_at: float, request: Request | None = None) -> None:
        """Args:
        order: the checked request.
        asked_at: when the request came, in seconds of the run's clock.
        request: the request itself, on rank 0, if its stop check or its tag is needed.
        """
        self.order, self._request = order, request
        self.context = order.prompt[:]
        """The prompt and the tokens so far."""
        self.statistics = Statistics(prompt_tokens=len(order.prompt))
        """The counts and times so far. Each round replaces the object, so that it can be read at any time."""
        self.state: State = "waiting" if order.error is None else "ended"
        self.failure: Exception | None = order.error
        """The error with which the sequence failed, while others went on."""
        self.read_share = 0.0
        """The finished share of the prefill, 0 to 1."""
        self.waits_for: str | None = None
        """Why the sequence has not begun yet, if it has to wait for others."""
        self.active_or_none: ActiveSequence | None = None
        """The sequence with its caches, from when it begins until it ends."""
        self.asked_at = asked_at
        """When the request came, in seconds of the run's clock."""
        self.since = asked_at
        """When the last round ended, in seconds of the run's clock."""
        self.logprobs: list[TokenLogprobs] = []
        """The log probabilities of the tokens so far, if the request asks for them."""
        self.asked_to_end = self.ends = False  # the second: all ranks agreed, after a round
        self.check_failure: Exception | None = None
        """The error of the stop check, on rank 0."""
        self._warnings: list[str] = []
        self._document: dict[str, Any] | None = None  # the JSON, once the caches are given back

    @property
    def unread(self) -> int:
        """The number of tokens of the context that the full cache lacks. For a sequence that has begun and not
        ended; see `active`."""
        return len(self.context) - self.active.full.length

    @property
    def active(self) -> ActiveSequence:
        """The sequence with its caches. Only from when it begins until it ends."""
        assert self.active_or_none is not None
        return self.active_or_none

    @property
    def error(self) -> str | None:
        """The message of the error with which the sequence failed; `None` if it did not fail."""
        return None if self.failure is None else str(self.failure)

    @property
    def tag(self) -> Any:
        """See `Request.tag`; `None` on ranks above 0."""
        return self._request and self._request.tag

    def is_to_end(self, tokens: list[int]) -> bool:
        """Whether the sequence ends with these new tokens: it was asked to end, or its stop check returns `True` or
        fails. For rank 0."""
        stops = self._request and self._request.stops
        try:
            return bool(stops and stops(tokens)) or self.asked_to_end
        except Exception as error:
            error.__traceback__ = None  # its frames hold this sequence
            self.check_failure = error
            return True

    @property
    def is_unfinished(self) -> bool:
        """Whether the sequence has not ended by length or by an end-of-sequence token."""
        return self.statistics.finish_reason == "interrupted"

    @property
    def missing(self) -> int:
        """The maximum number of tokens that may still come."""
        return self.order.max_new_tokens - len(self.statistics.token_ids)

    @property
    def saved(self) -> ContextUse | None:
        """The saved contexts that the sequence starts from and saves, if any. `None` before it begins and after it
        ends."""
        return self.active_or_none.saved if self.active_or_none else None

    @property
    def warnings(self) -> list[str]:
        """The warnings of the sequence so far, one line each."""
        return self.saved.warnings if self.saved else self._warnings

    def record(self, statistics: Statistics) -> None:
        """Completes `statistics`, which have the newest tokens, and replaces the old statistics in one step. So an
        interrupt finds either the old or the new ones."""
        ended, opened = statistics.finish_reason, self.active
        if opened.sampler.ends(statistics.token_ids[-1]):
            ended = "eos"
        elif len(statistics.token_ids) >= self.order.max_new_tokens:
            ended = "length"
        counts, read = opened.counts, opened.full.read_so_far()
        verify = counts["verify"]
        retrieval, draft = counts.get("retrieval", Counts()), counts.get("draft", Counts())
        self.statistics = statistics.changed(
            finish_reason=ended,
            verify_s=verify.seconds,
            retrieval_s=retrieval.seconds,
            draft_s=draft.seconds,
            retrieval_proposed=verify.proposed,
            retrieval_accepted=verify.accepted,
            retrieval_tested=verify.tested,
            draft_proposed=retrieval.proposed,
            draft_accepted=retrieval.accepted,
            draft_tested=retrieval.tested,
            kv_read_bytes=read.num_bytes - opened.read_before.num_bytes,
            kv_read_s=read.seconds - opened.read_before.seconds,
            link=opened.full.traffic().since(opened.traffic_before),
        )

    def document(self, lengths: dict[str, int], warnings: list[str]) -> dict[str, Any]:
        """The JSON of the sequence so far.

        Args: `lengths` are the current ones, see `Run.lengths`; `warnings` have one line each.
        """
        if self.active_or_none is None:
            return self._document or {"error": self.error, "new_tokens": 0, "token_ids": []}
        full, identity, saved = self.active_or_none.full, self.active_or_none.identity(), self.saved
        statistics = replace(
            self.statistics,
            kv_bytes=full.length * full.token_bytes * identity["world_size"],
            host_peak_bytes=host_peak_bytes(),
            device_peak_bytes=device_peak_bytes(full.blocks.device),
        )
        identity = identity | {"context": saved.name if saved else None}
        found = run_document(identity, statistics, lengths, warnings)
        return found if self.error is None else {**found, "error": self.error}

    def give_back(
        self, lengths: dict[str, int], warnings: list[str], synchronize: Callable[[torch.device], None]
    ) -> None:
        """Gives the caches back. Statistics and JSON stay.

        Args:
            lengths, warnings: for the JSON.
            synchronize: waits for a device.
        """
        opened, document = self.active_or_none, self.document(lengths, warnings)
        if opened is not None:
            self._document, self._warnings, self.active_or_none = document, self.warnings, None
            with suppress(LinkError):  # the copied data is not needed any more
                opened.full.blocks.drain()  # copies from and to memory that is freed may be in progress
            synchronize(opened.full.blocks.device)
            opened.full.release_prefix()

    def forget_request(self) -> None:
        """Drops the request, which may refer to this sequence. Call it after the end of the sequence is handled."""
        self._request = None

    def forget_prompt(self) -> None:
        """Drops the tokens of prompt and answer. The answer's tokens stay in the statistics."""
        self.order, self.context = replace(self.order, prompt=array("i")), array("i")


def kv_bytes_of(sequences: Iterable[BatchSequence]) -> int:
    """Bytes of the keys and values of these sequences, on one rank. Shared ones count once."""
    holders = {holder for one in sequences if one.active_or_none for holder in one.active_or_none.full.holders}
    return sum((holder.length - holder.start) * holder.token_bytes for holder in holders)
