"""Bodies that are no requests, or hardly: made from the fields that the server knows, with values of other kinds,
fields that are missing or too many, and JSON that is broken.
"""

from __future__ import annotations

import json
import random
from typing import Any

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
_MESSAGES = [{"role": "user", "content": "Why?"}]
_ODD: list[Any] = [
    *(None, True, False, -1, 0, 0.5, 1e308, -1e308, 10**30, "", "1", "\x00", "é" * 50, "\ud800", [], [None], [[]], {}),
    *({"": 1}, {"role": "user"}, [{"role": "user", "content": 3}], [1, -5, 10**12], ["a"] * 50, "../../etc/passwd"),
    *("<script>alert(1)</script>", [{"type": "text", "text": "a"}], {"type": "json_object"}),
    *({"type": "tool_use", "id": "a", "name": "f", "input": {}}, {"type": "tool_result", "tool_use_id": "a"}),
    *({"type": "thinking", "thinking": "a"}, {"type": "object", "properties": {"a": {"type": "string"}}}, "auto"),
    *({"type": "any"}, {"type": "tool", "name": "f"}, {"type": "adaptive"}, {"type": "json_schema"}, "required"),
    *([{"name": "f", "input_schema": {}}], {"$ref": "#"}, {"anyOf": []}, {"enum": []}, "(a|b)*", 'start: "a"'),
]
_FIELDS = (
    *("model", "messages", "prompt", "context", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k"),
    *(
        "min_p",
        "seed",
        "stop",
        "n",
        "stream",
        "stream_options",
        "return_progress",
        "timings_per_token",
        "logprobs",
        "user",
    ),
    *("top_logprobs", "frequency_penalty", "presence_penalty", "logit_bias", "best_of", "echo", "suffix", "tools"),
    *("tool_choice", "functions", "function_call", "response_format", "modalities", "metadata", "store"),
    *("ignore_eos", "repetition_penalty", "audio", "prediction", "reasoning_effort", "unknown", "__class__", ""),
    *("system", "stop_sequences", "thinking", "output_config", "context_management", "mcp_servers", "cache_control"),
    *("regex", "grammar", "chat_template_kwargs", "parallel_tool_calls", "json_schema", "schema", "format", "strict"),
    *(
        "type",
        "role",
        "content",
        "text",
        "id",
        "name",
        "input",
        "input_schema",
        "description",
        "parameters",
        "function",
    ),
    *("tool_calls", "tool_call_id", "tool_use_id", "is_error", "arguments", "properties", "$defs", "$ref", "pattern"),
)

_ROLES = ("system", "user", "assistant", "tool", "developer")
_BLOCKS = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking", "image")


class BodyFuzzer:
    """Draws bodies; a valid one among them asks for at most four tokens, or what the server's default is."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw

    def body(self) -> tuple[str, bytes]:
        """A path and a body."""
        draw, path = self._draw, self._draw.choice((CHAT, COMPLETION, MESSAGES, COUNT_TOKENS))
        fields: dict[str, Any] = {"max_tokens": draw.randrange(1, 5)}
        fields |= {"prompt": "It was"} if path == COMPLETION else {"messages": self._messages()}
        if draw.random() < 0.2:
            fields |= {"tools": [self._tool(path) for _ in range(draw.randrange(1, 3))]}
        for _ in range(draw.randrange(1, 4)):
            fields[draw.choice(_FIELDS)] = self._value()
        if draw.random() < 0.2:
            fields.pop(draw.choice(list(fields)))
        return path, self._broken(json.dumps(fields).encode())

    def _messages(self) -> list[Any]:
        """Those of a question, or of a conversation with blocks of any kind."""
        draw = self._draw
        if draw.random() < 0.5:
            return _MESSAGES
        found: list[Any] = [{"role": draw.choice(_ROLES), "content": self._value()} for _ in range(draw.randrange(5))]
        for one in found:
            if draw.random() < 0.5:
                one["content"] = [{"type": draw.choice(_BLOCKS), **self._object()} for _ in range(draw.randrange(4))]
        return [*found, *_MESSAGES]

    def _tool(self, path: str) -> dict[str, Any]:
        schema = {"type": "object", "properties": self._object(), **self._object()}
        if path == CHAT:
            return {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
        return {"name": "f", "input_schema": schema, **self._object()}

    def _object(self) -> dict[str, Any]:
        draw = self._draw
        return {draw.choice(_FIELDS): self._value(1) for _ in range(draw.randrange(4))}

    def _value(self, depth: int = 0) -> Any:
        draw = self._draw
        if depth < 3 and draw.random() < 0.2:
            return {draw.choice(_FIELDS): self._value(depth + 1) for _ in range(draw.randrange(3))}
        if depth < 3 and draw.random() < 0.2:
            return [self._value(depth + 1) for _ in range(draw.randrange(4))]
        return draw.choice(_ODD)

    def _broken(self, raw: bytes) -> bytes:
        """The body, or one that is not JSON any more."""
        draw, choice = self._draw, self._draw.random()
        at = draw.randrange(len(raw))
        if choice < 0.1:
            return raw[:at]
        if choice < 0.2:
            return raw[:at] + bytes([draw.randrange(256)]) + raw[at + 1 :]
        if choice < 0.25:
            return b"[" * draw.randrange(1, 5000) + raw
        if choice < 0.28:
            deep, number = draw.randrange(1, 5000), b"9" * draw.randrange(1, 9000)
            nested = b'{"a":' * deep + b"1" + b"}" * deep
            more = draw.choice((b'"seed":' + number, b'"metadata":' + nested, b'"stop":"\\ud800"', b'"\\udfff":1'))
            return b"{" + more + b"," + raw[1:]
        if choice < 0.33:
            return draw.choice((b"", b"null", b"[]", b"3", b'"a"', b"NaN", b"\xff\xfe", b"{}{}", raw + raw))
        return raw
