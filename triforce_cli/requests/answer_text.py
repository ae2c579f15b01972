"""The text of an answer while its tokens come, up to where it stops."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ...offload.speculation.sampling import TokenLogprobs
from ...tp.weights.tokenizer import TextStream, Tokenizer
from .logprobs import Entry, entries
from .prompts import RequestPrompt
from .stop_texts import StopTexts

_TAIL = 8
"""Last tokens of a prompt that decide how the first token of a text that goes on from it reads."""


class AnswerText:
    """Takes the tokens of one answer."""

    def __init__(self, tokenizer: Tokenizer, prompt: RequestPrompt, eos_ids: Collection[int]) -> None:
        """Args: `eos_ids` are tokens that end it, and are no part of it."""
        self._eos_ids, self._stops, self._decode = eos_ids, StopTexts(prompt.stops), tokenizer.decode
        self._stream = TextStream(tokenizer.decode)
        if prompt.continues:
            self._stream.push(prompt.token_ids[-_TAIL:])
            self._stream.flush()
        self._plain = prompt.plain
        self._text = ""
        self._stop_at: int | None = None
        self._shown = 0
        self.num_tokens = 0
        """Tokens up to the one that completed a stop; all, where none came."""

    @property
    def stopped(self) -> bool:
        """Whether one of the stops came: what follows is no part of the answer."""
        return self._stop_at is not None

    @property
    def text(self) -> str:
        """So far; of plain questions and answers without the white space around it."""
        text = self._text[: self._stop_at]
        return text.strip() if self._plain else text

    def update(self, token_ids: Sequence[int]) -> str:
        """Takes over all tokens of the answer so far; returns the text that is certain in addition."""
        return self.add(token_ids[self.num_tokens :])

    def add(self, token_ids: Sequence[int]) -> str:
        """Takes further tokens; returns the text that is certain in addition."""
        for token in token_ids:
            if self.stopped:
                break
            self.num_tokens += 1
            if token not in self._eos_ids:
                self._add(self._stream.push([token]))
        if self.stopped:
            return self._show(len(self.text))
        certain = self._text[: len(self._text) - self._stops.undecided(self._text)]
        return self._show(len(certain.strip() if self._plain else certain))

    def finish(self) -> str:
        """The text that was held back, once nothing follows."""
        if not self.stopped:
            self._add(self._stream.flush())
        return self._show(len(self.text))

    def described(self, found: Sequence[TokenLogprobs], first: int = 0) -> list[Entry]:
        """What is told of the answer's tokens from `first` on where `logprobs` is asked for.

        Args: `found` is of all tokens.
        """
        return entries(found[first : self.num_tokens], self._decode, self._eos_ids)

    def _add(self, piece: str) -> None:
        before = len(self._text)
        self._text += piece
        self._stop_at = self._stops.first(self._text, before)

    def _show(self, end: int) -> str:
        piece = self.text[self._shown : end]
        self._shown = max(self._shown, end)
        return piece
