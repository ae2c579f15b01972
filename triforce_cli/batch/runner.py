"""Answers requests: keeps so many sequences in a run as may be, and writes a line for each complete request."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from ...offload import Ended, Engine, Progress, Request, Run
from ...offload.batch.sequence import BatchSequence
from ...offload.contexts.manifest import ContextError
from ...offload.contexts.model import ContextRequest
from ...tp.errors import PeerError, TriforceError
from ...tp.weights.tokenizer import Tokenizer
from ..generate.report import SECONDS_BETWEEN_LINES, progress_lines
from ..generate.run import step
from ..requests.answer_text import AnswerText
from ..requests.prompts import PromptMaker
from ..requests.response import response_body
from ..session.wire import BodyError
from ..terminal.batch_frame import SequenceRow
from ..terminal.live_screen import LiveScreen
from ..terminal.stopping import Signals, Stop
from .answers_file import AnswersFile
from .request import BatchRequest
from .totals import Totals, answer_line, refused_line
from .writing import Job, Writing

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
        self._writing: dict[Writing, BatchSequence | None] = {}  # and their sequences, once something is known of them
        self._run: Run | None = None
        self._display: LiveScreen | None = None
        self._reading: dict[Writing, Callable[[float], None]] = {}
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
        for group in groups.values():
            self._waiting.extend((job, number) for job in group for number in range(job.request.answers))
        while self._waiting:
            self._answer()

    def rows(self) -> list[SequenceRow]:
        """The lines of the live display."""
        return [writing.row(sequence) for writing, sequence in list(self._writing.items())]

    def lengths(self) -> dict[str, int]:
        """The lengths in force."""
        return self._run.lengths if self._run else {"draft_length": 0, "block_length": 0}

    def others(self) -> tuple[int, int, int]:
        """Answers without a line: how many are complete, their tokens, and how many are not begun."""
        return self._done, self.totals.new_tokens, self._to_come

    def _answer(self) -> None:
        """Answers requests until none is left, or one takes the run with it."""
        self._reading = {}
        on_memory = None if self._display else progress_lines("taking host memory for the KV cache")
        run = self._run = self._engine.run(
            self._next,
            max_sequences=self._most,
            in_slices=False,
            interrupted=self._signals.came,
            on_memory=on_memory,
            on_prefill=self._read,
        )
        try:
            while (event := step(run, self._signals)) is not None:
                if not isinstance(event, Progress):
                    self._update(event.sequence, ended=isinstance(event, Ended))
                for sequence in run.live:
                    if sequence.tag not in self._writing:
                        run.end(sequence)
                if self._display:
                    self._display.draw_if_due()
                else:
                    self._tell_progress()
        except (Stop, Exception) as error:
            if (run.broken and self._engine.target.ranks.size > 1) or not self._is_of_requests(error):
                self._keep_unfinished()
                raise
            for job in {writing.job for writing in self._writing}:
                self._fail(job, _as_body_error(str(error)))
        finally:
            run.close()
            self.totals.add_run(run.stats())

    def _is_of_requests(self, error: BaseException) -> bool:
        """Whether an error is of what was asked for, and not of the model: others can still be answered."""
        if isinstance(error, PeerError) or not isinstance(error, TriforceError):
            return False
        return isinstance(error, ContextError) or len(self._writing) == 1

    def _update(self, sequence: BatchSequence, *, ended: bool) -> None:
        """Takes over what has been done of a sequence."""
        writing: Writing = sequence.tag
        if writing not in self._writing:
            return
        self._writing[writing] = sequence
        failed = sequence.error is not None or sequence.check_failure is not None
        answer = None if failed else writing.update(sequence)
        if answer is None:
            if ended:
                self._fail(writing.job, _as_body_error(sequence.error or "the run ended before the answer"))
            return
        del self._writing[writing]
        self._reading.pop(writing, None)
        self.totals.add_answer(answer, sequence.warnings)
        self._done += 1
        job = writing.job
        job.finished[writing.number] = answer
        if job.complete:
            answers = [job.finished[number] for number in range(job.request.answers)]
            self._file.add(answer_line(job.line, 200, response_body(job.request, self._model, answers)))
            self.totals.answered += 1
            job.finished, job.prompt = {}, None

    def _next(self, waits: bool) -> Request | None:
        """The next answer to be begun; requests whose prompt cannot be made fail on the way."""
        eos_ids = self._engine.target.config.eos_token_ids
        while self._waiting:
            job, number = self._waiting.popleft()
            self._to_come -= 1
            if job.failed:
                continue
            try:
                job.prompt = job.prompt or self._maker.make(job.request)
            except TriforceError as error:
                self._fail(job, error if isinstance(error, BodyError) else BodyError(str(error)))
                continue
            writing, asked = Writing(job, number, AnswerText(self._tokenizer, job.prompt, eos_ids)), job.request
            self._writing[writing] = None
            contexts = ContextRequest(name=asked.context, find=asked.context is None)
            options = {"number": number, "top_logprobs": asked.top_logprobs, "contexts": contexts}
            sampling, most = asked.sampling, asked.max_new_tokens
            return Request(job.prompt.token_ids, sampling, most, **options, stops=writing.take, tag=writing)
        return None

    def _fail(self, job: Job, error: BodyError) -> None:
        """Writes why a request gets no answer; what was begun of it is ended."""
        job.failed = True
        self._writing = {writing: sequence for writing, sequence in self._writing.items() if writing.job is not job}
        self._file.add(refused_line(job.line, error))
        self.totals.fail(job.line, str(error))

    def _keep_unfinished(self) -> None:
        """Writes what came of answers that were broken off; they are asked for again by the next run."""
        unfinished = {job: dict(job.finished) for job, _ in self._waiting if job.finished and not job.failed}
        for writing, sequence in self._writing.items():
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

    def _read(self, sequence: BatchSequence, share: float) -> None:
        """Takes note of a share of a prompt that is read."""
        writing: Writing = sequence.tag
        if writing not in self._writing:
            return
        self._writing[writing] = sequence
        tokens = len(writing.job.prompt.token_ids) if writing.job.prompt else 0
        if self._display:
            self._display.draw_if_due()
        elif tokens >= _LONG:
            self._reading.setdefault(writing, progress_lines(f"{writing.name}: reading {tokens:,} tokens"))(share)

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
