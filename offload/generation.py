"""One run: prefill, then rounds of speculation, as an iterator over what each round brought."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..tp.devices import synchronize, to_device
from ..tp.model.decoder import forward_work
from .caches.full import FullCache
from .caches.retrieval import RetrievalCache
from .caches.streaming import StreamingCache, prefill_streaming
from .contexts.use import ContextUse
from .graphs.passes import Graphs
from .planning.memory import device_peak_bytes, host_peak_bytes, shortage_explained
from .rank_agreement import RankAgreement
from .run_document import run_document
from .speculation.refresh import RefreshPolicy
from .speculation.sampler import Sampler
from .speculation.sampling import read
from .speculation.tiers import Counts, Tier
from .statistics import Statistics


@dataclass(frozen=True)
class Round:
    """What one step of a run brought. Round 0 is the prefill and its first token."""

    index: int
    tokens: list[int]
    """1 or more tokens of the text."""
    seconds: float
    proposed: int
    """Draft tokens that the full cache's pass was given to test."""
    accepted: int
    """Those of them that were accepted."""
    refreshed: bool
    """Whether the retrieval cache was refreshed after it."""


@dataclass(frozen=True)
class Result:
    """A finished run: its tokens and the JSON described in docs/json.md."""

    token_ids: list[int]
    stats: dict[str, Any]


class Generation(Iterator[Round]):
    """A run in progress. Iterate over it for rounds; `statistics` is current at any time (a new object a
    round), `stats()` gives the JSON."""

    def __init__(
        self,
        *,
        context: list[int],
        max_new_tokens: int,
        full: FullCache,
        retrieval: RetrievalCache | None,
        streaming: StreamingCache | None,
        tiers: list[Tier],
        graphs: Graphs,
        sampler: Sampler,
        refresh: RefreshPolicy,
        identity: dict[str, Any],
        on_prefill: Callable[[float], None] | None,
        saved: ContextUse | None = None,
    ) -> None:
        """Args:
        context: the prompt; grows by the generated tokens. The first `full.length` of them are in `full` already.
        tiers: the full cache's tier first, then those below it.
        graphs: what captures their passes.
        identity: the part of the JSON that is known before the run.
        on_prefill: called with the share of the prefill done, 0 to 1.
        saved: the saved contexts that it starts from and saves.
        """
        self._context = context
        self._max_new_tokens = max_new_tokens
        self._full, self._retrieval, self._streaming = full, retrieval, streaming
        self._tiers, self._top = tiers, tiers[0]
        self._graphs, self._sampler = graphs, sampler
        self._refresh = refresh
        self._identity = identity
        self._on_prefill = on_prefill
        self.saved = saved
        """The saved contexts that the run starts from and saves, if any."""
        self._agreement = RankAgreement(self._top.decoder.ranks, len(tiers))
        self._traffic_before = full.blocks.traffic()
        self.statistics = Statistics(prompt_tokens=len(context), reused_tokens=full.length)
        self.broken = False
        """Whether a pass was under way when the run was broken off."""
        self._asked_to_end = self._ended = False  # the second by all ranks, after a round
        self._rounds = self._run()

    @torch.inference_mode()
    def __next__(self) -> Round:
        self.broken = True
        with shortage_explained(self._top.decoder.device):
            event = next(self._rounds, None)
        self.broken = False
        if event is None:
            raise StopIteration
        return event

    def close(self) -> None:
        """Ends the run where it is; iteration stops, statistics stay."""
        self._rounds.close()

    def end(self) -> None:
        """Ends the run early, on rank 0: iteration stops, statistics stay. Other ranks, if any, have begun the next
        round by then: it is computed when this rank iterates on, and all end with it."""
        if self._top.decoder.ranks.size == 1:
            self.close()
        self._asked_to_end = True

    def replace_last(self, token: int) -> None:
        """Goes on as if the newest token were another one; statistics keep the one that was drawn."""
        self._context[-1] = token

    @property
    def lengths(self) -> dict[str, int]:
        """The lengths in force: `draft_length` and `block_length`; 0 where there is no such level."""
        lengths = {tier.name: tier.draft_tokens if tier.drafter else 0 for tier in self._tiers}
        return {"draft_length": lengths.get("retrieval", 0), "block_length": lengths["verify"]}

    @property
    def warnings(self) -> list[str]:
        """What the run had to do without so far, a line each."""
        failure = self._graphs.failure
        found = [f"drafting goes without CUDA graphs, and slower: {failure}"] if failure else []
        return found + (self.saved.warnings if self.saved else [])

    def stats(self) -> dict[str, Any]:
        """The JSON of the run so far."""
        decoder = self._top.decoder
        statistics = replace(
            self.statistics,
            kv_bytes=self._full.length * self._full.token_bytes * decoder.ranks.size,
            host_peak_bytes=host_peak_bytes(),
            device_peak_bytes=device_peak_bytes(decoder.device),
        )
        identity = self._identity | {"context": self.saved.name if self.saved else None}
        return run_document(identity, statistics, self.lengths, self.warnings)

    def _run(self) -> Generator[Round, None, None]:
        whole = False
        try:
            yield self._prefill()
            began = time.perf_counter()
            while self.statistics.finish_reason == "interrupted" and not self._ended:
                event, began = self._round(began)
                yield event
            whole = True
        finally:
            if self.saved:
                self.saved.finish(together=whole)

    def _read_prompt(self) -> Tensor:
        """Restores what is saved of the prompt and computes the rest, in parts where it is to be saved; the logits
        after its last token."""
        decoder, full, saved = self._top.decoder, self._full, self.saved
        if saved:
            saved.begin(full)
        start, stop = full.length, len(self._context)
        self.statistics = replace(self.statistics, reused_tokens=start)
        logits = torch.empty(0)
        for end in saved.stops(start, stop) if saved else [stop]:
            pending = to_device(self._context[full.length : end], decoder.device)
            logits = decoder.forward(pending, full, on_progress=self._progress(start, full.length, end))
            if saved:
                saved.save(full)
        return logits

    def _progress(self, start: int, first: int, end: int) -> Callable[[float], None] | None:
        """What to call with the share done of the tokens `first` to `end`, where all from `start` on are to be read."""
        report, config = self._on_prefill, self._top.decoder.config
        if report is None:
            return None
        done, part = forward_work(config, start, first - start), forward_work(config, first, end - first)
        whole = forward_work(config, start, len(self._context) - start)
        return lambda share: report((done + share * part) / whole)

    def _prefill(self) -> Round:
        began = time.perf_counter()
        sampler = self._sampler
        logits = self._read_prompt()
        token = read(sampler.draw(sampler.distribution(logits), len(self._context)))[0]
        if self._retrieval:
            self._retrieval.refresh()
        if self._streaming:
            prefill_streaming(self._tiers[-1].decoder, self._streaming, self._context)
        self._top.choose_lengths()
        self._agree([token], refresh=False)
        self._context.append(token)
        seconds = time.perf_counter() - began
        self._full.reads.reset()
        self._traffic_before = self._full.blocks.traffic()
        self._record(self.statistics.after_prefill(token, seconds))
        return Round(0, [token], seconds, 0, 0, False)

    def _round(self, began: float) -> tuple[Round, float]:
        """One round, timed from `began` to the time it returns, so that nothing between rounds goes uncounted."""
        counts = self._top.counts
        proposed, accepted = counts.proposed, counts.accepted
        limit = self._max_new_tokens - len(self.statistics.token_ids)
        tokens, _ = self._top.step(self._context, limit, self._sampler)
        self._context += tokens
        proposed, accepted = counts.proposed - proposed, counts.accepted - accepted
        self._top.choose_lengths()
        refreshed = self._agree(tokens, self._refresh.due(accepted, proposed))
        refresh_s = self._update_retrieval(refreshed, time.perf_counter() - began)
        now = time.perf_counter()
        self._record(self.statistics.after_round(tokens, now - began, refresh_s))
        return Round(self.statistics.rounds, tokens, now - began, proposed, accepted, refreshed), now

    def _update_retrieval(self, refreshed: bool, round_seconds: float) -> float:
        """Brings the retrieval cache up to what was verified, with its chunks chosen anew or not; the seconds."""
        if self._retrieval is None:
            return 0.0
        began = time.perf_counter()
        if refreshed:
            self._retrieval.refresh()
        else:
            self._retrieval.update_tail()
        if refreshed and self._top.adapts_to_time and self._refresh.mode == "auto":
            synchronize(self._top.decoder.device)  # its cost decides when the next one comes
        seconds = time.perf_counter() - began
        if refreshed:
            self._refresh.done(seconds if self._top.adapts_to_time else 0.0, round_seconds)
        return seconds

    def _agree(self, tokens: list[int], refresh: bool) -> bool:
        """Sets every tier's draft tokens to rank 0's; whether all ranks refresh now. See `RankAgreement`."""
        draft_tokens = [tier.draft_tokens for tier in self._tiers]
        refresh, draft_tokens, self._ended = self._agreement.agree(
            tokens, refresh and self._retrieval is not None, draft_tokens, ends=self._asked_to_end
        )
        for tier, number in zip(self._tiers, draft_tokens, strict=True):
            tier.draft_tokens = number
        return refresh

    def _record(self, statistics: Statistics) -> None:
        """Completes `statistics`, which have the newest tokens, and puts them in place of the old ones in one step, so
        that an interrupt finds either."""
        ended = statistics.finish_reason
        if self._sampler.ends(statistics.token_ids[-1]):
            ended = "eos"
        elif len(statistics.token_ids) >= self._max_new_tokens:
            ended = "length"
        counts = {tier.name: tier.counts for tier in self._tiers}
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
            kv_read_bytes=self._full.reads.num_bytes,
            kv_read_s=self._full.reads.seconds,
            link=self._full.blocks.traffic().since(self._traffic_before),
        )
