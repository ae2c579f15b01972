"""Rows of a matrix in page-locked host memory, read by NVIDIA GPUs in Triton. See `host_rows`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .attention import ceil_div
from .launch import launch

TILE_WIDTH = 1024
"""Numbers of a row that a program reads."""


def rows_triton(matrix: Tensor, ids: Tensor) -> Tensor:
    """`host_rows.rows_from_host`. Triton asks CUDA for the address by which a GPU knows page-locked memory."""
    n, width = len(ids), matrix.shape[1]
    assert matrix.is_contiguous()
    out = ids.new_empty(n, width, dtype=matrix.dtype)
    if n:
        # Of so many rows there may be more than the 65,535 programs of any but the first dimension.
        grid, tile = (n, ceil_div(width, TILE_WIDTH)), {"TILE_WIDTH": TILE_WIDTH, "num_warps": 4}
        launch(_rows_kernel, grid, out, matrix, ids.contiguous(), width, **tile)
    return out


@triton.jit
def _rows_kernel(
    out,  # [n, width]
    matrix,  # [outputs, width]
    ids,  # [n], int64
    width,
    TILE_WIDTH: tl.constexpr,
):
    place = tl.program_id(0)
    at = tl.program_id(1) * TILE_WIDTH + tl.arange(0, TILE_WIDTH)
    there = at < width
    row = tl.load(matrix + tl.load(ids + place) * width + at, mask=there)
    tl.store(out + place.to(tl.int64) * width + at, row, mask=there)
