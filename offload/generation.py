"""One run: prefill, then rounds of speculation, as an iterator of what happened; statistics grow beside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..tp.devices import synchronize, to_device
from ..tp.errors import TriforceError
from .caches.full import FullCache
from .caches.retrieval import RetrievalCache
from .caches.streaming import StreamingCache, prefill_streaming
from .graphs.passes import Graphs
from .planning.memory import device_peak_bytes, host_peak_bytes, shortage_explained
from .settings import MOST_BLOCK_LENGTH
from .speculation.refresh import RefreshPolicy
from .speculation.sampling import distribution, draw, read
from .speculation.tiers import Counts, Draws, Tier
from .statistics import Statistics


@dataclass(frozen=True)
class Round:
    """What one step of a run brought. Round 0 is the prefill and its first token."""

    index: int
    tokens: list[int]
    """1 or more tokens of the text."""
    seconds: float
    proposed: int
    """Tokens offered to the full cache's pass."""
    accepted: int
    """Those of them that stood."""
    refreshed: bool


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
        draws: Draws,
        refresh: RefreshPolicy,
        identity: dict[str, Any],
        on_prefill: Callable[[float], None] | None,
    ) -> None:
        """Args:
        context: the prompt; grows by the generated tokens. The first `full.length` of them are in `full` already.
        tiers: the full cache's tier first, then those below it.
        graphs: what captures their passes.
        identity: the part of the JSON that is known before the run.
        on_prefill: called with the share of the prefill done.
        """
        self._context, self._prompt_tokens = context, len(context)
        self._max_new_tokens = max_new_tokens
        self._full, self._retrieval, self._streaming = full, retrieval, streaming
        self._tiers, self._top = tiers, tiers[0]
        self._graphs, self._draws = graphs, draws
        self._refresh = refresh
        self._identity = identity
        self._on_prefill = on_prefill
        self._traffic_before = full.blocks.traffic()
        self.statistics = Statistics(prompt_tokens=len(context), reused_tokens=full.length)
        self.broken = False
        """Whether a pass was under way when the run was broken off."""
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

    @property
    def lengths(self) -> dict[str, int]:
        """The lengths in force: `draft_length` and `block_length`; 0 where there is no such level."""
        lengths = {tier.name: tier.draft_tokens if tier.drafter else 0 for tier in self._tiers}
        return {"draft_length": lengths.get("retrieval", 0), "block_length": lengths["verify"]}

    def stats(self) -> dict[str, Any]:
        """The JSON of the run so far."""
        measured = replace(self.statistics, **self._memory()).as_dict()
        settings = self._identity["settings"] | self.lengths
        return self._identity | measured | {"settings": settings, "warnings": self.warnings}

    @property
    def warnings(self) -> list[str]:
        """What the run had to do without so far, a line each."""
        failure = self._graphs.failure
        return [f"drafting goes without CUDA graphs, and slower: {failure}"] if failure else []

    def _run(self) -> Generator[Round, None, None]:
        yield self._prefill()
        began = time.perf_counter()
        while self.statistics.finish_reason == "interrupted":
            event, began = self._round(began)
            yield event

    def _prefill(self) -> Round:
        began = time.perf_counter()
        decoder = self._top.decoder
        pending = to_device(self._context[self._full.length :], decoder.device)
        logits = decoder.forward(pending, self._full, on_progress=self._on_prefill)
        token = read(draw(distribution(logits, self._draws.sampling), self._draws.generator))[0]
        if self._retrieval:
            self._retrieval.refresh()
        if self._streaming:
            prefill_streaming(self._tiers[-1].decoder, self._streaming, self._context)
        self._top.choose_lengths()
        self._agree([token], False)
        self._context.append(token)
        seconds = time.perf_counter() - began
        self._full.bytes_read, self._full.read_s = 0, 0.0
        self._traffic_before = self._full.blocks.traffic()
        self._record([token], prefill_s=seconds, ttft_s=seconds)
        return Round(0, [token], seconds, 0, 0, False)

    def _round(self, began: float) -> tuple[Round, float]:
        """One round, timed from `began` to the time it returns, so that nothing between rounds goes uncounted."""
        counts = self._top.counts
        proposed, accepted = counts.proposed, counts.accepted
        limit = self._max_new_tokens - len(self.statistics.token_ids)
        tokens, _ = self._top.step(self._context, limit, self._draws)
        self._context += tokens
        proposed, accepted = counts.proposed - proposed, counts.accepted - accepted
        self._top.choose_lengths()
        refreshed = self._agree(tokens, self._refresh.due(accepted, proposed))
        refresh_s = self._update_retrieval(refreshed, time.perf_counter() - began)

        now, old = time.perf_counter(), self.statistics
        self._record(
            tokens,
            rounds=old.rounds + 1,
            decode_s=old.decode_s + now - began,
            refresh_s=old.refresh_s + refresh_s,
            token_s=[*old.token_s, *[(now - began) / len(tokens)] * len(tokens)],
        )
        return Round(old.rounds + 1, tokens, now - began, proposed, accepted, refreshed), now

    def _update_retrieval(self, refreshed: bool, round_seconds: float) -> float:
        """Brings the retrieval cache up to what was verified, with its chunks chosen anew or not; the seconds."""
        if self._retrieval is None:
            return 0.0
        began = time.perf_counter()
        if refreshed:
            self._retrieval.refresh()
        else:
            self._retrieval.update_tail()
        if refreshed and self._draws.adapts_to_time and self._refresh.mode == "auto":
            synchronize(self._top.decoder.device)  # its cost decides when the next one comes
        seconds = time.perf_counter() - began
        if refreshed:
            self._refresh.done(seconds if self._draws.adapts_to_time else 0.0, round_seconds)
        return seconds

    def _agree(self, tokens: list[int], refreshed: bool) -> bool:
        """Takes rank 0's word for what a round brought and how the next one goes: the one broadcast of a round.

        Ranks draw the same tokens, but their clocks differ, and with them the lengths and refreshes they would choose.

        Raises:
            TriforceError: this rank drew other tokens than rank 0, so the caches are no longer one model's.
        """
        refreshed = refreshed and self._retrieval is not None
        ranks = self._top.decoder.ranks
        lengths = [tier.draft_tokens for tier in self._tiers]
        room = 1 + len(lengths) + MOST_BLOCK_LENGTH + 1
        word = ranks.share_numbers([int(refreshed), *lengths, *tokens], room)
        refreshed, lengths, theirs = bool(word[0]), word[1 : len(lengths) + 1], word[len(lengths) + 1 :]
        if theirs != tokens:
            raise TriforceError(
                f"rank {ranks.rank} drew the tokens {tokens} where rank 0 drew {theirs}: the ranks compute differently "
                "(other hardware or versions?), so nothing further would be the model's"
            )
        for tier, draft_tokens in zip(self._tiers, lengths, strict=True):
            tier.draft_tokens = draft_tokens
        return refreshed

    def _record(self, tokens: list[int], **measured: Any) -> None:
        """Replaces the statistics at once, so that an interrupt finds the old ones or those with `tokens`."""
        token_ids = [*self.statistics.token_ids, *tokens]
        ended = self.statistics.finish_reason
        if tokens[-1] in self._draws.eos_token_ids:
            ended = "eos"
        elif len(token_ids) >= self._max_new_tokens:
            ended = "length"
        counts = {tier.name: tier.counts for tier in self._tiers}
        verify = counts["verify"]
        retrieval, draft = counts.get("retrieval", Counts()), counts.get("draft", Counts())
        self.statistics = replace(
            self.statistics,
            token_ids=token_ids,
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
            kv_read_bytes=self._full.bytes_read,
            kv_read_s=self._full.read_s,
            link=self._full.blocks.traffic().since(self._traffic_before),
            **measured,
        )

    def _memory(self) -> dict[str, int]:
        return {
            "kv_bytes": self._full.length * self._full.token_bytes * self._top.decoder.ranks.size,
            "host_peak_bytes": host_peak_bytes(),
            "device_peak_bytes": device_peak_bytes(self._top.decoder.device),
        }
