"""How families of models write calls of tools: finds the family of a chat template, and makes the grammar of its calls.

| style | families | a call |
|---|---|---|
| `json` | Hermes, Qwen | in lines: `<tool_call>`, `{"name": "f", "arguments": {...}}`, `</tool_call>` |
| `xml` | Qwen3-Coder, Qwen3.5 | in lines: `<tool_call>`, `<function=f>`, `<parameter=x>`, value, `</parameter>`, ... |
| `bare` | Llama 3 | `{"name": "f", "parameters": {...}}`, and nothing else in the answer |
| `list` | Mistral | `[TOOL_CALLS]` and a list of `{"name": "f", "arguments": {...}}` |
| `named` | Mistral Small 3.2, Devstral | `[TOOL_CALLS]f[ARGS]{...}` |

The forms are those of the families' own chat templates. answer_parts.py reads calls from answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ...offload.speculation.grammar import MOST_BYTES, Grammar, GrammarError, check_length, json_rule
from ...tp.weights.tokenizer import Tokenizer

OPENS, CLOSES = "<tool_call>", "</tool_call>"
VALUE_END = "</parameter>"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
"""The marks of Mistral's calls."""


_BESIDE_SCHEMA = 64
"""Bytes that are counted for a tool in addition to its schema: approximately its size in a grammar."""


@dataclass(frozen=True)
class Tool:
    """A tool that a model may call."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """The JSON schema of its arguments, which is that of an object."""
    strict: bool = False
    """Whether the arguments must follow the schema even if the model decides whether to call the tool."""

    @property
    def properties(self) -> Mapping[str, Any]:
        """The schemas of the single arguments."""
        found = self.parameters.get("properties")
        return found if isinstance(found, dict) else {}

    def for_reading(self, form: CallForm | None) -> Tool:
        """The tool with the data that are needed to read calls of a form: types, if arguments are written one by
        one."""
        one_by_one = form is not None and form.style == "xml"
        types = {name: {"type": [*types_of(schema)]} for name, schema in self.properties.items()} if one_by_one else {}
        return Tool(self.name, "", {"properties": types})

    @property
    def for_template(self) -> dict[str, Any]:
        """The tool in the format of chat templates."""
        parameters = {"type": "object", "properties": {}, **self.parameters}
        described = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": described}


@dataclass(frozen=True)
class AllowedCalls:
    """The calls that an answer may have."""

    tools: tuple[Tool, ...] = ()
    needed: bool = False
    """Whether the answer must consist of calls, at least one."""
    several: bool = True
    """Whether the answer may have more than one call."""

    @property
    def takes_grammar(self) -> bool:
        """Whether a grammar is needed to ensure this."""
        return self.needed or not self.several or not self.tools or any(tool.strict for tool in self.tools)

    def check(self) -> None:
        """Checks the schemas of the tools.

        Raises:
            GrammarError: the schema of a tool is not supported; the message names the tool, and the place in the
                schema.
        """
        followed = [Grammar("json_schema", json.dumps(one.parameters)) for one in self.tools if self._follows(one)]
        # Before each of them takes its time.
        check_length("tools", sum(len(grammar.source) + _BESIDE_SCHEMA for grammar in followed))
        for tool, grammar in zip(filter(self._follows, self.tools), followed, strict=True):
            try:
                grammar.check()
            except GrammarError as error:
                raise GrammarError(f"{tool.name}: {error}") from error

    def _follows(self, tool: Tool) -> bool:
        """Whether calls of a tool must follow its schema."""
        return self.needed or tool.strict


@dataclass(frozen=True)
class CallForm:
    """The form of the calls of one family."""

    style: Literal["json", "xml", "bare", "list", "named"]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> CallForm | None:
        """The form of a model, from its chat template; `None` if the template does not support tools, or has an unknown
        form."""
        template = tokenizer.tool_template or ""
        if TOOL_CALLS in template:
            return cls("named" if ARGS in template else "list")
        if OPENS in template and "<function=" in template:
            return cls("xml")
        if OPENS in template and "<arg_key>" not in template:  # by which GLM's form is known
            return cls("json")
        return cls("bare") if '"parameters"' in template and '"name"' in template else None

    @property
    def opens(self) -> str:
        """The mark with which calls begin; empty if they are the whole answer."""
        return {"json": OPENS, "xml": OPENS, "bare": ""}.get(self.style, TOOL_CALLS)

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks that separate calls from other text."""
        return {"json": (OPENS, CLOSES), "xml": (OPENS, CLOSES), "bare": (), "list": (TOOL_CALLS,)}.get(
            self.style, (TOOL_CALLS, CALL_ID, ARGS)
        )


def call_grammar(form: CallForm, allowed: AllowedCalls, tokenizer: Tokenizer, answer_schema: str | None) -> Grammar:
    """The grammar of answers with these calls, or without calls.

    Args:
        answer_schema: the JSON schema of an answer without calls; `None`: such an answer is a text.

    Raises:
        GrammarError: the schema of an argument is not supported, or all schemas together are too long.
    """
    if form.style == "bare" and answer_schema is not None and allowed.tools:
        return Grammar("tools", _source({"start": json_rule(_call_or_answer(allowed, json.loads(answer_schema)))}))
    marks = {text: _Mark.of(text, tokenizer) for text in form.marks}
    first = opens = marks[form.opens].lark if form.opens else ""
    if answer_schema is not None:
        rules, other = {"answer": json_rule(answer_schema)}, "answer"
    else:
        rules, other = {"TEXT": _text(form, allowed)}, "TEXT?"
        if opens and not allowed.needed:  # a text may come before
            first = f"TEXT? {opens}"
            if not marks[form.opens].is_token:  # as one word, or its text would be taken for more of the one before
                rules["OPENING"], first = f"{rules['TEXT']} {opens}", "OPENING"
    if not allowed.tools:
        return Grammar("tools", _source({"start": other, **rules}))
    for index, tool in enumerate(allowed.tools):
        if form.style == "xml":
            rules |= _xml_call(index, tool, allowed.needed or tool.strict)
        else:
            rules[f"arguments_{index}"] = json_rule(json.dumps(_schema_of(tool, allowed)))
            rules[f"call_{index}"] = _json_call(form, tool.name, f"arguments_{index}", marks)
    rules["call"] = " | ".join(f"call_{index}" for index in range(len(allowed.tools)))
    calls = _calls(form, first, marks, several=allowed.several)
    rules["start"] = calls if allowed.needed else f"{other} | {calls}"
    return Grammar("tools", _source(rules))


@dataclass(frozen=True)
class _Mark:
    """A mark in a grammar."""

    lark: str
    """The mark in Lark's syntax. A control token is given by its number, because texts of a grammar consist of ordinary
    tokens."""
    is_token: bool

    @classmethod
    def of(cls, text: str, tokenizer: Tokenizer) -> _Mark:
        found = tokenizer.encode(text, False)
        return cls(f"<[{found[0]}]>", True) if len(found) == 1 else cls(json.dumps(text), False)


def _schema_of(tool: Tool, allowed: AllowedCalls) -> dict[str, Any]:
    """The schema of a call's arguments."""
    return {"type": "object", **(tool.parameters if allowed.needed or tool.strict else {})}


def _call_or_answer(allowed: AllowedCalls, answer: dict[str, Any]) -> str:
    """The schema of an object that is a call or an answer. Two separate rules would both begin with a brace, so their
    first words could not be distinguished."""
    parts = {"answer": answer}
    one_of: list[Any] = [{"$ref": "#/$defs/answer"}]
    for index, tool in enumerate(allowed.tools):
        part = f"call_{index}"
        parts[part] = _schema_of(tool, allowed)
        properties = {"name": {"const": tool.name}, "parameters": {"$ref": f"#/$defs/{part}"}}
        one_of.append(
            {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
        )
    return json.dumps({"anyOf": one_of, "$defs": {name: _moved(schema, name) for name, schema in parts.items()}})


def _moved(schema: Any, part: str) -> Any:
    """A schema with changed references, so that they lead to the same places when it is among the `$defs` of another
    schema."""
    if isinstance(schema, list):
        return [_moved(one, part) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: f"#/$defs/{part}{value[1:]}" if key == "$ref" and isinstance(value, str) and value[:1] == "#" else
        _moved(value, part)
        for key, value in schema.items()
    }  # fmt: skip


def _source(rules: Mapping[str, str]) -> str:
    return "\n".join(f"{name}: {body}" for name, body in rules.items())


def _text(form: CallForm, allowed: AllowedCalls) -> str:
    """A terminal of texts that cannot be read as calls. Even if a mark is a token, ordinary tokens could write it."""
    if form.opens:
        return _up_to(form.opens)
    return r"/\s*[^{\s](?s:.*)/" if allowed.tools else "/(?s:.+)/"


def _up_to(end: str) -> str:
    """A pattern for text without `end` in it. Before `end` in a terminal, it matches up to the first `end`."""
    escaped = "".join(f"\\{char}" if char in "[]/" else char for char in end).replace("\n", "\\n")
    return rf"(/(?s:.*)/ & ~/(?s:.*){escaped}(?s:.*)/)"


def _calls(form: CallForm, first: str, marks: Mapping[str, _Mark], *, several: bool) -> str:
    """The rule of calls, at least one. `first` is the beginning of the first call."""
    if form.style == "bare":
        return "call"
    opens = marks[form.opens].lark
    if form.style == "list":
        more = '("," " " call)*' if several else ""
        return f'{first} " "? "[" call {more} "]"'
    if form.style == "named":
        more = f"({opens} call)*" if several else ""
        return f"{first} call {more}"
    closes = marks[CLOSES].lark
    more = rf'("\n" {opens} call {closes})*' if several else ""
    return f"{first} call {closes} {more}"


def _json_call(form: CallForm, name: str, arguments: str, marks: Mapping[str, _Mark]) -> str:
    """The rule of a call whose arguments are one JSON object, with the rule `arguments`."""
    if form.style == "named":
        return f"{json.dumps(name)} {marks[ARGS].lark} {arguments}"
    key = "parameters" if form.style == "bare" else "arguments"
    head = json.dumps(f'{{"name": {json.dumps(name)}, "{key}": ')
    line = r'"\n"' if form.style == "json" else ""
    return f'{line} {head} {arguments} "}}" {line}'


def _xml_call(index: int, tool: Tool, of_schema: bool) -> dict[str, str]:
    """The rules of a call whose arguments are written one by one, in the order of the schema."""
    line_end = f"\n{VALUE_END}"
    end, written = json.dumps(line_end), list[str]()
    rules = {"VALUE": f"{_up_to(line_end)} {end}"}
    shared = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    required, num_bytes = tool.parameters.get("required"), 0
    required = required if isinstance(required, list) else ()
    for number, (name, given) in enumerate(tool.properties.items()):
        schema = given if isinstance(given, dict) else {}
        value, begin = "VALUE", json.dumps(f"<parameter={name}>\n")
        if of_schema and types_of(schema) == {"string"}:
            value = f"TEXT_{index}_{number}"
            rules[value] = f"({_limited_text(name, schema, _up_to(line_end))}) {end}"
        elif of_schema:
            rule = f"value_{index}_{number}"
            rules[rule], value = json_rule(json.dumps({**schema, **shared})), f"{rule} {end}"
            num_bytes += len(rules[rule])
            if num_bytes > MOST_BYTES["tools"]:
                raise GrammarError(
                    f"the grammar of the tools cannot be followed: the arguments of {tool.name} have "
                    f"more than {MOST_BYTES['tools']:,} bytes together, where definitions count again for each argument"
                )
        one = rf'{begin} {value} "\n"'
        written.append(one if name in required else f"({one})?")
    begin, end = json.dumps(f"\n<function={tool.name}>\n"), json.dumps("</function>\n")
    rules[f"call_{index}"] = f"{begin} {' '.join(written)} {end}"
    return rules


def _limited_text(name: str, schema: Mapping[str, Any], text: str) -> str:
    """The terminal of an argument that is a text and is written without quotes.

    Args:
        text: the terminal of an unlimited argument of this kind.

    Raises:
        GrammarError: its schema is not supported for this kind of text.
    """
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is not None:
        return " | ".join(json.dumps(value) for value in values if isinstance(value, str))
    least, most, pattern = schema.get("minLength", 0), schema.get("maxLength", ""), schema.get("pattern")
    if not all(type(limit) is int and limit >= 0 for limit in (least, most) if limit != ""):
        raise _not_followed(name, f"lengths {least!r} to {most!r}; they must be whole numbers")
    limits = [rf"/(?s:.{{{least},{most}}})/"] if least or most != "" else []
    if pattern is not None:
        if not isinstance(pattern, str) or not re.fullmatch(r"\^(?s:.*)(?<!\\)\$", pattern):
            raise _not_followed(name, f"the pattern {pattern!r}; it must go from ^ to $")
        # Within slashes; those that have a backslash before them stay.
        inner = re.sub(r"(?s:\\.)|/|\n", lambda found: _ESCAPED.get(found[0], found[0]), pattern[1:-1])
        limits.append(f"/({inner})/")
    if "format" in schema:
        raise _not_followed(name, f"the format {schema['format']!r}; it is not supported")
    return " & ".join([text, *limits])


_ESCAPED = {"/": r"\/", "\n": r"\n"}


def _not_followed(name: str, what: str) -> GrammarError:
    says = f"{name}, which this model writes without quotes, has {what}"
    return GrammarError(f"the grammar of the tools cannot be followed: {says}")


def types_of(schema: Any) -> set[str]:
    """The types that values of a schema can have, as named in schemas; empty: any type."""
    if not isinstance(schema, dict):
        return set()
    given = schema.get("type")
    if isinstance(given, str | list):
        return {given} if isinstance(given, str) else {one for one in given if isinstance(one, str)}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return {_TYPE_NAMES.get(type(value), "null") for value in values}
    parts = schema.get("anyOf", schema.get("oneOf"))
    found = [types_of(part) for part in parts] if isinstance(parts, list) else []
    return set[str]().union(*found) if all(found) else set()


_TYPE_NAMES: dict[type, str] = {
    bool: "boolean",
    str: "string",
    int: "integer",
    float: "number",
    dict: "object",
    list: "array",
}
