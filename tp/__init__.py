"""The transformer and its weights: configuration, RoPE, checkpoints, the decoder, and finding models by name.

The names below are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import CapacityError, ModelError, PeerError, TriforceError, UsageError
    from .weights.registry import PRESETS, find_pair
    from .weights.tokenizer import Tokenizer

__all__ = [
    "PRESETS",
    "CapacityError",
    "ModelError",
    "PeerError",
    "Tokenizer",
    "TriforceError",
    "UsageError",
    "find_pair",
]

_MODULES = {
    "PRESETS": ".weights.registry",
    "CapacityError": ".errors",
    "ModelError": ".errors",
    "PeerError": ".errors",
    "Tokenizer": ".weights.tokenizer",
    "TriforceError": ".errors",
    "UsageError": ".errors",
    "find_pair": ".weights.registry",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name], __name__), name)
