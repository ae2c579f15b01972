"""Where a user's saved contexts and the directories of GGUF files are."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path


def user_home() -> Path:
    """`$TRIFORCE_HOME`, else a folder of the user's cache directory."""
    home = os.environ.get("TRIFORCE_HOME")
    return Path(home).expanduser() if home else user_cache_path("triforce", appauthor=False)
