"""One batch of the engine: requests join it between rounds, and leave it when they are complete or nobody waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from hashlib import blake2b

from ....offload import Batch, Engine, Request, Round, Sampling
from ....offload.contexts.model import ContextRequest
from ....tp.weights.tokenizer import Tokenizer
from ...requests.answer_text import AnswerText
from ...requests.body import BodyError
from ...requests.response import FinishedAnswer
from .fair_queue import FairQueue
from .jobs import STOPPING, Finished, Job, Piece, Progress, Upload, Writing
from .metrics import Metrics

MOST_OF_A_BATCH = 512
"""Sequences after which a batch takes no more, so that what it knows of those that ended does not grow for ever."""

_SAVED_FROM = 1024
"""Tokens of a prompt from which on `--save-prompts` saves it."""


TELL_S = 0.1
"""Between two events of how a prompt is read."""


class CutError(Exception):
    """Broken off: the server ends, or nobody waits for what is being read."""


class RunningBatch:
    """Answers one request and those that join it."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        queue: FairQueue[Job | Upload],
        metrics: Metrics,
        *,
        most: int,
        save_prompts: bool,
        is_cut: Callable[[], bool],
    ) -> None:
        """Args:
        most: answers that are written at a time.
        is_cut: whether all is to end now.
        """
        self._engine, self._tokenizer, self._queue, self._metrics = engine, tokenizer, queue, metrics
        self._most, self._save_prompts, self._is_cut = most, save_prompts, is_cut
        self._context: str | None = None
        self._writing: dict[int, Writing] = {}

    def __len__(self) -> int:
        """Answers that are being written, or wait for memory."""
        return len(self._writing)

    def run(self, first: Job) -> None:
        """Answers until there is nothing left that fits. Every job that was taken from the queue gets its last event.

        Raises:
            Exception: the engine failed; those who waited are told.
        """
        self._context = first.request.context
        started = self._begin(first)
        self._writing = {index: writing for index, (writing, _) in enumerate(started)}
        batch: Batch | None = None
        try:
            batch = self._engine.batch(
                [request for _, request in started],
                max_sequences=self._most,
                contexts=self._contexts(first),
                on_prefill=lambda index, share: self._read(batch, index, share),
            )
            self._decode(batch)
        except CutError:
            self._fail_all(STOPPING)
        except Exception as error:
            self._fail_all(error)
            raise
        finally:
            if batch:
                batch.close()

    def _contexts(self, job: Job) -> ContextRequest:
        """What is to be restored, and saved, of a batch's first prompt; the others share what they have in common."""
        prompt, name = job.prompt.token_ids, job.request.context
        save = None
        if self._save_prompts and name is None and len(prompt) >= _SAVED_FROM:
            save = f"prompt-{blake2b(repr(prompt).encode(), digest_size=8).hexdigest()}"
        return ContextRequest(name=name, find=name is None, save=save)

    def _begin(self, job: Job) -> list[tuple[Writing, Request]]:
        eos_ids = self._engine.target.config.eos_token_ids
        sampling, most = Sampling(**job.request.sampling), job.request.max_new_tokens
        return [
            (
                Writing(job, number, AnswerText(self._tokenizer, job.prompt, eos_ids)),
                Request(job.prompt.token_ids, sampling, most, number=number),
            )
            for number in range(job.request.answers)
        ]

    def _decode(self, batch: Batch) -> None:
        """Runs the batch to its end."""
        while True:
            event = next(batch, None)
            if self._is_cut():
                raise CutError
            if event is not None:
                self._update(batch, *event)
            self._sweep(batch)
            if event is None:
                self._fail_all(BodyError("the batch ended before the answer", code="not_answered", status=500))
                return
            self._join(batch)

    def _join(self, batch: Batch) -> None:
        """Lets in what is next in the queue, as long as there is room. What is about another saved context waits for
        the end of the batch, as only the first is restored; so does what comes once all are complete, as only
        the first goes on from what the last batch has read."""
        while 0 < len(self._writing) < self._most and len(batch.sequences) < MOST_OF_A_BATCH:
            job = self._queue.pop(lambda w: isinstance(w, Job) and w.request.context in (None, self._context))
            if not isinstance(job, Job):
                return
            for writing, request in self._begin(job):
                self._writing[batch.add(request)] = writing

    def _update(self, batch: Batch, index: int, event: Round) -> None:
        """Takes over what a round brought to a sequence."""
        sequence, writing = batch.sequences[index], self._writing.get(index)
        if writing is None:
            return
        s, job, text = sequence.statistics, writing.job, writing.text
        if event.index == 0:
            self._metrics.add_first_token(time.perf_counter() - job.came)
            if writing.number == 0:
                self._metrics.add_prompt(s)
        self._metrics.add_round(event, sequence.caches.full.traffic().bytes_in if sequence.caches else 0)
        piece = text.update(s.token_ids)
        ended = s.finish_reason != "interrupted" or text.stopped
        if ended:
            piece += text.finish()
        if piece:
            job.send(Piece(writing.number, piece, s))
        if not ended:
            return
        batch.end(index)
        del self._writing[index]
        reason = "stop" if text.stopped else s.finish_reason
        job.send(Finished(writing.number, FinishedAnswer(text.text, reason, text.num_tokens, s)))

    def _sweep(self, batch: Batch) -> None:
        """Parts with answers that nobody waits for, and with those that the engine could not give."""
        for index, writing in list(self._writing.items()):
            sequence = batch.sequences[index] if index < len(batch.sequences) else None
            if sequence and sequence.error is not None:
                # What is wrong with a request itself was found before it came here.
                writing.job.fail(BodyError(sequence.error, code="not_answered", status=503))
                writing.job.abandoned = True
            if writing.job.abandoned:
                del self._writing[index]
                batch.end(index)

    def _read(self, batch: Batch | None, index: int, share: float) -> None:
        """Takes note of a share of a prompt that was read.

        Raises:
            CutError: nobody waits for any answer of this batch.
        """
        if self._is_cut() or all(writing.job.abandoned for writing in self._writing.values()):
            raise CutError
        writing = self._writing.get(index)
        now = time.perf_counter()
        if writing is None or batch is None or writing.number or (share < 1 and now - writing.told < TELL_S):
            return
        writing.began, writing.told = writing.began or now, now
        s = batch.sequences[index].statistics
        processed = s.reused_tokens + round(share * (s.prompt_tokens - s.reused_tokens))
        writing.job.send(Progress(s.prompt_tokens, s.reused_tokens, processed, now - writing.began))

    def _fail_all(self, error: BaseException) -> None:
        for job in {writing.job for writing in self._writing.values()}:
            job.fail(error)
        self._writing = {}
