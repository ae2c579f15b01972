"""Rotary position embedding in the half-split layout of Hugging Face's Llama (RoFormer, arXiv 2104.09864)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..kernels.layers import rotate
from .model.rope_scaling import RopeConfig

RopeRows = tuple[Tensor, Tensor]
"""Cosines and signed sines of `n` positions, each `[n, head_dim]`, float32."""


_PIECE = 65536
"""Positions whose angles are computed together, which bounds the memory that takes beside the table itself."""


def rope_bytes(head_dim: int, positions: int) -> int:
    """Bytes of the table for so many positions."""
    return 2 * 4 * head_dim * positions


class Rope:
    """Rotates queries and keys by position, with a table of cosines and sines that grows with the positions in use.

    Angles and the rotation itself are float32 whatever the model's dtype; the result has the input's dtype.

    With dynamic scaling a token's rotation depends on the length of the sequence when the token is added: all tokens of
    a prompt are added together, later ones one by one. `begin` sets the prompt's length, from which the rotation at
    every position follows, however many tokens are drafted and however many a pass has.
    """

    def __init__(self, head_dim: int, config: RopeConfig, device: torch.device) -> None:
        self._head_dim, self._config, self._device = head_dim, config, device
        self._prompt_length = 0
        self._cos = self._sin = torch.empty(0, head_dim, device=device)

    def begin(self, prompt_length: int) -> bool:
        """Sets the number of tokens of the prompt; returns whether that changes rotations, so that keys rotated before
        must not be used again, which only dynamic scaling can cause."""
        changes = self.changes_with(prompt_length)
        self._prompt_length = prompt_length
        if not changes:
            return False
        rows = self._cos.shape[0]
        self._cos = self._sin = self._cos[:0]
        self.reserve(rows)
        return True

    def changes_with(self, prompt_length: int) -> bool:
        """Whether a prompt of this length would be rotated otherwise than the one that was begun with."""
        original = self._config.original_positions
        lengths = max(prompt_length, original), max(self._prompt_length, original)
        return self._config.type == "dynamic" and lengths[0] != lengths[1]

    def reserve(self, positions: int) -> None:
        """Extends the table to all positions below `positions`; after a call for the whole context it grows no more."""
        if positions <= self._cos.shape[0]:
            return
        lengths = torch.arange(1, positions + 1)
        lengths[: self._prompt_length] = self._prompt_length
        cos, sin = (torch.empty(positions, self._head_dim, device=self._device) for _ in range(2))
        for first in range(0, positions, _PIECE):
            piece = slice(first, first + _PIECE)
            self._fill(first, lengths[piece], cos[piece], sin[piece])
        self._cos, self._sin = cos, sin

    def _fill(self, first: int, lengths: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Writes rows `[n, head_dim]` of the table, from position `first` on; `lengths`: see `inverse_frequencies`."""
        frequencies = self._config.inverse_frequencies(self._head_dim, lengths).to(self._device)
        positions = torch.arange(first, first + len(lengths), device=self._device)
        angles = positions.float().unsqueeze(1) * frequencies  # [n, head_dim / 2]
        half = self._head_dim // 2
        torch.mul(angles.cos(), self._config.attention_factor, out=cos[:, :half])
        torch.mul(angles.sin(), self._config.attention_factor, out=sin[:, half:])
        cos[:, half:] = cos[:, :half]
        # The table includes the sign of rotate_half, so that a rotation is a roll and two products.
        torch.neg(sin[:, half:], out=sin[:, :half])

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """The table, as the part `rope` of what a run holds."""
        yield from (("rope", table) for table in (self._cos, self._sin))

    def rows(self, start: int, n: int) -> RopeRows:
        """The table's rows for positions `start`, `start + 1`, ..."""
        if start + n > self._cos.shape[0]:
            self.reserve(max(start + n, 2 * self._cos.shape[0]))
        return self._cos[start : start + n], self._sin[start : start + n]

    def rotate(self, x: Tensor, start: int | RopeRows, out: Tensor | None = None) -> Tensor:
        """Rotates `x` `[heads, n, head_dim]`, whose rows have the positions `start`, `start + 1`, ..., into `out` if
        given.

        `start` may also be the table's rows for these positions, where the host does not know the positions.
        """
        return rotate(x, *self.angles(start, x.shape[1]), out)

    def angles(self, start: int | RopeRows, n: int) -> RopeRows:
        """What `rotate` turns `n` rows by."""
        return self.rows(start, n) if isinstance(start, int) else start

    def rotate_to(self, x: Tensor, position: int) -> Tensor:
        """Rotates every row of `x` `[heads, n, head_dim]` to the one `position`."""
        self.reserve(position + 1)
        return rotate(x, self._cos[position], self._sin[position])
