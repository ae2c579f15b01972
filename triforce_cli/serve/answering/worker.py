"""The thread that owns the engine: it loads the engine, and does the work in the queue."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

from ....offload import Engine
from ....offload.contexts.model import ModelContexts
from ....tp.errors import PeerError, TriforceError
from ....tp.weights.tokenizer import Tokenizer
from ...session.open import ROOM, load_engine
from ...session.wire import BodyError
from ..memory import RESERVED_BYTES
from ..options import ServeOptions
from .answering import Answering
from .arrivals import Arrivals
from .fair_queue import FairQueue
from .jobs import Job, Upload, engine_failed, queue_full, rank_ended, stopping
from .metrics import Metrics

State = Literal["loading", "ready", "stopping", "failed"]
"""The states of a worker, in the order in which it has them."""


class Worker:
    """Works from `start` until `stop`, or until it fails."""

    def __init__(self, options: ServeOptions, directory: Path, metrics: Metrics, note: Callable[[str], None]) -> None:
        """Args:
        directory: that of the target.
        note: prints a note for people.
        """
        self._options, self._directory, self._metrics, self._note = options, directory, metrics, note
        self.queue: FairQueue[Job | Upload] = FairQueue(
            options.max_queue, lambda work: work.begin(), lambda work: work.fail(queue_full())
        )
        self.arrivals = Arrivals()
        """The requests that are not in the queue yet."""
        self.state: State = "loading"
        self._changing = threading.Lock()  # the state, which other threads change too
        self.engine: Engine | None = None
        """The engine, after it is loaded."""
        self.reserves = False
        """Whether the engine has taken the memory of later caches; see `Engine.reserve_memory`."""
        self.error: BaseException | None = None
        """The error with which the worker failed."""
        self.ended = threading.Event()
        self._cut_by: BodyError | None = None
        self._answering: Answering | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        metrics.watch("queue_length", "Requests that wait in the queue", lambda: len(self.queue))
        metrics.watch("running_answers", "Answers that are being written, or wait for memory", lambda: self.running)

    @property
    def running(self) -> int:
        """The number of answers that are being written, and of texts that are being read."""
        return len(self._answering) if self._answering else 0

    @property
    def computes(self) -> bool:
        """Whether the model is being loaded, answers are being written, or texts are being read; not while a round
        waits until first tokens are passed on."""
        answering = self._answering
        waits = answering is not None and answering.waits_for_streams
        return self.state == "loading" or (self.running > 0 and not waits)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the worker after all requests are answered whose answers have begun. Waiting work is refused."""
        self._enter("stopping")
        for work in self.queue.close(keeps=lambda work: work.begun > 0):
            work.fail(self.refusal())

    def refusal(self) -> BodyError:
        """The error for requests that are no longer answered."""
        if isinstance(self.error, PeerError):
            return rank_ended()
        return engine_failed() if self.error else stopping()

    def cut(self, wait_s: float, why: BodyError) -> bool:
        """Interrupts the present work. All requests that wait get the error `why`. Returns whether the thread has ended
        within `wait_s` seconds. It cannot end while it loads weights."""
        self._cut_by = why
        if self._thread.is_alive():
            self._thread.join(wait_s if self.engine else 0)
        ended = not self._thread.is_alive()
        if not ended:
            for work in self.queue.clear():
                work.fail(why)
        return ended

    def _enter(self, state: State) -> bool:
        """Enters a state. Returns false if the worker was already in it or in a later state."""
        with self._changing:
            forward = get_args(State).index(state) > get_args(State).index(self.state)
            self.state = state if forward else self.state
            return forward

    def _run(self) -> None:
        try:
            engine = load_engine(self._options, None, ROOM)
            self.reserves = engine.reserve_memory(RESERVED_BYTES) > 0
            # Its own tokenizer: the other thread's may be encoding, which some do not allow beside anything else.
            tokenizer = Tokenizer.load(self._directory)
            if engine.contexts:
                self._read_fingerprint(engine.contexts)
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

    def _read_fingerprint(self, contexts: ModelContexts) -> None:
        """Computes the fingerprint of the model if it will be needed, which may read all weights: now, and not while
        answers are written.

        Raises:
            TriforceError, OSError: it cannot be computed, and `--save-prompts` needs it.
        """
        try:
            if self._options.save_prompts or contexts.store.any_of_shape(contexts.shape):
                _ = contexts.fingerprint
        except (TriforceError, OSError) as error:
            if self._options.save_prompts:
                raise
            self._note(f"warning: saved contexts cannot be used: {error}")

    def _answer(self, engine: Engine, tokenizer: Tokenizer) -> None:
        """Works until the queue is closed. An error does not end the server, unless ranks are lost or the engine does
        not work any more.

        Raises:
            TriforceError: the engine does not work any more; see `Answering`.
            Exception: the engine failed at a point at which other ranks continue, or other ranks have ended.
        """
        options = self._options
        self._answering = Answering(
            engine, tokenizer, self.queue, self.arrivals, self._metrics, self._note,
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
