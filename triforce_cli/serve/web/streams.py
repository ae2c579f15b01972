"""Server-sent events: an answer as it grows, in OpenAI's form, and how a text is read."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

from ....tp.errors import TriforceError
from ...session.answer_parts import AnswerParts, AnswerSyntax, Part
from ...session.logprobs import logprobs_field
from ...session.response import AnswerEnd, call_field, cost_of, finish_reason_of, response_head, timings
from ...session.wire import CHAT, AnswerRequest, BodyError, Delivery
from ..answering.jobs import Complete, Event, Failed, Piece, Progress, Saved, as_body_error
from .events import Events

DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE = b": keep-alive\n\n"


def sse(data: Any) -> bytes:
    """One event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def progress_body(event: Progress) -> dict[str, Any]:
    """As llama.cpp's server has it."""
    return {
        "total": event.total,
        "cache": event.cached,
        "processed": event.processed,
        "time_ms": event.seconds * 1e3,
    }


class AnswerStream:
    """The chunks of one request's answers."""

    def __init__(
        self, request: AnswerRequest, syntax: AnswerSyntax, model: str, delivery: Delivery, keep_alive_s: float
    ) -> None:
        """Args:
        syntax: how the answers are to be read.
        model: its name.
        keep_alive_s: after so long a comment goes out where nothing else does.
        """
        self._keep_alive_s = keep_alive_s
        self._request, self._chat, self._delivery = request, request.endpoint == CHAT, delivery
        self._same = response_head(request, model, streamed=True)
        self._parts = defaultdict[int, AnswerParts](lambda: AnswerParts(syntax))
        self._called: Counter[int] = Counter()  # of each answer: calls whose names were sent
        self._answers: dict[int, AnswerEnd] = {}
        self._offsets: dict[int, int] = {}  # of each answer: length of the tokens whose logprobs were sent

    async def run(
        self, first: Event | None, events: Events, error_of: Callable[[BodyError], dict[str, Any]]
    ) -> AsyncIterator[bytes]:
        """Until all answers are complete, or an error, which is then the last event.

        Args: `first` is an event that has come already, or `None`.
        """
        if self._chat:
            for number in range(self._request.answers):
                yield self._chunk(number, {"role": "assistant", "content": ""})
        event = first or await events.next(self._keep_alive_s)
        while True:
            if event is None:
                yield _KEEP_ALIVE
            elif isinstance(event, Failed):
                yield sse(error_of(event.error))
                return
            elif isinstance(event, Progress):
                yield self._chunk(event.number, {} if self._chat else "", prompt_progress=progress_body(event))
            elif isinstance(event, Piece):
                for chunk in self._piece(event):
                    yield chunk
            elif isinstance(event, Complete):
                self._answers[event.number] = event.end
                for part in self._parts[event.number].finish():
                    yield self._chunk(event.number, self._said(event.number, part))
                yield self._end(event)
                if len(self._answers) == self._request.answers:
                    break
            event = await events.next(self._keep_alive_s)
        if self._delivery.stream_options.include_usage:
            cost = cost_of(self._request, self._answers)
            yield sse({**self._same, "choices": [], **cost})
        yield DONE

    @property
    def new_tokens(self) -> int:
        """Of the answers that are complete."""
        return sum(answer.num_tokens for answer in self._answers.values())

    def _piece(self, piece: Piece) -> Iterator[bytes]:
        """A chunk for each part that goes on. What is told of the piece's tokens comes with the last one, or alone."""
        more: dict[str, Any] = {"logprobs": self._logprobs(piece)}
        if piece.timings:
            more["timings"] = timings([piece.timings], [piece.timings])
        said = [self._said(piece.number, part) for part in self._parts[piece.number].add(piece.text)]
        if not said and (piece.logprobs or piece.timings):
            said = [{} if self._chat else ""]
        for index, one in enumerate(said):
            yield self._chunk(piece.number, one, **(more if index == len(said) - 1 else {}))

    def _said(self, number: int, part: Part) -> dict[str, Any] | str:
        if not self._chat:
            return part.text
        if part.call is None:
            return {"content" if part.kind == "content" else "reasoning_content": part.text}
        index = part.call.index
        field: dict[str, Any] = {"index": index, "function": {"arguments": part.text}}
        if index >= self._called[number]:
            field |= call_field(part.call, part.text)
            self._called[number] = index + 1
        return {"tool_calls": [field]}

    def _end(self, event: Complete) -> bytes:
        whole = len(self._answers) == self._request.answers
        more = {"timings": cost_of(self._request, self._answers)["timings"]} if whole else {}
        reason = finish_reason_of(event.end, self._called[event.number] > 0)
        return self._chunk(event.number, {} if self._chat else "", reason, **more)

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
    """How a text is read, and what it then is. After `keep_alive_s` a comment goes out where nothing else does."""
    event = first or await events.next(keep_alive_s)
    while True:
        if event is None:
            yield _KEEP_ALIVE
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
