"""Finds the parts of an answer (reasoning, content, and calls of tools) in its text while the text grows.

Models write reasoning between `<think>` and `</think>` before everything else, and calls in the form of their family
(calls.py). White space around each part is left out. Text that begins like a call but is not a call is content, and
stays unchanged.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ...tp.weights.tokenizer import Tokenizer
from .calls import ARGS, CALL_ID, CLOSES, VALUE_END, CallForm, Tool, types_of

THINKS, THOUGHT = "<think>", "</think>"
"""The marks before and after reasoning."""

_ID_LETTERS = string.ascii_letters + string.digits


def new_call_id() -> str:
    """A new id for a call: nine letters and digits, as Mistral's templates require."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(9))


@dataclass(frozen=True)
class Call:
    """A call of a tool."""

    index: int
    """Its index among the calls of its answer, from 0."""
    name: str
    id: str = field(default_factory=new_call_id, compare=False)
    """The id by which its result refers to it."""


@dataclass(frozen=True)
class Part:
    """A further piece of a part of an answer."""

    kind: Literal["reasoning", "content", "call"]
    text: str
    """The additional text. For a call, it belongs to the arguments, which are JSON."""
    call: Call | None = None
    begins: bool = False
    """Whether it is the first piece of its call."""


@dataclass(frozen=True)
class AnswerSyntax:
    """How the parts of an answer are found in its text."""

    reasoning: bool | None = None
    """Whether the prompt has begun reasoning; `None`: there is no reasoning."""
    form: CallForm | None = None
    """The form of its calls; `None`: it has no calls."""
    tools: Mapping[str, Tool] = field(default_factory=dict)
    """The tools by their names."""

    def control_marks(self, tokenizer: Tokenizer) -> dict[int, str]:
        """The marks that are control tokens, by their ids. `Tokenizer.decode` leaves them out."""
        marks = (*((THINKS, THOUGHT) if self.reasoning is not None else ()), *(self.form.marks if self.form else ()))
        found = {mark: tokenizer.encode(mark, False) for mark in marks}
        return {ids[0]: mark for mark, ids in found.items() if len(ids) == 1 and not tokenizer.decode(ids)}


PLAIN = AnswerSyntax()
"""The syntax of an answer that only has content."""

_Reading = Generator[None, None, bool]
"""A reader that continues when there is more text, or when the text has ended. It returns whether it has found what it
was looking for."""

_HEAD = re.compile(r'\s*+\{\s*+"name"\s*+:\s*+("(?:[^"\\]|\\.)*+")\s*+,\s*+"(?:arguments|parameters)"\s*+:\s*+(?=\{)')
"""Matches the head of a call in JSON, up to its arguments."""

_NAMED_HEAD = re.compile(rf"\s*+([^\s\[{{]++)\s*+(?:{re.escape(CALL_ID)}[^\[{{]*+)?(?:{re.escape(ARGS)})?\s*+(?=\{{)")

_MOST_HEAD = 512
"""How many letters are searched for the head of a call. A call with another order of fields is read when it is
complete."""

_FUNCTION, _PARAMETER = re.compile(r"\s*+<function=([^>\n]*+)>"), re.compile(r"\s*+<parameter=([^>\n]*+)>(\n|(?=.))")
_FUNCTION_END = "</function>"

_SPACE = re.compile(r"\s*+")


class AnswerParts:
    """Reads one answer."""

    def __init__(self, syntax: AnswerSyntax) -> None:
        self._syntax = syntax
        self._text, self._at, self._ended = "", 0, False
        self._new: list[Part] = []
        self._space: dict[str, str | None] = {"reasoning": None, "content": None}
        """The white space that is held back after each kind of part. `None`: the part has not begun, so white space is
        left out."""
        self._reading = self._answer()
        self.num_calls = 0
        """The number of calls that have begun."""
        self._in_call = False

    @property
    def calls(self) -> bool:
        """Whether the answer has calls, and all of them are complete."""
        return self.num_calls > 0 and not self._in_call

    def add(self, text: str) -> list[Part]:
        """Adds text, and returns the new pieces of parts."""
        if self._syntax == PLAIN:
            return [Part("content", text)] if text else []
        longer, self._text = self._text, ""
        longer += text  # nothing else refers to it: CPython appends in place, where `self._text +=` copies all of it
        self._text = longer
        next(self._reading, None)
        found, self._new = self._new, []
        return joined(found)

    def finish(self) -> list[Part]:
        """The remaining pieces, after the end of the text."""
        self._ended = True
        return self.add("")

    def _answer(self) -> Generator[None, None, None]:
        form = self._syntax.form
        if self._syntax.reasoning or (self._syntax.reasoning is not None and (yield from self._begins(THINKS))):
            yield from self._up_to(THOUGHT, "reasoning")
        if form and form.style == "bare":
            yield from self._bare_calls()
        while not self._is_over():
            if (yield from self._up_to(form.opens if form else "", "content")) and form:
                begin = self._at - len(form.opens)
                if not (yield from self._read_calls(form)):
                    self._say("content", self._text[begin : self._at])

    def _is_over(self) -> bool:
        return self._ended and self._at >= len(self._text)

    # What is read. Text before `_at` is done with.

    def _begins(self, mark: str) -> _Reading:
        """Whether the rest begins with a mark after white space. If so, the mark is skipped."""
        while True:
            self._at = _SPACE.match(self._text, self._at).end()  # pyright: ignore[reportOptionalMemberAccess]
            if self._text.startswith(mark, self._at):
                self._at += len(mark)
                return True
            if self._ended or not mark.startswith(self._text[self._at : self._at + len(mark)]):
                return False
            yield

    def _up_to(self, mark: str, kind: Literal["reasoning", "content"] | None) -> _Reading:
        """Emits the text before a mark as a part of this kind, or drops it if `kind` is `None`. An empty mark is never
        found. Returns whether the mark was found."""
        searched = self._at
        while True:
            found = self._text.find(mark, searched) if mark else -1
            end = found if found >= 0 else len(self._text)
            if found < 0 and not self._ended:
                end -= _begun(self._text, mark, self._at)
            if kind:
                self._say(kind, self._text[self._at : end])
            self._at = searched = end
            if found >= 0:
                self._at += len(mark)
            if found >= 0 or self._ended:
                return found >= 0
            yield

    def _read_calls(self, form: CallForm) -> _Reading:
        """Reads calls after their opening mark. Returns whether there was a call."""
        if form.style in ("list", "named"):
            return (yield from self._mistral_calls())
        if form.style == "xml":
            found = yield from self._xml_call()
        else:
            found = yield from self._json_call()
            while found and (yield from self._json_call()):  # several within the same marks
                pass
        if found:
            yield from self._begins(CLOSES)
        else:
            yield from self._up_to(CLOSES, None)
        return found

    def _bare_calls(self) -> Generator[None, None, None]:
        """Reads the call if the whole answer is a call. Llama's template allows only one call in an answer."""
        if (yield from self._begins("{")):
            self._at = begin = self._at - 1
            if not (yield from self._json_call(self._syntax.tools)):
                self._say("content", self._text[begin : self._at])

    def _mistral_calls(self) -> _Reading:
        if not (yield from self._begins("[")):
            return (yield from self._named_call())
        found = False
        while not (yield from self._begins("]")):
            yield from self._begins(",")
            if self._is_over() or not (yield from self._json_call()):
                return found
            found = True
        return found

    def _named_call(self) -> _Reading:
        head = yield from self._match(_NAMED_HEAD)
        if head:
            self._in_call = True
            self._in_call = not (yield from self._arguments(head, head[1]))
        return head is not None

    def _json_call(self, known: Mapping[str, Tool] | None = None) -> _Reading:
        """Reads a call that is one JSON object, and skips the object.

        Args:
            known: the tools that may be called.
        """
        begin = self._at
        if not (yield from self._begins("{")):
            return False
        self._at = begin
        head = yield from self._match(_HEAD)
        name = _name(head[1]) if head else None
        if head and name is not None and (known is None or name in known):
            self._in_call = True
            yield from self._arguments(head, name)
            self._in_call = not (yield from self._value(1))
            return True
        if not (yield from self._value(0)):
            return False
        return self._whole_call(self._text[begin : self._at], known)

    def _match(self, head: re.Pattern[str]) -> Generator[None, None, re.Match[str] | None]:
        begin = self._at
        while True:
            found = head.match(self._text, begin, begin + _MOST_HEAD)
            if found or self._ended or len(self._text) - begin > _MOST_HEAD:
                return found
            yield

    def _arguments(self, head: re.Match[str], name: str) -> _Reading:
        """Emits a call whose arguments begin after `head`."""
        self._at, call = head.end(), self._begin_call(name)
        return (yield from self._value(0, lambda text: self._new.append(Part("call", text, call))))

    def _value(self, depth: int, say: Callable[[str], None] = lambda text: None) -> _Reading:
        """Skips the rest of an object, of which `depth` levels are open. Returns whether its end was found."""
        said, in_text = self._at, False
        while True:
            found = (_IN_TEXT if in_text else _BETWEEN).search(self._text, self._at)
            if found is None:
                self._at = max(self._at, len(self._text))
                say(self._text[said:])
                said = len(self._text)
                if self._ended:
                    return False
                yield
                continue
            self._at = found.end()
            if found[0] == '"':
                in_text = not in_text
            elif found[0] == "\\":
                self._at += 1
            else:
                depth += 1 if found[0] in "{[" else -1
                if depth == 0:
                    say(self._text[said : self._at])
                    return True

    def _whole_call(self, text: str, known: Mapping[str, Tool] | None) -> bool:
        """Emits a complete call, if `text` is one."""
        given = _parsed(text)
        name = given.get("name") if isinstance(given, dict) else None
        if not isinstance(name, str) or (known is not None and name not in known):
            return False
        arguments = given.get("arguments", given.get("parameters"))
        written = (
            arguments.encode(errors="replace").decode() if isinstance(arguments, str) else _as_json(arguments or {})
        )
        self._new.append(Part("call", written, self._begin_call(name)))
        return True

    def _xml_call(self) -> _Reading:
        """Reads a call whose arguments are written one by one. Each is emitted when it is complete."""
        head = yield from self._match(_FUNCTION)
        if head is None:
            return False
        tool, self._at, self._in_call = self._syntax.tools.get(head[1]), head.end(), True
        call, comma = self._begin_call(head[1]), "{"
        while not (yield from self._begins(_FUNCTION_END)):
            found = yield from self._match(_PARAMETER)
            if found is None:
                return True
            # A value in lines ends at the beginning of one.
            begin, end = found.end(), f"\n{VALUE_END}" if found[2] else VALUE_END
            self._at = begin - len(found[2])
            if not (yield from self._up_to(end, None)):
                return True
            value = _value_of(self._text[begin : self._at - len(end)], tool, found[1])
            self._new.append(Part("call", f"{comma}{_as_json(found[1])}: {_as_json(value)}", call))
            comma = ", "
        self._new.append(Part("call", "{}" if comma == "{" else "}", call))
        self._in_call = False
        return True

    # What is said.

    def _begin_call(self, name: str) -> Call:
        call = Call(self.num_calls, name.encode(errors="replace").decode())
        self.num_calls += 1
        self._new.append(Part("call", "", call, begins=True))
        return call

    def _say(self, kind: Literal["reasoning", "content"], text: str) -> None:
        """Emits a further piece of a part, and holds back the white space at its end."""
        before = self._space[kind]
        text = text.lstrip() if before is None else before + text
        kept = text.rstrip()
        if kept or before is not None:
            self._space[kind] = text[len(kept) :]
        if kept:
            self._new.append(Part(kind, kept))


_IN_TEXT, _BETWEEN = re.compile(r'["\\]'), re.compile(r'["{}\[\]]')
"""Match the characters that matter inside a text of JSON, and outside of texts."""


def _as_json(value: Any) -> str:
    """A value as JSON. If the model has written half a surrogate pair, it stays as it was written."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isascii() or text == text.encode(errors="replace").decode() else json.dumps(value)


def _begun(text: str, mark: str, start: int) -> int:
    """The number of letters at the end of a text, from `start` on, that may be the beginning of a mark."""
    longest = min(len(mark) - 1, len(text) - start)
    return next((size for size in range(longest, 0, -1) if text.endswith(mark[:size])), 0)


def _name(text: str) -> str | None:
    """The name of a call from a text in JSON; `None` if it is not a text."""
    found = _parsed(text)
    return found if isinstance(found, str) else None


def _parsed(text: str) -> Any:
    """Parses JSON that a model has written; `None` if it is not JSON, or has numbers that JSON does not allow."""
    try:
        return json.loads(text, strict=False, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return None


def _no_number(name: str) -> Any:
    raise ValueError(name)


def _value_of(text: str, tool: Tool | None, name: str) -> Any:
    """The value of an argument. Models write texts as they are, and other values as JSON or in Python's syntax."""
    types = types_of(tool.properties.get(name)) if tool else set[str]()
    if types == {"string"}:
        return text
    found = _OF_PYTHON[text] if text in _OF_PYTHON else _parsed(text)
    is_json = found is not None or text in ("null", "None")
    may_be = (
        not types or "string" not in types or any(isinstance(found, _TYPES[kind]) for kind in types & _TYPES.keys())
    )
    return found if is_json and may_be else text


_OF_PYTHON = {"True": True, "False": False, "None": None}
"""Python's words for values. Templates write arguments of earlier calls with them, so models may write them, too."""

_TYPES: dict[str, Any] = {
    "string": str,
    "boolean": bool,
    "null": type(None),
    "object": dict,
    "array": list,
    "integer": int,
    "number": (int, float),
}
"""Python's types for the types of a schema."""


def joined(parts: Sequence[Part]) -> list[Part]:
    """Joins consecutive pieces of one kind, or of one call."""
    found: list[Part] = []
    for part in parts:
        if found and (found[-1].kind, found[-1].call) == (part.kind, part.call):
            found[-1] = replace(found[-1], text=found[-1].text + part.text)
        else:
            found.append(part)
    return found
