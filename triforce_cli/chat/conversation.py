"""A conversation as token ids: what a model is given for each question, so that only new tokens have to be read.

It knows neither engine nor screen: whoever runs the model takes a `NextTurn`, and hands the answer back.
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
"""Further answers to one question come so many seeds after one another."""


@dataclass(frozen=True)
class Piece:
    """A text, and the token ids that stand for it."""

    text: str
    """As it is rendered: what is content is `Tokenizer.as_content`."""
    token_ids: list[int]


@dataclass(frozen=True)
class Turn:
    """A question and its answer."""

    question: str
    answer: str
    """As it is shown."""
    text: str
    """As it stands in the conversation: with the white space around it."""
    attempt: int
    """How many answers to the question there were before this one."""
    stats: dict[str, Any]
    """The run's statistics."""


@dataclass(frozen=True)
class _State:
    turns: tuple[Turn, ...]
    """Those that the model is given: not the dropped ones."""
    asked: int
    """Turns in all."""
    pieces: tuple[Piece, ...]
    """What the model has read and written, in order."""


@dataclass(frozen=True)
class NextTurn:
    """A question as the model is given it."""

    question: str
    token_ids: list[int]
    """The prompt: all of the conversation, up to where the answer begins."""
    seed: int | None
    attempt: int
    dropped: tuple[Turn, ...]
    """The oldest turns, which it no longer holds."""
    new_tokens: int
    """Tokens at the end of the prompt that the conversation did not have at these places."""
    rewritten: bool
    """Whether some of them stand where the conversation had others: the form rewrites what was said before."""
    state: _State
    """What it goes on from; without the dropped turns."""
    pieces: tuple[Piece, ...]


class Conversation:
    """Questions and answers, and the tokens that stand for them."""

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
        positions: of the model.
        max_new_tokens: of an answer; they must find room behind every question.
        context: the text that the conversation is about. It is never dropped.
        seed: what the seeds of all answers follow from; `None`: each is drawn at random.
        trim: drop the oldest turns where a question would find no room.
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
        """Those that the model is given with the next question."""
        return self._state.turns

    @property
    def history(self) -> list[Turn]:
        """All turns, those that were dropped too."""
        return [state.turns[-1] for state in self._states[1:]]

    @property
    def token_ids(self) -> list[int]:
        """All that the model has read and written, up to the last answer's end."""
        return _joined(self._state.pieces)

    @property
    def frame(self) -> Frame:
        """Of a saved context with these tokens."""
        return self._form.answered_frame

    def ask(self, question: str, drop: int = 0) -> NextTurn:
        """A new question.

        Args: `drop` is how many of the oldest turns to drop at least.

        Raises:
            CapacityError: it finds no room in the model's positions.
        """
        return self._next(self._state, question, 0, drop)

    def retry(self, drop: int = 0) -> NextTurn:
        """The last question again, with a new seed; its answer takes the place of the last one.

        Raises:
            UsageError: there is none.
            CapacityError: as for `ask`.
        """
        last = self._last()
        return self._next(self._states[-2], last.question, last.attempt + 1, drop)

    def undo(self) -> Turn:
        """Takes the last turn back, so that all is as before it.

        Raises:
            UsageError: there is none.
        """
        last = self._last()
        self._states.pop()
        return last

    def prompt(self, asked: NextTurn) -> Prompt:
        """What the engine is to answer."""
        return Prompt(asked.token_ids, True, self._form.stops)

    def syntax(self, asked: NextTurn) -> AnswerSyntax:
        """How the answer is to be read where it is shown. What is kept of it is its text as it was generated."""
        if self._form.template is None:
            return PLAIN
        form = CallForm.of(self.tokenizer)
        # Calls that are a whole answer are told from other JSON by the names of tools, which are not known here.
        return syntax_of(asked.token_ids, self.tokenizer, form if form and form.opens else None)

    def add(self, asked: NextTurn, reply: AnswerText, stats: dict[str, Any]) -> Turn:
        """Takes a question and its finished answer into the conversation."""
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
        """The prompt: the pieces that are known, as far as its text begins with theirs, and the rest as one."""
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
        """The seed of an answer: the conversation's own for the first one."""
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
            f"the question and all before it have {tokens:,} tokens and {new:,} more may follow, but the "
            f"model has {positions:,} positions; shorten the question, or lower --max-new-tokens"
        )


def _joined(pieces: Sequence[Piece]) -> list[int]:
    return list(chain.from_iterable(piece.token_ids for piece in pieces))


def _common(one: list[int], other: list[int]) -> int:
    """How many leading tokens are the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
