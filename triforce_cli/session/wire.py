"""Requests of clients in OpenAI's format: bodies of requests and lines of batch files, with a class for each object.
The parts that bodies in Anthropic's format have in common with these are here too; the rest is in anthropic.py.

A field that would change the answer and is not supported is refused by name, so that no client gets another answer than
it asked for without notice. Null means that a field is left out. Responses are made in response.py.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from reprlib import Repr
from typing import Annotated, Any, Literal, LiteralString, TypeVar, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    FailFast,
    Field,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from ...offload import Sampling
from ...offload.speculation.grammar import ANY_OBJECT, Grammar
from ...tp.errors import TriforceError
from ..options import AnsweringOptions
from .calls import AllowedCalls, Tool

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MESSAGES = "/v1/messages"
"""The endpoint in Anthropic's format: anthropic.py."""

MAX_ANSWERS = 128
"""Maximum number of answers of one request: `n`, as in OpenAI's format, times the number of prompts of a completion."""

MAX_STOPS = 16
"""Maximum number of stop texts of one request."""

MAX_STOP_BYTES = 1024
"""Maximum size of a stop text in UTF-8. After each token, every stop text is searched for, and up to this much text is
held back."""

MAX_DEPTH = 32
"""Maximum number of levels of lists and objects in a variable for the chat template."""

MAX_SCHEMA_DEPTH = 64
"""Maximum number of levels of lists and objects in a JSON schema."""

MAX_WRITTEN_DEPTH = 200
"""Maximum number of levels of lists and objects in arguments that a model has written."""

MAX_LOGPROBS = 20
"""Maximum number of most probable tokens at each position (`top_logprobs`; `logprobs` of a completion), as in OpenAI's
format."""

_NO_EFFECT = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
)
"""Fields that do not change the answer, whatever their value."""

_NEUTRAL: dict[str, Sequence[Any]] = {
    "stream": (False,),
    "return_progress": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "ignore_eos": (False,),
    "tools": ([],),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Values with which a field does not change the answer, whether the field is supported or not."""


class BodyError(TriforceError):
    """A request that cannot be answered."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        code: str | None = None,
        status: int = 400,
        may_lower: str | None = None,
    ) -> None:
        """Args:
        param: the field with the error.
        code: a word for programs.
        status: the status of HTTP.
        may_lower: a field with which the request would succeed if the field had a smaller number.
        """
        super().__init__(message)
        self.param, self.code, self.status, self.may_lower = param, code, status, may_lower


# Kinds of values. What their checks raise is the rest of a sentence that begins with the field's name.


def of_whole_characters(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"holds half a character (a lone surrogate) at letter {error.start:,}") from error
    return text


def _encodable(most: int) -> AfterValidator:
    """A check for an object: it can be written as JSON, and has at most `most` levels."""

    def check(given: dict[str, Any]) -> dict[str, Any]:
        if depth_of(given, most) > most:
            raise ValueError(f"is nested too deeply; it can be {most} levels deep")
        of_whole_characters(json.dumps(given, ensure_ascii=False))
        return given

    return AfterValidator(check)


def schema_of(given: Any) -> Any:
    found = given.get("schema") if isinstance(given, dict) else None
    if not isinstance(found, dict):
        raise ValueError(f"has {shown(found)} as schema; it must be a JSON object")
    return found


def depth_of(given: Any, most: int) -> int:
    """The number of levels of lists and objects. If there are more than `most`, the result is `most + 1`."""
    inner = given.values() if isinstance(given, dict) else given if isinstance(given, list) else None
    if inner is None or most < 0:
        return 0
    return 1 + max((depth_of(one, most - 1) for one in inner), default=0)


def _without_point(given: Any) -> Any:
    return int(given) if isinstance(given, float) and given.is_integer() else given


def _between(least: int, most: int) -> AfterValidator:
    def check(number: int) -> int:
        if not least <= number <= most:
            raise ValueError(f"is {number:,}; it must be from {least:,} to {most:,}")
        return number

    return AfterValidator(check)


def _stops(given: Any) -> tuple[str, ...]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"is {shown(given)}; it must be a text or a list of texts")
    if "" in texts:
        raise ValueError("has an empty text, at which every answer would end at once")
    if len(texts) > MAX_STOPS:
        raise ValueError(f"has {len(texts):,} texts; it can have {MAX_STOPS}")
    longest = max((len(of_whole_characters(text).encode()) for text in texts), default=0)
    if longest > MAX_STOP_BYTES:
        raise ValueError(f"has a text of {longest:,} bytes; it can have {MAX_STOP_BYTES:,}")
    return tuple(texts)


def _prompts(given: Any) -> tuple[str | list[int], ...]:
    if isinstance(given, str) or _are_tokens(given):
        return (of_whole_characters(given) if isinstance(given, str) else given,)
    if isinstance(given, list) and given:
        if len(given) > MAX_ANSWERS:
            raise ValueError(f"has {len(given):,} prompts; a request can have {MAX_ANSWERS}; send several requests")
        if all(isinstance(one, str) for one in given):
            return tuple(map(of_whole_characters, given))
        if all(map(_are_tokens, given)):
            return tuple(given)
    found = "missing" if given is None else shown(given)
    raise ValueError(f"is {found}; give a text or a list of token ids, or a list of texts, or of such lists")


def _are_tokens(given: Any) -> bool:
    return isinstance(given, list) and bool(given) and all(type(token) is int for token in given)


def given_messages(given: Any) -> list[Any]:
    if isinstance(given, list) and given:
        return given
    raise ValueError("is missing or empty; give a list of {role, content}")


def _role(given: Any) -> str:
    roles = ("system", "developer", "user", "assistant", "tool")
    if given not in roles:
        raise ValueError(f"is {shown(given)}; it is one of {', '.join(roles)}")
    return "system" if given == "developer" else given


def _tool_name(name: str) -> str:
    if not re.fullmatch(r"[\w.:/-]{1,128}", name, re.ASCII):
        raise ValueError(f"is {shown(name)}; it must be of 1 to 128 letters, digits and signs of _-.:/")
    return name


def _tool_choice(given: Any) -> tuple[str, str]:
    """Whether a tool is to be called, and which: `auto`, `none` or `required`; or `named`, and the name."""
    named = given.get("function") if isinstance(given, dict) and given.get("type") == "function" else None
    if isinstance(named, dict) and isinstance(named.get("name"), str):
        return "named", named["name"]
    if not isinstance(given, str) or given not in ("auto", "none", "required"):
        function = '{"type": "function", "function": {"name": ...}}'
        raise ValueError(f"is {shown(given)}; it must be none, auto, required, or {function}")
    return given, ""


def _texts(given: Any) -> tuple[str, ...]:
    if isinstance(given, list):
        return tuple(part.text for part in _PARTS.validate_python(given))
    if not isinstance(given, str):
        raise ValueError(f"is {shown(given)}; it must be a text")
    return (of_whole_characters(given),)


def shown(value: Any) -> str:
    """A value for a message, shortened if it is long."""
    with suppress(RecursionError):  # of what is nested too deeply
        if len(short := _SHORT.repr(value)) <= 60 and "..." not in short:
            return repr(value)
    return f"a {type(value).__name__}"


_SHORT = Repr()
"""Shows only the beginning of long values."""
for _limit in ("maxdict", "maxlist", "maxtuple", "maxset", "maxstring", "maxlong", "maxother"):
    setattr(_SHORT, _limit, 62)


Text = Annotated[str, AfterValidator(of_whole_characters)]
Texts = Annotated[tuple[str, ...], PlainValidator(_texts)]
"""A text, or a list of its parts."""
Stops = Annotated[tuple[str, ...], PlainValidator(_stops)]
"""A stop text, or several."""
ToolName = Annotated[Text, AfterValidator(_tool_name)]
Schema = Annotated[dict[str, Any], _encodable(MAX_SCHEMA_DEPTH)]
"""A JSON schema."""
TemplateArguments = Annotated[dict[str, Any], _encodable(MAX_DEPTH)]
"""Variables for the model's chat template."""
Number = float | int
"""A number, shown in messages as the client wrote it: -1, not -1.0."""
Whole = Annotated[int, BeforeValidator(_without_point)]
NotNegative = Annotated[Whole, Field(ge=0)]
Positive = Annotated[Whole, Field(ge=1)]

NEEDED: Any = Field(None, validate_default=True)
"""The default of a field that must be given. It is `None`, which the field's own check refuses."""


def refused(name: str, value: Any, refusal: str, kind: LiteralString = "unsupported_field") -> ValidationError:
    """The error for a field that is not supported or, with another `kind`, is not valid."""
    error = PydanticCustomError(kind, "{refusal}", {"refusal": refusal})
    return ValidationError.from_exception_data(name, [{"type": error, "loc": (name,), "input": value}])


class ClientObject(BaseModel, strict=True):
    """An object that a client sends."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_fields(cls, given: Any) -> dict[str, Any]:
        """Drops nulls and fields without effect, and refuses every other field that the class does not declare."""
        if not isinstance(given, dict):
            raise ValueError(f"is {shown(given)}; it must be an object with {' and '.join(cls.model_fields)}")
        honoured = {name: one for name, one in given.items() if one is not None and not cls._is_neutral(name, one)}
        for name, value in honoured.items():
            if name not in cls.model_fields:
                raise refused(name, value, cls._refusal(name))
        return honoured

    @classmethod
    def _is_neutral(cls, name: str, value: Any) -> bool:
        """Whether a field has no effect with this value."""
        return False

    @classmethod
    def _refusal(cls, name: str) -> str:
        """The message for a field that is not supported."""
        return "is not supported here; leave it out"


class TextPart(BaseModel, strict=True):
    """A part of a message's content. Its other fields change nothing."""

    type: Literal["text"]
    text: Text = NEEDED

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, given: Any) -> Any:
        kind = given.get("type") if isinstance(given, dict) else given
        if kind != "text":
            raise ValueError(f"is of type {shown(kind)}; only text is supported")
        return given


_PARTS = TypeAdapter(Annotated[list[TextPart], FailFast()])


class CalledFunction(ClientObject):
    """The function and the arguments of a call."""

    name: Text
    arguments: Text
    """JSON."""


class ToolCall(ClientObject):
    """A call that the model made earlier."""

    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction

    @classmethod
    def _is_neutral(cls, name: str, value: Any) -> bool:
        return name == "index"


_OF_ROLES = {"reasoning_content": "assistant", "tool_calls": "assistant", "tool_call_id": "tool", "name": "tool"}
"""Fields that only messages of one role have."""


class Message(ClientObject):
    """One of a chat's messages."""

    role: Annotated[Literal["system", "user", "assistant", "tool"], BeforeValidator(_role)] = NEEDED
    """`developer` is another name for `system`."""
    content: Texts = NEEDED
    """May be null for `assistant`, for example beside calls."""
    reasoning_content: Text | None = None
    """Of `assistant`: the reasoning that it wrote before its answer."""
    tool_calls: Annotated[list[ToolCall], FailFast()] = []
    """Of `assistant`: the calls that it made."""
    tool_call_id: Text | None = None
    """Of `tool`: the id of the call to which this result belongs."""
    name: Text | None = None
    """Of `tool`: the name of the tool, which the call also has."""

    @property
    def text(self) -> str:
        """The whole content."""
        return "".join(self.content)

    @model_validator(mode="before")
    @classmethod
    def _of_its_role(cls, given: Any) -> Any:
        """Refuses fields that belong to messages of another role."""
        if not isinstance(given, dict):
            return given
        for name, owner in _OF_ROLES.items():
            if given.get(name) and given.get("role") != owner:
                raise refused(name, given[name], f"is supported only in messages of {owner}; leave it out")
        if given.get("role") == "tool" and given.get("tool_call_id") is None:
            says = "is missing; give the id of the call whose result the message is"
            raise refused("tool_call_id", None, says, "needed")
        needs_none = given.get("content") is None and given.get("role") == "assistant"
        return given | {"content": ""} if needs_none else given

    @classmethod
    def _is_neutral(cls, name: str, value: Any) -> bool:
        return value == [] and name not in cls.model_fields


class FunctionOfTool(ClientObject):
    """The function of a tool."""

    name: ToolName
    description: Text | None = None
    parameters: Schema = {}
    """The JSON schema of its arguments."""
    strict: bool = False


class GivenTool(ClientObject):
    """A tool that the model may call."""

    type: Literal["function"] = "function"
    function: FunctionOfTool

    @property
    def tool(self) -> Tool:
        one = self.function
        return Tool(one.name, one.description or "", one.parameters, one.strict)


_SAMPLING = get_type_hints(Sampling)
_KINDS: dict[Any, Any] = {float: Number, int: NotNegative, int | None: Whole}
"""The types of the fields of `Sampling`. The whole number that may be `None` is the seed."""
_FIELDS: dict[str, Any] = {name: (_KINDS.get(kind, kind) | None, None) for name, kind in _SAMPLING.items()}

SamplingFields = create_model(
    "SamplingFields", __base__=ClientObject, __doc__="How tokens are drawn: the fields of `Sampling`.", **_FIELDS
)


class ResponseFormat(ClientObject):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"] = NEEDED
    json_schema: Annotated[dict[str, Any], BeforeValidator(schema_of), _encodable(MAX_SCHEMA_DEPTH)] | None = None
    """The schema in it. The other fields (a name, whether it is strict) have no effect."""

    def as_grammar(self) -> Grammar | None:
        if self.type == "text":
            return None
        return Grammar("json_schema", ANY_OBJECT if self.json_schema is None else json.dumps(self.json_schema))

    @model_validator(mode="after")
    def _agrees(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            has = "no json_schema" if self.json_schema is None else "a json_schema"
            raise ValueError(f"is of type {self.type} and has {has}")
        return self


class AskingBody(SamplingFields):
    """The fields of bodies of all endpoints. For absent fields, the command's options are used."""

    model: Text | None = None
    """If given, it must be the loaded model."""
    context: Text | None = None
    """The saved context before the prompt."""
    max_tokens: Positive | None = None

    def sampling(self, defaults: Sampling) -> Sampling:
        """The sampling; absent fields are taken from `defaults`."""
        try:
            return replace(defaults, **{name: getattr(self, name) for name in self.model_fields_set & _SAMPLING.keys()})
        except TriforceError as error:
            name = str(error).partition(" is ")[0].replace("-", "_")
            raise BodyError(str(error), name) from error


class AnswerBody(AskingBody):
    """The fields of bodies of both endpoints in OpenAI's format."""

    stop: Stops = ()
    n: Annotated[Whole, _between(1, MAX_ANSWERS)] = 1
    """The number of answers to each prompt."""
    response_format: ResponseFormat | None = None
    regex: Text | None = None
    """A regular expression that the answer must match."""
    grammar: Text | None = None
    """A grammar (Lark or GBNF) that the answer must follow."""

    @property
    def grammars(self) -> dict[str, Grammar]:
        """The required form of the answer, by the field that asks for it; at most one."""
        found = {"response_format": self.response_format and self.response_format.as_grammar()}
        found["regex"] = None if self.regex is None else Grammar("regex", self.regex)
        found["grammar"] = None if self.grammar is None else Grammar("lark", self.grammar)
        return {name: grammar for name, grammar in found.items() if grammar}

    @model_validator(mode="after")
    def _has_one_form(self) -> AnswerBody:
        if len(given := list(self.grammars)) > 1:
            raise BodyError(f"{given[0]} and {given[1]} are both given, but an answer has one form; give one", given[1])
        return self

    @classmethod
    def _is_neutral(cls, name: str, value: Any) -> bool:
        neutral = (one for one in _NEUTRAL.get(name, ()) if isinstance(one, bool) == isinstance(value, bool))
        return name in _NO_EFFECT or any(one == value for one in neutral)

    @classmethod
    def _refusal(cls, name: str) -> str:
        others = [endpoint for endpoint, body in _BODIES.items() if name in body.model_fields]
        if others:
            return f"is a field of {others[0]}, not of {COMPLETION if others[0] == CHAT else CHAT}"
        without = f" or give {json.dumps(_NEUTRAL[name][0])}" if name in _NEUTRAL else ""
        return f"would change the answer and is not supported here; leave it out{without}"


class ChatBody(AnswerBody):
    """A question, and the messages before it."""

    messages: Annotated[list[Message], FailFast(), BeforeValidator(given_messages)] = NEEDED
    max_completion_tokens: Positive | None = None
    """Another name for `max_tokens`."""
    chat_template_kwargs: TemplateArguments = {}  # noqa: RUF012 - copied
    tools: Annotated[list[GivenTool], FailFast()] = []  # noqa: RUF012 - copied
    tool_choice: Annotated[tuple[str, str], PlainValidator(_tool_choice)] = ("auto", "")
    parallel_tool_calls: bool = True
    """Whether an answer may have several calls."""
    logprobs: bool = False
    top_logprobs: Annotated[Whole, _between(0, MAX_LOGPROBS)] | None = None

    @property
    def allowed_calls(self) -> AllowedCalls | None:
        """The calls that the answer may have; `None`: the request has no tools."""
        return allowed_calls([one.tool for one in self.tools], *self.tool_choice, several=self.parallel_tool_calls)

    @model_validator(mode="after")
    def _agrees(self) -> ChatBody:
        older, newer = self.max_tokens, self.max_completion_tokens
        if older and newer and older != newer:
            says = f"max_tokens is {older:,} and max_completion_tokens {newer:,}; give one of them"
            raise BodyError(says, "max_completion_tokens")
        if self.top_logprobs and not self.logprobs:
            raise BodyError("top_logprobs is for answers with logprobs: true", "top_logprobs")
        check_tools([one.function.name for one in self.tools], *self.tool_choice, self.grammars)
        called: set[str] = set()
        for index, message in enumerate(self.messages):
            called |= {call.id for call in message.tool_calls}
            if message.role == "tool":
                check_result(f"messages[{index}].tool_call_id", message.tool_call_id, called)
        return self


def allowed_calls(tools: Sequence[Tool], choice: str, name: str, *, several: bool) -> AllowedCalls | None:
    """The calls that an answer may have; `None`: there are no tools.

    Args:
        choice: `auto`, `none` or `required`; or `named`, with the `name` of a tool.
        several: whether the answer may have more than one call.
    """
    if not tools:
        return None
    if choice == "named":
        return AllowedCalls(tuple(tool for tool in tools if tool.name == name), needed=True, several=False)
    return AllowedCalls(() if choice == "none" else tuple(tools), needed=choice == "required", several=several)


def check_tools(names: Sequence[str], choice: str, name: str, grammars: Mapping[str, Grammar]) -> None:
    """Checks the tools of a request.

    Args:
        names: the names of the tools.
        choice, name: see `allowed_calls`.
        grammars: see `AnswerBody.grammars`.

    Raises:
        BodyError: the tools do not fit with the other fields.
    """
    if len(set(names)) < len(names):
        twice = Counter(names).most_common(1)[0][0]
        raise BodyError(f"tools has two of the name {twice}", "tools")
    if choice == "named" and name not in names:
        raise BodyError(f"tool_choice is {shown(name)}, but no tool of tools has this name", "tool_choice")
    if choice == "required" and not names:
        raise BodyError("tool_choice asks for a call, but there are no tools", "tool_choice")
    for field_name, grammar in grammars.items() if names else ():
        if choice in ("named", "required"):
            says = f"tool_choice asks for a call, and {field_name} for an answer in a form; give one of them"
            raise BodyError(says, field_name)
        if grammar.kind != "json_schema":
            raise BodyError(f"{field_name} is for answers without tools; leave tools out, or it", field_name)


def check_result(place: str, call_id: str | None, called: Collection[str]) -> None:
    """Checks the result of a call.

    Args:
        place: the field with the id of the call.
        call_id: the id.
        called: the ids of the calls before the result.

    Raises:
        BodyError: the call does not exist.
    """
    if call_id not in called:
        raise BodyError(f"{place} is {shown(call_id)}, but no message before it has a call with this id", place)


class CompletionBody(AnswerBody):
    """Texts to be continued."""

    prompt: Annotated[tuple[str | list[int], ...], PlainValidator(_prompts)] = NEEDED
    """One or several prompts: texts, or token ids."""
    logprobs: Annotated[Whole, _between(0, MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _fits(self) -> CompletionBody:
        answers = len(self.prompt) * self.n
        if answers > MAX_ANSWERS:
            says = (
                f"prompt has {len(self.prompt):,} prompts and n is {self.n}, which are {answers:,} answers; a request "
                f"can have {MAX_ANSWERS}; send several requests"
            )
            raise BodyError(says, "prompt")
        return self


_BODIES: dict[str, type[ChatBody | CompletionBody]] = {CHAT: ChatBody, COMPLETION: CompletionBody}


class StreamOptions(ClientObject):
    """The `stream_options` of a body."""

    include_usage: bool = False
    include_obfuscation: Any = None
    """Has no effect."""


class Delivery(ClientObject):
    """Additional fields of a body for `serve`: how the answer is delivered."""

    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_progress: bool = False
    timings_per_token: bool = False

    @model_validator(mode="after")
    def _agrees(self) -> Delivery:
        if self.stream_options.model_fields_set and not self.stream:
            raise BodyError("stream_options is for answers with stream: true", "stream_options")
        return self


class BatchLine(ClientObject):
    """A line of a batch file."""

    custom_id: Text
    method: Literal["POST"] = "POST"
    url: Literal["/v1/chat/completions", "/v1/completions"] | None = None
    """If absent, it follows from the fields of the body."""
    body: dict[str, Any]

    @property
    def endpoint(self) -> str:
        return self.url or (CHAT if "messages" in self.body else COMPLETION)

    @classmethod
    def _refusal(cls, name: str) -> str:
        return f"is not a field of a line; there are {', '.join(cls.model_fields)}"


Model = TypeVar("Model", bound=ClientObject)


def validated(kind: type[Model], given: Any) -> Model:
    """Checks an object that a client has sent, and returns it.

    Raises:
        BodyError: the object is not valid; the message is about the first error.
    """
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _in_our_words(error.errors(include_url=False)[0]) from error


_WORDS = {
    "value_error": "{error}",
    "missing": "is missing",
    "bool_type": "must be true or false",
    "string_type": "is {given}; it must be a text",
    "float_type": "is {given}; it must be a number",
    "int_type": "is {given}; it must be a whole number",
    "dict_type": "is {given}; it must be an object",
    "greater_than_equal": "is {given}; it must be {ge} or more",
    "literal_error": "is {given}; it must be {expected}",
}
"""The message about a field, by the type of pydantic's error."""


def _in_our_words(fault: ErrorDetails) -> BodyError:
    places = [place for place in fault["loc"] if place not in ("float", "int")]  # without the types of a number
    path = (f"[{place}]" if isinstance(place, int) else f".{place}" for place in places)
    name, kind = "".join(path).removeprefix("."), fault["type"]
    about = {"given": shown(fault["input"]), "other": fault["msg"], **fault.get("ctx", {})}
    says = _WORDS.get(kind, "{other}").format(**about)
    return BodyError(f"{name} {says}", name, code=kind if kind == "unsupported_field" else None)


def check_model(name: str, models: Collection[str]) -> None:
    """Checks the model of a request.

    Args:
        models: the names of the loaded model.

    Raises:
        BodyError: the request is for another model.
    """
    if name not in models:
        names = " or ".join(map(repr, sorted(models)))
        raise BodyError(
            f"model is {shown(name)}, but the model here is named {names}; give that name, or none, or load the other "
            "model",
            "model", code="model_not_found", status=404,
        )  # fmt: skip


@dataclass(frozen=True)
class AnswerRequest:
    """The request of a body. It is checked, except for the length of its prompt."""

    endpoint: str
    """`CHAT`, `COMPLETION` or `MESSAGES`."""
    messages: tuple[Message, ...]
    """Of `CHAT` and `MESSAGES`; at least one."""
    prompts: tuple[str | list[int], ...]
    """Of `COMPLETION`; at least one: texts, or token ids."""
    context: str | None
    """The saved context before the prompt."""
    max_new_tokens: int
    sampling: Sampling
    stops: tuple[str, ...]
    n: int
    """The number of answers to each prompt. Answer `i` to prompt `p` has the number `p * n + i`."""
    top_logprobs: int | None = None
    """For how many of the most probable tokens the target's own probabilities are wanted, in addition to that of each
    token; `None`: no probabilities are wanted."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the chat template, besides those of the command's options."""
    thinks: bool | None = None
    """Whether answers begin with reasoning, if the chat template has a variable for it; `None`: the variable is not
    set."""
    grammar: Grammar | None = None
    """The required form of the answers."""
    grammar_field: str | None = None
    """The field that asks for this form."""
    tools: tuple[Tool, ...] = ()
    """The tools that the prompt describes."""
    calls: AllowedCalls | None = None
    """The calls that answers may have; `None`: there are no tools."""

    @property
    def answers(self) -> int:
        """The number of answers to all prompts together. Messages are one prompt."""
        return self.n * max(1, len(self.prompts))


def request_from_body(
    body: dict[str, Any], endpoint: str, options: AnsweringOptions, models: Collection[str]
) -> AnswerRequest:
    """Converts a body to a request.

    Args:
        options: those of the command, which are used for fields that the body does not have.
        models: the names of the loaded model.

    Raises:
        BodyError: a field is missing or impossible, or would change the answer and is not supported.
    """
    asked = validated(_BODIES[endpoint], body)
    if asked.model is not None:
        check_model(asked.model, models)
    if isinstance(asked, ChatBody):
        messages, prompts = tuple(asked.messages), ()
        max_tokens = asked.max_completion_tokens or asked.max_tokens
        top_logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
    else:
        messages, prompts, max_tokens, top_logprobs = (), asked.prompt, asked.max_tokens, asked.logprobs
    return AnswerRequest(
        endpoint=endpoint,
        messages=messages,
        prompts=prompts,
        context=asked.context or options.context,
        max_new_tokens=max_tokens or options.max_new_tokens,
        sampling=asked.sampling(options.sampling),
        stops=asked.stop,
        n=asked.n,
        top_logprobs=top_logprobs,
        template_arguments=asked.chat_template_kwargs if isinstance(asked, ChatBody) else {},
        grammar=next(iter(asked.grammars.values()), None),
        grammar_field=next(iter(asked.grammars), None),
        tools=tuple(one.tool for one in asked.tools) if isinstance(asked, ChatBody) else (),
        calls=asked.allowed_calls if isinstance(asked, ChatBody) else None,
    )
