"""Where results go: the text to stdout, the statistics to a JSON file. Nothing is lost on the way out."""

from __future__ import annotations

import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..tp.errors import TriforceError, UsageError
from .stopping import Stop
from .streams import abandon

_CONTROL = {code: "�" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def harmless(text: str) -> str:
    """`text` without characters that would steer a terminal."""
    return text.translate(_CONTROL)


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
        self._terminal = sys.stdout.isatty()
        self._pieces: list[str] = []
        self._last = ""
        if isinstance(sys.stdout, io.TextIOWrapper):
            encoding = sys.stdout.encoding if self._terminal else "utf-8"
            sys.stdout.reconfigure(encoding=encoding, errors="replace", newline="\n")

    def write(self, piece: str) -> None:
        """Raises:
        Stop: nobody reads stdout any more, or it cannot be written.
        """
        if self._deferred:
            self._pieces.append(piece)
        elif piece:
            self._put(piece)

    def close(self) -> None:
        """Writes what is left; `Stop` as for `write`."""
        self._deferred = False
        self.write("".join(self._pieces))
        self._pieces.clear()
        if self._terminal and self._last not in ("", "\n"):
            self._put("\n")

    def _put(self, text: str) -> None:
        try:
            sys.stdout.write(harmless(text) if self._terminal else text)
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


class JsonFile:
    """Where the JSON of a run goes, checked before the run. A regular file is replaced at once, or not at all."""

    def __init__(self, path: Path | None, temporary: Path | None) -> None:
        self._path, self._temporary = path, temporary

    @property
    def on_stdout(self) -> bool:
        return self._path == Path("-")

    @classmethod
    @contextmanager
    def prepare(cls, path: Path | None) -> Iterator[JsonFile]:
        """Raises:
        UsageError: a directory.
        TriforceError: a place that cannot be written.
        """
        if path is None or path == Path("-"):
            yield cls(path, None)
            return
        path = path.expanduser()
        if path.is_dir():
            raise UsageError(f"--json {path} is a directory; give a file in it")
        if path.exists() and not os.access(path, os.W_OK):
            raise TriforceError(f"--json {path} cannot be written: permission denied")
        if path.exists() and not path.is_file():
            yield cls(path, None)  # a device or a pipe takes what it is given
            return
        target = path.resolve()
        try:
            handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        except FileNotFoundError as error:
            raise TriforceError(f"--json {path}: there is no directory {target.parent}; make it first") from error
        except OSError as error:
            raise TriforceError(f"--json {path} cannot be written: {error.strerror or error}") from error
        os.close(handle)
        temporary = Path(name)
        try:
            yield cls(target, temporary)
        finally:
            temporary.unlink(missing_ok=True)

    def write(self, document: dict[str, Any]) -> None:
        """Writes `document`; nothing where no file was asked for.

        Raises:
            TriforceError: the disk says no.
            Stop: stdout does.
        """
        text = json.dumps(document, ensure_ascii=False, indent=2) + "\n"
        text = text.encode("utf-8", "backslashreplace").decode()  # a path need not be UTF-8; JSON escapes it likewise
        if self.on_stdout:
            output = TextOutput(deferred=False)
            output.write(text)
        elif self._path is not None:
            try:
                (self._temporary or self._path).write_text(text, encoding="utf-8")
                if self._temporary:
                    self._temporary.chmod(_mode_of(self._path))
                    self._temporary.replace(self._path)
            except OSError as error:
                raise TriforceError(f"--json {self._path} cannot be written: {error.strerror or error}") from error


def _mode_of(path: Path) -> int:
    """The permissions of `path`, or those of a new file."""
    if path.exists():
        return path.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
