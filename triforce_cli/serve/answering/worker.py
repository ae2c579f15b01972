"""The thread that owns the engine: loads it, and does what waits in the queue."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from ....offload import Engine
from ....tp.errors import PeerError, TriforceError
from ....tp.weights.tokenizer import Tokenizer
from ...session.open import ROOM, load_engine
from ...session.wire import BodyError
from ..options import ServeOptions
from .answering import Answering
from .fair_queue import FairQueue
from .jobs import Job, Upload, queue_full, rank_ended, stopping
from .metrics import Metrics


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
        self.state: Literal["loading", "ready", "stopping", "failed"] = "loading"
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
        if self.state != "failed":
            self.state = "stopping"
        for work in self.queue.close(keeps=lambda work: work.begun > 0):
            work.fail(self.refusal())

    def refusal(self) -> BodyError:
        """What those are told whom it does not answer any more."""
        return rank_ended() if isinstance(self.error, PeerError) else stopping()

    def cut(self, wait_s: float, why: BodyError) -> bool:
        """Breaks off what is under way, and tells those who wait `why`; whether the thread has ended within `wait_s`
        seconds. It cannot while it loads weights."""
        self._cut_by = why
        if self._thread.is_alive():
            self._thread.join(wait_s if self.engine else 0)
        ended = not self._thread.is_alive()
        if self._answering and not ended:
            self._answering.fail_all(why)
        return ended

    def _run(self) -> None:
        try:
            engine = load_engine(self._options, None, ROOM)
            # Its own tokenizer: the other thread's may be encoding, which some do not allow beside anything else.
            tokenizer = Tokenizer.load(self._directory)
            self.engine = engine
            if self.state == "loading":
                self.state = "ready"
                self._note("ready")
            self._answer(engine, tokenizer)
            engine.finish()
            engine.close()
        except BaseException as error:
            self.error, self.state = error, "failed"
        finally:
            self.stop()
            for work in self.queue.close():
                work.fail(self.refusal())
            self.ended.set()

    def _answer(self, engine: Engine, tokenizer: Tokenizer) -> None:
        """Works until the queue is closed. What fails does not end the server, unless ranks are lost.

        Raises:
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
                if isinstance(error, TriforceError):
                    continue  # whoever asked knows
                self._note(
                    f"error: the engine failed ({type(error).__name__}); requests under way were told; "
                    "--debug shows the traceback"
                )
                if self._options.debug:
                    traceback.print_exc()
