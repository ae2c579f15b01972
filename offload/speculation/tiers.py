"""The speculation loop: tiers that draft for one another, each a decoder with a cache, all running the same step.

A tier's `step` lets its drafter propose, tests the proposal in one pass, keeps what stands and draws one more token:
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
from .sampling import Sampling, distribution, draw, read
from .vocabulary import cover, readable

PROBE_EVERY = 24
"""Passes after which a tier that found drafting not worth it tries one drafted token again."""


@dataclass
class Counts:
    """What a tier has done so far."""

    seconds: float = 0.0
    """Time in its own passes, without its drafter's."""
    passes: int = 0
    proposed: int = 0
    """Tokens its drafter offered."""
    accepted: int = 0
    """Those of them that stood."""
    tested: int = 0
    """Those that stood, and the first of a pass that did not: nothing after it was tested."""


@dataclass
class Draws:
    """How tokens are drawn in one run: the sampling parameters, the stream of random numbers, and where text ends."""

    sampling: Sampling
    generator: torch.Generator
    eos_token_ids: frozenset[int]
    adapts_to_time: bool
    """Whether lengths adapt to measured times; if not, the same seed gives the same tokens again."""


@dataclass
class Tier:
    """One level of speculation.

    The cache holds every token of the context but those since the last pass; `step` feeds what is missing.
    """

    name: str
    decoder: Decoder
    cache: Cache
    passes: Passes
    """Of the decoder with the cache."""
    cost: PassCost
    vocab_size: int
    """Tokens of the target, which every tier's distributions cover."""
    drafter: Tier | None = None
    draft_tokens: int = 4
    """Tokens to ask of the drafter for one pass."""
    fixed: bool = False
    """Whether `draft_tokens` was set by hand."""
    longest: int = 8
    """The most `draft_tokens` may become."""
    acceptance: Acceptance = field(default_factory=Acceptance)
    counts: Counts = field(default_factory=Counts)
    _last_drafted: int = field(default=0, init=False)
    _prepared: int = field(default=0, init=False)

    def step(self, context: list[int], limit: int, draws: Draws) -> tuple[list[int], Tensor]:
        """Emits 1 to `limit` tokens that follow `context` and their distributions `[tokens, vocab]`.

        Nothing comes after an end-of-sequence token. `context` is left as it was.
        """
        if self.drafter is None:
            return self._draw_alone(context, 1, draws)
        start = len(context)
        wanted = min(self.draft_tokens, limit - 1)
        drafted, draft = self.drafter.extend(context, wanted, draws) if wanted else ([], None)

        began = time.perf_counter()
        pending = to_device(context[self.cache.length :] + drafted, self.decoder.device)
        target = self._distributions(pending, len(drafted) + 1, draws)
        accepted, token = accept(
            pending[len(pending) - len(drafted) :], target if draft is None else draft, target, draws.generator
        )
        emitted = _until_end([*drafted[:accepted], token], draws.eos_token_ids)
        self.rollback(start + len(emitted) - 1)
        self._measure(1, len(pending), time.perf_counter() - began, draws)
        self.counts.proposed += len(drafted)
        self.counts.accepted += accepted
        self.counts.tested += min(accepted + 1, len(drafted))
        if drafted:
            self.acceptance.observe(accepted, len(drafted))
        return emitted, target[: len(emitted)]

    def extend(self, context: list[int], count: int, draws: Draws) -> tuple[list[int], Tensor]:
        """Steps until `count` tokens follow `context` or the sequence ends; tokens and distributions as of `step`."""
        if self.drafter is None:
            return self._draw_alone(context, count, draws)
        start = len(context)
        rows = []
        while len(context) - start < count and (len(context) == start or context[-1] not in draws.eos_token_ids):
            emitted, target = self.step(context, count - (len(context) - start), draws)
            context += emitted
            rows.append(target)
        tokens = context[start:]
        del context[start:]
        return tokens, rows[0] if len(rows) == 1 else torch.cat(rows)

    def _draw_alone(self, context: list[int], count: int, draws: Draws) -> tuple[list[int], Tensor]:
        """`extend` without a drafter. What comes after an end-of-sequence token was drawn for nothing."""
        start, began = len(context), time.perf_counter()
        pending = start - self.cache.length
        drawn, targets = self.draw_ahead(context, count, draws)
        emitted = _until_end(read(drawn), draws.eos_token_ids)
        self.rollback(start + len(emitted) - 1)
        self._measure(count, pending + count - 1, time.perf_counter() - began, draws)
        return emitted, targets[: len(emitted)]

    def draw_ahead(self, context: list[int], count: int, draws: Draws) -> tuple[Tensor, Tensor]:
        """Draws `count` tokens, each fed back for the next one, as `[count]` and their distributions `[count, vocab]`.

        The tokens stay on the device meanwhile, and the host never waits for it. A token may turn out to be none (see
        `sampling.read`).
        """
        pending = to_device(context[self.cache.length :], self.decoder.device)
        tokens: list[Tensor] = []
        rows: list[Tensor] = []
        while len(tokens) < count:
            rows.append(self._distributions(pending, 1, draws))
            pending = draw(rows[-1], draws.generator)
            tokens.append(pending)
        return (torch.cat(tokens), torch.cat(rows)) if count > 1 else (tokens[0], rows[0])

    def _distributions(self, pending: Tensor, rows: int, draws: Draws) -> Tensor:
        """Feeds the next tokens; the distributions after the last `rows` of them."""
        logits = self.passes.forward(readable(pending, self.decoder.config.vocab_size), rows)
        return distribution(cover(logits, self.vocab_size), draws.sampling)

    def _measure(self, passes: int, rows: int, seconds: float, draws: Draws) -> None:
        """Notes passes over so many rows in all, and how long they took; what was compiled or captured meanwhile says
        nothing of the next ones."""
        self.counts.seconds += seconds
        self.counts.passes += passes
        steady = self.passes.prepared == self._prepared
        self._prepared = self.passes.prepared
        if draws.adapts_to_time and steady:
            self.cost.observe(rows / passes, seconds / passes)

    def rollback(self, length: int) -> None:
        """Takes this tier and those below back to the first `length` tokens, where they are further."""
        if self.cache.length > length:
            self.cache.rollback(length)
        if self.drafter:
            self.drafter.rollback(length)

    def choose_lengths(self) -> float:
        """Sets the draft_tokens of this tier and those below to what is expected to be fastest; seconds per token."""
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


def _until_end(tokens: list[int], eos_token_ids: frozenset[int]) -> list[int]:
    for i, token in enumerate(tokens):
        if token in eos_token_ids:
            return tokens[: i + 1]
    return tokens
