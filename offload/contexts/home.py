"""The place of a user's saved contexts, and their quota."""

from __future__ import annotations

import os
from pathlib import Path

from ...tp.errors import UsageError
from ...tp.home import user_home
from ...tp.units import parse_size
from .store import ContextStore


def contexts_root() -> Path:
    """`$TRIFORCE_HOME/contexts`; without this variable, `contexts` in the user's cache directory of triforce."""
    return user_home() / "contexts"


def user_store() -> ContextStore:
    """The contexts of this user. `TRIFORCE_CONTEXTS_MAX` is their quota, if it is set.

    Raises:
        UsageError: the value of `TRIFORCE_CONTEXTS_MAX` is not a size.
    """
    quota = os.environ.get("TRIFORCE_CONTEXTS_MAX")
    try:
        return ContextStore(contexts_root(), parse_size(quota) if quota else None)
    except ValueError as error:
        raise UsageError(f"TRIFORCE_CONTEXTS_MAX: {error}") from error
