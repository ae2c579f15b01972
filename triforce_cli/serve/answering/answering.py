"""The engine's run: answers to requests, and texts that are to be saved, join it one by one between rounds, and leave
it when they are complete or nobody waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from hashlib import blake2b

from ....offload import Engine, Request, Round, Run, Sampling
from ....offload.batch.run import Ended, Tokens
from ....offload.batch.sequence import BatchSequence
from ....offload.contexts.model import ContextRequest
from ....tp.weights.tokenizer import Tokenizer
from ...requests.answer_text import AnswerText
from ...requests.response import AnswerEnd, Timings
from ...session.wire import BodyError
from .fair_queue import FairQueue
from .jobs import Finished, Job, Piece, Progress, ReadingText, Saved, Upload, Writing
from .metrics import Metrics

_SAVED_FROM = 1024
"""Tokens of a prompt from which on `--save-prompts` saves it."""


TELL_S = 0.1
"""Between two events of how a prompt is read."""


class Answering:
    """Works on what waits in the queue."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        queue: FairQueue[Job | Upload],
        metrics: Metrics,
        tell: Callable[[str], None],
        *,
        most: int,
        save_prompts: bool,
        cut_by: Callable[[], BodyError | None],
    ) -> None:
        """Args:
        tell: takes notes for people.
        most: answers that are written at a time.
        cut_by: what those who wait are told where all is to end now.
        """
        self._engine, self._tokenizer, self._metrics, self._tell = engine, tokenizer, metrics, tell
        self._queue = queue
        self._most, self._save_prompts, self._cut_by = most, save_prompts, cut_by
        self._working: dict[Writing | ReadingText, None] = {}
        self._overtaken, self._one_waits = 0, False  # who joined while a prompt waited that must come alone
        self._just_begun = False  # whether the first was taken where nobody ran, and has not been opened
        self.broken = False
        """Whether it broke off where other ranks, if there are any, go on."""

    def __len__(self) -> int:
        """Answers that are being written and texts that are read, or wait for memory."""
        return len(self._working)

    def run(self) -> None:
        """Works until the queue is closed. All that was taken from it gets its last event.

        Raises:
            Exception: the engine failed; those who waited are told.
        """
        run = self._engine.run(self._next, max_sequences=self._most, on_prefill=self._read)
        try:
            for event in run:
                self._just_begun = False
                if self._cut_by():
                    run.end_all()
                    continue
                if isinstance(event, Tokens):
                    self._update(run, event.sequence, event.round)
                elif isinstance(event, Ended):
                    self._end(event.sequence)
                for sequence in run.live:
                    if sequence.tag.job.abandoned:
                        run.end(sequence)
                self._metrics.update(run.traffic(), run.kv_bytes())
            self.fail_all(
                self._cut_by() or BodyError("the run ended before the answer", code="not_answered", status=500)
            )
        except BaseException as error:
            self.fail_all(error)
            raise
        finally:
            self.broken = run.broken
            run.close()
            self._metrics.update(run.traffic(), run.kv_bytes())

    def _next(self, waits: bool) -> Request | None:
        """What the engine is to do next, and waits for it where it does nothing else. Once several have overtaken a
        prompt that must come alone, nothing joins until it has come."""
        if waits:
            self._overtaken, self._just_begun = 0, True
        elif self._overtaken >= self._most or (self._just_begun and self._engine.target.config.rope.type == "dynamic"):
            return None
        while True:
            self._one_waits = False
            found = self._queue.next() if waits else self._queue.pop(self._may_join)
            if found is None:
                return None
            self._overtaken += self._one_waits
            if found.abandoned:
                continue
            try:
                if why := self._cut_by():
                    raise why
                work, request = self._begin(found)
            except BodyError as error:
                self._fail(found, error)
            except Exception as error:
                self._tell(f"error: a request could not be begun ({type(error).__name__})")
                self._fail(found, error)
            else:
                self._working[work] = None
                return request

    def _contexts(self, work: Job | Upload) -> ContextRequest:
        """What is to be restored, and saved, of a prompt: the first answer saves for all."""
        if isinstance(work, Upload):
            return ContextRequest(save=work.name, frame=work.frame, required=True)
        prompt, name = work.prompt.token_ids, work.request.context
        save = None
        if self._save_prompts and name is None and len(prompt) >= _SAVED_FROM and work.begun == 1:
            save = f"prompt-{blake2b(repr(prompt).encode(), digest_size=8).hexdigest()}"
        return ContextRequest(name=name, find=name is None, save=save)

    def _begin(self, work: Job | Upload) -> tuple[Writing | ReadingText, Request]:
        """What the engine is to do for the part of it that was popped last.

        Raises:
            BodyError: it cannot be done any more.
        """
        contexts = self._contexts(work)
        if isinstance(work, Upload):
            assert self._engine.contexts  # it was loaded from files
            work.missing(self._engine.contexts)  # while it waited, another text may have got its name
            reading = ReadingText(work)
            return reading, Request(work.token_ids, Sampling(0.0), 1, contexts=contexts, tag=reading)
        eos_ids, asked, prompt = self._engine.target.config.eos_token_ids, work.request, work.prompt
        writing = Writing(work, work.begun - 1, AnswerText(self._tokenizer, prompt, eos_ids))
        options = {"number": writing.number, "top_logprobs": asked.top_logprobs, "contexts": contexts}
        sampling, most = asked.sampling, asked.max_new_tokens
        return writing, Request(prompt.token_ids, sampling, most, **options, stops=writing.take, tag=writing)

    def _may_join(self, work: Job | Upload) -> bool:
        """Texts that are read come one at a time, as several of the same name would be in each other's way; prompts
        whose length decides how they are rotated (dynamic RoPE) come alone."""
        if isinstance(work, Upload) and any(isinstance(one, ReadingText) for one in self._working):
            return False
        if self._engine.target.rope.changes_with(work.num_tokens):
            self._one_waits = True
            return False
        return True

    def _update(self, run: Run, sequence: BatchSequence, event: Round) -> None:
        """Takes over what a round brought to a sequence."""
        writing, s = sequence.tag, sequence.statistics
        if not isinstance(writing, Writing) or writing not in self._working:
            return
        job = writing.job
        if event.index == 0:
            self._metrics.add_first_token(time.perf_counter() - job.came)
            if writing.number == 0:
                self._metrics.add_prompt(s)
        else:
            self._metrics.add_round(event)
        ended = s.finish_reason != "interrupted" or writing.text.stopped
        piece, logprobs = writing.pop(last=ended), writing.describe(sequence.logprobs)
        if piece or logprobs:
            job.send(Piece(writing.number, piece, logprobs, Timings.of(s) if job.timed else None))
        if not ended:
            return
        del self._working[writing]
        reason = "stop" if writing.text.stopped else s.finish_reason
        job.send(Finished(writing.number, AnswerEnd(reason, writing.text.num_tokens, Timings.of(s))))

    def _end(self, sequence: BatchSequence) -> None:
        """Parts with a sequence that has ended: nobody waits for it, the engine could not do it, or a text is saved."""
        work = sequence.tag
        if work not in self._working:
            return
        del self._working[work]
        if work.job.abandoned:
            return
        if sequence.failure is not None:
            self._fail(work.job, sequence.failure)
        elif isinstance(work, ReadingText):
            s = sequence.statistics
            self._metrics.add_text(s)
            work.job.send(Saved(s.prompt_tokens - s.reused_tokens, s.ttft_s))
        else:
            self._fail(work.job, _ended_early())

    def _read(self, sequence: BatchSequence, share: float) -> None:
        """Takes note of a share of a prompt that was read."""
        work, now = sequence.tag, time.perf_counter()
        if work.number or not work.job.wants_progress or (share < 1 and now - work.told < TELL_S):
            return
        work.began, work.told = work.began or now, now
        s = sequence.statistics
        processed = s.reused_tokens + round(share * (s.prompt_tokens - s.reused_tokens))
        work.job.send(Progress(s.prompt_tokens, s.reused_tokens, processed, now - work.began))

    def fail_all(self, error: BaseException) -> None:
        """Tells all who still wait that nothing follows."""
        working, self._working = self._working, {}
        for job in dict.fromkeys(work.job for work in working):
            self._fail(job, error)

    def _fail(self, job: Job | Upload, error: BaseException) -> None:
        """Tells whoever waits for it that nothing follows; what waits of it is dropped."""
        job.fail(error)
        job.abandoned = True
        self._queue.remove(job)


def _ended_early() -> BodyError:
    return BodyError("the run ended before the answer", code="not_answered", status=500)
