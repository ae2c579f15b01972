"""The lines of a batch file, in OpenAI's format: each is a request, or the reason why it is not a request."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...tp.errors import TriforceError, UsageError
from ..session.source import read_bytes
from ..session.wire import BatchLine, BodyError, validated


@dataclass(frozen=True)
class RequestLine:
    """A line that is not empty."""

    number: int
    """The number of the line in the file, from 1."""
    custom_id: str | None
    """`None` if the line has no unique id."""
    endpoint: str
    body: dict[str, Any]
    error: str | None = None
    """The reason why it is not a request."""


def read_lines(path: Path) -> list[RequestLine]:
    """The lines of a file, or of standard input for `-`. The error of a line is in its `error`; the other lines are
    requests.

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
                reason = f"custom_id {one.custom_id!r} is also in line {first:,}; each line needs its own"
                one = RequestLine(number, None, "", {}, reason)
        found.append(one)
    if not found:
        raise UsageError(f"{path} has no requests; give one JSON object per line: custom_id, method, url, body")
    return found


def _parsed(number: int, line: bytes) -> RequestLine:
    custom_id = None
    try:
        given = json.loads(_decoded(line))
        if not isinstance(given, dict):
            raise BodyError("it is not a JSON object")
        custom_id = given["custom_id"] if isinstance(given.get("custom_id"), str) else None
        found = validated(BatchLine, given)
        return RequestLine(number, found.custom_id, found.endpoint, found.body)
    except BodyError as error:
        reason = str(error)
    except (ValueError, RecursionError) as error:
        at = f" at column {error.colno:,}" if isinstance(error, json.JSONDecodeError) else ""
        reason = f"it is not JSON: {getattr(error, 'msg', None) or error}{at}"
    return RequestLine(number, custom_id, "", {}, reason)


def _decoded(line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BodyError(f"it is not UTF-8: byte {line[error.start]:#04x} at offset {error.start:,}") from error
