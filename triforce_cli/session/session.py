"""From requests to text: the loop in which all commands have their answers written."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ...offload import Ended, Engine, Progress, Request, Round, Run, Sampling, Tokens
from ...offload.batch.sequence import BatchSequence
from ...offload.contexts.model import ContextRequest
from ...offload.settings import MOST_SEQUENCES
from ...offload.speculation.grammar import Grammar
from ...tp.errors import TriforceError
from ...tp.weights.tokenizer import Tokenizer
from .form import reasoning_of
from .logprobs import Entry
from .prompt import Prompt
from .text import AnswerText


@dataclass(eq=False)
class Task:
    """A task for the engine: the prefill of a prompt, and then writing an answer, or only saving the prompt."""

    prompt: Prompt
    contexts: ContextRequest
    """The saved contexts to start from, and to save."""
    sampling: Sampling = field(default_factory=lambda: Sampling(0.0))
    max_new_tokens: int = 1
    ignore_eos: bool = False
    number: int = 0
    """The number of the answer among the answers to one request, from 0."""
    draw: int = 0
    """The number of the answer among the answers that are drawn with one seed from one prompt, from 0."""
    top_logprobs: int | None = None
    grammar: Grammar | None = None
    """The required form of the answer."""
    owner: Any = None
    """Any object by which the command identifies the task."""
    writes: bool = True
    """Whether an answer is wanted; otherwise, the prompt is only saved."""
    sequence: BatchSequence | None = None
    """The engine's sequence, after it was opened."""
    _text: AnswerText | None = None  # once the engine has asked for it
    _new_text: Callable[[], AnswerText] | None = None
    _piece: str = ""
    _described: int = 0  # tokens whose log-probabilities were handed out

    @property
    def text(self) -> AnswerText:
        """The answer so far. Available after the engine has taken the task."""
        assert self._text
        return self._text

    @property
    def begun(self) -> bool:
        """Whether any token was written."""
        return self.sequence is not None and bool(self.sequence.statistics.token_ids)

    @property
    def finish_reason(self) -> str:
        """`eos`, `stop` (before one of the stop texts), `length`, or `interrupted` before that."""
        if self._text and self._text.stopped:
            return "stop"
        return self.sequence.statistics.finish_reason if self.sequence else "interrupted"

    def finish_text(self) -> str:
        """The rest of its text, after the last token."""
        return self.take_piece() + (self.text.finish() if self._text else "")

    def prepare(self, tokenizer: Tokenizer, eos_ids: Sequence[int]) -> Task:
        """Makes the `AnswerText` for its tokens, and returns the task. If it was not called, the session calls it."""
        self._new_text = partial(AnswerText, tokenizer, self.prompt, () if self.ignore_eos else eos_ids)
        self._text = self._text or self._new_text()
        if self.grammar and self.prompt.answers:
            self.grammar = replace(self.grammar, reasoning=reasoning_of(self.prompt.token_ids, tokenizer))
        return self

    def request(self) -> Request:
        """The request for the engine."""
        options = {"number": self.draw, "top_logprobs": self.top_logprobs, "contexts": self.contexts}
        options |= {"grammar": self.grammar}
        limits, stops = (self.max_new_tokens, self.ignore_eos), self._take if self.text.may_stop else None
        return Request(self.prompt.token_ids, self.sampling, *limits, **options, stops=stops, tag=self)

    def drop_unrecorded(self) -> None:
        """Removes the tokens of a round that was interrupted before it was recorded. None of their text was returned
        yet."""
        recorded = self.sequence.statistics.token_ids if self.sequence else []
        if self._text and self._new_text and self._text.num_tokens > len(recorded):
            self._text, self._piece = self._new_text(), ""
            self._text.update(recorded)

    def take_piece(self) -> str:
        """The additional text that can be shown since the last call."""
        if self.sequence and self._text and not self._text.may_stop:  # else its tokens are taken within the round
            self._piece += self._text.update(self.sequence.statistics.token_ids)
        piece, self._piece = self._piece, ""
        return piece

    def take_logprobs(self) -> list[Entry] | None:
        """The log-probabilities of the tokens since the last call, if they were asked for."""
        if self.top_logprobs is None or self.sequence is None:
            return None
        new = self.text.described(self.sequence.logprobs, self._described)
        self._described = self.text.num_tokens
        return new

    def _take(self, tokens: list[int]) -> bool:
        """Adds the tokens of a round. Returns whether the answer ends with them."""
        self._piece += self.text.add(tokens)
        return self.text.stopped


@dataclass(frozen=True)
class Written:
    """The text that a round has added to an answer."""

    task: Task
    round: Round
    piece: str
    """The additional text that can be shown."""


@dataclass(frozen=True)
class Finished:
    """An answer is complete, or a prompt is saved."""

    task: Task


@dataclass(frozen=True)
class Failed:
    """A task has failed. Nothing follows."""

    task: Task
    error: BaseException


Event = Written | Finished | Failed | None
"""`None`: a prefill is running, or a sequence that was ended has left the run."""

NextTask = Callable[[bool], Task | None]
"""Returns the next task, or `None` if there is none at present. It is called between rounds whenever another task may
run. The argument is true if nothing else is running; then it may wait for a task, and `None` ends the session's run."""


class Session:
    """Lets one engine do tasks."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        *,
        max_sequences: int = MOST_SEQUENCES,
        in_slices: bool = True,
        interrupted: Callable[[], bool] | None = None,
        on_memory: Callable[[float], None] | None = None,
        on_read: Callable[[Task, float], None] | None = None,
        on_warning: Callable[[str], None] | None = None,
    ) -> None:
        """Args:
        max_sequences, in_slices, interrupted, on_memory: see `Engine.batch` and `Engine.stream`.
        on_read: called with a task and the finished share of its prefill, 0 to 1.
        on_warning: called when a task ends, with a line for each feature that it had to do without.
        """
        self._engine, self._tokenizer, self._interrupted = engine, tokenizer, interrupted
        self._limits = {"max_sequences": max_sequences, "in_slices": in_slices}
        self.on_memory, self.on_read, self._on_warning = on_memory, on_read, on_warning
        self.tasks: dict[Task, None] = {}
        """The tasks that were passed to the engine and have not ended."""
        self.run: Run | None = None
        """The engine's run, after it has begun."""

    def events(self, next_task: NextTask) -> Generator[Event, None, None]:
        """Does the tasks of `next_task`, until it returns `None`, a signal ends the run, or this generator is closed.
        Tasks that are left in `tasks` then were interrupted.

        Raises:
            Exception: the engine failed. Tasks that are left in `tasks` were interrupted.
        """
        eos_ids = self._engine.target.config.eos_token_ids

        def next_request(waits: bool) -> Request | None:
            task = next_task(waits)
            if task is None:
                return None
            self.tasks[task] = None
            return task.prepare(self._tokenizer, eos_ids).request()

        calls = {"interrupted": self._interrupted, "on_memory": self.on_memory, "on_prefill": self._read}
        run = self.run = self._engine.run(next_request, **self._limits, **calls)
        try:
            for event in run:
                yield from self._events_of(event)
                del event  # it refers to a task that may have ended, and the run may wait for the next one for long
        finally:
            for sequence in run.live:
                if sequence.tag in self.tasks and sequence.active_or_none:  # else nothing is known of it
                    sequence.tag.sequence = sequence
                    sequence.tag.drop_unrecorded()
            if self._engine.target.ranks.size > 1 and not run.broken:  # other ranks end with it
                run.end_all()
                for _ in run:
                    pass
            run.close()

    def do(self, task: Task) -> Generator[Written | Finished, None, None]:
        """Does one task, until it is done, a signal ends the run, or this generator is closed.

        Raises:
            Exception: the error of the task or of the engine.
        """
        tasks = [task]
        with closing(self.events(lambda waits: tasks.pop() if tasks else None)) as events:
            for event in events:
                if isinstance(event, Failed):
                    raise event.error
                if event is not None:
                    yield event

    def warnings(self, task: Task) -> list[str]:
        """The features that the run and a task had to do without so far, a line each."""
        return (self.run.warnings if self.run else []) + (task.sequence.warnings if task.sequence else [])

    @property
    def broken(self) -> bool:
        """Whether the run was interrupted inside a pass, in which other ranks, if there are any, still are."""
        return self.run is not None and self.run.broken

    @property
    def lengths(self) -> dict[str, int]:
        """The present lengths: `draft_length` and `block_length`."""
        return self.run.lengths if self.run else {"draft_length": 0, "block_length": 0}

    def end(self, task: Task) -> None:
        """Ends a task after the present round, or before it begins. No event follows."""
        self.tasks.pop(task, None)
        for sequence in self.run.live if self.run else ():
            if self.run and sequence.tag is task:
                self.run.end(sequence)

    def end_all(self) -> None:
        """Ends the run after the present round."""
        if self.run:
            self.run.end_all()

    def _events_of(self, event: Tokens | Progress | Ended) -> Iterator[Event]:
        """The session's events for one event of the run."""
        task = event.sequence.tag
        if isinstance(event, Ended):
            if self._on_warning:
                for warning in event.sequence.warnings:
                    self._on_warning(warning)
            event.sequence.forget_request()  # it refers to the task, which refers to the sequence
        if task not in self.tasks:
            yield None
            return
        task.sequence = event.sequence
        if isinstance(event, Tokens):
            yield from self._written(task, event.round)
        elif isinstance(event, Ended):
            yield self._ended(task)
        else:
            yield None

    def _written(self, task: Task, event: Round) -> Iterator[Event]:
        sequence = task.sequence
        assert sequence
        if not task.writes or sequence.error is not None or sequence.check_failure is not None:
            return
        whole = task.finish_reason != "interrupted"
        piece = task.finish_text() if whole else task.take_piece()
        yield Written(task, event, piece)
        if whole and task in self.tasks:  # it may have been ended meanwhile
            self.tasks.pop(task, None)
            yield Finished(task)

    def _ended(self, task: Task) -> Event:
        """The event for a sequence that has ended before its answer was complete."""
        self.tasks.pop(task, None)
        assert task.sequence
        if task.sequence.failure is not None:
            return Failed(task, task.sequence.failure)
        return Finished(task) if not task.writes else Failed(task, TriforceError("the run ended before the answer"))

    def _read(self, sequence: BatchSequence, share: float) -> None:
        task = sequence.tag
        if task in self.tasks:
            task.sequence = sequence
            if self.on_read:
                self.on_read(task, share)
