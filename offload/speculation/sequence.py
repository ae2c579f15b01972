"""A sequence as the tiers see it while it is decoded: its tokens, how they are drawn, and its caches."""

from __future__ import annotations

from array import array
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
    """The counts of a tier so far, for one sequence or for all."""

    seconds: float = 0.0
    """Seconds in the tier's own passes, without its drafter's. The time of a pass counts in full for each sequence in
    it."""
    passes: int = 0
    """The number of the tier's own passes."""
    proposed: int = 0
    """Draft tokens in these passes."""
    accepted: int = 0
    """Draft tokens that were accepted."""
    tested: int = 0
    """Draft tokens that were accepted or rejected. Nothing after the first rejection of a pass is tested."""


@dataclass(eq=False)
class TokenSequence:
    """A prompt and its answer, being decoded."""

    context: array[int]
    """The prompt and the tokens so far."""
    sampler: Sampler
    passes: dict[str, Passes]
    """By the name of the tier: passes over this sequence alone, each with the sequence's cache."""
    counts: dict[str, Counts] = field(default_factory=dict)
    """By the name of the tier."""
    rated: dict[str, list[float]] = field(default_factory=dict)
    """By the name of the tier: its certainty of each token of its last draft; see `distribution.certainties`. Empty if
    it was not requested."""
    lookup: Lookup = field(default_factory=Lookup)
    """The index from which `--draft lookup` drafts."""
    matcher: Matcher | None = None
    """Follows the answer in its grammar; `None` without a grammar."""
    forced: int = 0
    """The number of leading tokens of the last draft for which the grammar leaves no choice."""
    top_logprobs: int | None = None
    """The number of likeliest tokens whose log probabilities are kept besides each token's own; `None`: none are kept.
    """
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """The log probabilities of the tokens so far, if requested."""

    def __post_init__(self) -> None:
        for name in self.passes:
            self.counts.setdefault(name, Counts())

    def rollback(self, tier: str, length: int) -> None:
        """Rolls a tier's cache back to the first `length` tokens, if it holds more."""
        cache = self.passes[tier].cache
        if cache.length > length:
            cache.rollback(length)

    def keep_logprobs(self, tokens: Sequence[int], logits: Tensor) -> None:
        """Keeps the log probabilities of `tokens`, if they are requested.

        Args: `logits` `[len(tokens) or more, vocab]` are those of the full cache, from the first token on.
        """
        if self.top_logprobs is not None:
            self.logprobs += logprobs_of(logits[: len(tokens)], tokens, self.top_logprobs)


class GrammarFailed(SequencesFailed, GrammarError):
    """The grammars of some sequences cannot be followed any further."""

    def __init__(self, reasons: Sequence[tuple[object, str]]) -> None:
        """Args: `reasons`: these sequences, each with its reason."""
        message = f"the answer's grammar cannot be followed any further: {in_a_line(reasons[0][1])}"
        super().__init__(message, [one for one, _ in reasons])
        self._reasons = reasons

    def alone(self, one: object) -> GrammarFailed:
        """The error for one of the sequences. It holds no reference to a sequence."""
        return GrammarFailed([(None, next(reason for whose, reason in self._reasons if whose is one))])


def forbid(
    logits: Tensor, sequences: Sequence[TokenSequence], proposed: Sequence[Sequence[int]], tier: str, known: int
) -> None:
    """Sets `logits` of tokens that the grammars forbid to minus infinity, in place: after the context of each sequence,
    and after each of its proposed tokens. Rows of a sequence without a grammar do not change.

    Args:
        logits: `[sum of len(proposed[i]) + 1, vocab]`, one sequence after another.
        tier: the name of the tier whose passes computed them. Tokens that the full cache's tier has drawn are the text.
        known: the number of tokens in the tier's vocabulary. A row does not change if none of these tokens is allowed,
            which happens to drafts only.

    Raises:
        GrammarFailed: the grammars of some sequences cannot be followed any further.
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
