"""The requests of a file that have no answer yet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .answers_file import AnswersFile
from .lines import RequestLine, read_lines


@dataclass(frozen=True)
class RequestsFile:
    """A file of requests, and the existing answers."""

    name: str
    """The name of the file, for messages."""
    lines: list[RequestLine]
    answers: AnswersFile

    @classmethod
    def read(cls, requests: Path, output: Path) -> RequestsFile:
        """Reads both files.

        Raises:
            UsageError, TriforceError: see `read_lines` and `AnswersFile`.
        """
        lines = read_lines(requests)
        return cls("standard input" if str(requests) == "-" else str(requests), lines, AnswersFile(output))

    @property
    def wanted(self) -> list[RequestLine]:
        """The requests to be answered."""
        return [one for one in self.lines if one.error is None and one.custom_id not in self.answers.answered]

    @property
    def malformed(self) -> list[RequestLine]:
        """The lines that are not requests."""
        return [one for one in self.lines if one.error is not None]

    @property
    def skipped(self) -> int:
        """The number of requests that already have an answer."""
        return sum(one.error is None and one.custom_id in self.answers.answered for one in self.lines)
