"""An index of the earlier places of token runs in a text, for drafts by lookup."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from .lengths import Acceptance

SHORTEST = 3
"""The minimum number of tokens in a match."""

_MOST_COMPARED = 64
"""The maximum number of tokens of a match that are counted."""

_CANDIDATES = 16
"""The number of earlier places that are compared, the latest first."""


class Occurrences:
    """The places of each run of `SHORTEST` tokens in a text that grows and is cut at its end.

    A dictionary has the last place of each run, arrays the tokens, and for each place the previous place. Together,
    they take 120 to 150 bytes per token. Making the index takes a microsecond per token, so it is not saved with
    contexts.
    """

    def __init__(self) -> None:
        self._tokens = array("i")
        self._last: dict[bytes, int] = {}  # by a run's tokens: the position after its last occurrence
        self._before = array("q", [])  # by position after a run: the position after its previous occurrence, or -1

    def follow(self, text: Sequence[int]) -> None:
        """Updates the index to `text`, which continues the indexed text, or is its beginning."""
        tokens, before, last = self._tokens, self._before, self._last
        self.cut(len(text))
        for position in range(len(tokens), len(text)):
            tokens.append(text[position])
            if position + 1 < SHORTEST:
                before.append(-1)
                continue
            run = tokens[-SHORTEST:].tobytes()
            before.append(last.get(run, -1))
            last[run] = position + 1

    def cut(self, length: int) -> None:
        """Forgets tokens from `length` on."""
        tokens, before, last = self._tokens, self._before, self._last
        while len(tokens) > length:
            run, earlier = tokens[-SHORTEST:].tobytes(), before.pop()
            if len(tokens) >= SHORTEST:
                if earlier < 0:
                    del last[run]
                else:
                    last[run] = earlier
            tokens.pop()

    def longest(self) -> tuple[int, int]:
        """Finds the longest match of the last tokens among the latest `_CANDIDATES` earlier places; among equally long
        matches, the latest. Returns the position after the match and its length, at most `_MOST_COMPARED` tokens; 0
        tokens if there is none."""
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
        """`count` tokens from `position` on. At the end of the text, they are repeated from `position`."""
        found = self._tokens[position : position + count].tolist()
        while len(found) < count:
            found.append(found[len(found) - (len(self._tokens) - position)])
        return found


@dataclass
class Lookup:
    """The index of a sequence's text, and the recent acceptance rate of each source of drafts."""

    occurrences: Occurrences = field(default_factory=Occurrences)
    """The index of the text."""
    model: Acceptance = field(default_factory=Acceptance)
    """The acceptance of the model's drafts."""
    short: Acceptance = field(default_factory=Acceptance)
    """The acceptance of drafts after short matches."""
    long: Acceptance = field(default_factory=Acceptance)
    """The acceptance of drafts after long matches."""
    last: Acceptance | None = None
    """The acceptance of the source of the last proposal; `None` if there was no proposal."""
