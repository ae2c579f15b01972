"""The durable changes that the store makes to a file system, each as one method, so that a test can record and
interrupt them.

A file counts as written when first its contents and then its directory are synced. Only the owner can read the files
and directories.
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
        """Makes a directory and its parents durably, if they do not exist."""
        if path.is_dir():
            return
        self.make_directory(path.parent)
        path.mkdir(exist_ok=True)
        path.chmod(0o700)  # whatever the umask
        self.sync_directory(path.parent)

    def create(self, path: Path) -> BinaryIO:
        """Opens a file for writing, unbuffered. A file that exists is emptied."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.fchmod(descriptor, 0o600)  # whatever the umask
        return os.fdopen(descriptor, "wb", buffering=0)

    def sync(self, file: BinaryIO) -> None:
        """Waits until the file's contents are on the disk."""
        os.fsync(file.fileno())

    def sync_directory(self, path: Path) -> None:
        """Waits until the entries of a directory are on the disk."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        """Renames a file. A file that has the new name is replaced."""
        os.replace(old, new)

    def link(self, old: Path, new: Path) -> None:
        """Gives a file a second name (a hard link)."""
        os.link(old, new)

    def remove(self, path: Path) -> None:
        """Removes a name of a file, if it exists. The contents are removed with the last name."""
        path.unlink(missing_ok=True)

    @contextmanager
    def replacing(self, path: Path) -> Iterator[BinaryIO]:
        """Yields a new file, which durably replaces `path` at the end. Whenever this is interrupted, `path` is either
        the complete old file or the complete new one."""
        temporary = path.with_name(f".{path.name}.new")
        try:
            with self.create(temporary) as file:
                yield file
                self.sync(file)
            self.rename(temporary, path)
        except BaseException:
            with suppress(OSError):  # the incomplete file must not take space on a disk that may be full
                self.remove(temporary)
            raise
        self.sync_directory(path.parent)

    def write_whole(self, path: Path, content: bytes) -> None:
        """Replaces `path` by a file with this content. See `replacing`."""
        with self.replacing(path) as file:
            write_all(file, content)


def write_all(file: BinaryIO, content: bytes | memoryview) -> None:
    """Writes all of `content` to an unbuffered file."""
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]
