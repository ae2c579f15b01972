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
    """Of queries, keys and values, of the gate of the output, of beta, and of the decay. The first two may be in one,
    and the last two; what belongs to a key head is then together there."""

    @classmethod
    def of(cls, *inputs: str) -> LinearNames:
        """By what distinguishes them.

        Raises:
            ValueError: no model has such.
        """
        if inputs not in _INPUTS:
            raise ValueError(f"linear_inputs {inputs} (known: {', '.join(map(str, _INPUTS))})")
        return cls(tuple(f"linear_attn.in_proj_{name}" for name in inputs))

    @property
    def joint_gate(self) -> bool:
        """Whether queries, keys, values and the gate of the output are in one."""
        return len(self.inputs) == 2

    @property
    def joint_decay(self) -> bool:
        """Whether beta and the decay are in one."""
        return len(self.inputs) < 4


_INPUTS = ("qkv", "z", "b", "a"), ("qkvz", "ba"), ("qkv", "z", "ba")


@dataclass(frozen=True)
class LinearAttention:
    """The layers of a model that have it, and their shape; of a rank's part, its heads."""

    layers: tuple[int, ...]
    """Their numbers, ascending."""
    key_heads: int
    """Of queries, too."""
    value_heads: int
    """A multiple: neighbouring ones have a key head together, unless they are `tiled`, and each has a state."""
    key_dim: int
    value_dim: int
    kernel: int
    """Tokens that the convolution sees, the last one itself."""
    names: LinearNames
    tiled: bool = False
    """Whether value head `i` has the key head `i % key_heads`, as in GGUF files of Qwen3.5."""
    plain_decay: bool = False
    """Whether the tensor `A_log` has the decay itself, below 0, as in GGUF files; else the logarithm of its size."""

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

    def value_heads_of(self, key_heads: slice) -> tuple[slice, ...]:
        """Those that have some neighbouring key heads, as runs of neighbours, in the order of the file."""
        together, first, stop = self.value_heads // self.key_heads, key_heads.start, key_heads.stop
        if not self.tiled or stop - first == self.key_heads:
            return (slice(first * together, stop * together),)
        return tuple(slice(i * self.key_heads + first, i * self.key_heads + stop) for i in range(together))

    @property
    def by_key_head(self) -> list[int]:
        """The value heads, those of the first key head first."""
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
    """What a `config.json` says of it. One that is made of a GGUF file has further keys: `linear_inputs`,
    `linear_tiled` and `linear_plain_decay`.

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
