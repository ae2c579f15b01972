"""Writes results: text to stdout, statistics to a JSON file. Each is written completely, or an error is raised."""

from __future__ import annotations

import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self, TextIO, cast

from ...tp.errors import TriforceError, UsageError
from .stopping import Stop
from .streams import BestEffortStream, abandon

if TYPE_CHECKING:
    from rich.console import Console

_CONTROL = {code: "�" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}

_DIM = "\x1b[2m", "\x1b[22m"
"""The codes before and after a dimmed text on a terminal."""
_WITHOUT_STYLES = ("dumb", "unknown")
"""Values of `TERM` for terminals that cannot dim text."""

_QUOTED = 60
"""Maximum number of letters of a text that a message quotes."""


def printable(text: str) -> str:
    """`text` without control characters, which a terminal would obey."""
    return text.translate(_CONTROL)


def in_one_line(text: str) -> str:
    """The beginning of a text, in one line, for a message."""
    line = " ".join(text.split())
    return line if len(line) <= _QUOTED else line[: _QUOTED - 1] + "…"


class TextOutput:
    """Writes generated text to stdout, as it grows or at the end.

    A file or a pipe gets only the text, in UTF-8. A terminal gets a line end after it, and no control characters.
    """

    def __init__(self, *, deferred: bool) -> None:
        """Args:
        deferred: keep the text back until `close`, because something else draws on the terminal.
        """
        self._deferred = deferred
        self.on_terminal = sys.stdout.isatty()
        """Whether stdout is a terminal: text is read as it arrives, and control characters would be obeyed."""
        self._pieces: list[str] = []
        self._last = ""
        if isinstance(sys.stdout, io.TextIOWrapper):
            encoding = sys.stdout.encoding if self.on_terminal else "utf-8"
            sys.stdout.reconfigure(encoding=encoding, errors="replace", newline="\n")

    def write(self, piece: str) -> None:
        """Raises:
        Stop: nobody reads stdout any more, or it cannot be written.
        """
        if self._deferred:
            self._pieces.append(piece)
        elif piece:
            self._put(piece)

    def write_dim(self, piece: str) -> None:
        """Writes a text at once, dimmed on a terminal that supports it. Raises `Stop` as `write` does."""
        if piece:
            dims = self.on_terminal and os.environ.get("TERM") not in _WITHOUT_STYLES
            self._put(piece, *(_DIM if dims else ()))

    def close(self) -> None:
        """Writes the text that is left. Raises `Stop` as `write` does."""
        self._deferred = False
        self.write("".join(self._pieces))
        self._pieces.clear()
        if self.on_terminal:
            self.end_line()

    def end_line(self) -> None:
        """Ends a line that has begun. Raises `Stop` as `write` does."""
        if self._last not in ("", "\n"):
            self.write("\n")

    def _put(self, text: str, before: str = "", after: str = "") -> None:
        try:
            sys.stdout.write(before + (printable(text) if self.on_terminal else text) + after)
            sys.stdout.flush()
        except Stop:  # the pipe is full, and nobody empties it
            abandon(sys.stdout)
            raise
        except BrokenPipeError as error:
            abandon(sys.stdout)
            raise Stop(141, "") from error
        except OSError as error:
            abandon(sys.stdout)
            raise Stop(1, f"error: standard output cannot be written: {error.strerror or error}") from error
        self._last = text[-1]


class ResultFile:
    """A file for a result, which is checked before the run. A regular file is replaced completely or not at all."""

    def __init__(self, path: Path | None, temporary: Path | None, option: str) -> None:
        self._path, self._temporary, self._option = path, temporary, option

    @property
    def wanted(self) -> bool:
        return self._path is not None

    @property
    def kind(self) -> str:
        """The ending of the file's name, without the dot."""
        return self._path.suffix[1:].lower() if self._path else ""

    @classmethod
    @contextmanager
    def prepare(cls, path: Path | None, option: str = "--json") -> Iterator[Self]:
        """Args: `option` is the one that gave `path`.

        Raises:
            UsageError: a directory.
            TriforceError: a place that cannot be written.
        """
        if path is None or path == Path("-"):
            yield cls(path, None, option)
            return
        path = path.expanduser()
        if path.is_dir():
            raise UsageError(f"{option} {path} is a directory; give a file in it")
        if path.exists() and not os.access(path, os.W_OK):
            raise TriforceError(f"{option} {path} cannot be written: permission denied")
        if path.exists() and not path.is_file():
            yield cls(path, None, option)  # a device or a pipe is written directly
            return
        target = path.resolve()
        try:
            handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        except FileNotFoundError as error:
            raise TriforceError(f"{option} {path}: there is no directory {target.parent}; make it first") from error
        except OSError as error:
            raise TriforceError(f"{option} {path} cannot be written: {error.strerror or error}") from error
        os.close(handle)
        temporary = Path(name)
        try:
            yield cls(target, temporary, option)
        finally:
            temporary.unlink(missing_ok=True)

    def write_bytes(self, content: bytes) -> None:
        """Writes the file. Does nothing if no file was asked for.

        Raises:
            TriforceError: it cannot be written.
        """
        if self._path is None:
            return
        try:
            (self._temporary or self._path).write_bytes(content)
            if self._temporary:
                self._temporary.chmod(_mode_of(self._path))
                self._temporary.replace(self._path)
        except OSError as error:
            raise TriforceError(f"{self._option} {self._path} cannot be written: {error.strerror or error}") from error


class JsonFile(ResultFile):
    """The destination of the JSON of a run; `-` is stdout."""

    @property
    def on_stdout(self) -> bool:
        return self._path == Path("-")

    def write(self, document: Any) -> None:
        """Writes `document`. Does nothing if no file was asked for.

        Raises:
            TriforceError: the file cannot be written.
            Stop: stdout cannot be written.
        """
        text = json.dumps(document, ensure_ascii=False, indent=2) + "\n"
        content = text.encode("utf-8", "backslashreplace")  # a path need not be UTF-8; JSON escapes it likewise
        if self.on_stdout:
            output = TextOutput(deferred=False)
            output.write(content.decode())
        else:
            self.write_bytes(content)


def same_terminal(one: TextIO, other: TextIO) -> bool:
    """Whether both streams are the same terminal. The devices are compared, because in a container a terminal may have
    no name."""
    if not (one.isatty() and other.isatty()):
        return False
    return os.fstat(one.fileno()).st_rdev == os.fstat(other.fileno()).st_rdev


def result_console(json_file: JsonFile) -> Console:
    """The console for a table that is the result: stdout, or stderr if the JSON goes to stdout. Without a terminal, it
    is as wide as the table needs."""
    from rich.console import Console

    stream = cast(IO[str], BestEffortStream(sys.stderr)) if json_file.on_stdout else sys.stdout
    console = Console(file=stream, highlight=False)
    return console if console.is_terminal else Console(file=stream, highlight=False, width=200)


def _mode_of(path: Path) -> int:
    """The permissions of `path`, or those of a new file."""
    if path.exists():
        return path.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
