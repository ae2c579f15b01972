"""The folder for a user's saved contexts and the directories of GGUF files, and the space on its disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NamedTuple

from platformdirs import user_cache_path


def user_home() -> Path:
    """The folder `$TRIFORCE_HOME`; if the variable is not set, `triforce` in the user's cache directory."""
    home = os.environ.get("TRIFORCE_HOME")
    return Path(home).expanduser() if home else user_cache_path("triforce", appauthor=False)


class DiskUsage(NamedTuple):
    """Bytes of a disk."""

    total: int
    used: int
    free: int


def disk_usage(folder: Path) -> DiskUsage:
    """The usage of the disk that a directory is on, or on which it would be created."""
    while not os.path.exists(folder):  # raises no error if a directory above cannot be read
        folder = folder.parent
    return DiskUsage(*shutil.disk_usage(folder))
