"""Server-sent events of an answer while it is written, and of the progress of reading a text. Those in Anthropic's
format are in message_stream.py."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any

from ....tp.errors import TriforceError
from ...session.answer_parts import AnswerParts, Part
from ...session.logprobs import logprobs_field
from ...session.response import AnswerEnd, call_field, cost_of, finish_reason_of, response_head, timings
from ...session.wire import CHAT, BodyError, Delivery
from ..answering.jobs import Complete, Event, Failed, Job, Piece, Progress, Saved, as_body_error
from .events import Events

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def sse(data: Any, name: str | None = None) -> bytes:
    """The bytes of one event. `name` is its type, if it has one."""
    begin = f"event: {name}\n" if name else ""
    return f"{begin}data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def progress_body(event: Progress) -> dict[str, Any]:
    """The progress of a prefill, in the format of llama.cpp's server."""
    return {
        "total": event.total,
        "cache": event.cached,
        "processed": event.processed,
        "time_ms": event.seconds * 1e3,
    }


class AnswerStream(ABC):
    """The events of one request's answers. A subclass for each format makes the events."""

    keep_alive: bytes
    """Sent if nothing else was sent for some time."""

    def __init__(self, job: Job, keep_alive_s: float, error_of: Callable[[BodyError], dict[str, Any]]) -> None:
        """Args:
        keep_alive_s: seconds without an event after which `keep_alive` is sent.
        error_of: makes the body of an error.
        """
        self._request, self._keep_alive_s, self._error_of = job.request, keep_alive_s, error_of
        syntax = job.prompts[0].syntax
        self._parts = defaultdict[int, AnswerParts](lambda: AnswerParts(syntax))
        self._answers: dict[int, AnswerEnd] = {}

    async def run(self, first: Event | None, events: Events) -> AsyncIterator[bytes]:
        """Yields events until all answers are complete, or until an error, which is then the last event. Those that
        belong to one event of the engine are yielded together.

        Args:
            first: an event that has arrived already, or `None`.
            events: the other events.
        """
        found = [*self._begin()]
        if found and first is None:
            yield b"".join(found)
            found = []
        event = first or await events.next(self._keep_alive_s)
        while True:
            if isinstance(event, Failed):
                yield b"".join([*found, self._error(event.error)])
                return
            try:
                found += [*self._events(event)]
                if self._is_whole:
                    found += [*self._end()]
            except Exception as error:  # or the stream would break off without a word
                yield b"".join([*found, self._error(as_body_error(error))])
                return
            if found:
                yield b"".join(found)
            if self._is_whole:
                return
            found, event = [], await events.next(self._keep_alive_s)

    @property
    def new_tokens(self) -> int:
        """The number of tokens of the complete answers."""
        return sum(answer.num_tokens for answer in self._answers.values())

    @property
    def _is_whole(self) -> bool:
        return len(self._answers) == self._request.answers

    def _events(self, event: Event | None) -> Iterator[bytes]:
        if event is None:
            yield self.keep_alive
        elif isinstance(event, Progress):
            yield from self._progress(event)
        elif isinstance(event, Piece):
            yield from self._piece(event, self._parts[event.number].add(event.text))
        elif isinstance(event, Complete):
            self._answers[event.number] = event.end
            yield from self._complete(event, self._parts[event.number].finish())

    @abstractmethod
    def _begin(self) -> Iterator[bytes]:
        """The events before all answers."""

    @abstractmethod
    def _progress(self, event: Progress) -> Iterator[bytes]: ...

    @abstractmethod
    def _piece(self, piece: Piece, parts: Sequence[Part]) -> Iterator[bytes]:
        """The events of a piece.

        Args:
            parts: the parts of the answer that it adds.
        """

    @abstractmethod
    def _complete(self, event: Complete, parts: Sequence[Part]) -> Iterator[bytes]:
        """The events at the end of an answer.

        Args:
            parts: the parts of the answer that were held back.
        """

    @abstractmethod
    def _end(self) -> Iterator[bytes]:
        """The events after all answers."""

    @abstractmethod
    def _error(self, error: BodyError) -> bytes: ...


class ChunkStream(AnswerStream):
    """Chunks, in OpenAI's format."""

    keep_alive = KEEP_ALIVE

    def __init__(
        self,
        job: Job,
        model: str,
        delivery: Delivery,
        keep_alive_s: float,
        error_of: Callable[[BodyError], dict[str, Any]],
    ) -> None:
        """Args: `model` is its name."""
        super().__init__(job, keep_alive_s, error_of)
        self._chat, self._delivery = job.request.endpoint == CHAT, delivery
        self._same = response_head(job.request, model, streamed=True)
        self._offsets: dict[int, int] = {}  # of each answer: length of the tokens whose logprobs were sent

    def _begin(self) -> Iterator[bytes]:
        for number in range(self._request.answers if self._chat else 0):
            yield self._chunk(number, {"role": "assistant", "content": ""})

    def _progress(self, event: Progress) -> Iterator[bytes]:
        yield self._chunk(event.number, {} if self._chat else "", prompt_progress=progress_body(event))

    def _piece(self, piece: Piece, parts: Sequence[Part]) -> Iterator[bytes]:
        """A chunk for each part that grows. Data about the tokens of the piece come with the last chunk, or alone."""
        more: dict[str, Any] = {"logprobs": self._logprobs(piece)}
        if piece.timings:
            more["timings"] = timings([piece.timings], [piece.timings])
        said = [self._said(part) for part in parts]
        if not said and (piece.logprobs or piece.timings):
            said = [{} if self._chat else ""]
        for index, one in enumerate(said):
            yield self._chunk(piece.number, one, **(more if index == len(said) - 1 else {}))

    def _complete(self, event: Complete, parts: Sequence[Part]) -> Iterator[bytes]:
        for part in parts:
            yield self._chunk(event.number, self._said(part))
        more = {"timings": cost_of(self._request, self._answers)["timings"]} if self._is_whole else {}
        reason = finish_reason_of(event.end, self._parts[event.number].calls)
        yield self._chunk(event.number, {} if self._chat else "", reason, **more)

    def _end(self) -> Iterator[bytes]:
        if self._delivery.stream_options.include_usage:
            cost = cost_of(self._request, self._answers)
            yield sse({**self._same, "choices": [], **cost})
        yield DONE

    def _error(self, error: BodyError) -> bytes:
        return sse(self._error_of(error))

    def _said(self, part: Part) -> dict[str, Any] | str:
        if not self._chat:
            return part.text
        if part.call is None:
            return {"content" if part.kind == "content" else "reasoning_content": part.text}
        field = call_field(part.call, part.text) if part.begins else {"function": {"arguments": part.text}}
        return {"tool_calls": [{"index": part.call.index, **field}]}

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        offset = self._offsets.get(piece.number, 0)
        self._offsets[piece.number] = offset + sum(len(entry["token"]) for entry in piece.logprobs or ())
        return logprobs_field(piece.logprobs, self._chat, offset)

    def _chunk(
        self,
        number: int,
        said: dict[str, Any] | str,
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
        **more: Any,
    ) -> bytes:
        choice = {"index": number, ("delta" if self._chat else "text"): said}
        choice |= {"logprobs": logprobs, "finish_reason": finish_reason}
        usage_of_none = {"usage": None} if self._delivery.stream_options.include_usage else {}
        return sse({**self._same, "choices": [choice], **usage_of_none, **more})


async def reading_stream(
    first: Event | None,
    events: Events,
    described: Callable[[Saved], Awaitable[dict[str, Any]]],
    error_of: Callable[[BodyError], dict[str, Any]],
    keep_alive_s: float,
) -> AsyncIterator[bytes]:
    """The events of the progress of reading a text, and at the end of the saved context. After `keep_alive_s` seconds
    without an event, a comment is sent."""
    event = first or await events.next(keep_alive_s)
    while True:
        if event is None:
            yield KEEP_ALIVE
        elif isinstance(event, Progress):
            yield sse({"prompt_progress": progress_body(event)})
        elif isinstance(event, Failed):
            yield sse(error_of(event.error))
            return
        elif isinstance(event, Saved):
            try:
                yield sse(await described(event))
            except TriforceError as error:  # another client has removed it
                yield sse(error_of(as_body_error(error)))
                return
            yield DONE
            return
        event = await events.next(keep_alive_s)
