"""Answers requests: keeps the maximum number of sequences in a run, and writes a line for each complete request."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from ...offload import Engine
from ...offload.contexts.manifest import ContextError
from ...tp.errors import PeerError, TriforceError
from ...tp.weights.tokenizer import Tokenizer
from ..session.prompt import Prompt
from ..session.report import SECONDS_BETWEEN_LINES, progress_lines
from ..session.request_prompt import request_prompts, request_task
from ..session.response import FinishedAnswer, Timings, response_body
from ..session.session import Failed, Finished, Session, Task, Written
from ..session.wire import AnswerRequest, BodyError
from ..terminal.live import LiveDisplay
from ..terminal.live_picture import AnswerRow, Figures
from ..terminal.stopping import Signals, Stop
from .answers_file import AnswersFile
from .lines import RequestLine
from .options import BatchOptions
from .totals import Totals, answer_line, refused_line

_LONG = 4096
"""From this number of tokens of a prompt on, lines report the progress of its prefill if there is no live display."""


@dataclass(eq=False)
class BatchItem:
    """A request to be answered."""

    line: RequestLine
    request: AnswerRequest
    prompts: tuple[Prompt, ...] = ()
    """Its prompts, when it is its turn."""
    finished: dict[int, FinishedAnswer] = field(default_factory=dict)
    """Its complete answers, by their numbers."""
    failed: bool = False

    @property
    def complete(self) -> bool:
        return len(self.finished) == self.request.answers


class Runner:
    """Answers requests with one engine."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        file: AnswersFile,
        totals: Totals,
        signals: Signals,
        options: BatchOptions,
    ) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._file, self.totals, self._signals = file, totals, signals
        self._model, self._most = options.model, options.max_sequences
        self._waiting: deque[tuple[BatchItem, int]] = deque()
        self._session: Session | None = None
        self._display: LiveDisplay | None = None
        self._reading: dict[Task, Callable[[float], None]] = {}
        self._told_at = time.monotonic()
        self._to_come = 0  # answers that are not begun
        self._done, self._figures = 0, Figures()  # answers that are complete

    def run(self, items: Sequence[BatchItem], display: LiveDisplay | None) -> None:
        """Answers all requests. Requests about one saved context are answered one after another.

        Raises:
            TriforceError: the model cannot continue; complete answers are written.
            Stop: the run was interrupted; each answer is written as far as it came.
        """
        self._display, self.totals.began = display, time.perf_counter()
        self._to_come = sum(item.request.answers for item in items)
        groups: dict[str | None, list[BatchItem]] = {}
        for item in items:
            groups.setdefault(item.request.context, []).append(item)
        for group in groups.values():
            self._waiting.extend((item, number) for item in group for number in range(item.request.answers))
        while self._waiting:
            self._answer()

    def rows(self) -> list[AnswerRow]:
        """The lines of the live display."""
        return [row(task) for task in self._tasks]

    def lengths(self) -> dict[str, int]:
        """The present `draft_length` and `block_length`."""
        return self._session.lengths if self._session else {"draft_length": 0, "block_length": 0}

    def others(self) -> tuple[int, Figures, int]:
        """Data about answers without a line: how many are complete, their figures, and how many have not begun."""
        return self._done, self._figures, self._to_come

    @property
    def _tasks(self) -> list[Task]:
        """The answers that are being written, or wait."""
        return list(self._session.tasks) if self._session else []

    def _answer(self) -> None:
        """Answers requests until none is left, or until a request ends the run with an error."""
        self._reading = {}
        on_memory = None if self._display else progress_lines("taking host memory for the KV cache")
        session = self._session = Session(
            self._engine,
            self._tokenizer,
            max_sequences=self._most,
            in_slices=False,
            interrupted=self._signals.pending,
            on_memory=on_memory,
            on_read=self._read,
        )
        try:
            with closing(session.events(self._next)) as events:
                for event in events:
                    if isinstance(event, Finished):
                        self._complete(event.task)
                    elif isinstance(event, Failed):
                        self._fail(event.task.owner, _as_body_error(str(event.error)))
                    if self._display is None:
                        self._print_progress()
                    elif isinstance(event, Written):
                        self._display.note(event.piece, event.round)
                    else:
                        self._display.draw_if_due()
            self._signals.raise_pending()
        except (Stop, Exception) as error:
            if (session.broken and self._engine.target.ranks.size > 1) or not self._is_of_requests(error):
                self._keep_unfinished()
                raise
            for item in {task.owner for task in self._tasks}:
                self._fail(item, _as_body_error(str(error)))
        finally:
            if session.run:
                self.totals.add_run(session.run.stats())

    def _is_of_requests(self, error: BaseException) -> bool:
        """Whether an error comes from a request, and not from the model. Then other requests can still be answered."""
        if isinstance(error, PeerError) or not isinstance(error, TriforceError):
            return False
        return isinstance(error, ContextError) or len(self._tasks) == 1

    def _complete(self, task: Task) -> None:
        """Stores an answer. If it is the last of its request, writes the line of the request."""
        self._reading.pop(task, None)
        answer, item = finished_answer(task), task.owner
        self.totals.add_answer(answer, task.sequence.warnings if task.sequence else ())
        self._done += 1
        if task.sequence:
            self._figures += Figures.of(task.sequence.statistics)
        item.finished[task.number] = answer
        if item.complete:
            self._file.add(answer_line(item.line, 200, response_body(item.request, self._model, item.finished)))
            self.totals.answered += 1
            item.finished, item.prompts = {}, ()

    def _next(self, waits: bool) -> Task | None:
        """The next answer to begin. Requests before it whose prompt cannot be made fail."""
        while self._waiting:
            item, number = self._waiting.popleft()
            self._to_come -= 1
            if item.failed:
                continue
            try:
                item.prompts = item.prompts or request_prompts(
                    item.request, self._tokenizer, self._engine.target.config
                )
            except TriforceError as error:
                self._fail(item, error if isinstance(error, BodyError) else BodyError(str(error)))
                continue
            except Exception as error:  # a fault here, which is to fail this request alone
                self._fail(item, _as_body_error(f"its prompt could not be made ({type(error).__name__})"))
                continue
            return request_task(item.request, item.prompts, number, item)
        return None

    def _fail(self, item: BatchItem, error: BodyError) -> None:
        """Writes the error of a request that gets no answer, and ends its answers that have begun."""
        item.failed = True
        for task in self._tasks:
            if self._session and task.owner is item:
                self._session.end(task)
        self._file.add(refused_line(item.line, error))
        self.totals.fail(item.line, str(error))

    def _keep_unfinished(self) -> None:
        """Writes interrupted answers as far as they came. The next run answers these requests again."""
        unfinished = {item: dict(item.finished) for item, _ in self._waiting if item.finished and not item.failed}
        for task in self._tasks:
            kept = unfinished.setdefault(task.owner, dict(task.owner.finished))
            if task.begun:
                kept[task.number] = finished_answer(task)
        for item, answers in unfinished.items():
            if answers:
                self.totals.interrupted += 1
                body = response_body(item.request, self._model, answers)
                error = {"code": "interrupted", "message": "the run was stopped before the answer was complete"}
                self._file.add(answer_line(item.line, 499, body, error))

    def _read(self, task: Task, share: float) -> None:
        """Notes the finished share of a prefill."""
        tokens = len(task.prompt.token_ids)
        if self._display:
            self._display.draw_if_due()
        elif tokens >= _LONG:
            self._reading.setdefault(task, progress_lines(f"{name_of(task)}: prefill of {tokens:,} tokens"))(share)

    def _print_progress(self) -> None:
        now = time.monotonic()
        if now - self._told_at < SECONDS_BETWEEN_LINES:
            return
        self._told_at = now
        totals, rows = self.totals, self.rows()
        tokens = totals.new_tokens + sum(len(row.statistics.token_ids) for row in rows)
        totals.note(
            f"{totals.answered:,} answered, {len(totals.failures):,} failed; {len(rows):,} being written, "
            f"{self._to_come:,} to come; {tokens / totals.elapsed_s:.1f} tokens/s"
        )


def _as_body_error(message: str) -> BodyError:
    """The error for a request that the engine has not answered."""
    return BodyError(message, code="not_answered", status=500)


def name_of(task: Task) -> str:
    """The description of an answer that is being written. Its owner is a `BatchItem`."""
    count = task.owner.request.answers
    return f"{task.owner.line.custom_id}" + (f" (answer {task.number + 1} of {count})" if count > 1 else "")


def row(task: Task) -> AnswerRow:
    """The line of an answer in the live display."""
    if task.sequence is None:
        return AnswerRow(name_of(task), "waiting", task.max_new_tokens)
    return AnswerRow.of(name_of(task), task.sequence, task.max_new_tokens, ended=False)


def finished_answer(task: Task) -> FinishedAnswer:
    """The answer as far as it was written; at least one token was written."""
    task.finish_text()
    assert task.sequence
    text = task.text
    logprobs = None if task.top_logprobs is None else text.described(task.sequence.logprobs)
    timings = Timings.of(task.sequence.statistics)
    said = text.text, logprobs, task.prompt.syntax
    return FinishedAnswer(task.finish_reason, text.stop, text.num_tokens, timings, *said)
