"""An answer while it is written: its text up to where it stops, and the token ids that stand for it in what follows."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ...tp.weights.tokenizer import TextStream, Tokenizer
from ..requests.stop_texts import StopTexts

_TAIL = 8
"""Last tokens of the prompt that decide how the answer's first token reads, as with tokens that begin a word."""


class Reply:
    """Takes an answer's tokens as they come."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stops: Sequence[str], eos_ids: Collection[int]
    ) -> None:
        """Args:
        prompt_ids: what it answers.
        stops: texts that it ends before.
        eos_ids: tokens that end it, and are no part of it.
        """
        self._encode, self._stops, self._eos_ids = tokenizer.encode, StopTexts(stops), eos_ids
        self._stream = TextStream(tokenizer.decode)
        self._stream.push(prompt_ids[-_TAIL:])
        self._stream.flush()
        self._taken = 0
        self._ids: list[int] = []
        self._lengths: list[int] = []
        """Of the text after each token."""
        self._text = ""
        self._stop_at: int | None = None
        self._shown, self._begun = 0, False

    @property
    def stopped(self) -> bool:
        """Whether one of the stops came: what follows is no part of the answer."""
        return self._stop_at is not None

    def update(self, token_ids: Sequence[int]) -> str:
        """Takes over all tokens of the answer so far; returns the text that can be shown in addition."""
        for token in token_ids[self._taken :]:
            self._taken += 1
            if self.stopped or token in self._eos_ids:
                continue
            self._ids.append(token)
            self._add(self._stream.push([token]))
            self._lengths.append(len(self._text))
        return self._show(len(self._text) - self._held_back())

    def finish(self) -> str:
        """The text that was held back, once nothing follows."""
        if not self.stopped:
            self._add(self._stream.flush())
        return self._show(len(self.text.rstrip()))

    @property
    def text(self) -> str:
        """As it stands in the conversation."""
        return self._text if self._stop_at is None else self._text[: self._stop_at].rstrip()

    @property
    def answer(self) -> str:
        """As it is shown, once it is finished."""
        return self.text.strip()

    @property
    def token_ids(self) -> list[int]:
        """Those that were generated, as far as they are of the answer; `text` is their text."""
        if self._stop_at is None:
            return list(self._ids)
        text = self.text
        whole = sum(length <= len(text) for length in self._lengths)
        rest = text[self._lengths[whole - 1] if whole else 0 :]  # a token may begin before the stop and end behind it
        return self._ids[:whole] + (self._encode(rest, False) if rest else [])

    def _add(self, piece: str) -> None:
        before = len(self._text)
        self._text += piece
        self._stop_at = self._stops.first(self._text, before)

    def _held_back(self) -> int:
        """How much of the text's end may turn out to be no part of the answer: the beginning of a stop, white space."""
        text = self.text
        return len(self._text) - len(text[: len(text) - self._stops.undecided(text)].rstrip())

    def _show(self, end: int) -> str:
        if not self._begun:
            self._shown = len(self._text) - len(self._text.lstrip())
        piece = self._text[self._shown : end]
        self._begun = self._begun or bool(piece)
        self._shown = max(self._shown, end)
        return piece
