"""The body of a response in OpenAI's format: choices, usage, and timings as in llama.cpp's server."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...offload.statistics import Statistics
from .answer_parts import PLAIN, AnswerParts, AnswerSyntax, Call, Part, joined
from .logprobs import Entry, logprobs_field
from .wire import CHAT, AnswerRequest, BodyError

_ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
"""OpenAI's types of errors, by status. Others are `invalid_request_error` below 500, and `server_error` from 500 on."""

_FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}


@dataclass(frozen=True)
class Timings:
    """The tokens and seconds of an answer so far. The size of this object does not depend on the length of the
    answer."""

    prompt_tokens: int
    reused_tokens: int
    """The number of tokens of the prompt that did not have to be read."""
    prefill_s: float
    new_tokens: int
    decoded_tokens: int
    """The number of tokens after the first."""
    decode_s: float
    proposed: int
    """The number of draft tokens that were proposed to passes over the full cache."""
    accepted: int

    @classmethod
    def of(cls, s: Statistics) -> Timings:
        return cls(
            prompt_tokens=s.prompt_tokens,
            reused_tokens=s.reused_tokens,
            prefill_s=s.prefill_s,
            new_tokens=len(s.token_ids),
            decoded_tokens=len(s.token_s),
            decode_s=s.decode_s,
            proposed=s.retrieval_proposed,
            accepted=s.retrieval_accepted,
        )


@dataclass(frozen=True)
class AnswerEnd:
    """How an answer ended, and its tokens and times."""

    finish_reason: str
    """`eos`, `stop` (before one of the request's texts), `length` or `interrupted`."""
    stop: str | None
    """The stop text, if the answer ended before one."""
    num_tokens: int
    timings: Timings


@dataclass(frozen=True)
class FinishedAnswer(AnswerEnd):
    """An answer that is complete, or was interrupted."""

    text: str
    logprobs: Sequence[Entry] | None = None
    """The log-probabilities of its tokens, if they were asked for."""
    syntax: AnswerSyntax = PLAIN
    """How the parts of the text are found."""


def response_body(request: AnswerRequest, model: str, answers: Mapping[int, FinishedAnswer]) -> dict[str, Any]:
    """The body with the answers to a request.

    Args:
        model: the name of the model.
        answers: the answers by their numbers, see `AnswerRequest.n`; at least one.
    """
    chat = request.endpoint == CHAT
    return {
        **response_head(request, model),
        "choices": [_choice(number, answers[number], chat) for number in sorted(answers)],
        **cost_of(request, answers),
    }


def _choice(index: int, answer: FinishedAnswer, chat: bool) -> dict[str, Any]:
    said, called = {"text": answer.text}, False
    if chat:
        parts, called = parts_of(answer)
        said = {"message": _message(parts)}
    logprobs = logprobs_field(answer.logprobs, chat)
    return {"index": index, **said, "logprobs": logprobs, "finish_reason": finish_reason_of(answer, called)}


def _message(parts: Sequence[Part]) -> dict[str, Any]:
    texts, calls = {"content": "", "reasoning": ""}, dict[Call, str]()
    for part in parts:
        if part.call:
            calls[part.call] = part.text
        else:
            texts[part.kind] += part.text
    message: dict[str, Any] = {"role": "assistant", "content": texts["content"] or (None if calls else "")}
    if texts["reasoning"]:
        message["reasoning_content"] = texts["reasoning"]
    if calls:
        message["tool_calls"] = [call_field(call, arguments) for call, arguments in calls.items()]
    return message


def parts_of(answer: FinishedAnswer) -> tuple[list[Part], bool]:
    """The parts of an answer, with consecutive parts of one kind joined; and whether it has calls, and all of them are
    complete."""
    reader = AnswerParts(answer.syntax)
    return joined([*reader.add(answer.text), *reader.finish()]), reader.calls


def call_field(call: Call, arguments: str) -> dict[str, Any]:
    """A call in OpenAI's format."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def response_head(request: AnswerRequest, model: str, *, streamed: bool = False) -> dict[str, Any]:
    """The first fields of a response to a request, or of each chunk if it is streamed. `model` is the name of the
    model."""
    if request.endpoint == CHAT:
        kind, name = "chatcmpl", "chat.completion.chunk" if streamed else "chat.completion"
    else:
        kind, name = "cmpl", "text_completion"
    return {"id": f"{kind}-{secrets.token_hex(12)}", "object": name, "created": int(time.time()), "model": model}


def finish_reason_of(answer: AnswerEnd, called: bool = False) -> str:
    """OpenAI's `finish_reason`. `called`: whether the answer has calls, and all of them are complete."""
    if called and answer.finish_reason in ("eos", "stop"):
        return "tool_calls"
    return _FINISH_REASONS.get(answer.finish_reason, answer.finish_reason)


def cost_of(request: AnswerRequest, answers: Mapping[int, AnswerEnd]) -> dict[str, Any]:
    """`usage` and `timings` of answers, given by their numbers; at least one. A prompt counts once, with the prefill of
    the first answer to it."""
    firsts: dict[int, Timings] = {}
    for number in sorted(answers):
        firsts.setdefault(number // request.n, answers[number].timings)
    read = list(firsts.values())
    prompts, written = sum(one.prompt_tokens for one in read), sum(one.num_tokens for one in answers.values())
    usage = {
        "prompt_tokens": prompts,
        "completion_tokens": written,
        "total_tokens": prompts + written,
        "prompt_tokens_details": {"cached_tokens": sum(one.reused_tokens for one in read)},
    }
    return {"usage": usage, "timings": timings(read, [one.timings for one in answers.values()])}


def timings(read: Sequence[Timings], answers: Sequence[Timings]) -> dict[str, Any]:
    """Milliseconds and tokens. The prefill is that of the first answer to each prompt (`read`). Decoding lasts as long
    as the longest answer. The speed counts the tokens after the first of each answer."""
    decode_s = max(one.decode_s for one in answers)
    decoded = sum(one.decoded_tokens for one in answers)
    return {
        "cache_n": sum(one.reused_tokens for one in read),
        "prompt_n": sum(one.prompt_tokens - one.reused_tokens for one in read),
        "prompt_ms": sum(one.prefill_s for one in read) * 1e3,
        "predicted_n": sum(one.new_tokens for one in answers),
        "predicted_ms": decode_s * 1e3,
        "predicted_per_second": decoded / decode_s if decode_s else 0.0,
        "draft_n": sum(one.proposed for one in answers),
        "draft_n_accepted": sum(one.accepted for one in answers),
    }


def error_body(error: BodyError) -> dict[str, Any]:
    """The body that says why a request was refused."""
    kind = "server_error" if error.status >= 500 else _ERROR_TYPES.get(error.status, "invalid_request_error")
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}
