"""What the routes ask for: prompts of checked requests, and their way to the engine's thread and back."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from ....offload.checks import check_context
from ....offload.contexts.home import user_store
from ....offload.contexts.model import ModelContexts
from ....tp.errors import CapacityError, TriforceError
from ....tp.model.config import ModelConfig
from ....tp.weights.tokenizer import Tokenizer
from ...session.prompt import Context
from ...session.request_prompt import request_prompt
from ...session.source import checked, decoded
from ...session.wire import AnswerRequest, BodyError, Delivery, request_from_body, validated
from ..answering.answering import SAVED_PROMPT
from ..answering.fair_queue import FairQueue
from ..answering.jobs import Job, Saved, Upload
from ..answering.worker import Worker
from ..http_limits import ServerLimits
from ..options import ServeOptions
from .events import Events

T = TypeVar("T")


class Service:
    """One model that answers."""

    def __init__(
        self, options: ServeOptions, directory: Path, config: ModelConfig, worker: Worker, limits: ServerLimits
    ) -> None:
        """Args: `directory` is the target's."""
        self.worker, self._config, self.grace_s, self.limits = worker, config, options.grace, limits
        self.name = Path(options.model).resolve().name if Path(options.model).is_dir() else options.model
        self._tokenizer = Tokenizer.load(directory).with_arguments(options.template_args)
        self._options, self._models = options, {self.name, self.name.rpartition("/")[2]}
        self.store = user_store()
        # One thread: some tokenizers cannot be used by two at a time.
        self._preparing = ThreadPoolExecutor(1, "prompts")
        self._verifying = ThreadPoolExecutor(1, "verifying")
        self._may_verify = threading.Semaphore(limits.verifications)
        self.hidden = _words_for({self.store.root: "the saved contexts", directory: "the model"})
        """What stands in messages to clients for places on this machine."""

    @property
    def queue(self) -> FairQueue[Job | Upload]:
        return self.worker.queue

    async def ask(self, raw: bytes, endpoint: str, client: str) -> tuple[Job, Events, Delivery]:
        """Puts a request for answers into the queue.

        Raises:
            BodyError: it cannot be answered as it was asked, or not now.
        """
        self._check_open()
        request, delivery = await self._prepare(lambda: self._checked(raw, endpoint))
        prompt = await self._prepare(lambda: request_prompt(request, self._tokenizer, self._config))
        events = Events(self.limits.unread_bytes if delivery.stream else self.limits.whole_bytes)
        told = delivery.timings_per_token, delivery.return_progress
        job = Job(client, events.send, request, prompt, *told)
        self._put(job)
        return job, events, delivery

    async def upload(self, name: str, raw: bytes, client: str) -> tuple[Upload, Events]:
        """A text that is to be read and saved; `begin` has that done.

        Raises:
            BodyError: it cannot be, or not now.
        """
        self._check_open()

        def prepare() -> Upload:
            self.store.directory(name)
            if name.casefold().startswith(SAVED_PROMPT):
                raise BodyError(
                    f"names that begin with {SAVED_PROMPT!r} are reserved for prompts that the server saves; take "
                    "another name",
                    "name",
                )
            text = checked(decoded(raw, "file", lambda _: None), "file")
            context = Context.read(text, name, self._tokenizer)
            check_context(self._config, len(context.token_ids), 1)
            return Upload(client, events.send, name, context.token_ids, context.frame)

        events = Events(self.limits.unread_bytes)
        return await self._prepare(prepare), events

    async def begin(self, upload: Upload, events: Events) -> None:
        """Puts a text into the queue, unless it is saved under its name already. What is saved of it is verified first.

        Raises:
            BodyError: another text has the name, or it cannot be done now.
        """
        engine = self.worker.engine
        assert engine and engine.contexts  # it was loaded from files
        if await asyncio.to_thread(upload.is_saved, engine.contexts) and await self._verified(upload, engine.contexts):
            events.send(Saved(0, 0.0))
        else:
            self._put(upload)

    async def _verified(self, upload: Upload, contexts: ModelContexts) -> bool:
        """Whether what is saved of a text is undamaged; one text is verified at a time.

        Raises:
            BodyError: too many wait to be verified, or it was given up.
        """
        if not self._may_verify.acquire(blocking=False):
            raise _queue_full()

        def verify() -> bool:
            try:
                return upload.verify(contexts, lambda: upload.abandoned or self.worker.state != "ready")
            finally:
                self._may_verify.release()

        # It always runs, if only to find that nobody waits for it: where it is cancelled, its place is not given back.
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._verifying, verify))

    def abandon(self, work: Job | Upload) -> None:
        """Nobody waits for it any more."""
        work.abandoned = True
        self.queue.remove(work)

    def close(self) -> None:
        for threads in (self._preparing, self._verifying):
            threads.shutdown(wait=False, cancel_futures=True)

    def _checked(self, raw: bytes, endpoint: str) -> tuple[AnswerRequest, Delivery]:
        body = parsed(raw)
        delivery = {name: body.pop(name, None) for name in Delivery.model_fields}
        return request_from_body(body, endpoint, self._options, self._models), validated(Delivery, delivery)

    async def _prepare(self, work: Callable[[], T]) -> T:
        """Runs what takes time beside the loop."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._preparing, work)
        except CapacityError as error:
            raise BodyError(str(error), code="context_length_exceeded") from error
        except TriforceError as error:
            raise error if isinstance(error, BodyError) else BodyError(str(error)) from error

    def _check_open(self) -> None:
        """Raises:
        BodyError: nothing can be answered now.
        """
        state = self.worker.state
        if state == "loading":
            raise BodyError("the model is being loaded; ask again later", code="loading", status=503)
        if state != "ready":
            raise self.worker.refusal()
        if self.queue.full:
            raise _queue_full()

    def _put(self, work: Job | Upload) -> None:
        if not self.queue.put(work):
            raise self.worker.refusal() if self.worker.state != "ready" else _queue_full()


def _words_for(places: dict[Path, str]) -> dict[str, str]:
    """The words for places as messages may name them: as they were given, and as the system knows them. A single name
    is no place: it may be any word."""
    named = ((one, word) for place, word in places.items() for one in (place, place.absolute(), place.resolve()))
    return {str(one): word for one, word in named if len(one.parts) > 1}


def _queue_full() -> BodyError:
    return BodyError("too many requests wait already; ask again later", code="queue_full", status=429)


def parsed(raw: bytes) -> dict[str, Any]:
    """A body's fields.

    Raises:
        BodyError: it is no JSON object.
    """
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", None) or type(error).__name__
        at = f" at line {error.lineno:,}, column {error.colno:,}" if isinstance(error, json.JSONDecodeError) else ""
        raise BodyError(f"the body is not JSON: {reason}{at}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise BodyError("the body is not a JSON object", code="invalid_json")
    return body
