"""Reads rows of a matrix in page-locked host memory from an NVIDIA GPU, in Triton. See `host_rows`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .attention import ceil_div
from .launch import launch

TILE_WIDTH = 1024
"""How many numbers of a row a program reads."""


def rows_triton(matrix: Tensor, ids: Tensor) -> Tensor:
    """`host_rows.rows_from_host` in Triton, which asks CUDA for the GPU's address of page-locked memory."""
    n, width = len(ids), matrix.shape[1]
    assert matrix.is_contiguous()
    out = ids.new_empty(n, width, dtype=matrix.dtype)
    if n:
        # Only the first dimension may have more than 65,535 programs, so it is that of the rows.
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
