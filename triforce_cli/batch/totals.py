"""The totals of a run over a file of requests: counts, tokens, times, and their JSON."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from ..session.response import FinishedAnswer, error_body
from ..session.wire import BodyError
from .lines import RequestLine
from .requests_file import RequestsFile

_SHARED = (
    "model",
    "draft",
    "device",
    "device_name",
    "world_size",
    "kernels",
    "arithmetic",
    "dtype",
    "weights",
    "settings",
)
_TRAFFIC = ("bytes_streamed", "bytes_written_back", "busy_s", "waited_s")


@dataclass
class Totals:
    """Adds up the results of a run, in bytes, tokens and seconds."""

    requests: RequestsFile
    note: Callable[[str], None]
    """Prints a line for people."""
    began: float = field(default_factory=time.perf_counter)
    answered: int = 0
    interrupted: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)
    prompt_tokens: int = 0
    reused_tokens: int = 0
    new_tokens: int = 0
    rounds: int = 0
    decode_s: float = 0.0
    warnings: list[str] = field(default_factory=list)
    identity: dict[str, Any] = field(default_factory=dict)
    link: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_TRAFFIC, 0))
    memory: dict[str, int] = field(default_factory=dict)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first request began; above 0."""
        return max(1e-9, time.perf_counter() - self.began)

    def add_answer(self, answer: FinishedAnswer, warnings: Sequence[str]) -> None:
        """Counts an answer's tokens, and its warnings."""
        self._warn(warnings)
        self.prompt_tokens += answer.timings.prompt_tokens
        self.reused_tokens += answer.timings.reused_tokens
        self.new_tokens += answer.timings.new_tokens

    def _warn(self, warnings: Sequence[str]) -> None:
        self.warnings += [line for line in warnings if line not in self.warnings]

    def add_run(self, stats: dict[str, Any]) -> None:
        """Adds the times and bytes of a run of the engine. `stats` is its JSON."""
        self.rounds += stats["rounds"]
        self.decode_s += stats["decode_s"]
        self.identity |= {name: stats[name] for name in _SHARED if name in stats}
        self._warn(stats["warnings"])
        for name in _TRAFFIC:
            self.link[name] += stats["link"][name]
        for name, held in stats["memory"].items():
            self.memory[name] = max(held, self.memory.get(name, 0))

    def fail(self, line: RequestLine, message: str) -> None:
        """Counts a request that got no answer, and prints a line about it."""
        self.failures.append({"line": line.number, "custom_id": line.custom_id, "message": message})
        self.note(f"{self.requests.name}, line {line.number:,}: {message}")

    def document(self, threads: int) -> dict[str, Any]:
        """The JSON of the run."""
        seconds, busy = self.elapsed_s, self.link["busy_s"]
        return {
            "version": version("triforce-cli"),
            **self.identity,
            "threads": threads,
            "input": self.requests.name,
            "output": str(self.requests.answers.path),
            "requests": {
                "total": len(self.requests.lines),
                "skipped": self.requests.skipped,
                "answered": self.answered,
                "failed": len(self.failures),
                "interrupted": self.interrupted,
            },
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "new_tokens": self.new_tokens,
            "total_s": seconds,
            "tokens_per_s": self.new_tokens / seconds,
            "rounds": self.rounds,
            "decode_s": self.decode_s,
            "link": {**self.link, "gb_per_s": self.link["bytes_streamed"] / busy / 1e9 if busy else None},
            "memory": self.memory,
            "warnings": self.warnings,
            "failures": self.failures,
        }


def answer_line(
    line: RequestLine, status: int, body: dict[str, Any] | None, error: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A line of the file of answers, in OpenAI's format. Without `body`, there was no request."""
    response = {"status_code": status, "request_id": f"req_{secrets.token_hex(12)}", "body": body}
    return {
        "id": f"batch_req_{secrets.token_hex(12)}",
        "custom_id": line.custom_id,
        "response": response if body is not None else None,
        "error": error,
    }


def malformed_line(requests: RequestsFile, line: RequestLine) -> dict[str, Any]:
    """The answer to a line that is not a request."""
    message = f"{requests.name}, line {line.number:,}: {line.error}"
    return answer_line(line, 0, None, {"code": "invalid_line", "message": message})


def refused_line(line: RequestLine, error: BodyError) -> dict[str, Any]:
    """The answer to a request that cannot be answered."""
    return answer_line(line, error.status, error_body(error))
