"""Slots: what packed keys and values look like in memory and in files. `packing` has the description.

Imports no PyTorch: reading what a file holds needs none.
"""

from __future__ import annotations

from dataclasses import dataclass

GROUP = 64
"""Tokens whose values of one channel share their largest exponent."""

FARTHEST = 15
"""How far below the largest exponent of its group the exponent of a value may be without being an exception."""

VALUES_PER_EXCEPTION = 512
"""Values of a block for which its slot has room for one exception."""

_ALIGNMENT = 64
"""Bytes that slots are a multiple of: a line of the processor's caches."""


@dataclass(frozen=True)
class Layout:
    """Where things are in the slot of a block of this shape: offsets in bytes.

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
        """Values of the block."""
        return self.num_kv_heads * self.tokens * self.head_dim

    @property
    def tiles(self) -> int:
        """`GROUP` tokens of one head with all channels: their exceptions follow one another."""
        return self.num_kv_heads * self.tokens // GROUP

    @property
    def capacity(self) -> int:
        """Exceptions that there is room for."""
        return self.values // VALUES_PER_EXCEPTION

    @property
    def below(self) -> int:
        """Offset of the distances to the largest exponent, half a byte each, behind a byte for each value."""
        return self.values

    @property
    def starts(self) -> int:
        """Offset of `tiles + 1` words of 32 bits: the number of exceptions before each tile, and in all."""
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
        """Bytes of a slot."""
        return -(-(self.largest + self.values // GROUP) // _ALIGNMENT) * _ALIGNMENT
