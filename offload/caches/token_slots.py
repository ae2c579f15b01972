"""The places of a pass's tokens in a cache's buffer: numbers, or tensors if the pass is captured and replayed."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...kernels.layers import put, rotate
from ...tp.rope import Angles, RopeRows


class TokenSlots(NamedTuple):
    """The rotation and the buffer slots of `n` consecutive tokens.

    A captured pass runs the same kernels on the same addresses each time. So everything that depends on the position
    must be in memory that the kernels read: the tensors here, which are set before each replay (see `graphs`).
    """

    rotation: int | RopeRows
    """The rotation of queries and keys: the position of the first token, or the rows of RoPE's tables."""
    slot: int | Tensor
    """The slot of the first token, or the slots of all tokens, `[n]` int64."""

    @property
    def diagonal(self) -> int | Tensor:
        """The last slot to which the first token attends: its own."""
        return self.slot if isinstance(self.slot, int) else self.slot[0]

    def put(self, buffer: Tensor, rows: Tensor, angles: Angles | None = None) -> None:
        """Writes `rows` `[heads, n, head_dim]` to their slots of `buffer` `[heads, slots, head_dim]`. If `angles` are
        given, rotates them."""
        if isinstance(self.slot, int):
            place = buffer[:, self.slot : self.slot + rows.shape[1]]
            if angles:
                rotate(rows, *angles, place)
            else:
                place.copy_(rows)
        else:
            put(rows, buffer, self.slot, angles)
