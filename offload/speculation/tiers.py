"""The speculation loop: tiers that draft for one another, each a decoder with a cache, all running the same step.

A tier's `step` asks its drafter for tokens, tests them in one pass, keeps those that are accepted and draws one more:
what it emits is distributed exactly as its own decoding would be. A tier without a drafter decodes token by token.
Three tiers (small model, target on a retrieval cache, target on the full cache) are three of these in a row.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...tp.devices import to_device
from ...tp.model.decoder import Cache, Decoder
from ..graphs.passes import Passes
from .acceptance import accept
from .lengths import Acceptance, PassCost, best_length
from .sampler import Sampler
from .sampling import read
from .vocabulary import cover, readable

PROBE_EVERY = 24
"""Passes after which a tier that stopped drafting, as that was slower, tries one draft token again."""


@dataclass
class Counts:
    """What a tier has done so far."""

    seconds: float = 0.0
    """Seconds in its own passes, without its drafter's."""
    passes: int = 0
    proposed: int = 0
    """Draft tokens that its passes were given to test."""
    accepted: int = 0
    """Those of them that were accepted."""
    tested: int = 0
    """Those that were accepted or rejected: nothing after the first rejection of a pass is tested."""


@dataclass
class Tier:
    """One level of speculation.

    Between steps the cache may lack the last tokens of the context; a step's first pass processes those too.
    """

    name: str
    decoder: Decoder
    cache: Cache
    passes: Passes
    """The passes of the decoder with the cache."""
    cost: PassCost
    vocab_size: int
    """Of the target: every tier's distributions are over its tokens."""
    drafter: Tier | None = None
    draft_tokens: int = 4
    """Draft tokens to ask of the drafter for one pass."""
    fixed: bool = False
    """Whether `draft_tokens` was set by hand."""
    adapts_to_time: bool = True
    """Whether the number is chosen by measured times; if not, by those that the plan expects."""
    longest: int = 8
    """The most `draft_tokens` may become."""
    acceptance: Acceptance = field(default_factory=Acceptance)
    counts: Counts = field(default_factory=Counts)
    _last_drafted: int = field(default=0, init=False)
    _prepared: int = field(default=0, init=False)

    def step(self, context: list[int], limit: int, sampler: Sampler) -> tuple[list[int], Tensor]:
        """Emits 1 to `limit` tokens that follow `context` and their distributions `[tokens, vocab]`, this tier's own.

        Nothing comes after an end-of-sequence token. `context` is not changed.
        """
        if self.drafter is None:
            return self._draw_alone(context, 1, sampler)
        start = len(context)
        wanted = min(self.draft_tokens, limit - 1)
        drafted, draft = self.drafter.extend(context, wanted, sampler) if wanted else ([], None)

        began = time.perf_counter()
        pending = to_device(context[self.cache.length :] + drafted, self.decoder.device)
        target = self._distributions(pending, len(drafted) + 1, sampler)
        proposed = pending[len(pending) - len(drafted) :]
        accepted, token = accept(proposed, target if draft is None else draft, target, sampler.noise, start)
        emitted = sampler.until_end([*drafted[:accepted], token])
        self.rollback(start + len(emitted) - 1)
        self._measure(1, len(pending), time.perf_counter() - began)
        self.counts.proposed += len(drafted)
        self.counts.accepted += accepted
        self.counts.tested += min(accepted + 1, len(drafted))
        if drafted:
            self.acceptance.observe(accepted, len(drafted))
        return emitted, target[: len(emitted)]

    def extend(self, context: list[int], count: int, sampler: Sampler) -> tuple[list[int], Tensor]:
        """Repeats `step` until `count` tokens follow `context` or the sequence ends; returns the same as `step`."""
        if self.drafter is None:
            return self._draw_alone(context, count, sampler)
        start = len(context)
        rows = []
        while len(context) - start < count and (len(context) == start or not sampler.ends(context[-1])):
            emitted, target = self.step(context, count - (len(context) - start), sampler)
            context += emitted
            rows.append(target)
        tokens = context[start:]
        del context[start:]
        return tokens, rows[0] if len(rows) == 1 else torch.cat(rows)

    def _draw_alone(self, context: list[int], count: int, sampler: Sampler) -> tuple[list[int], Tensor]:
        """`extend` without a drafter. Tokens drawn after an end-of-sequence token are dropped."""
        start, began = len(context), time.perf_counter()
        pending = start - self.cache.length
        drawn, targets = self.draw_ahead(context, count, sampler)
        emitted = sampler.until_end(read(drawn))
        self.rollback(start + len(emitted) - 1)
        self._measure(count, pending + count - 1, time.perf_counter() - began)
        return emitted, targets[: len(emitted)]

    def draw_ahead(self, context: list[int], count: int, sampler: Sampler) -> tuple[Tensor, Tensor]:
        """Draws `count` tokens one after another: `[count]`, and their distributions `[count, vocab]`.

        The tokens stay on the device, and the host never waits for it; `sampling.read` brings them to the host and
        reports those that were drawn from NaN.
        """
        pending = to_device(context[self.cache.length :], self.decoder.device)
        tokens: list[Tensor] = []
        rows: list[Tensor] = []
        while len(tokens) < count:
            rows.append(self._distributions(pending, 1, sampler))
            pending = sampler.draw(rows[-1], len(context) + len(tokens))
            tokens.append(pending)
        return (torch.cat(tokens), torch.cat(rows)) if count > 1 else (tokens[0], rows[0])

    def _distributions(self, pending: Tensor, rows: int, sampler: Sampler) -> Tensor:
        """Runs a pass over the next tokens; the distributions that follow the last `rows` of them."""
        logits = self.passes.forward(readable(pending, self.decoder.config.vocab_size), rows)
        return sampler.distribution(cover(logits, self.vocab_size))

    def _measure(self, passes: int, rows: int, seconds: float) -> None:
        """Counts `passes` over so many rows in all, and learns from how long they took, unless something was compiled
        or captured meanwhile, which will not happen again."""
        self.counts.seconds += seconds
        self.counts.passes += passes
        steady = self.passes.prepared == self._prepared
        self._prepared = self.passes.prepared
        if self.adapts_to_time and steady:
            self.cost.observe(rows / passes, seconds / passes)

    def rollback(self, length: int) -> None:
        """Rolls the caches of this tier and those below back to the first `length` tokens, if they hold more."""
        if self.cache.length > length:
            self.cache.rollback(length)
        if self.drafter:
            self.drafter.rollback(length)

    def choose_lengths(self) -> float:
        """Sets `draft_tokens` of this tier and those below to what is expected to be fastest, unless they are fixed;
        returns the seconds per token that are expected of this tier."""
        if self.drafter is None:
            return self.cost.seconds(1)
        draft_seconds = self.drafter.choose_lengths()
        best, seconds = best_length(self.cost, draft_seconds, self.acceptance.rate, self.longest)
        if self.fixed:
            return seconds
        if best:
            self._last_drafted = self.counts.passes
        elif self.counts.passes - self._last_drafted >= PROBE_EVERY:
            best, self._last_drafted = 1, self.counts.passes
        self.draft_tokens = best
        return seconds
