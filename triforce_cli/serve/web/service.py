"""The operations behind the routes: checks requests, makes their prompts, and passes them to the engine's thread."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from starlette.datastructures import UploadFile

from ....offload.checks import check_context
from ....offload.contexts.home import user_store
from ....tp.errors import CapacityError, TriforceError
from ....tp.model.config import ModelConfig
from ....tp.weights.chat_template import Messages
from ....tp.weights.tokenizer import Tokenizer
from ...session.anthropic import ENDPOINTS, messages_request
from ...session.prompt import Context, Prompt
from ...session.request_prompt import TIMES_POSITIONS, grammar_errors, request_prompts
from ...session.source import checked, decoded
from ...session.wire import AnswerRequest, BodyError, Delivery, request_from_body, validated
from ..answering.answering import SAVED_PROMPT
from ..answering.fair_queue import FairQueue
from ..answering.jobs import Job, Saved, Upload, queue_full
from ..answering.worker import Worker
from ..http_limits import ServerLimits
from ..options import ServeOptions
from .events import Events
from .lane import Lane
from .preparing import Preparing

T = TypeVar("T")

_SLICE = 2**16
"""How many letters of a long text are encoded at a time, to find out whether the text is too long."""

_MARGIN = 1.1
"""Factor on the model's positions: a text with more tokens is too long, however it is cut for encoding."""

_STRING = re.compile(rb'"(?:[^"\\]++|\\.?)*+"?', re.DOTALL)
"""Matches a text in JSON. A text without an end matches up to the end of the body, so no place is searched twice."""

_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class Service:
    """One model that answers."""

    def __init__(
        self, options: ServeOptions, directory: Path, config: ModelConfig, worker: Worker, limits: ServerLimits
    ) -> None:
        """Args: `directory` is the target's."""
        self.worker, self._config, self.grace_s, self.limits = worker, config, options.grace, limits
        self.name = Path(options.model).resolve().name if Path(options.model).is_dir() else options.model
        self._options, self.models = options, {self.name, self.name.rpartition("/")[2]}
        self._directory = directory
        self._load_tokenizer()  # a wrong --template-arg is said now
        self.store = user_store()
        self._preparing = Preparing(self._load_tokenizer, options.max_queue, limits)
        self._storing = Lane("contexts", options.max_queue)
        self._verifying = Lane("verifying", limits.verifications)
        self._writing = Lane("whole answers", options.max_queue + options.max_sequences)
        self.hidden = _words_for({self.store.root: "the saved contexts", directory: "the model"})
        """The words that replace paths of this machine in messages to clients."""

    @property
    def queue(self) -> FairQueue[Job | Upload]:
        return self.worker.queue

    async def ask(
        self, sent: UploadFile, endpoint: str, client: str, hold: Callable[[int], None]
    ) -> tuple[Job, Events, Delivery]:
        """Puts a request for answers into the queue. Its body `sent` must stay open meanwhile. `hold`: see `Events`, if
        the answers are streamed.

        Raises:
            BodyError: the request cannot be answered, or not now.
        """
        self._check_open(client)

        def prepare(tokenizer: Tokenizer) -> tuple[AnswerRequest, tuple[Prompt, ...], Delivery]:
            request, delivery = self._checked(sent, endpoint)
            prompts = request_prompts(request, tokenizer, self._config)
            self._prepare_grammar(prompts[0], request.grammar_field)
            return _without_contents(request), prompts, delivery

        request, prompts, delivery = await self._prepare(client, sent, prepare)
        events = Events(self.limits.unread_bytes, hold) if delivery.stream else Events(self.limits.whole_bytes)
        told = delivery.timings_per_token, delivery.return_progress
        job = Job(client, events.send, request, prompts, *told)
        if delivery.stream and not delivery.return_progress:
            job.is_taken = events.are_taken
        self._put(job)
        return job, events, delivery

    async def count_tokens(self, sent: UploadFile, endpoint: str, client: str) -> int:
        """The number of tokens of the prompt of a request. The request is not put into the queue.

        Raises:
            BodyError: see `ask`.
        """
        self._check_ready()

        def count(tokenizer: Tokenizer) -> int:
            request, _ = self._checked(sent, endpoint)
            return sum(len(one.token_ids) for one in request_prompts(request, tokenizer, self._config))

        return await self._prepare(client, sent, count)

    async def upload(self, name: str, sent: UploadFile, client: str) -> tuple[Upload, Events]:
        """Prepares the text `sent`, which is to be read and saved, and must stay open meanwhile. `begin` starts this.

        Raises:
            BodyError: the text cannot be read and saved, or not now.
        """
        self._check_open(client)

        def prepare(tokenizer: Tokenizer) -> Upload:
            self.store.directory(name)
            if name.casefold().startswith(SAVED_PROMPT):
                raise BodyError(
                    f"names that begin with {SAVED_PROMPT!r} are reserved for prompts that the server saves; take "
                    "another name",
                    "name",
                )
            text = checked(decoded(_bytes_of(sent), "file", lambda _: None), "file")
            context = Context.read(text, name, tokenizer)
            check_context(self._config, len(context.token_ids), 1)
            return Upload(client, events.send, name, context.token_ids, context.frame)

        events = Events(self.limits.unread_bytes)
        return await self._prepare(client, sent, prepare), events

    async def begin(self, upload: Upload, events: Events) -> None:
        """Puts a text into the queue, unless it is saved under its name already. First, the part of it that is saved
        already is verified.

        Raises:
            BodyError: another text has the name, or the text cannot be read now.
        """
        engine = self.worker.engine
        assert engine and engine.contexts  # it was loaded from files
        contexts = engine.contexts
        saved = await self.with_store(upload.client, lambda: upload.is_saved(contexts))

        def given_up() -> bool:
            return upload.abandoned or self.worker.state != "ready"

        # In a thread of its own: of a long text it takes its time.
        if saved and await self._verifying.run(upload.client, lambda: upload.verify(contexts, given_up)):
            events.send(Saved(0, 0.0))
        else:
            self._put(upload)

    async def with_store(self, client: str, work: Callable[[], T]) -> T:
        """Runs a client's operation on saved contexts in another thread than the event loop.

        Raises:
            BodyError: too many operations wait.
        """
        return await self._storing.run(client, work)

    async def write(self, client: str, body: Callable[[], Any]) -> bytes:
        """A body in JSON, made in another thread than the event loop. It is made in many small steps, so that other
        threads can run meanwhile, which `json.dumps` prevents.

        Raises:
            BodyError: too many operations wait.
        """
        return await self._writing.run(client, lambda: "".join(_JSON.iterencode(body())).encode())

    def abandon(self, work: Job | Upload) -> None:
        """Gives up work for which nobody waits any more."""
        work.abandoned = True
        self.queue.remove(work)

    def close(self, why: BodyError) -> None:
        """Refuses, with `why`, all work that waits for one of the threads, except ended answers and uploads."""
        self._preparing.close(why)
        self._verifying.close(why)

    def end(self, why: BodyError) -> None:
        """Also refuses answers and uploads that have ended, because their results can no longer be sent."""
        self._storing.close(why)
        self._writing.close(why)

    def _load_tokenizer(self) -> Tokenizer:
        """The model's tokenizer, which stops early if a text is too long."""
        tokenizer = Tokenizer.load(self._directory).with_arguments(self._options.template_args)
        positions = self._config.max_position_embeddings

        def within(text: str) -> str:
            tokens = 0
            may_be_too_long = len(text) > _SLICE and len(text.encode(errors="replace")) > positions
            for start in range(0, len(text) if may_be_too_long else 0, _SLICE):
                tokens += len(tokenizer.encode(text[start : start + _SLICE], False))
                if tokens > _MARGIN * positions:
                    raise CapacityError(
                        f"the text has more than {tokens:,} tokens, but {self._config.name} has {positions:,} positions"
                        f"{self._config.positions_note}; shorten it"
                    )
            return text

        def render(messages: Messages, **arguments: Any) -> str:
            assert tokenizer.render
            for text in _texts([*messages, arguments]):
                within(text)
            return tokenizer.render(messages, **arguments)

        return replace(
            tokenizer,
            encode=lambda text, special: tokenizer.encode(within(text), special),
            render=render if tokenizer.render else None,
            as_content=lambda text: tokenizer.as_content(within(text)),
        )

    def _checked(self, sent: UploadFile, endpoint: str) -> tuple[AnswerRequest, Delivery]:
        most_values = self.limits.parts + TIMES_POSITIONS * self._config.max_position_embeddings
        body = parsed(_bytes_of(sent), self.limits.parts, most_values)
        names, request = Delivery.model_fields, request_from_body
        if endpoint in ENDPOINTS:
            names, request = ("stream",), messages_request
        delivery = {name: body.pop(name, None) for name in names}
        return request(body, endpoint, self._options, self.models), validated(Delivery, delivery)

    def _prepare_grammar(self, prompt: Prompt, field: str | None) -> None:
        """Compiles the grammar of a request in this thread, so that no running answer waits for it.

        Raises:
            BodyError: the grammar is not supported.
        """
        engine = self.worker.engine
        if prompt.grammar and engine and engine.grammars:
            with grammar_errors(field or "tools"):
                engine.grammars.prepare(prompt.grammar)

    async def _prepare(self, client: str, sent: UploadFile, work: Callable[[Tokenizer], T]) -> T:
        """Runs work on what was sent in another thread than the event loop, because it takes time."""
        try:
            return await self._preparing.run(client, sent.size or 0, work)
        except CapacityError as error:
            raise BodyError(str(error), code="context_length_exceeded") from error
        except TriforceError as error:
            raise error if isinstance(error, BodyError) else BodyError(str(error)) from error

    def _check_open(self, client: str) -> None:
        """Checks that a request of the client can be accepted.

        Raises:
            BodyError: it cannot be answered now.
        """
        self._check_ready()
        if not self.queue.has_room(client):
            raise queue_full()

    def _check_ready(self) -> None:
        """Checks that the server can answer.

        Raises:
            BodyError: the model is not loaded yet, or the server is stopping.
        """
        state = self.worker.state
        if state == "loading":
            raise BodyError("the model is being loaded; ask again later", code="loading", status=503)
        if state != "ready":
            raise self.worker.refusal()

    def _put(self, work: Job | Upload) -> None:
        if not self.queue.put(work):
            raise self.worker.refusal() if self.worker.state != "ready" else queue_full()


def _without_contents(request: AnswerRequest) -> AnswerRequest:
    """A request whose prompts are made, without the contents that they were made from, because it may wait for long."""
    prompts = ("",) * len(request.prompts)
    return replace(request, messages=(), prompts=prompts, template_arguments={}, grammar=None, tools=(), calls=None)


def _bytes_of(sent: UploadFile) -> bytes:
    """All that was sent. Called in a thread that may wait for a disk."""
    sent.file.seek(0)
    return sent.file.read()


def _texts(value: Any) -> Iterator[str]:
    """All texts within a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(one)


def _words_for(places: dict[Path, str]) -> dict[str, str]:
    """The words for paths, by the forms in which messages may name the paths: as given, and as absolute paths. A single
    name is not included, because it may be any word."""
    named = ((one, word) for place, word in places.items() for one in (place, place.absolute(), place.resolve()))
    return {str(one): word for one, word in named if len(one.parts) > 1}


def parsed(raw: bytes, most_parts: int, most_values: int) -> dict[str, Any]:
    """A body's fields.

    Args:
        most_parts: the maximum number of objects, lists and names of fields. Each takes many times its bytes in memory.
        most_values: the maximum number of values.

    Raises:
        BodyError: the body is not a JSON object, or exceeds a maximum.
    """
    if not _is_within(raw, most_parts, most_values) and not _is_within(_STRING.sub(b"", raw), most_parts, most_values):
        raise BodyError(
            f"the body has more than {most_parts:,} objects, lists and fields, or {most_values:,} values",
            code="too_many_parts",
            status=413,
        )
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", None) or type(error).__name__
        at = f" at line {error.lineno:,}, column {error.colno:,}" if isinstance(error, json.JSONDecodeError) else ""
        raise BodyError(f"the body is not JSON: {reason}{at}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise BodyError("the body is not a JSON object", code="invalid_json")
    return body


def _is_within(raw: bytes, most_parts: int, most_values: int) -> bool:
    parts = raw.count(b"[") + raw.count(b"{") + raw.count(b":")
    return parts <= most_parts and raw.count(b",") <= most_values
