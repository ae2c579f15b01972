"""Makes the text of an answer while its tokens arrive, up to its end. Used by all commands."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from ...offload.speculation.sampling import TokenLogprobs
from ...tp.weights.tokenizer import TextStream, Tokenizer
from .logprobs import Entry, entries
from .prompt import Prompt

_TAIL = 8
"""The number of last tokens of a prompt on which the text of the next token depends, for example at the beginning of a
word."""


class StopTexts:
    """Finds the first of several stop texts in an answer that grows from call to call."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = tuple(text for text in texts if text)
        self._begun = [0] * len(self._texts)  # of each: where in the answer the earliest one may have begun

    @property
    def any(self) -> bool:
        """Whether there are stop texts."""
        return bool(self._texts)

    def first(self, text: str, searched: int) -> int | None:
        """The position of the first stop text in `text`; `None` if there is none. The first `searched` letters are
        known to contain none."""
        starts = (text.find(stop, max(0, searched - len(stop))) for stop in self._texts)
        return min((start for start in starts if start >= 0), default=None)

    def at(self, text: str, start: int) -> str:
        """The shortest stop text that is at position `start`."""
        return min((stop for stop in self._texts if text.startswith(stop, start)), key=len)

    def undecided(self, text: str) -> int:
        """The number of letters at the end of `text` that may be the beginning of a stop text."""
        for index, stop in enumerate(self._texts):
            start = max(self._begun[index], len(text) - len(stop) + 1)
            while start < len(text) and not stop.startswith(text[start:]):
                found = text.find(stop[0], start + 1)
                start = found if found >= 0 else len(text)
            self._begun[index] = start
        return max([0, *(len(text) - start for start in self._begun)])


def _decode_with(marks: Mapping[int, str], decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> str:
    """The text of token ids, including the control tokens in `marks`."""
    pieces, begin = [], 0
    for at, token in enumerate([*ids, -1]):
        if token in marks or token == -1:
            pieces += [decode(ids[begin:at]) if at > begin else "", marks.get(token, "")]
            begin = at + 1
    return "".join(pieces)


class AnswerText:
    """Collects the tokens of one answer, and makes its text.

    An answer to a question is shown without the white space around it; a continuation is shown unchanged.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt, eos_ids: Collection[int]) -> None:
        """Args:
        eos_ids: the tokens that end the answer. They are not part of it.
        """
        self._tokenizer, self._eos_ids = tokenizer, eos_ids
        self._stops, self._strips = StopTexts(prompt.stops), prompt.answers
        marks = prompt.syntax.control_marks(tokenizer)
        self._stream = TextStream(partial(_decode_with, marks, tokenizer.decode) if marks else tokenizer.decode)
        self._stream.push(prompt.token_ids[-_TAIL:])
        self._stream.flush()
        self._text = ""
        self._ids: list[int] = []
        self._lengths: list[int] = []  # of the text after each of these tokens, where there are stops
        self._stop_at: int | None = None
        self._shown = 0
        self.num_tokens = 0
        """The number of tokens up to the token that completed a stop text; without a stop text, of all tokens."""

    @property
    def stopped(self) -> bool:
        """Whether a stop text was found. The text after it is not part of the answer."""
        return self._stop_at is not None

    @property
    def stop(self) -> str | None:
        """The stop text that was found. If several begin at the same position, the shortest, which was complete
        first."""
        return None if self._stop_at is None else self._stops.at(self._text, self._stop_at)

    @property
    def may_stop(self) -> bool:
        """Whether there are stop texts. Then tokens must be taken before the next round."""
        return self._stops.any

    @property
    def text(self) -> str:
        """The text so far, as it is shown."""
        whole = self._text[: self._stop_at]
        return whole.strip() if self._strips else whole

    @property
    def whole_text(self) -> str:
        """The text of the tokens so far, with white space that is not shown. It ends before a stop text."""
        return self._text if self._stop_at is None else self._text[: self._stop_at].rstrip()

    @property
    def token_ids(self) -> list[int]:
        """The tokens of `whole_text`: the generated tokens, without end tokens and without tokens after a stop text."""
        if self._stop_at is None:
            return list(self._ids)
        text = self.whole_text
        whole = sum(length <= len(text) for length in self._lengths)
        rest = text[self._lengths[whole - 1] if whole else 0 :]  # a token may begin before the stop and end behind it
        return self._ids[:whole] + (self._tokenizer.encode(self._tokenizer.as_content(rest), False) if rest else [])

    def update(self, token_ids: Sequence[int]) -> str:
        """Replaces the tokens by all tokens of the answer so far. Returns the additional text that can be shown."""
        return self.add(token_ids[self.num_tokens :])

    def add(self, token_ids: Sequence[int]) -> str:
        """Adds tokens. Returns the additional text that can be shown."""
        if self._stops.any:
            for token in token_ids:
                if self.stopped:
                    break
                self._take([token])
                self._lengths += [len(self._text)] * (len(self._ids) - len(self._lengths))
        else:  # all at once, which is sooner decoded
            self._take(token_ids)
        end = len(self._text) - self._stops.undecided(self._text) if self._stop_at is None else self._stop_at
        return self._show(end)

    def finish(self) -> str:
        """The text that was held back, after the last tokens."""
        if not self.stopped:
            self._extend(self._stream.flush())
        return self._show(len(self._text[: self._stop_at]))

    def described(self, found: Sequence[TokenLogprobs], first: int = 0) -> list[Entry]:
        """The log-probabilities of the answer's tokens from `first` on, in the format of `logprobs`.

        Args:
            found: the log-probabilities of all tokens.
        """
        return entries(found[first : self.num_tokens], self._tokenizer.decode, self._eos_ids)

    def _take(self, token_ids: Sequence[int]) -> None:
        self.num_tokens += len(token_ids)
        own = [token for token in token_ids if token not in self._eos_ids]
        if own:
            self._ids += own
            self._extend(self._stream.push(own))

    def _extend(self, piece: str) -> None:
        before = len(self._text)
        self._text += piece
        self._stop_at = self._stops.first(self._text, before)

    def _show(self, end: int) -> str:
        """The part of the text up to `end` that can be shown and was not shown yet."""
        if self._strips:
            end = len(self._text[:end].rstrip())
            if not self._shown:
                self._shown = min(end, len(self._text) - len(self._text.lstrip()))
        piece = self._text[self._shown : end]
        self._shown = max(self._shown, end)
        return piece
