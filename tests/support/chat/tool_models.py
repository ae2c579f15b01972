"""Tiny models whose chat templates describe tools, in the forms of the families that `triforce.cli` knows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

_BEGIN = """{%- if tools %}Tools:
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
{% endif %}
{%- for m in messages %}<{{ m.role }}>{{ m.content }}
"""
_END = "\n{%- endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"

_CALLS = {
    "json": """{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}""",
    "xml": """{%- for call in m.tool_calls or [] %}
<tool_call>
<function={{ call.function.name }}>
{%- for name, value in call.function.arguments.items() %}
<parameter={{ name }}>
{{ value if value is string else value | tojson }}
</parameter>
{%- endfor %}
</function>
</tool_call>
{%- endfor %}""",
    "bare": """{%- for call in m.tool_calls or [] %}
{{- '{"name": "' + call.function.name + '", "parameters": ' }}{{ call.function.arguments | tojson }}{{ "}" }}
{%- endfor %}""",
    "list": """{%- if m.tool_calls %}[TOOL_CALLS] [
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception("ids have nine letters") }}{% endif %}
{{- {"name": call.function.name, "arguments": call.function.arguments, "id": call.id} | tojson }}
{%- endfor %}]{% endif %}""",
    "named": """{%- for call in m.tool_calls or [] %}[TOOL_CALLS]{{ call.function.name }}[ARGS]
{{- call.function.arguments | tojson }}{% endfor %}""",
}

STYLES = tuple(_CALLS)
TEMPLATES = {style: _BEGIN + calls + _END for style, calls in _CALLS.items()}

MARKS = {
    "json": ("<tool_call>", "</tool_call>"),
    "xml": ("<tool_call>", "</tool_call>"),
    "bare": (),
    "list": ("[TOOL_CALLS]",),
    "named": ("[TOOL_CALLS]", "[ARGS]"),
}


def tool_model(
    model: Path, folder: Path, style: str, *, special: bool | None = None, more: tuple[str, ...] = ()
) -> Path:
    """A copy of a model that knows tools.

    Args:
        special: whether its marks are control tokens; `None`: they are no tokens at all.
        more: further tokens, which are no control tokens.
    """
    directory = folder / f"{model.name}-{style}-{special}"
    shutil.copytree(model, directory)
    (directory / "chat_template.jinja").write_text(TEMPLATES[style])
    marks = {} if special is None else dict.fromkeys(MARKS[style], special)
    give_tokens(directory, marks | dict.fromkeys(more, False))
    return directory


def give_tokens(directory: Path, added: dict[str, bool]) -> None:
    """Has a model's last tokens read as these texts. `added` is whether each is a control token."""
    path = directory / "tokenizer.json"
    tokenizer: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    last = max(vocabulary.values())
    for index, (text, special) in enumerate(added.items()):
        token = last - index
        (before,) = [piece for piece, number in vocabulary.items() if number == token]
        del vocabulary[before]
        tokenizer["model"]["merges"] = [
            pair for pair in tokenizer["model"]["merges"] if before not in (*pair, "".join(pair))
        ]
        vocabulary[text] = token
        tokenizer["added_tokens"].append(
            {
                "id": token,
                "content": text,
                "special": special,
                "normalized": False,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
            }
        )
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
