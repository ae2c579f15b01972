"""Where runs of tokens occurred before in a text, for drafts that are looked up."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from .lengths import Acceptance

SHORTEST = 3
"""Tokens that must have come in the same order before, at least, for what followed them to be proposed."""

_MOST_COMPARED = 64
"""Tokens of a match that are counted at most."""

_CANDIDATES = 16
"""Earlier places that are compared, the latest first."""


class Occurrences:
    """Where each run of `SHORTEST` tokens occurred in a text that grows and is cut at its end.

    A dictionary has the last place of each run, and each place the one before it: some 130 bytes a token at
    most. To make it takes a microsecond a token, so none is kept with a saved context.
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._last: dict[tuple[int, ...], int] = {}  # position behind the last occurrence of a run
        self._before = array("q", [])  # by position behind a run: that of the occurrence before it, or -1

    def follow(self, text: Sequence[int]) -> None:
        """Takes in `text`, which goes on from, or is a beginning of, the one it has."""
        tokens, before, last = self._tokens, self._before, self._last
        self.cut(len(text))
        for position in range(len(tokens), len(text)):
            tokens.append(text[position])
            if position + 1 < SHORTEST:
                before.append(-1)
                continue
            run = tuple(tokens[-SHORTEST:])
            before.append(last.get(run, -1))
            last[run] = position + 1

    def cut(self, length: int) -> None:
        """Forgets tokens from `length` on."""
        tokens, before, last = self._tokens, self._before, self._last
        while len(tokens) > length:
            run, earlier = tuple(tokens[-SHORTEST:]), before.pop()
            if len(tokens) >= SHORTEST:
                if earlier < 0:
                    del last[run]
                else:
                    last[run] = earlier
            tokens.pop()

    def longest(self) -> tuple[int, int]:
        """Of the latest `_CANDIDATES` places where the last tokens came before, the one with the longest match, of
        equally long ones the latest: the position behind it, and the tokens that match, `_MOST_COMPARED` at most; 0
        tokens for none."""
        tokens, length = self._tokens, len(self._tokens)
        place, best = 0, 0
        at = self._before[-1] if length >= SHORTEST else -1
        for _ in range(_CANDIDATES):
            if at < 0:
                break
            matching = SHORTEST
            most = min(at, _MOST_COMPARED)
            while matching < most and tokens[at - 1 - matching] == tokens[length - 1 - matching]:
                matching += 1
            if matching > best:
                place, best = at, matching
            at = self._before[at - 1]
        return place, best

    def after(self, position: int, count: int) -> list[int]:
        """`count` tokens from `position` on; where they reach the end of the text, they go on as they began."""
        found = self._tokens[position : position + count]
        while len(found) < count:
            found.append(found[len(found) - (len(self._tokens) - position)])
        return found


@dataclass
class Lookup:
    """What of a sequence is looked up, and how often who drafted for it was right lately."""

    occurrences: Occurrences = field(default_factory=Occurrences)
    model: Acceptance = field(default_factory=Acceptance)
    short: Acceptance = field(default_factory=Acceptance)
    long: Acceptance = field(default_factory=Acceptance)
    last: Acceptance | None = None
    """Whose the last proposal was."""
