"""What each architecture name implies: where it departs from Llama's shape, and what its absent keys mean."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Family:
    """An architecture: where it departs from Llama's shape."""

    qkv_bias: bool = False
    """Queries, keys and values always have a bias; the output projection then has none."""
    attention_bias: bool = False
    """The key `attention_bias` is heard: it gives all four projections one."""
    qk_norm: bool = False
    """Queries and keys are normalised over `head_dim` before they are rotated."""
    windows: Literal["none", "all", "some"] = "none"
    """Which layers a sliding window applies to: `some` are those that `layer_types` or `max_window_layers` tells."""
    defaults: dict[str, int] = field(default_factory=dict)
    """What keys mean that a `config.json` does not give, as in `transformers`."""


_QWEN_DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

FAMILIES = {
    "LlamaForCausalLM": Family(attention_bias=True, defaults={"max_position_embeddings": 2048, "eos_token_id": 2}),
    "MistralForCausalLM": Family(
        windows="all",
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
            "eos_token_id": 2,
        },
    ),
    "Qwen2ForCausalLM": Family(qkv_bias=True, windows="some", defaults=_QWEN_DEFAULTS),
    "Qwen3ForCausalLM": Family(
        attention_bias=True, qk_norm=True, windows="some", defaults=_QWEN_DEFAULTS | {"head_dim": 128}
    ),
}
"""Every architecture the decoder computes, by its name in `config.json`."""


def sliding_windows(family: Family, raw: dict[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """For each layer how many tokens it sees, its own included, `None` for all; empty where no layer has a window.

    Raises:
        TypeError, ValueError: an impossible window, or layer types that do not fit the model.
    """
    if family.windows == "none":
        return ()
    types = ["sliding_attention"] * num_layers
    window = raw["sliding_window"]
    if family.windows == "some":
        window = window if raw.get("use_sliding_window") else None
        first = num_layers if window is None else int(raw["max_window_layers"])
        types = raw.get("layer_types") or [
            "sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)
        ]
    if len(types) != num_layers or not set(types) <= {"sliding_attention", "full_attention"}:
        raise ValueError(f"layer_types {types} (known: sliding_attention, full_attention; one a layer)")
    if "sliding_attention" not in types or (window is None and family.windows == "all"):
        return ()
    if window is None or int(window) < 1:
        raise ValueError(f"sliding_window {window} (in use: 1 or more)")
    return tuple(int(window) if kind == "sliding_attention" else None for kind in types)
