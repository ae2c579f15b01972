"""RoPE scaling as a user asks for it: YaRN, by a factor. Does not import PyTorch."""

from __future__ import annotations

from typing import Any

from ..errors import UsageError

MOST_FACTOR = 1024
"""By which positions are multiplied at most."""


def parse_rope_scaling(text: str, max_positions: int) -> dict[str, Any]:
    """The `rope_scaling` of a `config.json` for `yarn:FACTOR` or `yarn:FACTOR:ORIGINAL`.

    Args: `max_positions` are those of the model, from which it is scaled unless `ORIGINAL` says otherwise.

    Raises:
        UsageError: it is something else.
    """
    kind, _, numbers = text.partition(":")
    factor, _, original = numbers.partition(":")
    try:
        if kind != "yarn" or not 1 < float(factor) <= MOST_FACTOR or not 1 <= int(original or 1) < 2**31:
            raise ValueError
    except ValueError:
        raise UsageError(
            f"rope-scaling is {text[:80]!r}; it is yarn:FACTOR, with a factor above 1, up to {MOST_FACTOR}, or "
            "yarn:FACTOR:ORIGINAL, with the positions that the factor is of (default: the model's own)"
        ) from None
    return {
        "rope_type": "yarn",
        "factor": float(factor),
        "original_max_position_embeddings": int(original or max_positions),
    }
