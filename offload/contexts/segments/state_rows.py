"""Converts states to the rows of a segment's file and back. The values of a head fill two halves, like keys and
values."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .contents import STATE_ROW, StatesShape


def as_rows(numbers: Tensor) -> Tensor:
    """The values `[key_heads, any]` of a layer as `[2, key_heads, rows, STATE_ROW]`, padded with zeros."""
    missing = -numbers.shape[1] % (2 * STATE_ROW)
    return F.pad(numbers, (0, missing)).view(len(numbers), 2, -1, STATE_ROW).transpose(0, 1)


def empty_rows(shape: StatesShape, key_heads: int) -> Tensor:
    """Uninitialised memory for the result of `as_rows` for `key_heads` key heads."""
    return torch.empty(key_heads, 2, shape.rows, STATE_ROW).transpose(0, 1)


def from_rows(rows: Tensor, shape: StatesShape) -> Tensor:
    """The inverse of `as_rows`: the values `[key_heads, numbers]`."""
    return rows.transpose(0, 1).flatten(1)[:, : shape.numbers]
