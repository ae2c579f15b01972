"""Where a user's saved contexts and the directories of GGUF files are, and what their disk has room for."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from platformdirs import user_cache_path


def user_home() -> Path:
    """`$TRIFORCE_HOME`, else a folder of the user's cache directory."""
    home = os.environ.get("TRIFORCE_HOME")
    return Path(home).expanduser() if home else user_cache_path("triforce", appauthor=False)


def disk_usage(folder: Path) -> tuple[int, int]:
    """Bytes of the disk that a directory is on, or will be once it is made, and those of them that are free."""
    while not folder.exists():
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    return usage.total, usage.free
