"""Linear attention: layers that keep a state of fixed size instead of keys and values.

It is the gated delta rule (arXiv 2412.06464) with a short convolution before it, as in Qwen3-Next and Qwen3.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class LinearNames:
    """The names that a family gives to the projections of a layer with linear attention, without the layer's prefix."""

    inputs: tuple[str, ...]
    """The projections of queries, keys and values; of the gate of the output; of beta; and of the decay. The first two
    may be joined into one, and so may the last two. The outputs for a key head are then adjacent."""

    @classmethod
    def of(cls, *inputs: str) -> LinearNames:
        """Makes the names from the endings that distinguish them.

        Raises:
            ValueError: no supported model has these projections.
        """
        if inputs not in _INPUTS:
            raise ValueError(f"linear_inputs {inputs} (known: {', '.join(map(str, _INPUTS))})")
        return cls(tuple(f"linear_attn.in_proj_{name}" for name in inputs))

    @property
    def joint_gate(self) -> bool:
        """Whether queries, keys, values and the gate of the output have one projection."""
        return len(self.inputs) == 2

    @property
    def joint_decay(self) -> bool:
        """Whether beta and the decay have one projection."""
        return len(self.inputs) < 4


_INPUTS = ("qkv", "z", "b", "a"), ("qkvz", "ba"), ("qkv", "z", "ba")


@dataclass(frozen=True)
class LinearAttention:
    """The layers of a model with linear attention, and their shape. For a rank's part, the heads are those of the
    rank."""

    layers: tuple[int, ...]
    """The numbers of the layers, in ascending order."""
    key_heads: int
    """The number of key heads, and of query heads."""
    value_heads: int
    """The number of value heads, a multiple of `key_heads`. Neighbouring value heads share a key head, unless they are
    `tiled`. Each value head has a state."""
    key_dim: int
    value_dim: int
    kernel: int
    """The number of tokens that the convolution sees, including the present token."""
    names: LinearNames
    tiled: bool = False
    """Whether value head `i` has the key head `i % key_heads`, as in GGUF files of Qwen3.5."""
    plain_decay: bool = False
    """Whether the tensor `A_log` contains the decay itself, below 0, as in GGUF files. Otherwise it contains the
    logarithm of its absolute value."""

    def __post_init__(self) -> None:
        """Checks the shape.

        Raises:
            ValueError: no model can have this shape.
        """
        sizes = self.key_heads, self.value_heads, self.key_dim, self.value_dim, self.kernel - 1
        if min(sizes) < 1 or self.value_heads % self.key_heads:
            raise ValueError(
                f"linear attention with {self.key_heads} key heads and {self.value_heads} value heads (which must be a "
                f"multiple), {self.key_dim} and {self.value_dim} wide, and a convolution over {self.kernel} tokens"
            )

    def value_heads_of(self, key_heads: slice) -> tuple[slice, ...]:
        """The value heads of some neighbouring key heads, as runs of neighbours, in the order of the file."""
        together, first, stop = self.value_heads // self.key_heads, key_heads.start, key_heads.stop
        if not self.tiled or stop - first == self.key_heads:
            return (slice(first * together, stop * together),)
        return tuple(slice(i * self.key_heads + first, i * self.key_heads + stop) for i in range(together))

    @property
    def by_key_head(self) -> list[int]:
        """The numbers of the value heads, sorted by their key heads."""
        heads = range(self.value_heads)
        return sorted(heads, key=lambda head: head % self.key_heads) if self.tiled else list(heads)

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
        """Width of the inputs of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """The shape of a layer's state, which is float32: `[value_heads, key_dim, value_dim]`."""
        return self.value_heads, self.key_dim, self.value_dim

    @property
    def key_head_numbers(self) -> int:
        """How many numbers of a layer's state, and of the earlier tokens' inputs of the convolution, belong to one key
        head."""
        heads, key_dim, value_dim = self.state_shape
        return (heads * key_dim * value_dim + (self.kernel - 1) * self.channels) // self.key_heads

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one state for each of the layers, with the earlier tokens' inputs of the convolution in `dtype`."""
        heads, key_dim, value_dim = self.state_shape
        past = (self.kernel - 1) * self.channels * dtype.itemsize
        return len(self.layers) * (4 * heads * key_dim * value_dim + past)

    def row_bytes(self, dtype: torch.dtype) -> int:
        """Bytes that are kept for a token in all layers, so that the token can be removed: its inputs of the
        convolution, beta and decay, in `dtype`."""
        return len(self.layers) * (self.channels + 2 * self.value_heads) * dtype.itemsize


def linear_attention(names: LinearNames | None, raw: Mapping[str, Any], num_layers: int) -> LinearAttention | None:
    """Reads the linear attention of a model from its `config.json`; `None` if no layer has it.

    The `config.json` that is made for a GGUF file has additional keys: `linear_inputs`, `linear_tiled` and
    `linear_plain_decay`.

    Args:
        names: those of the family; `None` if it has no linear attention.
        raw: the content of `config.json`.

    Raises:
        KeyError, TypeError, ValueError: a value is missing or impossible.
    """
    if names is None:
        return None
    every = int(raw.get("full_attention_interval") or 4)
    types = raw.get("layer_types") or [
        "linear_attention" if (layer + 1) % every else "full_attention" for layer in range(num_layers)
    ]
    if len(types) != num_layers or not set(types) <= {"linear_attention", "full_attention"}:
        kinds = ", ".join(sorted(map(str, set(types))))
        raise ValueError(
            f"{len(types)} layer_types for {num_layers} layers, of them {kinds} (known: linear_attention, "
            "full_attention; one a layer)"
        )
    layers = tuple(layer for layer, kind in enumerate(types) if kind == "linear_attention")
    if len(layers) == num_layers:
        raise ValueError("layer_types without full_attention, which a text of any length needs")
    if not layers:
        return None
    key_heads, value_heads = int(raw["linear_num_key_heads"]), int(raw["linear_num_value_heads"])
    return LinearAttention(
        layers,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=int(raw["linear_key_head_dim"]),
        value_dim=int(raw["linear_value_head_dim"]),
        kernel=int(raw["linear_conv_kernel_dim"]),
        names=LinearNames.of(*raw["linear_inputs"]) if "linear_inputs" in raw else names,
        tiled=bool(raw.get("linear_tiled")) and value_heads != key_heads,
        plain_decay=bool(raw.get("linear_plain_decay")),
    )
