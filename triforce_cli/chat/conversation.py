"""A conversation as token ids. It makes the prompt for each question so that only new tokens have a prefill.

It does not know the engine or the screen. The code that runs the model takes a `NextTurn`, and returns the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from ...offload.contexts.manifest import Frame
from ...offload.speculation.noise import key_of
from ...tp.errors import CapacityError, UsageError
from ...tp.weights.tokenizer import Tokenizer
from ..session.answer_parts import PLAIN, AnswerSyntax
from ..session.calls import CallForm
from ..session.form import syntax_of
from ..session.prompt import Context, Prompt, QuestionForm, encode_behind
from ..session.text import AnswerText

_ATTEMPTS = 2**20
"""The distance between the seeds of two answers to the same question."""


@dataclass(frozen=True)
class Piece:
    """A text and its token ids."""

    text: str
    """The rendered text; content in it went through `Tokenizer.as_content`."""
    token_ids: Sequence[int]


@dataclass(frozen=True)
class Turn:
    """A question and its answer."""

    question: str
    answer: str
    """The answer as it is shown."""
    text: str
    """The answer as it is in the conversation, with white space around it."""
    attempt: int
    """The number of earlier answers to the question."""
    stats: dict[str, Any]
    """The run's statistics."""


@dataclass(frozen=True)
class _State:
    turns: tuple[Turn, ...]
    """The turns in the model's prompt, without dropped turns."""
    asked: int
    """The number of all turns."""
    pieces: tuple[Piece, ...]
    """All text that the model has read and written, in order."""


@dataclass(frozen=True)
class NextTurn:
    """A question as it is passed to the model."""

    question: str
    token_ids: list[int]
    """The prompt: all of the conversation, up to where the answer begins."""
    seed: int | None
    attempt: int
    dropped: tuple[Turn, ...]
    """The oldest turns, which are no longer in the prompt."""
    new_tokens: int
    """The number of tokens at the end of the prompt that were not at these positions in the conversation."""
    rewritten: bool
    """Whether some of these tokens replace others of the conversation, because turns were dropped or the chat template
    changes earlier turns."""
    state: _State
    """The state that it continues, without the dropped turns."""
    pieces: tuple[Piece, ...]


class Conversation:
    """Questions and answers, and their tokens."""

    def __init__(
        self,
        form: QuestionForm,
        tokenizer: Tokenizer,
        *,
        positions: int,
        max_new_tokens: int,
        context: Context | None = None,
        seed: int | None = None,
        trim: bool = False,
    ) -> None:
        """Args:
        positions: the maximum number of positions of the model.
        max_new_tokens: the maximum of tokens of an answer. There must be room for them after every question.
        context: the text that the conversation is about. It is never dropped.
        seed: the seeds of all answers are derived from it; `None`: each is drawn at random.
        trim: whether the oldest turns are dropped if there is no room for a question.
        """
        self._form, self.tokenizer = form, tokenizer
        self.positions, self.max_new_tokens, self.trim = positions, max_new_tokens, trim
        self._seed = seed
        pieces = ()
        if context:
            pieces = (Piece(form.split_around_text([], "?")[0] + form.placeholder, context.token_ids),)
        self._states = [_State((), 0, pieces)]

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns that are in the prompt of the next question."""
        return self._state.turns

    @property
    def history(self) -> list[Turn]:
        """All turns, including the dropped turns."""
        return [state.turns[-1] for state in self._states[1:]]

    @property
    def token_ids(self) -> list[int]:
        """All tokens that the model has read and written, up to the end of the last answer."""
        return _joined(self._state.pieces)

    @property
    def frame(self) -> Frame:
        """The frame of a saved context with these tokens."""
        return self._form.answered_frame

    def ask(self, question: str, drop: int = 0) -> NextTurn:
        """Prepares a new question.

        Args:
            question: its text.
            drop: the minimum number of the oldest turns to drop.

        Raises:
            CapacityError: the model does not have enough positions for it.
        """
        return self._next(self._state, question, 0, drop)

    def retry(self, drop: int = 0) -> NextTurn:
        """Prepares the last question again, with a new seed. Its answer replaces the last answer.

        Raises:
            UsageError: there is no question.
            CapacityError: as for `ask`.
        """
        last = self._last()
        return self._next(self._states[-2], last.question, last.attempt + 1, drop)

    def undo(self) -> Turn:
        """Removes the last turn, and restores the state before it.

        Raises:
            UsageError: there is no turn.
        """
        last = self._last()
        self._states.pop()
        return last

    def prompt(self, asked: NextTurn) -> Prompt:
        """The prompt for the engine."""
        return Prompt(asked.token_ids, True, self._form.stops)

    def syntax(self, asked: NextTurn) -> AnswerSyntax:
        """How the parts of the answer are found for showing it. The conversation keeps the generated text."""
        if self._form.template is None:
            return PLAIN
        form = CallForm.of(self.tokenizer)
        # Calls that are a whole answer are told from other JSON by the names of tools, which are not known here.
        return syntax_of(asked.token_ids, self.tokenizer, form if form and form.opens else None)

    def add(self, asked: NextTurn, reply: AnswerText, stats: dict[str, Any]) -> Turn:
        """Adds a question and its finished answer to the conversation."""
        turn = Turn(asked.question, reply.text, reply.whole_text, asked.attempt, stats)
        if asked.attempt:
            self._states.pop()
        before = asked.state
        pieces = (*asked.pieces, Piece(self.tokenizer.as_content(reply.whole_text), reply.token_ids))
        self._states.append(_State((*before.turns, turn), before.asked + 1, pieces))
        return turn

    @property
    def _state(self) -> _State:
        return self._states[-1]

    def _last(self) -> Turn:
        if len(self._states) == 1:
            raise UsageError("there is no turn yet")
        return self._state.turns[-1]

    def _next(self, state: _State, question: str, attempt: int, drop: int) -> NextTurn:
        turns = state.turns[drop:]
        while True:
            pieces = self._pieces(state, turns, question)
            tokens = sum(len(piece.token_ids) for piece in pieces)
            if tokens + self.max_new_tokens <= self.positions:
                break
            if not self.trim or not turns:
                raise CapacityError(self._too_long(tokens, bool(turns)))
            turns = turns[1:]
        token_ids, known = _joined(pieces), _joined(state.pieces)
        same = _common(token_ids, known)
        return NextTurn(
            question=question,
            token_ids=token_ids,
            seed=self._seed_of(state.asked, attempt),
            attempt=attempt,
            dropped=state.turns[: len(state.turns) - len(turns)],
            new_tokens=len(token_ids) - same,
            rewritten=same < len(known),
            state=replace(state, turns=turns),
            pieces=pieces,
        )

    def _pieces(self, state: _State, turns: Sequence[Turn], question: str) -> tuple[Piece, ...]:
        """The pieces of the prompt: known pieces, as far as the text of the prompt begins with theirs, and the rest as
        one piece."""
        text = self._form.render([(turn.question, turn.text) for turn in turns], question)
        kept: list[Piece] = []
        at = 0
        for piece in state.pieces:
            if not text.startswith(piece.text, at):
                break
            kept.append(piece)
            at += len(piece.text)
        rest, tokenizer = text[at:], self.tokenizer
        token_ids = encode_behind(rest, tokenizer) if kept else tokenizer.encode(rest, self._form.begins_text)
        return (*kept, Piece(rest, token_ids))

    def _seed_of(self, turn: int, attempt: int) -> int | None:
        """The seed of an answer. The first answer has the seed of the conversation."""
        number = turn + attempt * _ATTEMPTS
        return key_of(self._seed, number) % 2**53 if self._seed is not None and number else self._seed

    def _too_long(self, tokens: int, turns: bool) -> str:
        new, positions = self.max_new_tokens, self.positions
        if turns:
            return (
                f"the conversation has {tokens:,} tokens and {new:,} more may follow, but the model has {positions:,} "
                "positions; take turns back (/undo), drop the oldest ones (--trim), or lower --max-new-tokens"
            )
        return (
            f"the text, the system message and the question have {tokens:,} tokens and {new:,} more may follow, but "
            f"the model has {positions:,} positions; shorten them, or lower --max-new-tokens"
        )


def _joined(pieces: Sequence[Piece]) -> list[int]:
    return list(chain.from_iterable(piece.token_ids for piece in pieces))


def _common(one: list[int], other: list[int]) -> int:
    """The number of equal tokens at the beginning of both lists."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
