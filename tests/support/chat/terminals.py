"""A command on a pseudo-terminal, in a fork of this process, and what its screen shows."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import termios
import time

import pyte
from command import Fork, triforce

_CURSOR_ASKED = "\x1b[6n"


class Terminal:
    """A process whose standard streams are a terminal, which answers where its cursor is."""

    def __init__(self, *arguments: object, columns: int = 80, rows: int = 24) -> None:
        self.screen = pyte.HistoryScreen(columns, rows, history=5000)
        self._stream = pyte.Stream(self.screen)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a read may end within a character
        self.raw = ""
        self._ours, theirs = pty.openpty()
        self.resize(columns, rows)
        command = triforce(*arguments)

        def call() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # Ctrl-C is then a signal to this process
            command()

        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self._fork = Fork(call, (theirs, theirs, theirs), environment, new_session=True)
        os.close(theirs)

    def resize(self, columns: int, rows: int) -> None:
        self.screen.resize(rows, columns)
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        data = text.encode()
        while data:  # a terminal's buffer takes some thousand bytes, and ours may have to be read meanwhile
            self._take(0)
            if select.select([], [self._ours], [], 0.05)[1]:
                data = data[os.write(self._ours, data[:1024]) :]

    def paste(self, text: str) -> None:
        self.type(f"\x1b[200~{text}\x1b[201~")

    @property
    def shown(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display)

    @property
    def local_mode(self) -> int:
        """The flags of the terminal's local modes, as in `termios.tcgetattr`."""
        return termios.tcgetattr(self._ours)[3]

    @property
    def written(self) -> str:
        """What is shown, and the lines before that are no longer on the screen."""
        gone = ("".join(line[x].data for x in range(self.screen.columns)) for line in self.screen.history.top)
        return "\n".join([*(line.rstrip() for line in gone), self.shown])

    def read_until(self, pattern: str, seconds: float = 60.0) -> None:
        """Feeds the screen until it shows `pattern`."""
        end = time.monotonic() + seconds
        while not re.search(pattern, self.shown, re.MULTILINE):
            assert time.monotonic() < end, f"{pattern!r} never came:\n{self.shown}"
            assert self._take(0.2), f"it ended without {pattern!r}:\n{self.shown}"

    def finish(self, seconds: float = 60.0) -> int:
        """Reads to the end; the exit code."""
        end = time.monotonic() + seconds
        while self._take(0.2):
            assert time.monotonic() < end, f"it does not end:\n{self.shown}"
        return self._fork.wait(10)

    def close(self) -> None:
        self._fork.kill()
        os.close(self._ours)

    def _take(self, seconds: float) -> bool:
        """Shows what comes within some seconds; false once the process has closed the terminal."""
        if not select.select([self._ours], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self._ours, 65536)
        except OSError:
            return False
        new = self._decoder.decode(data)
        self.raw += new
        for index, part in enumerate(new.split(_CURSOR_ASKED)):
            if index:
                os.write(self._ours, f"\x1b[{self.screen.cursor.y + 1};{self.screen.cursor.x + 1}R".encode())
            self._stream.feed(part)
        return bool(data)
