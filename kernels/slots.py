"""Slots: the layout of packed keys and values in memory and in files. `packing` describes it.

Imports no PyTorch, so that files can be inspected without it.
"""

from __future__ import annotations

from dataclasses import dataclass

GROUP = 64
"""Tokens whose values of one channel share their largest exponent."""

FARTHEST = 15
"""Maximum distance of a value's exponent from the largest exponent of its group. A value beyond it is an exception."""

VALUES_PER_EXCEPTION = 512
"""Number of values of a block for each exception that its slot has room for."""

_ALIGNMENT = 64
"""The size of a slot is a multiple of this number of bytes: a line of the processor's caches."""


@dataclass(frozen=True)
class Layout:
    """The layout of the slot of a block of this shape. Offsets are in bytes.

    Raises:
        ValueError: `tokens` is not a multiple of 64, or the block has 2³¹ values or more.
    """

    num_kv_heads: int
    tokens: int
    head_dim: int

    def __post_init__(self) -> None:
        if self.tokens % GROUP:
            raise ValueError(f"a block of {self.tokens} tokens cannot be packed: not a multiple of {GROUP}")
        if self.values >= 2**31:
            raise ValueError(f"a block of {self.values} values cannot be packed: 2^31 or more")

    @property
    def values(self) -> int:
        """Number of values of the block."""
        return self.num_kv_heads * self.tokens * self.head_dim

    @property
    def tiles(self) -> int:
        """Number of tiles. A tile is `GROUP` tokens of one head with all channels; its exceptions are adjacent."""
        return self.num_kv_heads * self.tokens // GROUP

    @property
    def capacity(self) -> int:
        """Maximum number of exceptions."""
        return self.values // VALUES_PER_EXCEPTION

    @property
    def below(self) -> int:
        """Offset of the distances to the largest exponent, half a byte each. Before them is one byte for each value."""
        return self.values

    @property
    def starts(self) -> int:
        """Offset of `tiles + 1` words of 32 bits: the number of exceptions before each tile, and the total."""
        return self.below + self.values // 2

    @property
    def exceptions(self) -> int:
        """Offset of the exceptions, a word of 32 bits each."""
        return self.starts + 4 * (self.tiles + 1)

    @property
    def largest(self) -> int:
        """Offset of each group's largest exponent, a byte each."""
        return self.exceptions + 4 * self.capacity

    @property
    def slot_bytes(self) -> int:
        """Size of a slot in bytes."""
        return -(-(self.largest + self.values // GROUP) // _ALIGNMENT) * _ALIGNMENT
