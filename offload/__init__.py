"""The engine: places keys and values in memory, and speculates in three tiers without changing the distribution.

Each name below is imported when it is first used, so modules that need no PyTorch (settings, the table of cards) can be
imported without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .batch.batch import Batch
    from .batch.request import Request
    from .batch.run import Ended, Progress, Run, Tokens
    from .contexts.manifest import ContextError
    from .contexts.model import ContextRequest
    from .contexts.store import ContextStore
    from .engine import Engine
    from .generation import Generation, Result, Round
    from .speculation.grammar import Grammar
    from .speculation.sampling import Sampling

__all__ = [
    "Batch",
    "ContextError",
    "ContextRequest",
    "ContextStore",
    "Ended",
    "Engine",
    "Generation",
    "Grammar",
    "Progress",
    "Request",
    "Result",
    "Round",
    "Run",
    "Sampling",
    "Tokens",
]

_MODULES = {
    "Batch": ".batch.batch",
    "ContextError": ".contexts.manifest",
    "ContextRequest": ".contexts.model",
    "ContextStore": ".contexts.store",
    "Ended": ".batch.run",
    "Engine": ".engine",
    "Generation": ".generation",
    "Grammar": ".speculation.grammar",
    "Progress": ".batch.run",
    "Request": ".batch.request",
    "Result": ".generation",
    "Round": ".generation",
    "Run": ".batch.run",
    "Sampling": ".speculation.sampling",
    "Tokens": ".batch.run",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name], __name__), name)
