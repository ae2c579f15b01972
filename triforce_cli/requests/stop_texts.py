"""Texts that an answer ends before."""

from __future__ import annotations

from collections.abc import Sequence


class StopTexts:
    """Finds the first of some texts in an answer that grows."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = tuple(text for text in texts if text)
        self._beginnings = tuple(text[:length] for text in self._texts for length in range(1, len(text)))

    def first(self, text: str, searched: int) -> int | None:
        """Where the first of them begins in `text`, of which the first `searched` letters had none."""
        starts = (text.find(stop, max(0, searched - len(stop))) for stop in self._texts)
        return min((start for start in starts if start >= 0), default=None)

    def undecided(self, text: str) -> int:
        """How many letters at the end of `text` may turn out to be the beginning of one of them."""
        return max((len(one) for one in self._beginnings if text.endswith(one)), default=0)
