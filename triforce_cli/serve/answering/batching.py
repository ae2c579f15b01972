"""One batch of the engine: requests and texts that are to be saved join it between rounds, and leave it when they are
complete or nobody waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
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

MOST_OF_A_BATCH = 512
"""Sequences after which a batch takes no more, so that what it knows of those that ended does not grow for ever."""

_SAVED_FROM = 1024
"""Tokens of a prompt from which on `--save-prompts` saves it."""


TELL_S = 0.1
"""Between two events of how a prompt is read."""


class RunningBatch:
    """Works on one request or text, and those that join it."""

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
            started = self._begin(first)
        except Exception as error:
            first.fail(error)
            raise
        self._working = {index: work for index, (work, _) in enumerate(started)}
        batch: Batch | None = None
        try:
            batch = self._engine.batch(
                [request for _, request in started],
                max_sequences=self._most,
                in_slices=True,
                contexts=self._contexts(first),
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
        """What is to be restored, and saved, of a prompt."""
        if isinstance(work, Upload):
            return ContextRequest(save=work.name, frame=work.frame, required=True)
        prompt, name = work.prompt.token_ids, work.request.context
        save = None
        if self._save_prompts and name is None and len(prompt) >= _SAVED_FROM:
            save = f"prompt-{blake2b(repr(prompt).encode(), digest_size=8).hexdigest()}"
        return ContextRequest(name=name, find=name is None, save=save)

    def _begin(self, work: Job | Upload) -> list[tuple[Writing | ReadingText, Request]]:
        """What the engine is to do for it.

        Raises:
            BodyError: it cannot be done any more.
        """
        contexts = self._contexts(work)
        if isinstance(work, Upload):
            assert self._engine.contexts  # it was loaded from files
            work.missing(self._engine.contexts)  # while it waited, another text may have got its name
            return [(ReadingText(work), Request(work.token_ids, Sampling(0.0), 1, contexts=contexts))]
        eos_ids, asked, prompt = self._engine.target.config.eos_token_ids, work.request, work.prompt
        sampling, most = Sampling(**asked.sampling), asked.max_new_tokens
        request = Request(prompt.token_ids, sampling, most, top_logprobs=asked.top_logprobs, contexts=contexts)
        others = replace(request, contexts=replace(contexts, save=None))  # the first one saves for all
        return [
            (
                Writing(work, number, AnswerText(self._tokenizer, prompt, eos_ids)),
                replace(others if number else request, number=number),
            )
            for number in range(asked.answers)
        ]

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
        next batch, as the first of a batch goes on from what the last one has read."""
        while 0 < len(self._working) < self._most and len(batch.sequences) < MOST_OF_A_BATCH:
            found = self._queue.pop(self._may_join)
            if found is None:
                return
            try:
                joined = {batch.add(request): work for work, request in self._begin(found)}
            except BodyError as error:
                found.fail(error)
                continue
            except Exception as error:
                found.fail(error)
                raise
            self._working |= joined

    def _may_join(self, work: Job | Upload) -> bool:
        """Texts that are read come one at a time, as several of the same name would be in each other's way; prompts
        whose length decides how they are rotated (dynamic RoPE) come alone."""
        if isinstance(work, Upload) and any(isinstance(one, ReadingText) for one in self._working.values()):
            return False
        return not self._engine.target.rope.changes_with(work.num_tokens)

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
        batch.end(index)
        del self._working[index]
        reason = "stop" if text.stopped else s.finish_reason
        job.send(Finished(writing.number, AnswerEnd(reason, text.num_tokens, Timings.of(s))))

    def _sweep(self, batch: Batch) -> None:
        """Parts with what nobody waits for, with what the engine could not do, and with texts that are saved."""
        for index, work in list(self._working.items()):
            sequence = batch.sequences[index] if index < len(batch.sequences) else None
            if sequence and sequence.failure is not None:
                work.job.fail(sequence.failure)
                work.job.abandoned = True
            elif sequence and isinstance(work, ReadingText) and sequence.state == "ended" and not work.job.abandoned:
                s = sequence.statistics
                self._metrics.add_text(s)
                work.job.send(Saved(s.prompt_tokens - s.reused_tokens, s.ttft_s))
                del self._working[index]
                continue
            if work.job.abandoned:
                del self._working[index]
                batch.end(index)

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
        if work is None or work.number or (share < 1 and now - work.told < TELL_S):
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
            job.fail(error)
        self._working = {}
