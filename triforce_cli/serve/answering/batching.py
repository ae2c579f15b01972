"""One batch of the engine: answers to requests, and texts that are to be saved, join it one by one between rounds, and
leave it when they are complete or nobody waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from hashlib import blake2b

from ....offload import Batch, Engine, Request, Round, Sampling
from ....offload.contexts.model import ContextRequest
from ....tp.weights.tokenizer import Tokenizer
from ...requests.answer_text import AnswerText
from ...requests.body import BodyError
from ...requests.response import AnswerEnd, Timings
from .fair_queue import FairQueue
from .jobs import Finished, Job, Piece, Progress, ReadingText, Saved, Upload, Writing
from .metrics import Metrics

_SAVED_FROM = 1024
"""Tokens of a prompt from which on `--save-prompts` saves it."""


TELL_S = 0.1
"""Between two events of how a prompt is read."""


class RunningBatch:
    """Works on an answer to one request, or on a text, and those that join it."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        queue: FairQueue[Job | Upload],
        metrics: Metrics,
        *,
        most: int,
        save_prompts: bool,
        cut_by: Callable[[], BodyError | None],
    ) -> None:
        """Args:
        most: answers that are written at a time.
        cut_by: what those who wait are told where all is to end now.
        """
        self._engine, self._tokenizer, self._metrics = engine, tokenizer, metrics
        self._queue = queue
        self._most, self._save_prompts, self._cut_by = most, save_prompts, cut_by
        self._working: dict[int, Writing | ReadingText] = {}
        self._overtaken, self._one_waits = 0, False  # who joined while a prompt waited that must come alone
        self.broken = False
        """Whether it broke off where other ranks, if there are any, go on."""

    def __len__(self) -> int:
        """Answers that are being written and texts that are read, or wait for memory."""
        return len(self._working)

    def run(self, first: Job | Upload) -> None:
        """Works until there is nothing left that fits. All that was taken from the queue gets its last event.

        Raises:
            Exception: the engine failed; those who waited are told.
        """
        try:
            work, request = self._begin(first)
        except Exception as error:
            self._fail(first, error)
            raise
        self._working = {0: work}
        batch: Batch | None = None
        try:
            batch = self._engine.batch(
                [request],
                max_sequences=self._most,
                expected=first.parts,
                in_slices=True,
                contexts=request.contexts,
                on_prefill=lambda index, share: self._read(batch, index, share),
            )
            self._decode(batch)
        except Exception as error:
            self.fail_all(error)
            raise
        finally:
            if batch:
                self.broken = batch.broken
                batch.close()
                self._measure(batch)

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
            return ReadingText(work), Request(work.token_ids, Sampling(0.0), 1, contexts=contexts)
        eos_ids, asked, prompt = self._engine.target.config.eos_token_ids, work.request, work.prompt
        options = {"number": work.begun - 1, "top_logprobs": asked.top_logprobs, "contexts": contexts}
        request = Request(prompt.token_ids, Sampling(**asked.sampling), asked.max_new_tokens, **options)
        return Writing(work, request.number, AnswerText(self._tokenizer, prompt, eos_ids)), request

    def _decode(self, batch: Batch) -> None:
        """Runs the batch to its end; where it is broken off, that is on all ranks."""
        while True:
            event = next(batch, None)
            if why := self._cut_by():
                batch.end_all()
                if event is None:
                    self.fail_all(why)
                    return
                continue
            try:
                if event is not None:
                    self._update(batch, *event)
                self._sweep(batch)
                self._measure(batch)
                if event is not None:
                    self._join(batch)
            except Exception:
                for index in self._working:
                    batch.end(index)
                batch.end_all()
                for _ in batch:
                    pass  # until it has ended on all ranks
                raise
            if event is None:
                self.fail_all(BodyError("the batch ended before the answer", code="not_answered", status=500))
                return

    def _join(self, batch: Batch) -> None:
        """Lets in what is next in the queue, as long as there is room. What comes once all are complete waits for the
        next batch, as the first of a batch goes on from what the last one has read. So does all, once several have
        overtaken a prompt that must come alone."""
        while 0 < len(self._working) < self._most and self._overtaken < self._most:
            self._one_waits = False
            found = self._queue.pop(self._may_join)
            if found is None:
                return
            self._overtaken += self._one_waits
            try:
                work, request = self._begin(found)
                self._working[batch.add(request)] = work
            except BodyError as error:
                self._fail(found, error)
            except Exception as error:
                self._fail(found, error)
                raise

    def _may_join(self, work: Job | Upload) -> bool:
        """Texts that are read come one at a time, as several of the same name would be in each other's way; prompts
        whose length decides how they are rotated (dynamic RoPE) come alone."""
        if isinstance(work, Upload) and any(isinstance(one, ReadingText) for one in self._working.values()):
            return False
        if self._engine.target.rope.changes_with(work.num_tokens):
            self._one_waits = True
            return False
        return True

    def _update(self, batch: Batch, index: int, event: Round) -> None:
        """Takes over what a round brought to a sequence."""
        sequence, writing = batch.sequences[index], self._working.get(index)
        if not isinstance(writing, Writing):
            return
        s, job, text = sequence.statistics, writing.job, writing.text
        if event.index == 0:
            self._metrics.add_first_token(time.perf_counter() - job.came)
            if writing.number == 0:
                self._metrics.add_prompt(s)
        else:
            self._metrics.add_round(event)
        piece = text.update(s.token_ids)
        logprobs = writing.describe(sequence.logprobs)
        ended = s.finish_reason != "interrupted" or text.stopped
        if ended:
            piece += text.finish()
        if piece or logprobs:
            job.send(Piece(writing.number, piece, logprobs, Timings.of(s) if job.timed else None))
        if not ended:
            return
        self._part_with(batch, index)
        reason = "stop" if text.stopped else s.finish_reason
        job.send(Finished(writing.number, AnswerEnd(reason, text.num_tokens, Timings.of(s))))

    def _sweep(self, batch: Batch) -> None:
        """Parts with what nobody waits for, with what the engine could not do, and with texts that are saved."""
        for index, work in list(self._working.items()):
            sequence = batch.sequences[index] if index < len(batch.sequences) else None
            if sequence and sequence.failure is not None and not work.job.abandoned:
                self._fail(work.job, sequence.failure)
            elif sequence and isinstance(work, ReadingText) and sequence.state == "ended" and not work.job.abandoned:
                s = sequence.statistics
                self._metrics.add_text(s)
                work.job.send(Saved(s.prompt_tokens - s.reused_tokens, s.ttft_s))
                self._part_with(batch, index)
                continue
            if work.job.abandoned:
                self._part_with(batch, index)

    def _part_with(self, batch: Batch, index: int) -> None:
        """Ends a sequence that nothing more is wanted of."""
        del self._working[index]
        batch.end(index)
        batch.forget(index)

    def _read(self, batch: Batch | None, index: int, share: float) -> None:
        """Takes note of a share of a prompt that was read."""
        if batch is None:
            return
        cut = self._cut_by() is not None
        for other, work in self._working.items():
            if cut or work.job.abandoned:
                batch.end(other)
        self._measure(batch)
        work, now = self._working.get(index), time.perf_counter()
        if work is None or work.number or not work.job.wants_progress:
            return
        if share < 1 and now - work.told < TELL_S:
            return
        work.began, work.told = work.began or now, now
        s = batch.sequences[index].statistics
        processed = s.reused_tokens + round(share * (s.prompt_tokens - s.reused_tokens))
        work.job.send(Progress(s.prompt_tokens, s.reused_tokens, processed, now - work.began))

    def _measure(self, batch: Batch) -> None:
        self._metrics.update(batch.traffic(), batch.kv_bytes())

    def fail_all(self, error: BaseException) -> None:
        """Tells all who still wait that nothing follows."""
        for job in {work.job for work in self._working.values()}:
            self._fail(job, error)
        self._working = {}

    def _fail(self, job: Job | Upload, error: BaseException) -> None:
        """Tells whoever waits for it that nothing follows; what waits of it is dropped."""
        job.fail(error)
        job.abandoned = True
        self._queue.remove(job)
