"""Answers requests: keeps so many sequences in a batch as may be, and writes a line for each complete request."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from ...offload import Batch, Engine, Request, Sampling
from ...offload.contexts.manifest import ContextError
from ...offload.contexts.model import ContextRequest
from ...tp.errors import PeerError, TriforceError
from ...tp.weights.tokenizer import Tokenizer
from ..generate.report import SECONDS_BETWEEN_LINES, progress_lines
from ..generate.run import step
from ..requests.answer_text import AnswerText
from ..requests.body import BodyError
from ..requests.prompts import PromptMaker
from ..requests.response import response_body
from ..terminal.batch_frame import SequenceRow
from ..terminal.batch_live import ShownSequence
from ..terminal.live_screen import LiveScreen
from ..terminal.stopping import Signals, Stop
from .answers_file import AnswersFile
from .request import BatchRequest
from .totals import Totals, answer_line, refused_line
from .writing import Job, Writing

_AHEAD = 1
"""Sequences that wait in a batch, so that it does not end while there are more."""

LASTING = 256
"""Sequences that a batch takes before another one begins: what has ended stays in its statistics, prompts too."""

_LONG = 4096
"""Tokens of a prompt from which on lines tell how it is read, where there is no live display."""


class Runner:
    """Works through requests with one engine."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        maker: PromptMaker,
        file: AnswersFile,
        totals: Totals,
        signals: Signals,
        request: BatchRequest,
    ) -> None:
        self._engine, self._tokenizer, self._maker = engine, tokenizer, maker
        self._file, self.totals, self._signals = file, totals, signals
        self._model, self._most = request.model, request.max_sequences
        self._waiting: deque[tuple[Job, int]] = deque()
        self._writing: dict[int, Writing] = {}
        self._batch: Batch | None = None
        self._display: LiveScreen | None = None
        self._reading: dict[int, Callable[[float], None]] = {}
        self._events = self._taken = 0  # of this batch
        self._told_at = time.monotonic()
        self._to_come = 0  # answers that are not begun
        self._done = 0

    def run(self, jobs: Sequence[Job], display: LiveScreen | None) -> None:
        """Answers all, those about one saved context after one another.

        Raises:
            TriforceError: the model cannot go on; what was complete is written.
            Stop: it was interrupted; what came of each answer is written.
        """
        self._display, self.totals.began = display, time.perf_counter()
        self._to_come = sum(job.request.answers for job in jobs)
        groups: dict[str | None, list[Job]] = {}
        for job in jobs:
            groups.setdefault(job.request.context, []).append(job)
        for context, group in groups.items():
            self._waiting.extend((job, number) for job in group for number in range(job.request.answers))
            while self._waiting:
                self._run_batch(ContextRequest(name=context, find=context is None))

    def rows(self) -> list[SequenceRow]:
        """The lines of the live display."""
        return [writing.row(self._sequence(index)) for index, writing in list(self._writing.items())]

    def lengths(self) -> dict[str, int]:
        """The lengths in force."""
        return self._batch.lengths if self._batch else {"draft_length": 0, "block_length": 0}

    def others(self) -> tuple[int, int, int]:
        """Answers without a line: how many are complete, their tokens, and how many are not begun."""
        return self._done, self.totals.new_tokens, self._to_come

    def _run_batch(self, contexts: ContextRequest) -> None:
        """Answers requests until none is left, in one batch that others join."""
        self._batch, self._reading, self._events = None, {}, 0
        started = list(self._next(self._most + _AHEAD))
        if not started:
            return
        self._writing = {index: writing for index, (writing, _) in enumerate(started)}
        self._taken = len(started)
        try:
            self._batch = self._engine.batch(
                [request for _, request in started],
                max_sequences=self._most,
                contexts=contexts,
                on_memory=None if self._display else progress_lines("taking host memory for the KV cache"),
                on_prefill=self._read,
            )
            self._decode(self._batch)
        except (Stop, Exception) as error:
            if not self._is_of_requests(error):
                self._keep_unfinished()
                raise
            for job in {writing.job for writing in self._writing.values()}:
                self._fail(job, _as_body_error(str(error)))
        finally:
            if self._batch:
                self._batch.close()
                self.totals.add_batch(self._batch.stats())

    def _is_of_requests(self, error: BaseException) -> bool:
        """Whether an error is of what was asked for, and not of the model: others can still be answered."""
        if isinstance(error, PeerError) or not isinstance(error, TriforceError):
            return False
        return isinstance(error, ContextError) or len(self._writing) == 1

    def _decode(self, batch: Batch) -> None:
        """Runs the batch to its end; others take the places of those that are complete."""
        while True:
            event = step(batch, self._signals)
            if event is not None:
                self._events += 1
                self._update(batch, event[0])
            for index in list(self._writing):
                sequence = self._sequence(index)
                if event is None or (sequence and sequence.error is not None):
                    self._update(batch, index)
            if self._display:
                self._display.draw_if_due()
            else:
                self._tell_progress()
            if event is None:
                self._begin_again()
                return
            room = min(self._most + _AHEAD - len(self._writing), LASTING - self._taken)
            for writing, request in self._next(room):
                self._writing[batch.add(request)] = writing
                self._taken += 1

    def _update(self, batch: Batch, index: int) -> None:
        """Takes over what has been done of a sequence."""
        sequence, writing = self._sequence(index), self._writing.get(index)
        if sequence is None or writing is None:
            return
        if sequence.error is not None:
            self._fail(writing.job, _as_body_error(sequence.error))
            return
        answer = writing.update(sequence)
        if answer is None:
            return
        if sequence.statistics.finish_reason == "interrupted":
            batch.end(index)
        del self._writing[index]
        self.totals.add_answer(answer)
        self._done += 1
        job = writing.job
        job.finished[writing.number] = answer
        if job.complete:
            answers = [job.finished[number] for number in range(job.request.answers)]
            self._file.add(answer_line(job.line, 200, response_body(job.request, self._model, answers)))
            self.totals.answered += 1
            job.finished, job.prompt = {}, None

    def _next(self, count: int) -> Iterable[tuple[Writing, Request]]:
        """The next answers to be begun, at most `count`; requests whose prompt cannot be made fail on the way."""
        eos_ids = self._engine.target.config.eos_token_ids
        while count > 0 and self._waiting:
            job, number = self._waiting.popleft()
            self._to_come -= 1
            if job.failed:
                continue
            try:
                job.prompt = job.prompt or self._maker.make(job.request)
            except TriforceError as error:
                self._fail(job, error if isinstance(error, BodyError) else BodyError(str(error)))
                continue
            text = AnswerText(self._tokenizer, job.prompt, eos_ids)
            asked = job.request
            options = {"number": number, "top_logprobs": asked.top_logprobs}
            sampling, most = Sampling(**asked.sampling), asked.max_new_tokens
            yield Writing(job, number, text), Request(job.prompt.token_ids, sampling, most, **options)
            count -= 1

    def _fail(self, job: Job, error: BodyError) -> None:
        """Writes why a request gets no answer, and ends what was begun of it."""
        job.failed = True
        for index, writing in list(self._writing.items()):
            if writing.job is job:
                del self._writing[index]
                if self._batch:
                    self._batch.end(index)
        self._file.add(refused_line(job.line, error))
        self.totals.fail(job.line, str(error))

    def _begin_again(self) -> None:
        """Puts back what joined a batch too late to be begun in it."""
        for index, writing in sorted(self._writing.items(), reverse=True):
            sequence = self._sequence(index)
            if self._events and (sequence is None or sequence.state == "waiting"):
                del self._writing[index]
                self._waiting.appendleft((writing.job, writing.number))
                self._to_come += 1
            elif not writing.job.failed:
                self._fail(writing.job, _as_body_error("the batch ended before the answer was complete"))

    def _keep_unfinished(self) -> None:
        """Writes what came of answers that were broken off; they are asked for again by the next run."""
        unfinished = {job: dict(job.finished) for job, _ in self._waiting if job.finished and not job.failed}
        for index, writing in self._writing.items():
            sequence = self._sequence(index)
            kept = unfinished.setdefault(writing.job, dict(writing.job.finished))
            if sequence and sequence.statistics.token_ids:
                kept[writing.number] = writing.finish(sequence)
        self._writing = {}
        for job, answers in unfinished.items():
            if answers:
                self.totals.interrupted += 1
                body = response_body(job.request, self._model, [answers[number] for number in sorted(answers)])
                error = {"code": "interrupted", "message": "the run was stopped before the answer was complete"}
                self._file.add(answer_line(job.line, 499, body, error))

    def _sequence(self, index: int) -> ShownSequence | None:
        """A sequence of the batch, once it has joined."""
        batch = self._batch
        return batch.sequences[index] if batch and index < len(batch.sequences) else None

    def _read(self, index: int, share: float) -> None:
        """Takes note of a share of a prompt that is read."""
        writing = self._writing.get(index)
        if writing is None:
            return
        writing.read = share
        tokens = len(writing.job.prompt.token_ids) if writing.job.prompt else 0
        if self._display:
            self._display.draw_if_due()
        elif tokens >= _LONG:
            self._reading.setdefault(index, progress_lines(f"{writing.name}: reading {tokens:,} tokens"))(share)

    def _tell_progress(self) -> None:
        now = time.monotonic()
        if now - self._told_at < SECONDS_BETWEEN_LINES:
            return
        self._told_at = now
        totals, rows = self.totals, self.rows()
        tokens = totals.new_tokens + sum(row.new_tokens for row in rows)
        totals.note(
            f"{totals.answered:,} answered, {len(totals.failures):,} failed; {len(rows):,} being written, "
            f"{self._to_come:,} to come; {tokens / totals.elapsed_s:.1f} tokens/s"
        )


def _as_body_error(message: str) -> BodyError:
    """Why the engine has not answered."""
    return BodyError(message, code="not_answered", status=500)
