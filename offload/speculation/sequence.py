"""What the tiers know of a sequence that is being decoded: its tokens, how they are drawn, and its caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..graphs.passes import Passes
from .distribution import SequencesFailed, logprobs_of
from .grammar import GrammarError, Matcher, in_a_line
from .occurrences import Lookup
from .sampler import Sampler
from .sampling import TokenLogprobs


@dataclass
class Counts:
    """What a tier has done for a sequence, or for all, so far."""

    seconds: float = 0.0
    """Seconds in its own passes, without its drafter's. A pass takes its time for each of the sequences in it."""
    passes: int = 0
    proposed: int = 0
    """Draft tokens that its passes were given to test."""
    accepted: int = 0
    """Those of them that were accepted."""
    tested: int = 0
    """Those that were accepted or rejected: nothing after the first rejection of a pass is tested."""


@dataclass(eq=False)
class TokenSequence:
    """A prompt and its answer, being decoded."""

    context: list[int]
    """The prompt and the tokens so far."""
    sampler: Sampler
    passes: dict[str, Passes]
    """By the name of the tier: passes over this sequence alone, each with the sequence's cache."""
    counts: dict[str, Counts] = field(default_factory=dict)
    """By the name of the tier."""
    rated: dict[str, list[float]] = field(default_factory=dict)
    """By the name of the tier: how sure it was of each token of its last draft; see `distribution.certainties`. Empty
    where nobody asked."""
    lookup: Lookup = field(default_factory=Lookup)
    """What `--draft lookup` drafts from."""
    matcher: Matcher | None = None
    """What may follow within its grammar, if it has one."""
    forced: int = 0
    """Of its last draft, the first tokens, which the grammar leaves no choice for."""
    top_logprobs: int | None = None
    """Of how many of the likeliest tokens logarithms are wanted besides each token's own; `None` for none at all."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the tokens so far, if wanted."""

    def __post_init__(self) -> None:
        for name in self.passes:
            self.counts.setdefault(name, Counts())

    def rollback(self, tier: str, length: int) -> None:
        """Rolls a tier's cache back to the first `length` tokens, if it holds more."""
        cache = self.passes[tier].cache
        if cache.length > length:
            cache.rollback(length)

    def keep_logprobs(self, tokens: Sequence[int], logits: Tensor) -> None:
        """Keeps the logarithms for `tokens`, if they are wanted.

        Args: `logits` `[len(tokens) or more, vocab]` are the full cache's, those of the first token first.
        """
        if self.top_logprobs is not None:
            self.logprobs += logprobs_of(logits[: len(tokens)], tokens, self.top_logprobs)


class GrammarFailed(SequencesFailed, GrammarError):
    """The grammars of some sequences cannot be followed any further."""

    def __init__(self, reasons: Sequence[tuple[object, str]]) -> None:
        """Args: `reasons`: these sequences, each with its own."""
        message = f"the answer's grammar cannot be followed any further: {in_a_line(reasons[0][1])}"
        super().__init__(message, [one for one, _ in reasons])
        self._reasons = reasons

    def alone(self, one: object) -> GrammarFailed:
        return GrammarFailed([(None, next(reason for whose, reason in self._reasons if whose is one))])


def forbid(
    logits: Tensor, sequences: Sequence[TokenSequence], proposed: Sequence[Sequence[int]], tier: str, known: int
) -> None:
    """Takes from `logits`, in place, what may not follow the context of each sequence, and each of its proposed tokens
    behind it: where a sequence has no grammar, nothing.

    Args:
        logits: `[sum of len(proposed[i]) + 1, vocab]`, of one sequence after another.
        tier: by whose passes they are; what that of the full cache has drawn is what the text is.
        known: tokens that it knows: a row stays as it is if none of these may come, which drafts only meet.

    Raises:
        GrammarFailed: of some sequences.
    """
    failed: list[tuple[object, str]] = []
    first = 0
    for sequence, tokens in zip(sequences, proposed, strict=True):
        if sequence.matcher:
            try:
                allowed = sequence.matcher.allowed(sequence.context, tokens, decides=tier == "verify")
            except ValueError as error:
                failed.append((sequence, str(error)))
            else:
                for row, may in zip(logits[first:], allowed, strict=False):  # one at a time: no more memory is planned
                    if may[:known].any():
                        row.masked_fill_(torch.from_numpy(~may).to(logits.device), float("-inf"))
        first += len(tokens) + 1
    if failed:
        raise GrammarFailed(failed)
