"""States as rows of a segment's file, where the numbers of a head are in two halves, as its keys and values are."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .contents import STATE_ROW, StatesShape


def as_rows(numbers: Tensor) -> Tensor:
    """The numbers `[key_heads, any]` of a layer as `[2, key_heads, rows, STATE_ROW]`, with zeros behind them."""
    missing = -numbers.shape[1] % (2 * STATE_ROW)
    return F.pad(numbers, (0, missing)).view(len(numbers), 2, -1, STATE_ROW).transpose(0, 1)


def empty_rows(shape: StatesShape, key_heads: int) -> Tensor:
    """Memory for what `as_rows` gives of so many key heads."""
    return torch.empty(key_heads, 2, shape.rows, STATE_ROW).transpose(0, 1)


def from_rows(rows: Tensor, shape: StatesShape) -> Tensor:
    """The numbers that `as_rows` was given."""
    return rows.transpose(0, 1).flatten(1)[:, : shape.numbers]
