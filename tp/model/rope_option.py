"""The option for RoPE scaling: YaRN with a factor. Does not import PyTorch."""

from __future__ import annotations

from typing import Any

from ..errors import UsageError

MOST_FACTOR = 1024
"""The maximum factor by which positions are multiplied."""


def parse_rope_scaling(text: str, max_positions: int) -> dict[str, Any]:
    """Converts `yarn:FACTOR` or `yarn:FACTOR:ORIGINAL` to the `rope_scaling` of a `config.json`.

    Args:
        text: the value of the option.
        max_positions: the positions of the model; they are the original positions unless `ORIGINAL` is given.

    Raises:
        UsageError: `text` is something else.
    """
    kind, _, numbers = text.partition(":")
    factor, _, original = numbers.partition(":")
    try:
        if kind != "yarn" or not 1 < float(factor) <= MOST_FACTOR or not 1 <= int(original or 1) < 2**31:
            raise ValueError
    except ValueError:
        raise UsageError(
            f"rope-scaling is {text[:80]!r}; it is yarn:FACTOR, with a factor above 1, up to {MOST_FACTOR}, or "
            "yarn:FACTOR:ORIGINAL, with the number of positions that the factor multiplies (default: the model's own)"
        ) from None
    return {
        "rope_type": "yarn",
        "factor": float(factor),
        "original_max_position_embeddings": int(original or max_positions),
    }
