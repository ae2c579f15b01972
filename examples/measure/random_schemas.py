"""Random JSON schemas whose answers are of bounded size: not of numbers, which may have any number of digits."""

from __future__ import annotations

import json
import random
from typing import Any

NAMES = ("name", "age", "tags", "kind", "id", "note", "size", "next", "on", "é")


def random_schema(chance: random.Random, depth: int = 2) -> dict[str, Any]:
    """An object whose values are of any kind, with few and short ones."""
    names = chance.sample(NAMES, chance.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _value(chance, depth) for name in names},
        "required": names if chance.random() < 0.7 else names[:1],
        "additionalProperties": False,
    }


def damaged(value: Any, chance: random.Random) -> Any:
    """What becomes of JSON where a few letters of it are others; `None`: none."""
    text = list(json.dumps(value))
    for _ in range(chance.randint(1, 4)):
        text[chance.randrange(len(text))] = chance.choice('{}[]",:0a$')
    try:
        return json.loads("".join(text))
    except ValueError:
        return None


def _value(chance: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["string", "integer", "boolean", "null", "enum", "const", "pattern"]
    kind = chance.choice(kinds + (["object", "array", "any"] * 2 if depth else []))
    if kind == "object":
        return random_schema(chance, depth - 1)
    if kind == "array":
        least = chance.randint(0, 2)
        return {"type": "array", "items": _value(chance, depth - 1), "minItems": least, "maxItems": least + 2}
    if kind == "any":
        return {"anyOf": [_value(chance, depth - 1) for _ in range(2)]}
    if kind == "string":
        return {"type": "string", "minLength": chance.randint(0, 3), "maxLength": chance.randint(3, 12)}
    if kind == "pattern":
        return {"type": "string", "pattern": chance.choice(["^[a-z]{2,5}$", "^x-[0-9]{3}$", "^(yes|no)$"])}
    if kind == "integer":
        least = chance.randint(-50, 50)
        return {"type": "integer", "minimum": least, "maximum": least + chance.randint(0, 1000)}
    if kind == "enum":
        return {"enum": chance.sample(["red", "green", 3, None, "blue\n", 2.5], 3)}
    if kind == "const":
        return {"const": chance.choice(["fixed", 7, True, [1, 2], {"a": "b"}])}
    return {"type": kind}
