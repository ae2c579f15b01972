"""Rotary position embedding in the half-split layout of Hugging Face's Llama (RoFormer, arXiv 2104.09864)."""

from __future__ import annotations

import torch
from torch import Tensor


class Rope:
    """Rotates queries and keys by position, from a table of cosines and sines that grows as positions do.

    Angles and the rotation itself are float32 whatever the model's dtype; the result has the input's dtype.
    """

    def __init__(self, head_dim: int, theta: float, device: torch.device) -> None:
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        self._inverse_frequencies = (1.0 / theta**exponents).to(device)  # [head_dim / 2]
        self._cos = self._sin = torch.empty(0, head_dim, device=device)

    def reserve(self, positions: int) -> None:
        """Makes the table hold positions below `positions`; called for the whole context, it never grows again."""
        if positions <= self._cos.shape[0]:
            return
        angles = torch.outer(
            torch.arange(positions, device=self._cos.device).float(), self._inverse_frequencies
        )  # [positions, head_dim / 2]
        self._cos = torch.cat((angles.cos(), angles.cos()), dim=-1)
        # The sign of rotate_half lives in the table, so that a rotation is a roll and two products.
        self._sin = torch.cat((-angles.sin(), angles.sin()), dim=-1)

    def rotate(self, x: Tensor, start: int) -> Tensor:
        """Rotates `x` `[heads, n, head_dim]`, whose rows stand at positions `start`, `start + 1`, ..."""
        n, head_dim = x.shape[-2:]
        if start + n > self._cos.shape[0]:
            self.reserve(max(start + n, 2 * self._cos.shape[0]))
        cos, sin = self._cos[start : start + n], self._sin[start : start + n]
        return torch.addcmul(x * cos, x.roll(head_dim // 2, dims=-1), sin).to(x.dtype)

    def rotate_to(self, x: Tensor, position: int) -> Tensor:
        """Rotates every row of `x` `[heads, n, head_dim]` to the one `position`."""
        self.reserve(position + 1)
        cos, sin = self._cos[position], self._sin[position]
        return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin).to(x.dtype)
