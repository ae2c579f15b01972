"""The engine's run. Answers to requests, and texts that are to be saved, join it one by one between rounds. They leave
it when they are complete, or when nobody waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from hashlib import blake2b
from weakref import WeakSet

from ....offload import Engine
from ....offload.contexts.manifest import ContextError
from ....offload.contexts.model import ContextRequest
from ....tp.errors import CapacityError, TriforceError, UsageError
from ....tp.weights.tokenizer import Tokenizer
from ...session.prompt import Prompt
from ...session.request_prompt import request_task
from ...session.response import AnswerEnd, Timings
from ...session.session import Event, Failed, Finished, Session, Task, Written
from ...session.wire import BodyError
from .arrivals import Arrivals
from .fair_queue import FairQueue
from .jobs import Check, Complete, Job, Piece, Progress, Saved, Upload
from .metrics import Metrics

_SAVED_FROM = 1024
"""From this number of tokens on, `--save-prompts` saves a prompt."""

SAVED_PROMPT = "prompt-"
"""The beginning of the names of contexts that `--save-prompts` saves. The hash of the model's fingerprint and of the
token ids follows. Texts that clients upload cannot have such a name."""

TELL_S = 0.1
"""Seconds between two events about the progress of a prefill."""

_CHECK_TOKENS = 3
"""The number of tokens of a check: it has a prefill, and rounds."""

_COUNT_S = 0.1
"""Minimum time in seconds between two updates of the metrics of link and memory while answers are written. With 256
kept caches, an update takes 0.12 ms (AMD EPYC, Zen 4)."""

_PASSED_ON_S = 3e-3
"""Maximum seconds for which a round waits until the thread that serves HTTP has passed first tokens on. Otherwise most
of them would leave after the round."""

_EXPLAINED = CapacityError, ContextError, UsageError, BodyError
"""Errors that do not indicate that the engine is broken."""


class Answering:
    """Does the work in the queue.

    An error may belong to one request; or the engine may work again after it; or it may be permanent, as most errors of
    a GPU are. The kind is only known afterwards. After an error that is none of `_EXPLAINED`, the engine is in doubt
    until it has written a token. If it has nothing to write, or its run has ended, it first writes a few tokens as a
    check. If the check fails, the engine has failed permanently. So a request that always fails does not end the
    server.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        queue: FairQueue[Job | Upload],
        arrivals: Arrivals,
        metrics: Metrics,
        note: Callable[[str], None],
        *,
        most: int,
        save_prompts: bool,
        cut_by: Callable[[], BodyError | None],
    ) -> None:
        """Args:
        arrivals: the requests that are not in the queue yet.
        note: prints a note for people.
        most: maximum number of answers that are written at a time.
        cut_by: returns the error for all waiting requests if everything must end now, otherwise `None`.
        """
        self._engine, self._tokenizer, self._metrics, self._note = engine, tokenizer, metrics, note
        self._queue, self._arrivals = queue, arrivals
        self._most, self._save_prompts, self._cut_by = most, save_prompts, cut_by
        self._session: Session | None = None
        self.broken = False
        """Whether the run ended at a point at which other ranks, if there are any, continue."""
        self.failed = False
        """Whether the engine has failed permanently."""
        self._written: WeakSet[Task] = WeakSet()  # what the round under way has brought tokens to so far
        self._in_doubt = False  # whether it works
        self._checking = False  # and nothing else begins meanwhile
        self._unsent: list[tuple[Job, Piece]] = []  # first tokens, while others of the same pass follow
        self._firsts: WeakSet[Job] = WeakSet()  # since the last round: those whose first token may not be passed on yet
        self.waits_for_streams = False
        """Whether the next round waits until first tokens are passed on to their clients."""
        self._counted_at = 0.0  # when the metrics of link and memory were last updated

    def __len__(self) -> int:
        """The number of answers that are being written, and of texts that are being read, including those that wait for
        memory. May be called from any thread."""
        return len(self._session.tasks) if self._session else 0

    @property
    def _tasks(self) -> list[Task]:
        return list(self._session.tasks) if self._session else []

    def run(self) -> None:
        """Works until the queue is closed. All work that was taken from the queue gets its last event.

        Raises:
            Exception: the engine failed; the waiting requests have got an error. `failed` says whether the failure is
                permanent.
        """
        self._checking = self._in_doubt
        session = self._session = Session(
            self._engine,
            self._tokenizer,
            max_sequences=self._most,
            on_read=self._send_progress,
            on_warning=lambda warning: self._note(f"warning: {warning}"),
        )
        try:
            with closing(session.events(self._next)) as events:
                for event in events:
                    self._handle(event, session)
                    del event  # it refers to an answer that may have ended, and the next one may come late
            self._fail_all(
                self._cut_by() or BodyError("the run ended before the answer", code="not_answered", status=500)
            )
        except BaseException as error:
            explained = isinstance(error, _EXPLAINED)
            self.failed = self._checking and not explained
            self._in_doubt = not explained or (self._in_doubt and not self._checking)
            self._fail_all(error)
            raise
        finally:
            self.broken = session.broken
            self._count_traffic(session)

    def _handle(self, event: Event, session: Session) -> None:
        """Sends what an event tells, and ends the answers that nobody wants any more.

        Raises:
            Exception: see `_judge`.
        """
        if why := self._cut_by():
            session.end_all()
            if isinstance(event, Finished | Failed):
                self._fail(event.task.owner, why)
            return
        self._judge(event)
        if not (isinstance(event, Written) and event.round.index == 0):
            self._send_first_tokens()  # before what follows them
        looks = self._begins_round(event)
        if looks:
            self._firsts.clear()
        if event and not event.task.owner.abandoned and not isinstance(event.task.owner, Check):
            if isinstance(event, Written):
                self._send_piece(event)
            elif isinstance(event, Finished):
                self._send_end(event.task)
            else:
                self._fail(event.task.owner, event.error)
        self._let_first_tokens_go(session)
        if looks:
            for task in self._tasks:
                if task.owner.abandoned:
                    session.end(task)
        if not self._tasks or (looks and time.monotonic() - self._counted_at > _COUNT_S):
            self._count_traffic(session)

    def _begins_round(self, event: Event) -> bool:
        """Whether an event is the first event of a round that follows another, or does not belong to an answer's
        tokens."""
        if not isinstance(event, Written):
            return event is None
        begins = event.task in self._written
        if begins:
            self._written.clear()
        self._written.add(event.task)
        return begins

    def _count_traffic(self, session: Session) -> None:
        self._counted_at = time.monotonic()
        if session.run:
            self._metrics.update(session.run.traffic(), session.run.kv_memory_bytes())

    def _next(self, waits: bool) -> Task | None:
        """The next task for the engine. Waits for it if nothing else is running."""
        if waits and self._in_doubt:
            self._checking = True
            owner, limits = Check("", lambda _: None), {"max_new_tokens": _CHECK_TOKENS, "ignore_eos": True}
            prompt = self._tokenizer.encode("The", True) or [0]
            return Task(Prompt(prompt), ContextRequest(), **limits, owner=owner)
        while not self._checking:
            found = self._queue.next() if waits else self._queue.pop(self._may_join)
            if found is None:
                return None
            if waits and self._most > 1 and self._engine.reads_together and not isinstance(found, Upload):
                self._arrivals.wait()
            if task := self._task_of(found):
                return task
            del found  # the next one may come late
        return None

    def _task_of(self, work: Job | Upload) -> Task | None:
        """As `_begin`. Also `None` if nobody wants the work any more, or if it cannot be done; then its client gets the
        error."""
        if work.abandoned:
            return None
        try:
            if why := self._cut_by():
                raise why
            return self._begin(work)
        except BodyError as error:
            self._fail(work, error)
        except Exception as error:
            self._note(f"error: a request could not be started ({type(error).__name__})")
            self._fail(work, error)
        return None

    def _judge(self, event: Event) -> None:
        """Updates, from an event, whether the engine works.

        Raises:
            Exception: the error with which a check has failed.
        """
        checks = event is not None and isinstance(event.task.owner, Check)
        if isinstance(event, Failed):
            explained = isinstance(event.error, _EXPLAINED)
            if checks and not explained:
                raise event.error
            if checks or not explained:  # a check that memory is short for says as much as one can know
                self._in_doubt = not explained
            if not isinstance(event.error, TriforceError):
                self._note(
                    f"error: the engine failed at a request ({type(event.error).__name__}); its client got an error"
                )
        elif event is not None and (isinstance(event, Finished) or not checks):
            self._in_doubt = False
        if checks and not isinstance(event, Written):
            self._checking = False

    def _saved_as(self, work: Job) -> str | None:
        """The name of the context as which a prompt is saved; `None` if it is not saved. The first answer to a prompt
        saves it for all answers."""
        index, draw = divmod(work.begun - 1, work.request.n)
        prompt, contexts = work.prompts[index].token_ids, self._engine.contexts
        wanted = self._save_prompts and work.request.context is None and len(prompt) >= _SAVED_FROM and draw == 0
        if not wanted or contexts is None:
            return None
        try:
            named = f"{contexts.fingerprint} {list(prompt)}"
        except (TriforceError, OSError) as error:
            self._note(f"warning: the prompt is not saved: {error}")
            return None
        return SAVED_PROMPT + blake2b(named.encode(), digest_size=16).hexdigest()

    def _begin(self, work: Job | Upload) -> Task | None:
        """The engine's task for the part of the work that was popped last; `None` if there is nothing to do.

        Raises:
            BodyError: the work cannot be done any more.
        """
        if isinstance(work, Upload):
            assert self._engine.contexts  # it was loaded from files
            if work.is_saved(self._engine.contexts):  # by another client, while it waited
                self._queue.remove(work)
                work.send(Saved(0, 0.0))
                return None
            contexts = ContextRequest(save=work.name, frame=work.frame, required=True, origin="client")
            return Task(Prompt(work.token_ids), contexts, owner=work, writes=False)
        work.compiled = None  # the grammar may be dropped before the next answer begins
        task = request_task(work.request, work.prompts, work.begun - 1, work, self._saved_as(work))
        return task.prepare(self._tokenizer, self._engine.target.config.eos_token_ids)

    def _may_join(self, work: Job | Upload) -> bool:
        """Whether a piece of work may join the run now. Texts that are read join one at a time, because several of the
        same name would conflict; one that nobody wants any more counts until its last write is done. If a grammar is
        no longer compiled, it is first compiled again beside the answers, which may take a second."""
        if isinstance(work, Upload):
            run = self._session and self._session.run
            left = [sequence.tag for sequence in run.live if sequence.tag] if run else []
            return not any(isinstance(task.owner, Upload) for task in [*self._tasks, *left])
        grammar, grammars = work.prompts[0].grammar, self._engine.grammars
        if grammar is None or grammars is None:
            return True
        work.compiled = work.compiled or grammars.compile_beside(grammar)
        return work.compiled is not None and work.compiled.is_set()

    def _send_piece(self, event: Written) -> None:
        """Sends the text that a round has added to an answer."""
        task, job = event.task, event.task.owner
        assert task.sequence
        s = task.sequence.statistics
        if event.round.index == 0:
            self._metrics.add_first_token(time.perf_counter() - job.asked_at)
            if task.draw == 0:
                self._metrics.add_prompt(s)
        else:
            self._metrics.add_round(event.round)
        logprobs = task.take_logprobs()
        first = event.round.index == 0
        if first and self._engine.target.is_on_one_cpu:
            self._firsts.add(job)
        if event.piece or logprobs:
            self._unsent.append((job, Piece(task.number, event.piece, logprobs, Timings.of(s) if job.timed else None)))
        if not first:
            self._send_first_tokens()

    def _send_first_tokens(self) -> None:
        """Sends the pieces that were kept back. First tokens of one pass are sent together: each piece wakes the thread
        that serves HTTP, which would take turns with this thread."""
        unsent, self._unsent = self._unsent, []
        for job, piece in unsent:
            if not job.abandoned:
                job.send(piece)

    def _let_first_tokens_go(self, session: Session) -> None:
        """Sends first tokens, if no others of the same pass follow. Before a round that takes all cores, leaves the
        cores for a moment to the thread that serves HTTP, so that most of the first tokens leave before it."""
        if session.run and session.run.first_tokens_follow:
            return
        self._send_first_tokens()
        if self._firsts and self._tasks:  # otherwise no round follows
            passed_on = lambda: all(job.abandoned or job.is_taken() for job in self._firsts)  # noqa: E731
            self.waits_for_streams = True
            try:
                self._arrivals.wait_until(passed_on, most_s=_PASSED_ON_S)
            finally:
                self.waits_for_streams = False
        self._firsts.clear()

    def _send_end(self, task: Task) -> None:
        """Sends the event that an answer is complete, or that a text is saved."""
        assert task.sequence
        s, work = task.sequence.statistics, task.owner
        work.ended += 1
        if work.ended == work.parts:
            self._queue.remove(work)
        if isinstance(work, Upload):
            self._metrics.add_text(s)
            work.send(Saved(s.prompt_tokens - s.reused_tokens, s.ttft_s))
        else:
            text = task.text
            end = AnswerEnd(task.finish_reason, text.stop, text.num_tokens, Timings.of(s))
            work.send(Complete(task.number, end))

    def _send_progress(self, task: Task, share: float) -> None:
        """Sends the progress of a prefill."""
        work, now = task.owner, time.perf_counter()
        if task.draw or not work.wants_progress or (share < 1 and now - work.progress_sent < TELL_S):
            return
        assert task.sequence
        if task.number != work.reading:
            work.reading, work.reading_began = task.number, 0.0
        work.reading_began, work.progress_sent = work.reading_began or now, now
        s = task.sequence.statistics
        processed = s.reused_tokens + round(share * (s.prompt_tokens - s.reused_tokens))
        work.send(Progress(s.prompt_tokens, s.reused_tokens, processed, now - work.reading_began, task.number))

    def _fail_all(self, error: BaseException) -> None:
        """Sends an error for all work that was begun. Nothing follows it."""
        for job in dict.fromkeys(task.owner for task in self._tasks):
            self._fail(job, error)
        if self._session:
            self._session.tasks.clear()

    def _fail(self, job: Job | Upload, error: BaseException) -> None:
        """Sends an error for a piece of work. Nothing follows it, and its waiting parts are dropped."""
        self._send_first_tokens()
        job.fail(error)
        self._queue.remove(job)
