"""Texts that an answer ends before."""

from __future__ import annotations

from collections.abc import Sequence

MAX_STOPS = 16
"""Of one request."""

MAX_STOP_BYTES = 1024
"""Of one of them, in UTF-8. Between two tokens each is looked for once more, and as much text is held back at most."""


class StopTexts:
    """Finds the first of some texts in one answer, which grows from call to call."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = tuple(text for text in texts if text)
        self._begun = [0] * len(self._texts)  # of each: where in the answer the earliest one may have begun

    def first(self, text: str, searched: int) -> int | None:
        """Where the first of them begins in `text`, of which the first `searched` letters had none."""
        starts = (text.find(stop, max(0, searched - len(stop))) for stop in self._texts)
        return min((start for start in starts if start >= 0), default=None)

    def undecided(self, text: str) -> int:
        """How many letters at the end of `text` may turn out to be the beginning of one of them."""
        for index, stop in enumerate(self._texts):
            start = max(self._begun[index], len(text) - len(stop) + 1)
            while start < len(text) and not stop.startswith(text[start:]):
                found = text.find(stop[0], start + 1)
                start = found if found >= 0 else len(text)
            self._begun[index] = start
        return max([0, *(len(text) - start for start in self._begun)])
