"""What the store does to a file system, call by call, so that a test can record it and cut it off anywhere.

A file counts as written once its contents and then its directory are synced. Files and directories are readable by
their owner only.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO


class Disk:
    """Durable changes of files."""

    def make_directory(self, path: Path) -> None:
        """Makes a directory and those above it, if they are not there."""
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def create(self, path: Path) -> BinaryIO:
        """A new file, unbuffered; one that is there is emptied."""
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb", buffering=0)

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

    def write_whole(self, path: Path, content: bytes) -> None:
        """Puts a file with this content in the place of `path`, durably: whatever happens, either is there whole."""
        temporary = path.with_name(f".{path.name}.new")
        with self.create(temporary) as file:
            write_all(file, content)
            self.sync(file)
        self.rename(temporary, path)
        self.sync_directory(path.parent)


def write_all(file: BinaryIO, content: bytes | memoryview) -> None:
    """Writes all of `content` to an unbuffered file."""
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]
