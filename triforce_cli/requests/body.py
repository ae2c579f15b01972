"""The body of a request for an answer, in OpenAI's form, checked: a field that would change the answer and is not
honoured is refused by name, so that no answer is silently another one than was asked for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, get_type_hints

from ...offload import Sampling
from ...tp.errors import TriforceError

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"

MOST_ANSWERS = 128
"""Of one request (`n`), as in OpenAI's form."""

MOST_LOGPROBS = 20
"""Likeliest tokens in the place of each (`top_logprobs`; `logprobs` of a completion), as in OpenAI's form."""

MAX_STOPS = 16
"""Stop texts of one request."""

MAX_STOP_BYTES = 1024
"""Of one stop text, in UTF-8. After each token every one is searched for, and as much text is held back at most."""

_SAMPLING = get_type_hints(Sampling)
"""The fields of how tokens are drawn, and their types."""

_BOTH = ("model", "context", "max_tokens", *_SAMPLING, "stop", "n")
_HONOURED = {
    CHAT: ("messages", "max_completion_tokens", "logprobs", "top_logprobs", *_BOTH),
    COMPLETION: ("prompt", "logprobs", *_BOTH),
}

_NO_EFFECT = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    "parallel_tool_calls",
)
"""Fields that change no answer, whatever they hold."""

_NEUTRAL: dict[str, Sequence[Any]] = {
    "stream": (False,),
    "return_progress": (False,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "ignore_eos": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Values with which a field that is not honoured changes no answer; null is one for every field."""

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class Message(NamedTuple):
    """A message, by its parts where it was given in several."""

    role: str
    """`system`, `user` or `assistant`."""
    parts: tuple[str, ...]

    @property
    def text(self) -> str:
        return "".join(self.parts)


class BodyError(TriforceError):
    """A request that cannot be answered as it was asked."""

    def __init__(self, message: str, param: str | None = None, *, code: str | None = None, status: int = 400) -> None:
        """Args:
        param: the field that is at fault.
        code: in a word, for programs.
        status: as of HTTP.
        """
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


@dataclass(frozen=True)
class Defaults:
    """What a body need not say."""

    models: Collection[str]
    """Names of the model that is loaded."""
    max_new_tokens: int
    sampling: Sampling
    context: str | None = None


@dataclass(frozen=True)
class AnswerRequest:
    """A body, checked but for the length of its prompt."""

    endpoint: str
    """`CHAT` or `COMPLETION`."""
    messages: tuple[Message, ...]
    """Of `CHAT`; at least one."""
    prompt: str | list[int]
    """Of `COMPLETION`: a text, or token ids."""
    context: str | None
    """The saved context that stands before it."""
    max_new_tokens: int
    sampling: Sampling
    stops: tuple[str, ...]
    answers: int
    top_logprobs: int | None = None
    """Of how many of the likeliest tokens the target's own probabilities are wanted, besides each token's; `None` for
    none at all."""


def check_body(body: Mapping[str, Any], endpoint: str, defaults: Defaults) -> AnswerRequest:
    """Raises:
    BodyError: a field is missing, impossible, or would change the answer and is not honoured.
    """
    given = {name: value for name, value in body.items() if value is not None and name not in _NO_EFFECT}
    for name, value in given.items():
        if name not in _HONOURED[endpoint] and not _is_neutral(name, value):
            raise BodyError(_not_honoured(name, endpoint), name, code="unsupported_field")
    fields = _Fields(given)
    model = fields.text("model")
    if model is not None and model not in defaults.models:
        names = " or ".join(map(repr, sorted(defaults.models)))
        raise BodyError(
            f"model is {model!r}, but {names} answers here; leave the field out, or load that model",
            "model", code="model_not_found", status=404,
        )  # fmt: skip
    return AnswerRequest(
        endpoint=endpoint,
        messages=_messages(given.get("messages")) if endpoint == CHAT else (),
        prompt=_prompt(given.get("prompt")) if endpoint == COMPLETION else "",
        context=fields.text("context") or defaults.context,
        max_new_tokens=_most_tokens(fields) or defaults.max_new_tokens,
        sampling=_sampling(fields, defaults.sampling),
        stops=_stops(given.get("stop")),
        answers=fields.whole("n", 1, MOST_ANSWERS) or 1,
        top_logprobs=_chat_logprobs(given, fields) if endpoint == CHAT else _completion_logprobs(given, fields),
    )


def _is_neutral(name: str, value: Any) -> bool:
    """Whether a field that is not honoured changes no answer with this value. 0 is not false here."""
    found = (one for one in _NEUTRAL.get(name, ()) if isinstance(one, bool) == isinstance(value, bool))
    return any(one == value for one in found)


def _not_honoured(name: str, endpoint: str) -> str:
    other = next((path for path, names in _HONOURED.items() if path != endpoint and name in names), None)
    if other:
        return f"{name} is a field of {other}, not of {endpoint}"
    neutral = _NEUTRAL.get(name)
    without = f" or give {neutral[0]!r}" if neutral else ""
    return f"{name} would change the answer and is not supported here; leave it out{without}"


def _sampling(fields: _Fields, defaults: Sampling) -> Sampling:
    given = {name: fields.number(name) if kind is float else fields.whole(name, 0) for name, kind in _SAMPLING.items()}
    try:
        return replace(defaults, **{name: value for name, value in given.items() if value is not None})
    except TriforceError as error:
        name = str(error).partition(" is ")[0].replace("-", "_")
        raise BodyError(str(error), name) from error


class _Fields:
    """Values by their kinds; `None` where a field is absent."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given

    def text(self, name: str) -> str | None:
        value = self._given.get(name)
        return None if value is None else checked_text(value, name)

    def number(self, name: str) -> float | None:
        value = self._given.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise BodyError(f"{name} is {value!r}; it must be a number", name)
        return value

    def whole(self, name: str, least: int, most: int | None = None) -> int | None:
        value = self.number(name)
        if value is None:
            return None
        if value != value or value in (float("inf"), -float("inf")) or value != int(value):
            raise BodyError(f"{name} is {value}; it must be a whole number", name)
        if value < least or (most is not None and value > most):
            possible = f"from {least:,} to {most:,}" if most is not None else f"{least:,} or more"
            raise BodyError(f"{name} is {value:,}; it must be {possible}", name)
        return int(value)


def checked_text(value: Any, name: str) -> str:
    """Raises:
    BodyError: it is no text, or holds halves of characters.
    """
    if not isinstance(value, str):
        raise BodyError(f"{name} is {_shown(value)}; it must be a text", name)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BodyError(f"{name} holds half a character (a lone surrogate) at letter {error.start:,}", name) from error
    return value


def _most_tokens(fields: _Fields) -> int | None:
    older, newer = fields.whole("max_tokens", 1), fields.whole("max_completion_tokens", 1)
    if older is not None and newer is not None and older != newer:
        raise BodyError(
            f"max_tokens is {older:,} and max_completion_tokens {newer:,}; give one of them", "max_completion_tokens"
        )
    return newer or older


def _chat_logprobs(given: Mapping[str, Any], fields: _Fields) -> int | None:
    wanted, top = given.get("logprobs", False), fields.whole("top_logprobs", 0, MOST_LOGPROBS)
    if not isinstance(wanted, bool):
        raise BodyError(f"logprobs is {_shown(wanted)}; it must be true or false", "logprobs")
    if top and not wanted:
        raise BodyError("top_logprobs is for answers with logprobs: true", "top_logprobs")
    return (top or 0) if wanted else None


def _completion_logprobs(given: Mapping[str, Any], fields: _Fields) -> int | None:
    return None if given.get("logprobs") is False else fields.whole("logprobs", 0, MOST_LOGPROBS)


def _stops(value: Any) -> tuple[str, ...]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise BodyError(f"stop is {_shown(value)}; it must be a text or a list of texts", "stop")
    if "" in stops:
        raise BodyError("stop has an empty text, which every answer would end before", "stop")
    if len(stops) > MAX_STOPS:
        raise BodyError(f"stop has {len(stops):,} texts; it can have {MAX_STOPS}", "stop")
    texts = tuple(checked_text(stop, "stop") for stop in stops)
    longest = max((len(text.encode()) for text in texts), default=0)
    if longest > MAX_STOP_BYTES:
        raise BodyError(f"stop has a text of {longest:,} bytes; it can have {MAX_STOP_BYTES:,}", "stop")
    return texts


def _prompt(value: Any) -> str | list[int]:
    if value is None:
        raise BodyError("prompt is missing; give a text, or a list of token ids", "prompt")
    if isinstance(value, list):
        if value and all(isinstance(token, int) and not isinstance(token, bool) for token in value):
            return value
        raise BodyError("prompt is a list; give one text, or one list of token ids, a request", "prompt")
    return checked_text(value, "prompt")


def _messages(value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise BodyError("messages is missing or empty; give a list of {role, content}", "messages")
    return tuple(_message(one, f"messages[{index}]") for index, one in enumerate(value))


def _message(value: Any, name: str) -> Message:
    if not isinstance(value, dict):
        raise BodyError(f"{name} is {_shown(value)}; it must be an object with role and content", name)
    role, content = value.get("role"), value.get("content")
    if not isinstance(role, str) or role not in _ROLES:
        raise BodyError(f"{name}.role is {_shown(role)}; it is one of {', '.join(_ROLES)}", f"{name}.role")
    others = [key for key, one in value.items() if key not in ("role", "content") and one not in (None, [])]
    if others:
        raise BodyError(f"{name}.{others[0]} is not supported here; leave it out", f"{name}.{others[0]}")
    if isinstance(content, list):
        parts = [_part(part, f"{name}.content[{index}]") for index, part in enumerate(content)]
    else:
        parts = [checked_text(content, f"{name}.content")]
    return Message(_ROLES[role], tuple(parts))


def _part(value: Any, name: str) -> str:
    """The text of a part of a message's content."""
    kind = value.get("type") if isinstance(value, dict) else value
    if not isinstance(value, dict) or kind != "text":
        raise BodyError(f"{name} is of type {_shown(kind)}; only text is supported", name)
    return checked_text(value.get("text"), f"{name}.text")


def _shown(value: Any) -> str:
    """A value in a message: as it is where it is short."""
    shown = repr(value)
    return shown if len(shown) <= 60 else f"a {type(value).__name__}"
