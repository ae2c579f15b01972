"""The lines of a batch file, in OpenAI's form: each a request, or the reason why it is none."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...tp.errors import TriforceError, UsageError
from ..requests.body import CHAT, COMPLETION, BodyError, checked_text
from ..session.source import read_bytes

_FIELDS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True)
class RequestLine:
    """A line that is not empty."""

    number: int
    """Of the file's lines, from 1."""
    custom_id: str | None
    """`None` where the line does not give one that is its own."""
    endpoint: str
    body: dict[str, Any]
    error: str | None = None
    """Why it is no request."""


def read_lines(path: Path) -> list[RequestLine]:
    """The lines of a file, or of standard input for `-`. What is wrong with one is in it: the others are requests.

    Raises:
        TriforceError: the file cannot be read.
        UsageError: it has no lines.
    """
    if str(path) == "-":
        if sys.stdin is None or sys.stdin.closed:
            raise TriforceError("the requests are to be read from -, but there is no standard input")
        raw = sys.stdin.buffer.read()
    else:
        raw = read_bytes(path, "the file of requests")
    found: list[RequestLine] = []
    first_of: dict[str, int] = {}
    for number, line in enumerate(raw.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.strip():
            continue
        one = _parsed(number, line)
        if one.custom_id is not None:
            first = first_of.setdefault(one.custom_id, number)
            if first != number:
                reason = f"custom_id {one.custom_id!r} is that of line {first:,} too; each line needs its own"
                one = RequestLine(number, None, "", {}, reason)
        found.append(one)
    if not found:
        raise UsageError(f"{path} has no requests; give a JSON object a line: custom_id, method, url, body")
    return found


def _parsed(number: int, line: bytes) -> RequestLine:
    custom_id = None
    try:
        value = json.loads(_decoded(line))
        if not isinstance(value, dict):
            raise BodyError("it is not a JSON object")
        if "custom_id" not in value:
            raise BodyError("custom_id is missing")
        custom_id = checked_text(value["custom_id"], "custom_id")
        others = [name for name in value if name not in _FIELDS]
        if others:
            raise BodyError(f"{others[0]} is not a field of a line; there are {', '.join(_FIELDS)}")
        if value.get("method", "POST") != "POST":
            raise BodyError(f"method is {value['method']!r}; it must be 'POST'")
        body = value.get("body")
        if not isinstance(body, dict):
            raise BodyError("body is missing, or not a JSON object")
        return RequestLine(number, custom_id, _endpoint(value.get("url"), body), body)
    except BodyError as error:
        return RequestLine(number, custom_id, "", {}, str(error))
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", None) or str(error)
        at = f" at column {error.colno:,}" if isinstance(error, json.JSONDecodeError) else ""
        return RequestLine(number, custom_id, "", {}, f"it is not JSON: {reason}{at}")


def _decoded(line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BodyError(f"it is not UTF-8: byte {line[error.start]:#04x} at offset {error.start:,}") from error


def _endpoint(url: Any, body: dict[str, Any]) -> str:
    """What a line asks for: by its url, or by what its body has."""
    if url is None:
        return CHAT if "messages" in body else COMPLETION
    if url not in (CHAT, COMPLETION):
        raise BodyError(f"url is {url!r}; it is {CHAT} or {COMPLETION}")
    return url
