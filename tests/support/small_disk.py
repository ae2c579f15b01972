"""File systems in memory that are full soon."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class NoDiskError(Exception):
    """The system lets nobody mount one here."""


@contextmanager
def small_disk(place: Path, size: int) -> Iterator[Path]:
    """A file system in memory with room for so many bytes, in whole pages.

    Raises:
        NoDiskError: nothing can be mounted.
    """
    place.mkdir(parents=True)
    options = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    try:
        done = subprocess.run(options, capture_output=True, text=True)
    except OSError as error:
        raise NoDiskError(str(error)) from error
    if done.returncode:
        raise NoDiskError(done.stderr.strip())
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)
