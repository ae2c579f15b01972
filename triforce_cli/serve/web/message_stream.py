"""Server-sent events of an answer while it is written, in Anthropic's format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ...session.answer_parts import Part
from ...session.anthropic import block_begin, cost_of, ending, message_head, usage_of
from ...session.wire import BodyError
from ..answering.jobs import Complete, Job, Piece, Progress
from .streams import AnswerStream, sse


def _event(name: str, **data: Any) -> bytes:
    return sse({"type": name, **data}, name)


class MessageStream(AnswerStream):
    """One answer as a message of blocks. A block begins, grows and ends before the next block begins."""

    keep_alive = _event("ping")

    def __init__(
        self, job: Job, model: str, keep_alive_s: float, error_of: Callable[[BodyError], dict[str, Any]]
    ) -> None:
        """Args: `model` is its name."""
        super().__init__(job, keep_alive_s, error_of)
        self._head, self._prompt_tokens = message_head(model), len(job.prompts[0].token_ids)
        self._open: Part | None = None
        """The part with which the present block began."""
        self._index = -1

    def _begin(self) -> Iterator[bytes]:
        # How many tokens of the prompt are known already is not known yet: the last event has it.
        usage, no_end = usage_of(self._prompt_tokens, 0, 0), {"stop_reason": None, "stop_sequence": None}
        yield _event("message_start", message={**self._head, "content": [], **no_end, "usage": usage})

    def _progress(self, event: Progress) -> Iterator[bytes]:
        yield from ()

    def _piece(self, piece: Piece, parts: Sequence[Part]) -> Iterator[bytes]:
        for part in parts:
            if self._open is None or (part.kind, part.call) != (self._open.kind, self._open.call):
                yield from self._end_block()
                yield from self._begin_block(part)
            if part.text:
                yield self._delta(part)

    def _complete(self, event: Complete, parts: Sequence[Part]) -> Iterator[bytes]:
        yield from self._piece(Piece(event.number, ""), parts)
        yield from self._end_block()
        called = self._parts[event.number].calls
        yield _event("message_delta", delta=ending(self._request, event.end, called), **cost_of(event.end))

    def _end(self) -> Iterator[bytes]:
        yield _event("message_stop")

    def _error(self, error: BodyError) -> bytes:
        return sse(self._error_of(error), "error")

    def _begin_block(self, part: Part) -> Iterator[bytes]:
        self._open = part
        self._index += 1
        yield _event("content_block_start", index=self._index, content_block=block_begin(part))

    def _end_block(self) -> Iterator[bytes]:
        if self._open is None:
            return
        if self._open.kind == "reasoning":
            yield self._content({"type": "signature_delta", "signature": ""})
        self._open = None
        yield _event("content_block_stop", index=self._index)

    def _delta(self, part: Part) -> bytes:
        kind, field = _DELTAS[part.kind]
        return self._content({"type": kind, field: part.text})

    def _content(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


_DELTAS = {
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
"""The type of the delta, and the field of its text, by kind of part."""
