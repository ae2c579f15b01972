"""The speculation loop: tiers that draft for one another, each a decoder with a cache, all running the same step.

A tier's `step` asks its drafter for tokens, tests them in one pass, keeps those that are accepted and draws one more:
what it emits is distributed exactly as its own decoding would be. A tier without a drafter decodes token by token.
Three tiers (small model, target on a retrieval cache, target on the full cache) are three of these in a row. How far
each drafts is decided by its `DraftControl`.

Sequences that are decoded together take their steps together: one pass for all of them that still ask for tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.selection import STEP_ROWS
from ...tp.decoder import Decoder
from ...tp.devices import to_device
from ..caches.streaming import StreamingCache
from ..graphs.passes import JOINED, JoinedPasses, Passes
from ..held import Held
from .acceptance import accept
from .control import DraftControl
from .distribution import check_finite, rounded_certainties
from .sampler import certain, distributions, draw
from .sequence import TokenSequence, forbid

AcceptanceRule = Callable[..., tuple[list[tuple[int, int]], list[list[float]]]]
"""`acceptance.accept`, or what a test has in its place."""

Emitted = tuple[list[int], Tensor]
"""Tokens that follow a sequence's context, and the distributions `[tokens, vocab]` they were drawn from."""


@dataclass(eq=False)
class Tier:
    """One level of speculation.

    Between steps a sequence's cache may lack the last tokens of its context; a step's first pass processes those too.
    """

    name: str
    decoder: Decoder
    control: DraftControl
    vocab_size: int
    """Of the target: every tier's distributions are over its tokens."""
    drafter: Tier | None = None
    accept: AcceptanceRule = accept
    """Which of the drafter's tokens are kept, and what follows them."""
    _joined: dict[tuple[Passes, ...], JoinedPasses] = field(default_factory=dict, init=False)

    def step(self, sequences: Sequence[TokenSequence], limits: Sequence[int], *, rated: bool = False) -> list[Emitted]:
        """Emits 1 to `limits[i]` tokens that follow the context of each sequence, and this tier's own distributions.

        Nothing comes after an end-of-sequence token. Contexts are not changed.

        Raises:
            NotFiniteError, GrammarFailed: of some sequences logits are not finite, or a grammar cannot go on; contexts
                and caches are as far as they came.

        Args: `rated`: whether `TokenSequence.rated` gets how sure this tier is of the tokens.
        """
        asked = self.control.begin_step() if self.drafter else 0
        wanted = [min(asked, limit - 1) for limit in limits]
        if not any(wanted):
            return self._step_without_draft(sequences, 1, rated=rated)
        drafts = self._drafts(sequences, wanted)
        proposed = [tokens for tokens, _ in drafts]
        self.control.begin_pass(drafted=True)
        logits, rows, processed = self._verify(sequences, proposed)
        samplers = [sequence.sampler for sequence in sequences]
        own = self._own_logits(sequences, logits.split(rows))
        forbid(logits, sequences, proposed, self.name, self.decoder.config.vocab_size)
        target = distributions(logits, samplers, rows)
        starts = [len(sequence.context) for sequence in sequences]
        given = proposed, [q for _, q in drafts], target, samplers, starts
        outcomes, ratings = self.accept(*given, logits if rated else None)
        check_finite(sequences, [[token] for _, token in outcomes])
        emitted, parts = [], target.split(rows)
        for i, sequence in enumerate(sequences):
            accepted, token = outcomes[i]
            kept = self._keep(sequence, [*proposed[i][:accepted], token], ratings[i])
            if self.name == "verify":
                sequence.keep_logprobs(kept, own[i])
            emitted.append((kept, parts[i][: len(kept)]))
        self._note_step(sequences, processed, wanted, proposed, [accepted for accepted, _ in outcomes], emitted)
        return emitted

    def extend(
        self, sequences: Sequence[TokenSequence], counts: Sequence[int], least_chance: float = 0.0
    ) -> list[Emitted]:
        """Repeats `step` until `counts[i]` tokens follow each sequence's context, or it ends, or a further token is not
        worth its time; returns the same as `step`.

        Args: `least_chance`: ends where it is less likely than this that the next token, and all of these before it,
            are accepted, on average over the sequences; after one step at the earliest. `TokenSequence.rated` then has
            how sure this tier was of them.
        """
        if self.drafter is None and not least_chance:
            return self._step_without_draft(sequences, max(counts), counts)
        starts = [len(sequence.context) for sequence in sequences]
        rows: list[list[Tensor]] = [[] for _ in sequences]
        rated: list[list[float]] = [[] for _ in sequences]
        missing, chances, confidence = list(counts), [1.0] * len(sequences), self.control.confidence
        while going := [i for i, count in enumerate(missing) if count > 0]:
            likely = sum(chances[i] for i in going) * confidence.rate
            if likely < least_chance * len(sequences) and rows[0]:
                break
            some, limits = [sequences[i] for i in going], [missing[i] for i in going]
            if self.drafter:
                found = self.step(some, limits, rated=least_chance > 0)
            else:
                found = self._step_without_draft(some, min(self.control.read_together, max(limits)), limits, rated=True)
            # Copies: rows of a pass over all would keep those of all that were rejected, as long as they last.
            found = [(tokens, target.clone()) for tokens, target in found]
            for i, (tokens, target) in zip(going, found, strict=True):
                sequences[i].context.extend(tokens)
                rows[i].append(target)
                missing[i] = 0 if sequences[i].sampler.ends(tokens[-1]) else missing[i] - len(tokens)
                if least_chance:
                    new = sequences[i].rated[self.name]
                    rated[i] += new
                    chances[i] *= math.prod(map(confidence.chance, new))
        emitted: list[Emitted] = []
        for i, (sequence, start, parts) in enumerate(zip(sequences, starts, rows, strict=True)):
            emitted.append((sequence.context[start:], parts[0] if len(parts) == 1 else torch.cat(parts)))
            parts.clear()
            del sequence.context[start:]
            sequence.rated[self.name] = rated[i]
        return emitted

    def read(self, sequences: Sequence[TokenSequence]) -> Tensor:
        """One pass over the tokens of each context that this tier's caches lack, at least one, and at most `STEP_ROWS`
        together: the logits `[sequences, vocab]` of what follows."""
        pending = [self._pending(sequence) for sequence in sequences]
        passes = JoinedPasses([sequence.passes[self.name] for sequence in sequences], captures=False)
        token_ids = self.decoder.readable(self._concatenated(pending))
        logits = passes.forward(token_ids, [len(tokens) for tokens in pending], [1] * len(sequences))
        return cover(logits, self.vocab_size)

    def rollback(self, sequence: TokenSequence, length: int) -> None:
        """Rolls the sequence's caches of this tier and those below back to its first `length` tokens, if they hold
        more."""
        sequence.rollback(self.name, length)
        if self.drafter:
            self.drafter.rollback(sequence, length)

    def _drafts(
        self, sequences: Sequence[TokenSequence], wanted: Sequence[int]
    ) -> list[tuple[list[int], Tensor | None]]:
        """Up to `wanted[i]` draft tokens for each sequence, and what they were drawn from. What a grammar leaves no
        choice for comes first."""
        assert self.drafter
        forced = [self._forced(sequence, count) for sequence, count in zip(sequences, wanted, strict=True)]
        for sequence, tokens in zip(sequences, forced, strict=True):
            sequence.context.extend(tokens)
        drafts: list[tuple[list[int], Tensor | None]] = [([], None)] * len(sequences)
        counts = [count - len(tokens) for count, tokens in zip(wanted, forced, strict=True)]
        drafting = [i for i, count in enumerate(counts) if count]
        self.drafter.control.steady = True
        some, counts = [sequences[i] for i in drafting], [counts[i] for i in drafting]
        if some:
            found = self.drafter.extend(some, counts, self.control.least_chance)
            for i, draft in zip(drafting, found, strict=True):
                drafts[i] = draft
        for i, (sequence, tokens) in enumerate(zip(sequences, forced, strict=True)):
            sequence.forced = len(tokens)
            if tokens:
                del sequence.context[-len(tokens) :]
                source = certain(tokens, sequence.sampler, self.vocab_size, self.decoder.device)
                behind, drawn_from = drafts[i]
                drafts[i] = tokens + behind, source if drawn_from is None else torch.cat((source, drawn_from))
        self.drafter.end_draft(some)
        return drafts

    def _forced(self, sequence: TokenSequence, most: int) -> list[int]:
        """The next tokens, up to `most`, if a grammar leaves no choice for them; for the tier that decides about the
        text."""
        return sequence.matcher.forced(sequence.context, most) if sequence.matcher and self.name == "verify" else []

    def end_draft(self, sequences: Sequence[TokenSequence]) -> None:
        """Takes from this tier's caches what was computed otherwise than it will be: a multi-token-prediction head has
        its own results, or nothing, in the place of the target's hidden states for what was drafted."""
        for sequence, cache in self._of_heads(sequences):
            assert cache.hidden_states
            self.rollback(sequence, min(len(sequence.context), cache.hidden_states.known.stop + 1))

    def _of_heads(self, sequences: Sequence[TokenSequence]) -> Iterator[tuple[TokenSequence, StreamingCache]]:
        """With the caches of this tier, if it drafts with a multi-token-prediction head."""
        for sequence in sequences if self.decoder.config.is_head else ():
            cache = sequence.passes[self.name].cache
            assert isinstance(cache, StreamingCache)
            yield sequence, cache

    def _verify(
        self, sequences: Sequence[TokenSequence], proposed: Sequence[list[int]]
    ) -> tuple[Tensor, list[int], int]:
        """One pass over what is proposed: the logits of what follows each sequence's context and each of its proposed
        tokens, one sequence after another; how many rows each has; and how many tokens the pass processed in all."""
        rows = [len(tokens) + 1 for tokens in proposed]
        self._catch_up(sequences, sum(rows))
        pending = [self._pending(s) + tokens for s, tokens in zip(sequences, proposed, strict=True)]
        logits = self._logits(sequences, self._concatenated(pending), [len(tokens) for tokens in pending], rows)
        return logits, rows, sum(map(len, pending))

    def _keep(self, sequence: TokenSequence, tokens: list[int], rated: list[float]) -> list[int]:
        """What of a pass's tokens is kept: up to an end-of-sequence token. Caches are rolled back to it, but for the
        last token, which the next pass processes."""
        kept = sequence.sampler.until_end(tokens)
        self.rollback(sequence, len(sequence.context) + len(kept) - 1)
        sequence.rated[self.name] = rated[: len(kept)]
        return kept

    def _note_step(
        self,
        sequences: Sequence[TokenSequence],
        processed: int,
        wanted: Sequence[int],
        proposed: Sequence[list[int]],
        accepted: Sequence[int],
        emitted: Sequence[Emitted],
    ) -> None:
        """Tells the control what a step with a draft took and brought."""
        assert self.drafter
        control, steady = self.control, self._was_steady(sequences)
        control.note_passes(sequences, 1, processed, steady)
        for sequence, tokens, count in zip(sequences, proposed, accepted, strict=True):
            control.note_draft(sequence, len(tokens), count, sequence.forced)
        brought = sum(len(tokens) for tokens, _ in emitted) / len(emitted)
        control.note_step(steady and self.drafter.control.steady, max(wanted), max(map(len, proposed)), brought)

    def _step_without_draft(
        self,
        sequences: Sequence[TokenSequence],
        steps: int,
        counts: Sequence[int] | None = None,
        *,
        rated: bool = False,
    ) -> list[Emitted]:
        """`extend` without a draft. Tokens drawn after an end-of-sequence token, or beyond those that were asked for,
        are dropped."""
        self.control.begin_pass(drafted=False)
        rows = sum(len(self._pending(sequence)) + steps - 1 for sequence in sequences)
        drawn, targets, sure, logits = self._drawn(sequences, steps, rated)
        emitted: list[Emitted] = []
        numbers = (drawn if sure is None else torch.cat((drawn, sure))).flatten().tolist()
        tokens = numbers[: drawn.numel()]
        check_finite(sequences, [tokens[i * steps : (i + 1) * steps] for i in range(len(sequences))])
        for i, sequence in enumerate(sequences):
            wanted = steps if counts is None else counts[i]
            first = drawn.numel() + i * steps  # nothing is there unless they were rated
            ratings = [number / 1e6 for number in numbers[first : first + steps]]
            kept = self._keep(sequence, tokens[i * steps : (i + 1) * steps][:wanted], ratings)
            if self.name == "verify":  # of which a step is one token
                sequence.keep_logprobs(kept, logits[i])
            emitted.append((kept, targets[i, : len(kept)]))
        steady = self._was_steady(sequences)
        self.control.note_passes(sequences, steps, rows, steady)
        self.control.note_step(steady, 0, 0, sum(len(kept) for kept, _ in emitted) / len(emitted))
        return emitted

    def _drawn(
        self, sequences: Sequence[TokenSequence], count: int, rated: bool
    ) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
        """Draws `count` tokens of each sequence one after another: `[sequences, count]`, their distributions
        `[sequences, count, vocab]`, if `rated` the `rounded_certainties` of the tokens, `[sequences, count]`, and the
        logits of the first ones, `[1, vocab]` each. They stay on the device; tokens that were drawn from NaN are
        below 0."""
        self._catch_up(sequences, len(sequences))
        waiting = [self._pending(sequence) for sequence in sequences]
        pending, counts = self._concatenated(waiting), [len(tokens) for tokens in waiting]
        samplers, one_each = [sequence.sampler for sequence in sequences], [1] * len(sequences)
        tokens: list[Tensor] = []
        rows: list[Tensor] = []
        sure: list[Tensor] = []
        unmasked: list[Tensor] = []
        while len(tokens) < count:
            logits = self._logits(sequences, pending, counts, one_each)
            if not tokens:  # what follows those that the host has not read is not known
                unmasked = self._own_logits(sequences, logits.split(one_each))
                forbid(logits, sequences, [()] * len(sequences), self.name, self.decoder.config.vocab_size)
            rows.append(distributions(logits, samplers, one_each))
            positions = [len(sequence.context) + len(tokens) for sequence in sequences]
            pending, counts = draw(rows[-1], samplers, one_each, positions), one_each
            tokens.append(pending)
            if rated:
                sure.append(rounded_certainties(logits, pending))
        drawn, targets = torch.stack(tokens, dim=1), torch.stack(rows, dim=1)
        return drawn, targets, torch.stack(sure, dim=1) if rated else None, unmasked

    def _own_logits(self, sequences: Sequence[TokenSequence], logits: Sequence[Tensor]) -> list[Tensor]:
        """Each sequence's logits; as they are before its grammar forbids some tokens, where logarithms of their
        probabilities are wanted."""
        wanted = [one.matcher and one.top_logprobs is not None and self.name == "verify" for one in sequences]
        return [part.clone() if is_wanted else part for part, is_wanted in zip(logits, wanted, strict=True)]

    def _pending(self, sequence: TokenSequence) -> list[int]:
        """The tokens of the context that this tier's cache lacks."""
        return sequence.context[sequence.passes[self.name].cache.length :]

    def _catch_up(self, sequences: Sequence[TokenSequence], rows: int) -> None:
        """Brings caches that lack many tokens, as nothing was drafted for a while, up to the last token of the context,
        where all together would be more than the rows of a step; `rows` come besides."""
        for sequence, cache in self._of_heads(sequences):
            cache.skip_unseen(len(sequence.context))
        if len(sequences) == 1 or rows + sum(len(self._pending(sequence)) for sequence in sequences) <= STEP_ROWS:
            return
        for sequence in sequences:
            behind = self._pending(sequence)[:-1]
            if behind:
                tokens = to_device(behind, self.decoder.device)
                sequence.passes[self.name].forward(self.decoder.readable(tokens))

    def _concatenated(self, tokens: Sequence[list[int]]) -> Tensor:
        return to_device([token for part in tokens for token in part], self.decoder.device)

    def _logits(
        self, sequences: Sequence[TokenSequence], pending: Tensor, counts: Sequence[int], rows: Sequence[int]
    ) -> Tensor:
        """Runs a pass over the next `counts[i]` tokens of each sequence; the logits over the target's vocabulary of
        what follows the last `rows[i]` of them."""
        token_ids = self.decoder.readable(pending)
        if len(sequences) == 1:
            logits = sequences[0].passes[self.name].forward(token_ids, rows[0])
        else:
            logits = self._together(sequences).forward(token_ids, counts, rows)
        return cover(logits, self.vocab_size)

    def _together(self, sequences: Sequence[TokenSequence]) -> JoinedPasses:
        """The passes over all of these sequences, which are kept until others join or one of those that are decoded
        ends. Of all that run they are captured, and of some of them as long as their members are not more together than
        the plan's reserve counts: each set has captured passes of its own."""
        members = tuple(sequence.passes[self.name] for sequence in sequences)
        if members not in self._joined:
            most = max(map(len, self._joined), default=0)
            if len(members) > most:  # a round's first pass is of all that run
                self._joined.clear()
                most = len(members)
            room = JOINED * most - sum(len(known) for known, passes in self._joined.items() if passes.captures)
            self._joined[members] = JoinedPasses(members, captures=len(members) <= room)
        return self._joined[members]

    def held(self) -> Held:
        """See `offload.held`: what this tier and those below have of several sequences together."""
        for passes in self._joined.values():
            yield from passes.held()
        if self.drafter:
            yield from self.drafter.held()

    def drop_joined(self) -> None:
        """Drops what this tier and those below keep of the sequences of their last pass, as one of them has ended."""
        self._joined.clear()
        if self.drafter:
            self.drafter.drop_joined()

    def _was_steady(self, sequences: Sequence[TokenSequence]) -> bool:
        """Whether nothing was compiled or captured in the last pass over these sequences."""
        used = sequences[0].passes[self.name] if len(sequences) == 1 else self._together(sequences)
        return used.was_steady()


def cover(logits: Tensor, vocab_size: int) -> Tensor:
    """`logits` `[n, any]` as `[n, vocab_size]`, as distributions are always over the target's vocabulary, and a draft's
    may be padded otherwise: surplus tokens are dropped, missing ones get probability 0."""
    missing = vocab_size - logits.shape[-1]
    return logits if missing == 0 else F.pad(logits, (0, missing), value=float("-inf"))
