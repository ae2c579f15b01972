"""The speculation loop: tiers that draft for one another. Each is a decoder with a cache, and all run the same step.

A tier's `step` asks its drafter for tokens, tests them in one pass, keeps the accepted ones and draws one more token.
The emitted tokens have exactly the distribution of the tier's own decoding. A tier without a drafter decodes token by
token. With three tiers, the small model drafts for the target on a retrieval cache, which drafts for the target on the
full cache. The `DraftControl` of a tier decides how many tokens are drafted.

Sequences that are decoded together take their steps together: one pass for all that still need tokens.
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
"""`acceptance.accept`, or a substitute in a test."""

Emitted = tuple[list[int], Tensor]
"""Tokens that follow a sequence's context, and the distributions `[tokens, vocab]` from which they were drawn."""


@dataclass(eq=False)
class Tier:
    """One level of speculation.

    Between steps, a sequence's cache may lack the last tokens of its context. The first pass of a step processes these
    tokens too.
    """

    name: str
    """`verify` (full cache), `retrieval` (retrieval cache), `draft` (small model) or `lookup`."""
    decoder: Decoder
    control: DraftControl
    """Decides how many tokens are drafted for the tier."""
    vocab_size: int
    """The size of the target's vocabulary. The distributions of all tiers are over its tokens."""
    drafter: Tier | None = None
    """The tier that drafts for this one; `None`: no draft."""
    accept: AcceptanceRule = accept
    """Decides which of the drafter's tokens are kept, and draws the token that follows them."""
    _joined: dict[tuple[Passes, ...], JoinedPasses] = field(default_factory=dict, init=False)

    def step(self, sequences: Sequence[TokenSequence], limits: Sequence[int], *, rated: bool = False) -> list[Emitted]:
        """Emits 1 to `limits[i]` tokens that follow the context of each sequence, with this tier's own distributions.

        Nothing comes after an end-of-sequence token. Contexts are not changed.

        Args: `rated`: whether this tier's certainties of the tokens are stored in `TokenSequence.rated`.

        Raises:
            NotFiniteError, GrammarFailed: the logits of some sequences are not finite, or a grammar cannot be followed
                any further. Contexts and caches stay in the state reached so far.
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
        """Repeats `step` until `counts[i]` tokens follow each sequence's context, the text ends, or a further token is
        not worth its time. Returns the same as `step`.

        Args: `least_chance`: ends early if the next token, with all of these before it, is less likely than this to be
            accepted, on average over the sequences. It ends after one step at the earliest. If above 0, this tier's
            certainties of the tokens are stored in `TokenSequence.rated`.
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
            # Copies the rows, as views would keep the memory of the whole pass, with the rejected rows.
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
            emitted.append((sequence.context[start:].tolist(), parts[0] if len(parts) == 1 else torch.cat(parts)))
            parts.clear()
            del sequence.context[start:]
            sequence.rated[self.name] = rated[i]
        return emitted

    def read(self, sequences: Sequence[TokenSequence]) -> Tensor:
        """Computes one pass over the tokens of each context that this tier's caches lack: at least one token of each,
        at most `STEP_ROWS` in all. Returns the logits `[sequences, vocab]` of the next tokens."""
        pending = [self._pending(sequence) for sequence in sequences]
        passes = JoinedPasses([sequence.passes[self.name] for sequence in sequences], captures=False)
        token_ids = self.decoder.readable(self._concatenated(pending))
        logits = passes.forward(token_ids, [len(tokens) for tokens in pending], [1] * len(sequences))
        return cover(logits, self.vocab_size)

    def rollback(self, sequence: TokenSequence, length: int) -> None:
        """Rolls the sequence's caches of this tier and the tiers below back to the first `length` tokens, if they hold
        more."""
        sequence.rollback(self.name, length)
        if self.drafter:
            self.drafter.rollback(sequence, length)

    def _drafts(
        self, sequences: Sequence[TokenSequence], wanted: Sequence[int]
    ) -> list[tuple[list[int], Tensor | None]]:
        """Up to `wanted[i]` draft tokens for each sequence, and the distributions from which they were drawn. Tokens
        for which a grammar leaves no choice come first."""
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
        """The next tokens, at most `most`, for which a grammar leaves no choice. Only in the tier on the full cache."""
        return sequence.matcher.forced(sequence.context, most) if sequence.matcher and self.name == "verify" else []

    def end_draft(self, sequences: Sequence[TokenSequence]) -> None:
        """Rolls back the entries of this tier's caches that will be computed again with other inputs. While drafting, a
        multi-token-prediction head uses its own results, or nothing, in place of the target's hidden states."""
        for sequence, cache in self._of_heads(sequences):
            assert cache.hidden_states
            self.rollback(sequence, min(len(sequence.context), cache.hidden_states.known.stop + 1))

    def _of_heads(self, sequences: Sequence[TokenSequence]) -> Iterator[tuple[TokenSequence, StreamingCache]]:
        """The sequences with their caches of this tier, if it drafts with a multi-token-prediction head; else none."""
        for sequence in sequences if self.decoder.config.is_head else ():
            cache = sequence.passes[self.name].cache
            assert isinstance(cache, StreamingCache)
            yield sequence, cache

    def _verify(
        self, sequences: Sequence[TokenSequence], proposed: Sequence[list[int]]
    ) -> tuple[Tensor, list[int], int]:
        """Computes one pass over the proposed tokens. Returns the logits after each sequence's context and after each
        of its proposed tokens, one sequence after another; the number of rows of each sequence; and the number of
        tokens that the pass processed in all."""
        rows = [len(tokens) + 1 for tokens in proposed]
        self._catch_up(sequences, sum(rows))
        pending = [self._pending(s) + tokens for s, tokens in zip(sequences, proposed, strict=True)]
        logits = self._logits(sequences, self._concatenated(pending), [len(tokens) for tokens in pending], rows)
        return logits, rows, sum(map(len, pending))

    def _keep(self, sequence: TokenSequence, tokens: list[int], rated: list[float]) -> list[int]:
        """Keeps the tokens of a pass up to an end-of-sequence token, and returns them. Caches are rolled back to these
        tokens without the last one, which the next pass processes."""
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
        """Reports the time and the tokens of a step with a draft to the control."""
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
        """`extend` without a drafter. Tokens after an end-of-sequence token, or beyond `counts`, are dropped."""
        self.control.begin_pass(drafted=False)
        rows = sum(len(self._pending(sequence)) + steps - 1 for sequence in sequences)
        drawn, targets, sure, logits = self._drawn(sequences, steps, rated)
        emitted: list[Emitted] = []
        numbers = (drawn if sure is None else torch.cat((drawn, sure))).flatten().tolist()
        tokens = numbers[: drawn.numel()]
        check_finite(sequences, [tokens[i * steps : (i + 1) * steps] for i in range(len(sequences))])
        for i, sequence in enumerate(sequences):
            wanted = steps if counts is None else counts[i]
            first = drawn.numel() + i * steps  # there are no numbers unless tokens were rated
            ratings = [number / 1e6 for number in numbers[first : first + steps]]
            kept = self._keep(sequence, tokens[i * steps : (i + 1) * steps][:wanted], ratings)
            if self.name == "verify":  # here, a step is one token
                sequence.keep_logprobs(kept, logits[i])
            emitted.append((kept, targets[i, : len(kept)]))
        steady = self._was_steady(sequences)
        self.control.note_passes(sequences, steps, rows, steady)
        self.control.note_step(steady, 0, 0, sum(len(kept) for kept, _ in emitted) / len(emitted))
        return emitted

    def _drawn(
        self, sequences: Sequence[TokenSequence], count: int, rated: bool
    ) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
        """Draws `count` tokens of each sequence, one after another. Returns the tokens `[sequences, count]`; their
        distributions `[sequences, count, vocab]`; if `rated`, the `rounded_certainties` of the tokens
        `[sequences, count]`, else `None`; and the logits of the first tokens, `[1, vocab]` each. All stay on the
        device. Tokens that were drawn from NaN are below 0."""
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
            if not tokens:  # later tokens are not masked: the host has not read the tokens before them
                unmasked = self._own_logits(sequences, logits.split(one_each))
                forbid(logits, sequences, [()] * len(sequences), self.name, self.decoder.config.vocab_size)
            rows.append(distributions(logits, samplers, one_each))
            positions = [len(sequence.context) + len(tokens) for sequence in sequences]
            pending, counts = draw(rows[-1], samplers, one_each, positions), one_each
            tokens.append(pending)
            if rated:
                sure.append(rounded_certainties(logits, pending))
        drawn, targets = _in_columns(tokens), _in_columns(rows)
        return drawn, targets, _in_columns(sure) if rated else None, unmasked

    def _own_logits(self, sequences: Sequence[TokenSequence], logits: Sequence[Tensor]) -> list[Tensor]:
        """The logits of each sequence, copied if its grammar will mask them and log probabilities are needed."""
        wanted = [one.matcher and one.top_logprobs is not None and self.name == "verify" for one in sequences]
        return [part.clone() if is_wanted else part for part, is_wanted in zip(logits, wanted, strict=True)]

    def _pending(self, sequence: TokenSequence) -> list[int]:
        """The tokens of the context that this tier's cache lacks."""
        return sequence.context[sequence.passes[self.name].cache.length :].tolist()

    def _catch_up(self, sequences: Sequence[TokenSequence], rows: int) -> None:
        """Processes the tokens that caches lack, except the last one, if all together would have more rows than a step.
        Caches lack many tokens if nothing was drafted for a while. `rows` are the further rows of the pass."""
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
        """Computes a pass over the next `counts[i]` tokens of each sequence. Returns the logits, over the target's
        vocabulary, after the last `rows[i]` of them."""
        token_ids = self.decoder.readable(pending)
        if len(sequences) == 1:
            logits = sequences[0].passes[self.name].forward(token_ids, rows[0])
        else:
            logits = self._together(sequences).forward(token_ids, counts, rows)
        return cover(logits, self.vocab_size)

    def _together(self, sequences: Sequence[TokenSequence]) -> JoinedPasses:
        """The passes over these sequences together. They are kept until other sequences join or one of them ends. Those
        over all running sequences are captured. Each smaller set of sequences has captured passes of its own, as long
        as the sets have no more members in all than the plan's reserve counts."""
        members = tuple(sequence.passes[self.name] for sequence in sequences)
        if members not in self._joined:
            most = max(map(len, self._joined), default=0)
            if len(members) > most:  # the first pass of a round is over all running sequences
                self._joined.clear()
                most = len(members)
            room = JOINED * most - sum(len(known) for known, passes in self._joined.items() if passes.captures)
            self._joined[members] = JoinedPasses(members, captures=len(members) <= room)
        return self._joined[members]

    def held(self) -> Held:
        """See `offload.held`: tensors of passes over several sequences together, of this tier and the tiers below."""
        for passes in self._joined.values():
            yield from passes.held()
        if self.drafter:
            yield from self.drafter.held()

    def drop_joined(self) -> None:
        """Drops the passes over several sequences together, of this tier and the tiers below. Called when a sequence
        ends."""
        self._joined.clear()
        if self.drafter:
            self.drafter.drop_joined()

    def _was_steady(self, sequences: Sequence[TokenSequence]) -> bool:
        """Whether nothing was compiled or captured in the last pass over these sequences."""
        used = sequences[0].passes[self.name] if len(sequences) == 1 else self._together(sequences)
        return used.was_steady()


def _in_columns(tensors: Sequence[Tensor]) -> Tensor:
    """`torch.stack(tensors, dim=1)`, without a copy if there is only one."""
    return torch.stack(list(tensors), dim=1) if len(tensors) > 1 else tensors[0].unsqueeze(1)


def cover(logits: Tensor, vocab_size: int) -> Tensor:
    """Fits `logits` `[n, any]` to `[n, vocab_size]`. Distributions are always over the target's vocabulary; that of a
    draft may be padded differently. Surplus tokens are dropped, missing ones get probability 0."""
    missing = vocab_size - logits.shape[-1]
    return logits if missing == 0 else F.pad(logits, (0, missing), value=float("-inf"))
