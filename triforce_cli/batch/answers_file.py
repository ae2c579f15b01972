"""The file of answers. Each answer is a line that is added when the answer is complete, so that a stopped run can be
continued."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ...tp.errors import TriforceError, UsageError


class AnswersFile:
    """The answers in a file, to which further answers are added."""

    def __init__(self, path: Path) -> None:
        """Reads the file, if it exists. It is not changed before `open`.

        Raises:
            UsageError: the path is a directory, or a file with other contents.
            TriforceError: the file cannot be read or written.
        """
        self.path = path.expanduser()
        self.answered: set[str] = set()
        """The `custom_id` of all requests that have an answer."""
        self._dropped: set[int] = set()  # lines that will not be kept: failed ones, and a torn one
        self._ends_whole = True
        self._file: FileIO | None = None
        if self.path.is_dir():
            raise UsageError(f"--output {path} is a directory; give a file in it")
        try:
            if self.path.exists():
                self._read()
            elif not self.path.absolute().parent.is_dir():
                raise TriforceError(f"--output {path}: there is no directory {self.path.parent}; make it first")
        except OSError as error:
            raise TriforceError(f"--output {path} cannot be read: {error.strerror or error}") from error

    def open(self) -> Self:
        """Prepares the file for further answers. Removes the lines of failed requests, which are tried again, and an
        incomplete last line.

        Raises:
            TriforceError: the file cannot be written.
        """
        try:
            if self._dropped:
                self._rewrite()
            self._file = FileIO(self.path, "ab")
            if not self._ends_whole:
                self._file.write(b"\n")
        except OSError as error:
            raise self._not_written(error) from error
        return self

    def add(self, line: dict[str, Any]) -> None:
        """Adds a line in one write, so that it cannot be mixed with another line.

        Raises:
            TriforceError: the file cannot be written.
        """
        assert self._file is not None
        content = (json.dumps(line, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
        try:
            while content:
                content = content[self._file.write(content) :]
        except OSError as error:
            raise self._not_written(error) from error

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if self._file:
            self._file.close()

    def _read(self) -> None:
        with open(self.path, "rb") as file:
            for index, line in enumerate(file):
                answer = _answer(line)
                if answer is None:
                    if line.endswith(b"\n"):
                        raise UsageError(
                            f"--output {self.path}, line {index + 1:,} is not an answer of a batch; give another file"
                        )
                    self._dropped.add(index)
                    continue
                self._ends_whole = line.endswith(b"\n")
                if _succeeded(answer):
                    self.answered.add(answer["custom_id"])
                else:
                    self._dropped.add(index)

    def _rewrite(self) -> None:
        """Writes the file again without the dropped lines: as another file, which then replaces it."""
        target = self.path.resolve()
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with open(target, "rb") as old, open(handle, "wb") as new:
                for index, line in enumerate(old):
                    if index not in self._dropped:
                        new.write(line if line.endswith(b"\n") else line + b"\n")
            shutil.copymode(target, name)
            os.replace(name, target)
            self._ends_whole = True
        finally:
            Path(name).unlink(missing_ok=True)

    def _not_written(self, error: OSError) -> TriforceError:
        return TriforceError(f"--output {self.path} cannot be written: {error.strerror or error}")


def _answer(line: bytes) -> dict[str, Any] | None:
    """The answer in a line of the file; `None` if it is not an answer."""
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) and {"custom_id", "response", "error"} <= answer.keys() else None


def _succeeded(answer: dict[str, Any]) -> bool:
    response = answer["response"]
    whole = isinstance(response, dict) and response.get("status_code") == 200
    return whole and answer["error"] is None and isinstance(answer["custom_id"], str)
