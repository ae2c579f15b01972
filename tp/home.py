"""Where a user's saved contexts and the directories of GGUF files are, and what their disk has room for."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NamedTuple

from platformdirs import user_cache_path


def user_home() -> Path:
    """`$TRIFORCE_HOME`, else a folder of the user's cache directory."""
    home = os.environ.get("TRIFORCE_HOME")
    return Path(home).expanduser() if home else user_cache_path("triforce", appauthor=False)


class DiskUsage(NamedTuple):
    """Bytes of a disk."""

    total: int
    used: int
    free: int


def disk_usage(folder: Path) -> DiskUsage:
    """Of the disk that a directory is on, or will be once it is made."""
    while not os.path.exists(folder):  # no error where a directory above it cannot be looked into
        folder = folder.parent
    return DiskUsage(*shutil.disk_usage(folder))
