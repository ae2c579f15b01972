"""A sequence of a batch: what it was asked for, its caches, and what it brought so far."""

from __future__ import annotations

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


@dataclass(frozen=True)
class Round:
    """What one round of a sequence brought. Round 0 is the prefill and its first token."""

    index: int
    tokens: list[int]
    """1 or more tokens of the text."""
    seconds: float
    proposed: int
    """Draft tokens that the full cache's pass was given to test."""
    accepted: int
    """Those of them that were accepted."""
    refreshed: bool
    """Whether chunks of the retrieval cache were chosen anew after it, as `--refresh` says or as the tail was full: not
    where they are because drafting begins again."""


@dataclass(eq=False, kw_only=True)
class ActiveSequence(TokenSequence):
    """A sequence while it is decoded: with its caches, which it gives back when it ends."""

    plan: RunPlan
    full: FullCache
    drafting: DraftingCaches | None
    """`None` where nothing is ever drafted."""
    refresh: RetrievalRefresh | None
    """Of its retrieval cache, if it has one."""
    saved: ContextUse | None
    identity: dict[str, Any]
    """The part of its JSON that is known before it is read."""
    traffic_before: Traffic = field(default_factory=Traffic)
    read_before: ReadCounter = field(default_factory=ReadCounter)
    """What attention had read when its prefill ended."""
    drafting_filled: bool = False
    """Whether the drafting tiers' caches were filled: they are before the first round for which anything may be
    drafted."""

    @property
    def retrieval(self) -> RetrievalCache | None:
        return self.drafting and self.drafting.retrieval

    @property
    def streaming(self) -> StreamingCache | None:
        return self.drafting and self.drafting.streaming

    def fill_drafting_caches(self, *, looks_up: bool, chooses: bool) -> None:
        """Fills the drafting tiers' caches with what they need of the context.

        Args:
            looks_up: whether what occurred before is proposed.
            chooses: whether chunks are chosen now, by the attention of the full cache's last pass; else the round to
                come does that.
        """
        if self.streaming:  # before the retrieval cache takes memory
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
        """Bytes that it may take on the device and keep, from its first rounds on, of those that are planned."""
        plan = self.plan
        parts = {"retrieval": plan.retrieval, "mass": plan.mass, "scratch": plan.scratch}
        own = (self.full, *([self.drafting] if self.drafting else []), self.passes["verify"])  # not what it shares
        held = bytes_by_part(one for holder in own for one in holder.held() if one[0] in parts)
        return sum(max(0, size // plan.request.sequences - held.get(part, 0)) for part, size in parts.items())


class BatchSequence:
    """One of the sequences that are decoded together."""

    def __init__(self, order: Order, asked_at: float, request: Request | None = None) -> None:
        """Args:
        asked_at: when it was asked for, by the run's clock.
        request: what was asked for, on rank 0, if its stop check or its tag is wanted.
        """
        self.order, self._request = order, request
        self.context = list(order.prompt)
        """The prompt and the tokens so far."""
        self.statistics = Statistics(prompt_tokens=len(order.prompt))
        """Current at any time: a new object a round."""
        self.state: Literal["waiting", "reading", "running", "ended"] = "waiting" if order.error is None else "ended"
        self.failure: Exception | None = order.error
        """What it failed with, while others went on."""
        self.read_share = 0.0
        """Of its prompt, what is read, 0 to 1."""
        self.waits_for: str | None = None
        """Why it has not begun, where others had to be served first."""
        self.active_or_none: ActiveSequence | None = None
        self.asked_at = asked_at
        self.since = asked_at
        """When its last round ended."""
        self.logprobs: list[TokenLogprobs] = []
        """Of the tokens so far, where the request wants them."""
        self.asked_to_end = self.ends = False  # the second by all ranks, after a round
        self.check_failure: Exception | None = None
        """What its stop check failed with, on rank 0."""
        self._warnings: list[str] = []
        self._document: dict[str, Any] | None = None  # once the caches are given back

    @property
    def active(self) -> ActiveSequence:
        """The same, from when it begins until it ends."""
        assert self.active_or_none is not None
        return self.active_or_none

    @property
    def error(self) -> str | None:
        """The message of what it failed with."""
        return None if self.failure is None else str(self.failure)

    @property
    def tag(self) -> Any:
        """See `Request`; `None` on other ranks."""
        return self._request and self._request.tag

    def is_to_end(self, tokens: list[int]) -> bool:
        """Whether it is to end with these new tokens, asked to, by its stop check, or as that fails; on rank 0."""
        stops = self._request and self._request.stops
        try:
            return bool(stops and stops(tokens)) or self.asked_to_end
        except Exception as error:
            error.__traceback__ = None  # its frames hold this sequence
            self.check_failure = error
            return True

    @property
    def is_unfinished(self) -> bool:
        """Whether more tokens are to come."""
        return self.statistics.finish_reason == "interrupted"

    @property
    def missing(self) -> int:
        """Tokens that may still come."""
        return self.order.max_new_tokens - len(self.statistics.token_ids)

    @property
    def saved(self) -> ContextUse | None:
        """The saved contexts that it starts from and saves, if any."""
        return self.active_or_none.saved if self.active_or_none else None

    @property
    def warnings(self) -> list[str]:
        """What it had to do without so far, a line each."""
        return self.saved.warnings if self.saved else self._warnings

    def record(self, statistics: Statistics) -> None:
        """Completes `statistics`, which have the newest tokens, and puts them in place of the old ones in one step, so
        that an interrupt finds either."""
        ended, opened = statistics.finish_reason, self.active
        if opened.sampler.ends(statistics.token_ids[-1]):
            ended = "eos"
        elif len(statistics.token_ids) >= self.order.max_new_tokens:
            ended = "length"
        counts, read = opened.counts, opened.full.read_so_far()
        verify = counts["verify"]
        retrieval, draft = counts.get("retrieval", Counts()), counts.get("draft", Counts())
        self.statistics = replace(
            statistics,
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

        Args: `lengths` are those in force.
        """
        if self.active_or_none is None:
            return self._document or {"error": self.error, "new_tokens": 0, "token_ids": []}
        full, identity, saved = self.active_or_none.full, self.active_or_none.identity, self.saved
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
        """Parts with the caches; statistics and its JSON stay.

        Args:
            lengths, warnings: for the JSON.
            synchronize: waits for a device.
        """
        opened, document = self.active_or_none, self.document(lengths, warnings)
        if opened is not None:
            self._document, self._warnings, self.active_or_none = document, self.warnings, None
            with suppress(LinkError):  # of what is not wanted any more
                opened.full.blocks.drain()  # copies may be under way from and to memory that is freed
            synchronize(opened.full.blocks.device)
            opened.full.release_prefix()

    def forget_request(self) -> None:
        """Drops what was asked, once whoever asked has taken note of its end: it may refer to this sequence."""
        self._request = None

    def forget_prompt(self) -> None:
        """Drops the tokens of prompt and answer; the answer is in the statistics."""
        self.order, self.context = replace(self.order, prompt=[]), []


def kv_bytes_of(sequences: Iterable[BatchSequence]) -> int:
    """Keys and values of these sequences, on one rank; what several share counts once."""
    holders = {holder for one in sequences if one.active_or_none for holder in one.active_or_none.full.holders}
    return sum((holder.length - holder.start) * holder.token_bytes for holder in holders)
