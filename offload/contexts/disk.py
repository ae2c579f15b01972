"""What the store does to a file system, call by call, so that a test can record it and cut it off anywhere.

A file counts as written once its contents and then its directory are synced. Files and directories are readable by
their owner only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


class Disk:
    """Durable changes of files."""

    def make_directory(self, path: Path) -> None:
        """Makes a directory and those above it durably, if they are not there."""
        if path.is_dir():
            return
        self.make_directory(path.parent)
        path.mkdir(exist_ok=True)
        path.chmod(0o700)  # whatever the umask
        self.sync_directory(path.parent)

    def create(self, path: Path) -> BinaryIO:
        """A new file, unbuffered; one that is there is emptied."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.fchmod(descriptor, 0o600)  # whatever the umask
        return os.fdopen(descriptor, "wb", buffering=0)

    def sync(self, file: BinaryIO) -> None:
        """Waits until the file's contents are on the disk."""
        os.fsync(file.fileno())

    def sync_directory(self, path: Path) -> None:
        """Waits until the names in a directory are on the disk."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        """Gives a file another name, in place of the file that had it."""
        os.replace(old, new)

    def link(self, old: Path, new: Path) -> None:
        """Gives a file a second name."""
        os.link(old, new)

    def remove(self, path: Path) -> None:
        """Removes a name; the contents go with the last one."""
        path.unlink(missing_ok=True)

    @contextmanager
    def replacing(self, path: Path) -> Iterator[BinaryIO]:
        """A new file that takes the place of `path`, durably, once it is written: whatever happens, either is there
        whole."""
        temporary = path.with_name(f".{path.name}.new")
        try:
            with self.create(temporary) as file:
                yield file
                self.sync(file)
            self.rename(temporary, path)
        except BaseException:
            with suppress(OSError):  # the disk may be full: what is of no use must not fill it
                self.remove(temporary)
            raise
        self.sync_directory(path.parent)

    def write_whole(self, path: Path, content: bytes) -> None:
        """Puts a file with this content in the place of `path`. See `replacing`."""
        with self.replacing(path) as file:
            write_all(file, content)


def write_all(file: BinaryIO, content: bytes | memoryview) -> None:
    """Writes all of `content` to an unbuffered file."""
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]
