"""Where results go: the text to stdout, statistics to a JSON file, each written whole or with an error."""

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
"""What a terminal dims a text between."""
_WITHOUT_STYLES = ("dumb", "unknown")
"""Terminals that cannot, by their `TERM`."""

_QUOTED = 60
"""Letters of a text that a message quotes."""


def printable(text: str) -> str:
    """`text` without control characters, which a terminal would act on."""
    return text.translate(_CONTROL)


def in_one_line(text: str) -> str:
    """The beginning of a text, as a message quotes it."""
    line = " ".join(text.split())
    return line if len(line) <= _QUOTED else line[: _QUOTED - 1] + "…"


class TextOutput:
    """Generated text on stdout, as it grows or at the end.

    A file or a pipe gets the text and nothing else, in UTF-8. A terminal gets a line end after it, and no control
    characters.
    """

    def __init__(self, *, deferred: bool) -> None:
        """Args:
        deferred: keep the text back until `close`, because something else draws on the terminal.
        """
        self._deferred = deferred
        self.on_terminal = sys.stdout.isatty()
        """Whether it is read as it comes, and control characters would be obeyed."""
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
        """Writes a text at once, dimmed on a terminal that can do so; `Stop` as for `write`."""
        if piece:
            dims = self.on_terminal and os.environ.get("TERM") not in _WITHOUT_STYLES
            self._put(piece, *(_DIM if dims else ()))

    def close(self) -> None:
        """Writes what is left; `Stop` as for `write`."""
        self._deferred = False
        self.write("".join(self._pieces))
        self._pieces.clear()
        if self.on_terminal:
            self.end_line()

    def end_line(self) -> None:
        """Ends a line that has begun; `Stop` as for `write`."""
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
    """A file for a result, checked before the run. A regular file is replaced as a whole or not at all."""

    def __init__(self, path: Path | None, temporary: Path | None, option: str) -> None:
        self._path, self._temporary, self._option = path, temporary, option

    @property
    def wanted(self) -> bool:
        return self._path is not None

    @property
    def kind(self) -> str:
        """The ending of its name, without the dot."""
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
        """Writes the file; nothing where none was asked for.

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
    """Where the JSON of a run goes; `-` is stdout."""

    @property
    def on_stdout(self) -> bool:
        return self._path == Path("-")

    def write(self, document: Any) -> None:
        """Writes `document`; nothing where no file was asked for.

        Raises:
            TriforceError: the file cannot be written.
            Stop: stdout cannot.
        """
        text = json.dumps(document, ensure_ascii=False, indent=2) + "\n"
        content = text.encode("utf-8", "backslashreplace")  # a path need not be UTF-8; JSON escapes it likewise
        if self.on_stdout:
            output = TextOutput(deferred=False)
            output.write(content.decode())
        else:
            self.write_bytes(content)


def same_terminal(one: TextIO, other: TextIO) -> bool:
    """Whether both streams are the same terminal, by its device: in a container it may have no name."""
    if not (one.isatty() and other.isatty()):
        return False
    return os.fstat(one.fileno()).st_rdev == os.fstat(other.fileno()).st_rdev


def result_console(json_file: JsonFile) -> Console:
    """Where a table that is the result goes: stdout, or stderr where stdout is the JSON's; as wide as it needs, where
    there is no terminal."""
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
