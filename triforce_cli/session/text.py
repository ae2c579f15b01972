"""The text of an answer while its tokens arrive, up to where it stops: for all commands."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from ...offload.speculation.sampling import TokenLogprobs
from ...tp.weights.tokenizer import TextStream, Tokenizer
from .logprobs import Entry, entries
from .prompt import Prompt

_TAIL = 8
"""Last tokens of a prompt that decide how the first token behind them reads, as with tokens that begin a word."""


class StopTexts:
    """Finds the first of some texts in one answer, which grows from call to call."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = tuple(text for text in texts if text)
        self._begun = [0] * len(self._texts)  # of each: where in the answer the earliest one may have begun

    @property
    def any(self) -> bool:
        """Whether there are any."""
        return bool(self._texts)

    def first(self, text: str, searched: int) -> int | None:
        """Where the first stop text begins in `text`; none begins and ends in its first `searched` letters."""
        starts = (text.find(stop, max(0, searched - len(stop))) for stop in self._texts)
        return min((start for start in starts if start >= 0), default=None)

    def at(self, text: str, start: int) -> str:
        """The shortest of them that stands there."""
        return min((stop for stop in self._texts if text.startswith(stop, start)), key=len)

    def undecided(self, text: str) -> int:
        """How many letters at the end of `text` may turn out to be the beginning of one of them."""
        for index, stop in enumerate(self._texts):
            start = max(self._begun[index], len(text) - len(stop) + 1)
            while start < len(text) and not stop.startswith(text[start:]):
                found = text.find(stop[0], start + 1)
                start = found if found >= 0 else len(text)
            self._begun[index] = start
        return max([0, *(len(text) - start for start in self._begun)])


def _decode_with(marks: Mapping[int, str], decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> str:
    """The text of ids, with the control tokens `marks` in it."""
    pieces, begin = [], 0
    for at, token in enumerate([*ids, -1]):
        if token in marks or token == -1:
            pieces += [decode(ids[begin:at]) if at > begin else "", marks.get(token, "")]
            begin = at + 1
    return "".join(pieces)


class AnswerText:
    """Takes the tokens of one answer.

    An answer to a question is shown without the white space around it; a continuation as it is.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt, eos_ids: Collection[int]) -> None:
        """Args: `eos_ids` are tokens that end it, and are no part of it."""
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
        """Tokens up to the one that completed a stop; all, where there was none."""

    @property
    def stopped(self) -> bool:
        """Whether one of the stop texts is there: what follows is no part of the answer."""
        return self._stop_at is not None

    @property
    def stop(self) -> str | None:
        """The stop text that is there; of several that begin at one place the shortest, which was complete first."""
        return None if self._stop_at is None else self._stops.at(self._text, self._stop_at)

    @property
    def may_stop(self) -> bool:
        """Whether there are stop texts, so that tokens must be taken before the next round."""
        return self._stops.any

    @property
    def text(self) -> str:
        """As it is shown, so far."""
        whole = self._text[: self._stop_at]
        return whole.strip() if self._strips else whole

    @property
    def whole_text(self) -> str:
        """The text of its tokens so far, with white space that is not shown; up to a stop, and there without it."""
        return self._text if self._stop_at is None else self._text[: self._stop_at].rstrip()

    @property
    def token_ids(self) -> list[int]:
        """The tokens of `whole_text`: those that were generated, without end tokens and what follows a stop."""
        if self._stop_at is None:
            return list(self._ids)
        text = self.whole_text
        whole = sum(length <= len(text) for length in self._lengths)
        rest = text[self._lengths[whole - 1] if whole else 0 :]  # a token may begin before the stop and end behind it
        return self._ids[:whole] + (self._tokenizer.encode(self._tokenizer.as_content(rest), False) if rest else [])

    def update(self, token_ids: Sequence[int]) -> str:
        """Takes over all tokens of the answer so far; returns the text that can be shown in addition."""
        return self.add(token_ids[self.num_tokens :])

    def add(self, token_ids: Sequence[int]) -> str:
        """Takes further tokens; returns the text that can be shown in addition."""
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
        """The text that was held back, once nothing follows."""
        if not self.stopped:
            self._extend(self._stream.flush())
        return self._show(len(self._text[: self._stop_at]))

    def described(self, found: Sequence[TokenLogprobs], first: int = 0) -> list[Entry]:
        """The log-probabilities of the answer's tokens from `first` on, where a request asks for `logprobs`.

        Args: `found` are those of all tokens.
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
        """What is to be shown of the text up to `end` and was not."""
        if self._strips:
            end = len(self._text[:end].rstrip())
            if not self._shown:
                self._shown = min(end, len(self._text) - len(self._text.lstrip()))
        piece = self._text[self._shown : end]
        self._shown = max(self._shown, end)
        return piece
