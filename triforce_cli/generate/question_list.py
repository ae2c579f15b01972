"""The questions of a run: those of `--ask` and of the file that `--asks` names, or some about the built-in text."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...tp.errors import TriforceError, UsageError
from ..logbook import Day, LogBook
from ..session.source import read_bytes
from ..terminal.output import in_one_line

MOST_ANSWERS = 1024
"""Maximum number of answers of one run. `triforce batch` takes any number, and can continue after it was stopped."""


LOG_QUESTIONS = 3
"""The number of questions about the built-in text, a harbour's log, for runs without questions."""


@dataclass(frozen=True)
class WantedAnswer:
    """An answer that is wanted."""

    question: str | None
    """`None` if the text is to be continued."""
    number: int
    """The number of the answer among the answers to this question, from 0."""
    of: int
    """The number of answers to this question."""
    entry: str | None = None
    """The entry of the text that answers the question, if it is known."""
    depth: float = 0.0
    """The position of the entry in the text, from 0 to 1."""

    @property
    def name(self) -> str:
        """A description in one line."""
        if self.question is None:
            return f"continuation {self.number + 1} of {self.of}"
        return in_one_line(self.question) + (f" (answer {self.number + 1} of {self.of})" if self.of > 1 else "")


def wanted_answers(asks: Sequence[str | None], file: Path | None, answers: int) -> list[WantedAnswer]:
    """All wanted answers, in the order of the questions; at least one.

    Args:
        answers: the number of answers to each question.

    Raises:
        UsageError: there are more than `MOST_ANSWERS` answers.
        TriforceError: the file cannot be read, or a line, which the message names, is not UTF-8.
    """
    questions = list(asks)
    most = MOST_ANSWERS // answers
    if file is not None:
        found = _lines(file)
        if len(questions) + len(found) > most:
            line = found[max(0, most - len(questions))][0]
            raise UsageError(f"--asks {file}, line {line:,}: {_too_many(answers)}")
        questions += [question for _, question in found]
    if len(questions) > most or answers > MOST_ANSWERS:
        raise UsageError(_too_many(answers))
    return [WantedAnswer(question, i, answers) for question in questions or [None] for i in range(answers)]


def _too_many(answers: int) -> str:
    each = f" ({answers:,} to each question)" if answers > 1 else ""
    return (
        f"more than {MOST_ANSWERS:,} answers are asked for{each}, the maximum of one run; triforce batch takes "
        "any number"
    )


def _lines(file: Path) -> list[tuple[int, str]]:
    """The lines of a file that are not empty, with their numbers."""
    if str(file) == "-":
        if sys.stdin is None or sys.stdin.closed:
            raise TriforceError("--asks is -, but there is no standard input")
        name, raw = "standard input", sys.stdin.buffer.read()
    else:
        name, raw = str(file), read_bytes(file, "--asks")
    found = []
    for number, line in enumerate(raw.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        try:
            text = line.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise TriforceError(
                f"--asks {name}, line {number:,} is not UTF-8: byte {line[error.start]:#04x}; convert it "
                "(iconv -f latin1 -t utf-8) or give another file"
            ) from error
        if "\0" in text:
            raise TriforceError(f"--asks {name}, line {number:,} is not text: it has a NUL byte; give a text file")
        if text:
            found.append((number, text))
    if not found:
        raise TriforceError(f"--asks {name} is empty; give one question per line")
    return found


def log_questions(text: str, seed: int) -> list[WantedAnswer]:
    """Questions drawn uniformly from the facts of `text`, which is the first days of the log of `seed`. Each has the
    entry that answers it. The last item is the continuation of the log.
    """
    book = LogBook(seed)
    days = book.days()
    told: list[tuple[Day, str, str]] = []
    while len(book.text) < len(text):
        day = next(days)
        told += [(day, fact.question, fact.sentence) for fact in day.facts]
    if book.text != text:  # the last day is not there as a whole
        told = [one for one in told if one[0] is not book.written[-1]]
    drawn = random.Random(f"opening {seed}").sample(told, min(LOG_QUESTIONS, len(told)))
    asked = [
        WantedAnswer(question, 0, 1, f"{day.text.partition('.')[0]}: {entry}", text.index(entry) / len(text))
        for day, question, entry in drawn
    ]
    return [*asked, WantedAnswer(None, 0, 1)]
