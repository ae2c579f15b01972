"""The routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import PurePath
from tempfile import SpooledTemporaryFile
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ....offload.contexts.manifest import ContextError
from ....tp.errors import UsageError
from ...contexts import describe, describe_all
from ...session.anthropic import COUNT_TOKENS, message_body
from ...session.response import AnswerEnd, FinishedAnswer, response_body
from ...session.wire import CHAT, COMPLETION, MESSAGES, AnswerRequest, BodyError, Delivery, check_model
from ..access import Access
from ..answering.jobs import Complete, Event, Failed, Job, Piece, Saved, Upload, as_body_error
from ..answering.metrics import Metrics
from .connection import cut
from .events import Events
from .gate import GONE, Body, Gate, error_response, public_error
from .message_stream import MessageStream
from .page import PAGE, page_response
from .service import Service
from .streams import AnswerStream, ChunkStream, reading_stream

T = TypeVar("T")

_MODELS, _CONTEXTS = "/v1/models", "/v1/contexts"
_ROUTES = (*PAGE, "/health", "/metrics", _MODELS, CHAT, COMPLETION, MESSAGES, COUNT_TOKENS, _CONTEXTS)
_STREAM = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
_STREAM_TYPE = "text/event-stream"


def make_app(service: Service, access: Access, metrics: Metrics, log: Callable[[str], None]) -> ASGIApp:
    """The application of one server."""
    handlers = Handlers(service, metrics)
    routes = [
        *(Route(path, handlers.page) for path in PAGE),
        Route("/health", handlers.health),
        Route("/metrics", handlers.metrics),
        Route(_MODELS, handlers.models),
        Route(_MODELS + "/{name:path}", handlers.model),
        *(Route(path, handlers.answer, methods=["POST"]) for path in (CHAT, COMPLETION, MESSAGES)),
        Route(COUNT_TOKENS, handlers.count_tokens, methods=["POST"]),
        Route(_CONTEXTS, handlers.list_contexts),
        Route(_CONTEXTS, handlers.add_context, methods=["POST"]),
        Route(_CONTEXTS + "/{name}", handlers.remove_context, methods=["DELETE"]),
    ]

    async def known(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            error = BodyError(str(error.detail).lower(), code="invalid_request", status=error.status_code)
        return await error_response(as_body_error(error), service.hidden, request.scope)

    async def nobody_waits(*_: object) -> Response:
        return Response(status_code=GONE)  # for the log

    of_errors = {BodyError: known, HTTPException: known, Exception: known, ClientDisconnect: nobody_waits}
    app = Starlette(routes=routes, exception_handlers=of_errors)
    app.router.redirect_slashes = False
    return Gate(app, access, metrics, route_of, log, service.hidden, service.limits, service.worker.arrivals)


def route_of(path: str) -> str:
    """The route of a path, without any text that a client chooses."""
    if path in _ROUTES:
        return path
    return next((f"{one}/{{name}}" for one in (_MODELS, _CONTEXTS) if path.startswith(f"{one}/")), "other")


def _do_nothing() -> None:
    pass


class Handlers:
    """The handlers of the routes."""

    def __init__(self, service: Service, metrics: Metrics) -> None:
        self._service, self._metrics = service, metrics

    async def page(self, request: Request) -> Response:
        return page_response(request.url.path)

    async def health(self, _: Request) -> Response:
        state = self._service.worker.state
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)

    async def metrics(self, _: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model]})

    async def model(self, request: Request) -> Response:
        check_model(request.path_params["name"], self._service.models)
        return JSONResponse(self._model)

    @property
    def _model(self) -> dict[str, Any]:
        return {"id": self._service.name, "object": "model", "created": 0, "owned_by": "triforce"}

    async def answer(self, request: Request) -> Response:
        """An answer, streamed or whole."""
        service = self._service
        body = _body_of(request)
        async with self._received(request) as sent:
            asking = service.ask(sent, request.url.path, body.client, body.hold_unread)
            job, events, delivery = await self._until_gone(request, None, asking)
        body.release()
        noted = request.scope["triforce"]
        noted |= {"prompt_tokens": sum(len(one.token_ids) for one in job.prompts), "answers": job.request.answers}
        if not delivery.stream:
            collecting = _collect(job, events, service.limits.whole_bytes, body.hold_answer)
            answers = await self._until_gone(request, job, collecting)
            noted["new_tokens"] = sum(answer.num_tokens for answer in answers.values())
            raw = await service.write(body.client, lambda: _answer_body(job.request, service.name, answers))
            return Response(raw, media_type="application/json")
        stream = self._stream(job, delivery)

        def end() -> None:
            noted["new_tokens"] = stream.new_tokens

        return await self._streamed(request, job, events, lambda first: stream.run(first, events), end)

    def _stream(self, job: Job, delivery: Delivery) -> AnswerStream:
        service, endpoint = self._service, job.request.endpoint

        def error_of(error: BodyError) -> dict[str, Any]:
            return public_error(error, service.hidden, endpoint)

        if endpoint == MESSAGES:
            return MessageStream(job, service.name, service.limits.keep_alive_s, error_of)
        return ChunkStream(job, service.name, delivery, service.limits.keep_alive_s, error_of)

    async def count_tokens(self, request: Request) -> Response:
        """Counts the tokens of a message's prompt."""
        body = _body_of(request)
        async with self._received(request) as sent:
            counting = self._service.count_tokens(sent, request.url.path, body.client)
            tokens = await self._until_gone(request, None, counting)
        request.scope["triforce"]["prompt_tokens"] = tokens
        return JSONResponse({"input_tokens": tokens})

    async def list_contexts(self, request: Request) -> Response:
        store = self._service.store
        listing = self._service.with_store(_body_of(request).client, lambda: describe_all(store))
        found = await self._until_gone(request, None, listing)
        data = [{"name": one["name"], "damaged": True} if "damaged" in one else _public(one) for one in found]
        return JSONResponse({"object": "list", "data": data})

    async def add_context(self, request: Request) -> Response:
        """Reads a text and saves it."""
        service, body = self._service, _body_of(request)
        async with request.form(max_files=1, max_fields=2, max_part_size=1024) as form:
            others = [field for field in form if field not in ("name", "file", "return_progress")]
            if others:
                raise BodyError("there are only the fields name, file and return_progress")
            name, file, wanted = form.get("name"), form.get("file"), form.get("return_progress", "false")
            if not isinstance(name, str) or not isinstance(file, UploadFile):
                raise BodyError("give the fields name (a text) and file (a file) as multipart/form-data", "file")
            if wanted not in ("true", "false"):
                raise BodyError("return_progress must be true or false", "return_progress")
            uploading = service.upload(name, file, body.client)
            upload, events = await self._until_gone(request, None, uploading)
        del file
        body.release()
        await self._until_gone(request, upload, service.begin(upload, events))
        request.scope["triforce"]["prompt_tokens"] = len(upload.token_ids)

        async def described(saved: Saved) -> dict[str, Any]:
            found = await service.with_store(upload.client, lambda: describe(service.store, name))
            return _public(found) | {"read_tokens": saved.tokens, "read_s": saved.seconds}

        if wanted == "true":
            return await self._streamed(
                request,
                upload,
                events,
                lambda first: reading_stream(first, events, described, self._error, service.limits.keep_alive_s),
            )
        saved = await self._until_gone(request, upload, _saved(events))
        return JSONResponse(await described(saved), 201)

    async def remove_context(self, request: Request) -> Response:
        store, name = self._service.store, request.path_params["name"]

        def remove() -> bool:
            known = store.holds(name)
            if known:
                store.remove(name)
            return known

        try:
            known = await self._service.with_store(_body_of(request).client, remove)
        except UsageError as error:
            raise BodyError(str(error), "name") from error
        except ContextError as error:
            raise BodyError(str(error), "name", code="context_in_use", status=409) from error
        if not known:
            raise BodyError("there is no context of this name", "name", code="context_not_found", status=404)
        return JSONResponse({"name": name, "deleted": True})

    @asynccontextmanager
    async def _received(self, request: Request) -> AsyncIterator[UploadFile]:
        """The whole body of a request: in memory, or in a file if it is long. So of the long bodies, only the one whose
        prompt is being made is in memory. In contrast to `Request.body`, it is not kept."""
        with SpooledTemporaryFile(self._service.limits.long_bytes) as file:
            sent = UploadFile(file, size=0)  # pyright: ignore[reportArgumentType]
            async for piece in request.stream():
                await sent.write(piece)
            yield sent

    def _error(self, error: BodyError) -> dict[str, Any]:
        return public_error(error, self._service.hidden, _CONTEXTS)

    async def _streamed(
        self,
        request: Request,
        work: Job | Upload,
        events: Events,
        run: Callable[[Event | None], AsyncIterator[bytes]],
        end: Callable[[], None] = _do_nothing,
    ) -> Response:
        """A stream of the results of a piece of work. Work that fails at once is answered with its status. A stream
        that nobody reads is cut."""

        def too_much_unread() -> None:
            self._service.abandon(work)
            cut(request.scope)

        events.on_too_many = too_much_unread
        _body_of(request).begin_stream(too_much_unread)

        def give_up() -> None:
            self._service.abandon(work)
            events.on_too_many = _do_nothing  # it refers to the work, which refers to the events

        try:
            first = await self._until_gone(request, work, events.next(self._service.limits.first_event_s))
            if isinstance(first, Failed):
                raise first.error
        except BaseException:
            give_up()
            raise

        def ended() -> None:
            give_up()
            end()

        return _WorkStream(run(first), ended)

    async def _until_gone(self, request: Request, work: Job | Upload | None, wanted: Coroutine[Any, Any, T]) -> T:
        """Waits for `wanted`. If the client disconnects, `wanted` is cancelled, and the work is given up.

        Raises:
            ClientDisconnect: the client has disconnected.
        """
        waiting, gone = asyncio.ensure_future(wanted), asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return waiting.result()
            raise ClientDisconnect
        finally:
            if work and (not waiting.done() or waiting.cancelled() or waiting.exception() is not None):
                self._service.abandon(work)
            waiting.cancel()
            gone.cancel()


class _WorkStream(StreamingResponse):
    """A stream that gives up its work when it ends, for any reason."""

    def __init__(self, content: AsyncIterator[bytes], end: Callable[[], None]) -> None:
        super().__init__(content, headers=_STREAM, media_type=_STREAM_TYPE)
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()


def _body_of(request: Request) -> Body:
    """The `Body` of a request, which the gate has set."""
    return request.scope["triforce_body"]


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _public(described: dict[str, Any]) -> dict[str, Any]:
    """The description of a context (`describe`) for clients: only the name of a model's directory, not its path."""
    model = PurePath(described["model"])
    return described | {"model": model.name} if model.is_absolute() else described


_PIECE_BYTES = 200
"""Bytes that Python takes for a piece besides its text, approximately."""


async def _collect(job: Job, events: Events, most_bytes: int, hold: Callable[[int], None]) -> dict[int, FinishedAnswer]:
    """Collects all answers of a request, by their numbers.

    Args:
        most_bytes: the maximum of bytes that they may take, approximately.
        hold: called with the number of bytes that they take so far.

    Raises:
        BodyError: the request failed, or the answers take too many bytes, or `hold` refuses them.
    """
    pieces: dict[int, list[Piece]] = {number: [] for number in range(job.request.answers)}
    ends: dict[int, AnswerEnd] = {}
    num_bytes = 0
    while len(ends) < job.request.answers:
        event = await events.next()
        waits_too_much = False
        if isinstance(event, Failed):
            waits_too_much = isinstance(event.error, BodyError) and event.error.code == "not_read"
            if not waits_too_much:
                raise event.error
        if isinstance(event, Piece):
            pieces[event.number].append(event)
            num_bytes += event.num_bytes + _PIECE_BYTES
        if waits_too_much or num_bytes > most_bytes:
            raise BodyError(
                f"the answers take more than {most_bytes:,} bytes; set stream to true, or ask for less",
                "stream", code="answer_too_long",
            )  # fmt: skip
        if isinstance(event, Piece):
            hold(num_bytes)
        if isinstance(event, Complete):
            ends[event.number] = event.end
    return {number: _whole(job, pieces[number], end) for number, end in ends.items()}


def _whole(job: Job, pieces: Sequence[Piece], end: AnswerEnd) -> FinishedAnswer:
    """A complete answer, made from its pieces and its end."""
    wanted = job.request.top_logprobs is not None
    logprobs = [entry for piece in pieces for entry in piece.logprobs or ()] if wanted else None
    text, syntax = "".join(piece.text for piece in pieces), job.prompts[0].syntax
    return FinishedAnswer(end.finish_reason, end.stop, end.num_tokens, end.timings, text, logprobs, syntax)


def _answer_body(request: AnswerRequest, model: str, answers: dict[int, FinishedAnswer]) -> dict[str, Any]:
    """The body of a response with complete answers, in the format of its endpoint."""
    if request.endpoint == MESSAGES:
        return message_body(request, model, answers[0])
    return response_body(request, model, answers)


async def _saved(events: Events) -> Saved:
    """Waits until a text is saved.

    Raises:
        BodyError: the text was not saved.
    """
    while not isinstance(event := await events.next(), Saved):
        if isinstance(event, Failed):
            raise event.error
    return event
