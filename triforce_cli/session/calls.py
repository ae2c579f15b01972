"""How families of models write calls of tools: which family a chat template is of, and the grammar of its calls.

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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from ...offload.speculation.grammar import Grammar, GrammarError, json_rule
from ...tp.weights.tokenizer import Tokenizer

OPENS, CLOSES = "<tool_call>", "</tool_call>"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
"""Mistral's."""


@dataclass(frozen=True)
class Tool:
    """What a model may call."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """The JSON schema of its arguments, an object."""
    strict: bool = False
    """Whether the arguments must be of that schema also where the model decides whether to call."""

    @property
    def for_template(self) -> dict[str, Any]:
        """As chat templates take it."""
        parameters = {"type": "object", "properties": {}, **self.parameters}
        described = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": described}


@dataclass(frozen=True)
class AllowedCalls:
    """Which calls an answer may have."""

    tools: tuple[Tool, ...] = ()
    needed: bool = False
    """Whether it must be calls, at least one."""
    several: bool = True
    """Whether it may have more than one."""

    @property
    def takes_grammar(self) -> bool:
        """Whether only a grammar ensures that."""
        return self.needed or not self.several or not self.tools or any(tool.strict for tool in self.tools)


@dataclass(frozen=True)
class CallForm:
    """The form of one family."""

    style: Literal["json", "xml", "bare", "list", "named"]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> CallForm | None:
        """That of a model, by its chat template; `None`: it has none for tools, or one that is not known here."""
        template = tokenizer.tool_template or ""
        if TOOL_CALLS in template:
            return cls("named" if ARGS in template else "list")
        if OPENS in template:
            return cls("xml" if "<function=" in template else "json")
        return cls("bare") if '"parameters"' in template and '"name"' in template else None

    @property
    def opens(self) -> str:
        """What calls begin with; nothing where they are the whole answer."""
        return {"json": OPENS, "xml": OPENS, "bare": ""}.get(self.style, TOOL_CALLS)

    @property
    def marks(self) -> tuple[str, ...]:
        """What parts calls from all else."""
        return {"json": (OPENS, CLOSES), "xml": (OPENS, CLOSES), "bare": (), "list": (TOOL_CALLS,)}.get(
            self.style, (TOOL_CALLS, CALL_ID, ARGS)
        )


def call_grammar(form: CallForm, allowed: AllowedCalls, tokenizer: Tokenizer, answer_schema: str | None) -> Grammar:
    """The grammar of answers with these calls, or without.

    Args: `answer_schema` is the JSON schema of an answer without calls; `None`: that is a text.

    Raises:
        GrammarError: an argument's schema has what cannot be followed.
    """
    if form.style == "bare" and answer_schema is not None and allowed.tools:
        return Grammar("tools", _source({"start": json_rule(_call_or_answer(allowed, json.loads(answer_schema)))}))
    mark = partial(_mark, tokenizer=tokenizer)
    opens = mark(form.opens) if form.opens else ""
    rules = {}
    if answer_schema is not None:
        rules["answer"], text, first = json_rule(answer_schema), "answer", opens
    else:
        rules["TEXT"], text = _text(form.opens, opens), "TEXT?"
        if opens.startswith('"') and not allowed.needed:
            rules["OPENING"], first = f"{rules['TEXT']} {opens}", "OPENING"
        else:
            first = opens if allowed.needed or not opens else f"TEXT? {opens}"
    if not allowed.tools:
        return Grammar("tools", _source({"start": text, **rules}))
    for index, tool in enumerate(allowed.tools):
        if form.style == "xml":
            rules |= _xml_call(index, tool, allowed.needed or tool.strict)
        else:
            rules[f"arguments_{index}"] = json_rule(json.dumps(_schema_of(tool, allowed)))
            rules[f"call_{index}"] = _json_call(form, tool.name, f"arguments_{index}", mark)
    rules["call"] = " | ".join(f"call_{index}" for index in range(len(allowed.tools)))
    rules["start"] = _calls(form, first, opens, allowed.several, mark)
    if not allowed.needed:
        rules["start"] = f"{text} | {rules['start']}"
    return Grammar("tools", _source(rules))


def _schema_of(tool: Tool, allowed: AllowedCalls) -> dict[str, Any]:
    """That of a call's arguments."""
    return {"type": "object", **(tool.parameters if allowed.needed or tool.strict else {})}


def _call_or_answer(allowed: AllowedCalls, answer: dict[str, Any]) -> str:
    """The schema of an object that is a call or an answer: as two rules that both begin with a brace, their first
    words would be taken for one another."""
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
    """A schema whose references lead to the same places once it stands among the `$defs` of another one."""
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


def _mark(text: str, tokenizer: Tokenizer) -> str:
    """A mark in Lark's syntax: as a token where it is one, by its number, as a text of Lark is spelled by ordinary
    tokens."""
    found = tokenizer.encode(text, False)
    return f"<[{found[0]}]>" if len(found) == 1 else json.dumps(text)


def _text(opens: str, mark: str) -> str:
    """A terminal of texts without calls."""
    if not opens:
        return r"/\s*[^{\s](?s:.*)/"
    return "/(?s:.+)/" if mark.startswith("<[") else _up_to(opens)


def _up_to(end: str) -> str:
    """What has no `end` in it. Before `end` in a terminal, it finds the first one."""
    escaped = "".join(f"\\{char}" if char in "[]/" else char for char in end).replace("\n", "\\n")
    return rf"(/(?s:.*)/ & ~/(?s:.*){escaped}(?s:.*)/)"


def _calls(form: CallForm, first: str, opens: str, several: bool, mark: Callable[[str], str]) -> str:
    """Calls, at least one. `first` is what the first of them begins with."""
    if form.style == "bare":
        return "call"
    if form.style == "list":
        more = '("," " " call)*' if several else ""
        return f'{first} " "? "[" call {more} "]"'
    if form.style == "named":
        more = f"({opens} call)*" if several else ""
        return f"{first} call {more}"
    more = rf'("\n" {opens} call {mark(CLOSES)})*' if several else ""
    return f"{first} call {mark(CLOSES)} {more}"


def _json_call(form: CallForm, name: str, arguments: str, mark: Callable[[str], str]) -> str:
    """A call whose arguments are one object of JSON, by the rule `arguments`."""
    if form.style == "named":
        return f"{json.dumps(name)} {mark(ARGS)} {arguments}"
    key = "parameters" if form.style == "bare" else "arguments"
    head = json.dumps(f'{{"name": {json.dumps(name)}, "{key}": ')
    line = r'"\n"' if form.style == "json" else ""
    return f'{line} {head} {arguments} "}}" {line}'


_VALUE_END = "\n</parameter>"


def _xml_call(index: int, tool: Tool, of_schema: bool) -> dict[str, str]:
    """The rules of a call whose arguments are written one by one, in the order of the schema."""
    end = json.dumps(_VALUE_END)
    rules, written = {"VALUE": f"{_up_to(_VALUE_END)} {end}"}, list[str]()
    shared = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    required = tool.parameters.get("required", ())
    for number, (name, schema) in enumerate(tool.parameters.get("properties", {}).items()):
        value, begin = "VALUE", json.dumps(f"<parameter={name}>\n")
        if of_schema and is_text(schema):
            value = f"TEXT_{index}_{number}"
            rules[value] = f"({_limited_text(name, schema)}) {end}"
        elif of_schema:
            rule = f"value_{index}_{number}"
            rules[rule], value = json_rule(json.dumps({**schema, **shared})), f"{rule} {end}"
        one = rf'{begin} {value} "\n"'
        written.append(one if name in required else f"({one})?")
    begin, end = json.dumps(f"\n<function={tool.name}>\n"), json.dumps("</function>\n")
    rules[f"call_{index}"] = f"{begin} {' '.join(written)} {end}"
    return rules


def _limited_text(name: str, schema: Mapping[str, Any]) -> str:
    """A terminal of an argument that is written as it is.

    Raises:
        GrammarError: its schema has what cannot be followed in such a text.
    """
    least, most, pattern = schema.get("minLength", 0), schema.get("maxLength", ""), schema.get("pattern")
    limits = [rf"/(?s:.{{{least},{most}}})/"] if least or most != "" else []
    if pattern is not None:
        inner = pattern.removeprefix("^").removesuffix("$").replace("/", r"\/")
        if not pattern.startswith("^") or not pattern.endswith("$") or pattern.endswith(r"\$"):
            raise _not_followed(name, f"the pattern {pattern!r}, which must be from ^ to $")
        limits.append(f"/({inner})/")
    if "format" in schema:
        raise _not_followed(name, f"the format {schema['format']!r}")
    return " & ".join([_up_to(_VALUE_END), *limits])


def _not_followed(name: str, what: str) -> GrammarError:
    says = f"{name} has {what}, in this model's form of calls"
    return GrammarError(f"the grammar of the tools cannot be followed: {says}")


def is_text(schema: Any) -> bool:
    """Whether an argument of this schema is any text, which the style `xml` writes as it is."""
    return isinstance(schema, dict) and schema.get("type") == "string" and not schema.keys() & {"enum", "const"}
