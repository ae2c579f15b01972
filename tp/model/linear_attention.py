"""Linear attention: layers that keep a state of one size instead of keys and values.

The gated delta rule (arXiv 2412.06464) with a short convolution before it, as Qwen3-Next and Qwen3.5 have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class LinearNames:
    """What a family calls the projections of such a layer, within it."""

    inputs: tuple[str, ...]
    """Of queries, keys and values, of the gate of the output, of beta, and of the decay. Where two of them are in one,
    what belongs to a key head is together."""

    @property
    def by_key_head(self) -> bool:
        """Whether the outputs of a key head are together."""
        return len(self.inputs) == 2


@dataclass(frozen=True)
class LinearAttention:
    """The layers of a model that have it, and their shape; of a rank's part, its heads."""

    layers: tuple[int, ...]
    """Their numbers, ascending."""
    key_heads: int
    """Of queries, too."""
    value_heads: int
    """A multiple: neighbouring ones have a key head together, and each has a state."""
    key_dim: int
    value_dim: int
    kernel: int
    """Tokens that the convolution sees, the last one itself."""
    names: LinearNames

    def __post_init__(self) -> None:
        """Raises:
        ValueError: no model can have this shape.
        """
        sizes = self.key_heads, self.value_heads, self.key_dim, self.value_dim, self.kernel - 1
        if min(sizes) < 1 or self.value_heads % self.key_heads:
            raise ValueError(
                f"linear attention with {self.key_heads} heads of keys and {self.value_heads} of values, which must be "
                f"a multiple, {self.key_dim} and {self.value_dim} wide, and a convolution over {self.kernel} tokens"
            )

    @property
    def keys(self) -> int:
        """Width of all keys of a token, and of all queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of all values of a token, and of the gate of the output."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Width of what the convolution sees: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Of a layer's state, float32: `[value_heads, key_dim, value_dim]`."""
        return self.value_heads, self.key_dim, self.value_dim

    @property
    def key_head_numbers(self) -> int:
        """Of a layer's state, with what the convolution still sees, those that belong to one key head."""
        heads, key_dim, value_dim = self.state_shape
        return (heads * key_dim * value_dim + (self.kernel - 1) * self.channels) // self.key_heads

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Of one state of all layers, with the tokens that the convolution still sees."""
        heads, key_dim, value_dim = self.state_shape
        past = (self.kernel - 1) * self.channels * dtype.itemsize
        return len(self.layers) * (4 * heads * key_dim * value_dim + past)

    def row_bytes(self, dtype: torch.dtype) -> int:
        """Of what is kept of a token in all layers, so that it can be taken back: what the convolution sees, beta and
        decay."""
        return len(self.layers) * (self.channels + 2 * self.value_heads) * dtype.itemsize


def linear_attention(names: LinearNames | None, raw: Mapping[str, Any], num_layers: int) -> LinearAttention | None:
    """What a `config.json` says of it.

    Raises:
        KeyError, TypeError, ValueError: it does not say what is needed, or something impossible.
    """
    if names is None:
        return None
    every = int(raw.get("full_attention_interval") or 4)
    types = raw.get("layer_types") or [
        "linear_attention" if (layer + 1) % every else "full_attention" for layer in range(num_layers)
    ]
    if len(types) != num_layers or not set(types) <= {"linear_attention", "full_attention"}:
        raise ValueError(f"layer_types {types} (known: linear_attention, full_attention; one a layer)")
    layers = tuple(layer for layer, kind in enumerate(types) if kind == "linear_attention")
    if len(layers) == num_layers:
        raise ValueError("layer_types without full_attention, which a text of any length needs")
    if not layers:
        return None
    return LinearAttention(
        layers,
        key_heads=int(raw["linear_num_key_heads"]),
        value_heads=int(raw["linear_num_value_heads"]),
        key_dim=int(raw["linear_key_head_dim"]),
        value_dim=int(raw["linear_value_head_dim"]),
        kernel=int(raw["linear_conv_kernel_dim"]),
        names=names,
    )
