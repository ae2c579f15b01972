"""The thread that owns the engine: loads it, and does what waits in the queue."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

from ....offload import Engine
from ....tp.errors import PeerError, TriforceError
from ....tp.weights.tokenizer import Tokenizer
from ...session.open import ROOM, load_engine
from ...session.wire import BodyError
from ..options import ServeOptions
from .answering import Answering
from .fair_queue import FairQueue
from .jobs import Job, Upload, engine_failed, queue_full, rank_ended, stopping
from .metrics import Metrics

State = Literal["loading", "ready", "stopping", "failed"]
"""In the order that it goes through them."""


class Worker:
    """Works from `start` until `stop`, or until it fails."""

    def __init__(self, options: ServeOptions, directory: Path, metrics: Metrics, note: Callable[[str], None]) -> None:
        """Args:
        directory: of the target.
        note: takes notes for people.
        """
        self._options, self._directory, self._metrics, self._note = options, directory, metrics, note
        self.queue: FairQueue[Job | Upload] = FairQueue(
            options.max_queue, lambda work: work.begin(), lambda work: work.fail(queue_full())
        )
        self.state: State = "loading"
        self._changing = threading.Lock()  # the state, which other threads change too
        self.engine: Engine | None = None
        """Once it is loaded."""
        self.error: BaseException | None = None
        """What it failed with."""
        self.ended = threading.Event()
        self._cut_by: BodyError | None = None
        self._answering: Answering | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        metrics.watch("queue_length", "Requests that wait in the queue", lambda: len(self.queue))
        metrics.watch("running_answers", "Answers that are being written, or wait for memory", lambda: self.running)

    @property
    def running(self) -> int:
        """Answers that are being written, and texts that are read."""
        return len(self._answering) if self._answering else 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Has it end once the requests are answered that have begun to be; what waits is refused."""
        self._enter("stopping")
        for work in self.queue.close(keeps=lambda work: work.begun > 0):
            work.fail(self.refusal())

    def refusal(self) -> BodyError:
        """What those are told whom it does not answer any more."""
        if isinstance(self.error, PeerError):
            return rank_ended()
        return engine_failed() if self.error else stopping()

    def cut(self, wait_s: float, why: BodyError) -> bool:
        """Breaks off what is under way, and tells those who wait `why`; whether the thread has ended within `wait_s`
        seconds. It cannot while it loads weights."""
        self._cut_by = why
        if self._thread.is_alive():
            self._thread.join(wait_s if self.engine else 0)
        ended = not self._thread.is_alive()
        if not ended:
            for work in self.queue.clear():
                work.fail(why)
        return ended

    def _enter(self, state: State) -> bool:
        """Goes on to a state; whether it was not past that already."""
        with self._changing:
            forward = get_args(State).index(state) > get_args(State).index(self.state)
            self.state = state if forward else self.state
            return forward

    def _run(self) -> None:
        try:
            engine = load_engine(self._options, None, ROOM)
            # Its own tokenizer: the other thread's may be encoding, which some do not allow beside anything else.
            tokenizer = Tokenizer.load(self._directory)
            if engine.contexts and self._options.save_prompts:
                _ = engine.contexts.fingerprint  # it reads the weights: now, and not while answers are written
            engine.start_threads()  # now, so that their number stays as it is
            self.engine = engine
            if self._enter("ready"):
                self._note("ready")
            self._answer(engine, tokenizer)
            engine.finish()
            engine.close()
        except BaseException as error:
            self.error = error
            self._enter("failed")
        finally:
            self.stop()
            for work in self.queue.close():
                work.fail(self.refusal())
            self.ended.set()

    def _answer(self, engine: Engine, tokenizer: Tokenizer) -> None:
        """Works until the queue is closed. What fails does not end the server, unless ranks are lost or the engine does
        not work any more.

        Raises:
            TriforceError: it does not; see `Answering`.
            Exception: it failed where other ranks go on with it, or they have ended.
        """
        options = self._options
        self._answering = Answering(
            engine, tokenizer, self.queue, self._metrics, self._note,
            most=options.max_sequences, save_prompts=options.save_prompts, cut_by=lambda: self._cut_by,
        )  # fmt: skip
        while True:
            try:
                return self._answering.run()
            except Exception as error:
                if isinstance(error, PeerError) or (self._answering.broken and engine.target.ranks.size > 1):
                    raise
                if self._answering.failed:
                    what = f"{type(error).__name__}: {error}".partition("\n")[0]
                    raise TriforceError(
                        f"the engine failed, and failed again in a test with a few tokens ({what}): the server cannot "
                        "go on; start it again"
                    ) from error
                if isinstance(error, TriforceError):
                    continue  # whoever asked knows
                self._note(
                    f"error: the engine failed ({type(error).__name__}); running requests got an error; "
                    "--debug shows the traceback"
                )
                if self._options.debug:
                    traceback.print_exc()
