"""Anthropic's format of requests and answers: bodies of `/v1/messages`, with a class for each object, and responses.

A body becomes an `AnswerRequest` with the same messages and tools as a body in OpenAI's format (wire.py), so the code
behind it is the same. A field that would change the answer and is not supported is refused by name. Null means that a
field is left out.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, FailFast, PlainValidator, TypeAdapter, model_validator
from pydantic_core import from_json

from ...offload.speculation.grammar import Grammar
from ..options import AnsweringOptions
from .answer_parts import Part
from .calls import Tool
from .response import AnswerEnd, FinishedAnswer, parts_of, timings
from .wire import (
    MAX_WRITTEN_DEPTH,
    MESSAGES,
    NEEDED,
    AnswerRequest,
    AskingBody,
    BodyError,
    CalledFunction,
    ClientObject,
    Message,
    Schema,
    Stops,
    TemplateArguments,
    Text,
    TextPart,
    Texts,
    ToolCall,
    ToolName,
    allowed_calls,
    check_model,
    check_result,
    check_tools,
    depth_of,
    given_messages,
    of_whole_characters,
    refused,
    schema_of,
    shown,
    validated,
)

COUNT_TOKENS = f"{MESSAGES}/count_tokens"

ENDPOINTS = (MESSAGES, COUNT_TOKENS)

_NO_EFFECT = ("metadata", "service_tier", "cache_control", "inference_geo", "speed", "diagnostics", "user_profile_id")
"""Fields of bodies that do not change the answer, whatever their value."""

_ERROR = "Error: "
"""The beginning of the result of a failed call, because chat templates have no other place for this information."""


_BETWEEN = "\n\n"
"""The separator between the texts of separate blocks."""

_ATTRIBUTION = "x-anthropic-billing-header:"
"""The beginning of a text of the system message in which Anthropic's clients identify themselves. The text is dropped:
it differs in each request, so that no prompt would begin like the one before, and it is of no use to a model."""


class _Object(ClientObject):
    """An object that a client sends. It may have fields that do not change the answer."""

    without_effect: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def _is_neutral(cls, name: str, value: Any) -> bool:
        return name in cls.without_effect


# Messages.


class ToolUse(_Object):
    """A call that the model made earlier."""

    without_effect = ("cache_control", "caller")

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: Schema

    @property
    def call(self) -> ToolCall:
        arguments = json.dumps(self.input, ensure_ascii=False)
        function = CalledFunction.model_construct(name=self.name, arguments=arguments)
        return ToolCall.model_construct(id=self.id, function=function)


class ToolResult(_Object):
    """The result of a call."""

    without_effect = ("cache_control",)

    type: Literal["tool_result"]
    tool_use_id: Text
    content: Texts = ()
    is_error: bool = False


class Thinking(_Object):
    """The reasoning that the model wrote before an answer."""

    without_effect = ("signature",)

    type: Literal["thinking"]
    thinking: Text


class RedactedThinking(_Object):
    """Encrypted reasoning, which cannot be read here."""

    without_effect = ("data",)

    type: Literal["redacted_thinking"]


Block = TextPart | ToolUse | ToolResult | Thinking | RedactedThinking

_BLOCKS: dict[str, type[Block]] = {
    "text": TextPart,
    "tool_use": ToolUse,
    "tool_result": ToolResult,
    "thinking": Thinking,
    "redacted_thinking": RedactedThinking,
}

_OF_ROLES = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}
"""The types of blocks that messages of each role may have."""


def _block(given: Any) -> Block:
    kind = given.get("type") if isinstance(given, dict) else given
    found = _BLOCKS.get(kind) if isinstance(kind, str) else None
    if found is None:
        raise ValueError(f"is of type {shown(kind)}; the supported types are {', '.join(_BLOCKS)}")
    return found.model_validate(given)


_LIST_OF_BLOCKS = TypeAdapter(Annotated[list[Annotated[Any, PlainValidator(_block)]], FailFast()])


def _content(given: Any) -> tuple[Block, ...]:
    if isinstance(given, list):
        return tuple(_LIST_OF_BLOCKS.validate_python(given))
    if not isinstance(given, str):
        raise ValueError(f"is {shown(given)}; it must be a text or a list of blocks")
    return (TextPart.model_construct(type="text", text=of_whole_characters(given)),)


class GivenMessage(ClientObject):
    """One of the messages."""

    role: Literal["user", "assistant", "system"] = NEEDED
    content: Annotated[tuple[Block, ...], PlainValidator(_content)] = NEEDED
    """A text, or a list of blocks."""

    @model_validator(mode="after")
    def _has_blocks_of_its_role(self) -> GivenMessage:
        for block in self.content:
            if block.type not in _OF_ROLES[self.role]:
                raise ValueError(f"is of {self.role} and has a block of type {block.type}, which it cannot have")
        return self


def _for_prompt(messages: Sequence[GivenMessage], *, in_parts: bool) -> Iterator[Message]:
    """The messages from which prompts are made. Consecutive messages of one role are joined. Results of calls become
    separate messages, before the other content of the user's message.

    Args:
        in_parts: whether the texts of a message stay separate; otherwise, they are joined with an empty line.

    Raises:
        BodyError: a result does not belong to a call.
    """
    names: dict[str, str] = {}
    """The names of the tools that were called, by the ids of the calls."""
    for role, group in groupby(enumerate(messages), lambda one: one[1].role):
        blocks = [(f"messages[{at}].content[{n}]", block) for at, one in group for n, block in enumerate(one.content)]
        calls = [block.call for _, block in blocks if isinstance(block, ToolUse)]
        names |= {call.id: call.function.name for call in calls}
        results = [(place, block) for place, block in blocks if isinstance(block, ToolResult)]
        for place, result in results:
            check_result(f"{place}.tool_use_id", result.tool_use_id, names)
            yield _result(result, names[result.tool_use_id])
        said = tuple(block.text for _, block in blocks if isinstance(block, TextPart))
        if not said and results:
            continue
        if said and not in_parts:
            said = (_BETWEEN.join(said),)
        thought = "".join(block.thinking for _, block in blocks if isinstance(block, Thinking))
        yield Message.model_construct(role=role, content=said, reasoning_content=thought or None, tool_calls=calls)


def _result(block: ToolResult, name: str) -> Message:
    content = (_ERROR, *block.content) if block.is_error else block.content
    return Message.model_construct(role="tool", content=content, tool_call_id=block.tool_use_id, name=name)


# What is asked.


class CustomTool(ClientObject):
    """A tool that the model may call."""

    name: ToolName
    description: Text | None = None
    input_schema: Schema
    """The JSON schema of its arguments."""
    strict: bool = False

    @model_validator(mode="before")
    @classmethod
    def _is_the_clients(cls, given: Any) -> Any:
        kind = given.get("type") if isinstance(given, dict) else None
        if kind not in (None, "custom"):
            raise refused("type", kind, f"is {shown(kind)}; only tools of type custom are supported")
        return given

    @classmethod
    def _is_neutral(cls, name: str, value: Any) -> bool:
        neutral = {"allowed_callers": (["direct"], []), "defer_loading": (False,), "input_examples": ([],)}
        return name in ("type", "cache_control", "eager_input_streaming") or value in neutral.get(name, ())

    @property
    def tool(self) -> Tool:
        return Tool(self.name, self.description or "", self.input_schema, self.strict)


class ToolChoice(ClientObject):
    """Whether a tool is to be called, and which."""

    type: Literal["auto", "any", "tool", "none"] = NEEDED
    name: Text | None = None
    """The name of the tool, if the type is `tool`."""
    disable_parallel_tool_use: bool = False

    @property
    def as_openai(self) -> tuple[str, str]:
        """See `allowed_calls`."""
        return {"any": "required", "tool": "named"}.get(self.type, self.type), self.name or ""

    @model_validator(mode="after")
    def _agrees(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            has = "no name" if self.name is None else "a name"
            raise ValueError(f"is of type {self.type} and has {has}")
        return self


class ThinkingConfig(_Object):
    """Whether an answer must begin with reasoning."""

    without_effect = ("budget_tokens", "display")

    type: Literal["enabled", "disabled", "adaptive"] = NEEDED


def _json_format(given: Any) -> Any:
    if not isinstance(given, dict) or given.get("type") != "json_schema":
        raise ValueError(f'is {shown(given)}; it must be {{"type": "json_schema", "schema": ...}}')
    return schema_of(given)


class OutputConfig(_Object):
    """The form of an answer."""

    without_effect = ("effort",)

    format: Annotated[Schema, BeforeValidator(_json_format)] | None = None
    """The JSON schema that the answer must follow."""


def _keeps_all(management: Any) -> bool:
    """Whether a body's `context_management` leaves all messages unchanged."""
    edits = management.get("edits", []) if isinstance(management, dict) else None
    keeping = {"type": "clear_thinking_20251015", "keep": "all"}
    return isinstance(edits, list) and all(edit == keeping for edit in edits)


class MessagesBody(AskingBody):
    """A question, and the messages before it."""

    messages: Annotated[list[GivenMessage], FailFast(), BeforeValidator(given_messages)] = NEEDED
    system: Texts = ()
    stop_sequences: Stops = ()
    tools: Annotated[list[CustomTool], FailFast()] = []  # noqa: RUF012 - copied
    tool_choice: ToolChoice = ToolChoice(type="auto")
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig = OutputConfig()
    chat_template_kwargs: TemplateArguments = {}  # noqa: RUF012 - copied

    @property
    def grammars(self) -> dict[str, Grammar]:
        """The required form of the answer, by the field that asks for it."""
        schema = self.output_config.format
        return {} if schema is None else {"output_config.format": Grammar("json_schema", json.dumps(schema))}

    @property
    def conversation(self) -> tuple[Message, ...]:
        """All messages from which prompts are made.

        Raises:
            BodyError: a result does not belong to a call.
        """
        said = [text for text in self.system if not text.startswith(_ATTRIBUTION)]
        system = [Message.model_construct(role="system", content=(_BETWEEN.join(said),))] if any(said) else []
        # Of a conversation about no tools, parts of the first question are a text and a question about it.
        return (*system, *_for_prompt(self.messages, in_parts=not self.tools and len(self.messages) == 1))

    @model_validator(mode="after")
    def _agrees(self) -> MessagesBody:
        check_tools([one.name for one in self.tools], *self.tool_choice.as_openai, self.grammars)
        if self.messages[-1].role == "assistant":
            says = "the last of messages is of assistant, and an answer cannot continue its text here"
            raise BodyError(f"{says}; end with one of user", "messages")
        return self

    @classmethod
    def _is_neutral(cls, name: str, value: Any) -> bool:
        if name == "context_management":
            return _keeps_all(value)
        return name in _NO_EFFECT or (name == "mcp_servers" and value == [])

    @classmethod
    def _refusal(cls, name: str) -> str:
        return "would change the answer and is not supported here; leave it out"


def messages_request(
    body: dict[str, Any], endpoint: str, options: AnsweringOptions, models: Collection[str]
) -> AnswerRequest:
    """Converts a body to a request.

    Args:
        endpoint: one of `ENDPOINTS`.
        options: those of the command, which are used for fields that the body does not have.
        models: the names of the loaded model.

    Raises:
        BodyError: a field is missing or impossible, or would change the answer and is not supported.
    """
    asked = validated(MessagesBody, body)
    if endpoint == MESSAGES and asked.max_tokens is None:
        raise BodyError("max_tokens is missing; say how many tokens the answer may have", "max_tokens")
    if asked.model is not None:
        check_model(asked.model, models)
    tools = tuple(one.tool for one in asked.tools)
    several = not asked.tool_choice.disable_parallel_tool_use
    return AnswerRequest(
        endpoint=MESSAGES,
        messages=asked.conversation,
        prompts=(),
        context=asked.context or options.context,
        max_new_tokens=asked.max_tokens or 0,
        sampling=asked.sampling(options.sampling),
        stops=asked.stop_sequences,
        n=1,
        template_arguments=asked.chat_template_kwargs,
        thinks=None if asked.thinking is None else asked.thinking.type != "disabled",
        grammar=next(iter(asked.grammars.values()), None),
        grammar_field=next(iter(asked.grammars), None),
        tools=tools,
        calls=allowed_calls(tools, *asked.tool_choice.as_openai, several=several),
    )


# What is sent back.


def message_head(model: str) -> dict[str, Any]:
    """The beginning of an answer, streamed or not. `model` is the name of the model."""
    return {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": model}


def message_body(request: AnswerRequest, model: str, answer: FinishedAnswer) -> dict[str, Any]:
    """The body with the answer to a request. `model` is the name of the model."""
    parts, called = parts_of(answer)
    content = [_whole_block(part) for part in parts]
    return {**message_head(model), "content": content, **ending(request, answer, called), **cost_of(answer)}


def block_begin(part: Part) -> dict[str, Any]:
    """The block for a part of an answer, without its text."""
    if part.call:
        return {"type": "tool_use", "id": part.call.id, "name": part.call.name, "input": {}}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _whole_block(part: Part) -> dict[str, Any]:
    begin = block_begin(part)
    if part.call:
        return begin | {"input": _arguments(part.text)}
    return begin | {"text" if part.kind == "content" else "thinking": part.text}


def _arguments(text: str) -> dict[str, Any]:
    """The arguments of a call. Of a call that was cut, the arguments so far, as clients read them from a stream. Empty
    if the model has not written JSON, if it has numbers or letters that JSON does not allow, or is nested too
    deeply."""
    for read in (partial(json.loads, strict=False), partial(from_json, allow_partial=True)):
        with suppress(ValueError, RecursionError):
            found = read(text)
            if not isinstance(found, dict) or depth_of(found, MAX_WRITTEN_DEPTH) > MAX_WRITTEN_DEPTH:
                continue
            if json.dumps(found, ensure_ascii=False, allow_nan=False).encode():
                return found
    return {}


def ending(request: AnswerRequest, end: AnswerEnd, called: bool) -> dict[str, Any]:
    """The fields that say why an answer ended. `called`: whether it has calls, and all of them are complete."""
    if end.finish_reason == "length":
        reason = "max_tokens"
    elif end.stop in request.stops:
        reason = "stop_sequence"
    else:
        reason = "tool_use" if called else "end_turn"
    return {"stop_reason": reason, "stop_sequence": end.stop if reason == "stop_sequence" else None}


def cost_of(end: AnswerEnd) -> dict[str, Any]:
    """`usage` and `timings` of an answer."""
    cost = end.timings
    usage = usage_of(cost.prompt_tokens - cost.reused_tokens, cost.reused_tokens, end.num_tokens)
    return {"usage": usage, "timings": timings([cost], [cost])}


def usage_of(read: int, cached: int, written: int) -> dict[str, Any]:
    """The counts of tokens: tokens of the prompt that had to be read, tokens of the prompt that were in a cache, and
    tokens of the answer."""
    return {
        "input_tokens": read,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": written,
    }


_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's types of errors, by status. Others are `invalid_request_error` below 500, and `api_error` from 500 on."""


def message_error(error: BodyError) -> dict[str, Any]:
    """The body that says why a request was refused."""
    kind = _ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    words = ""
    if error.code == "context_length_exceeded":  # agents do what helps where they read these words
        words = _TOO_LONG if error.may_lower is None else _TOO_LONG_TOGETHER
    return {"type": "error", "error": {"type": kind, "message": f"{words}{error}"}}


_TOO_LONG = "prompt is too long: "
_TOO_LONG_TOGETHER = "input length and `max_tokens` exceed context limit: "
