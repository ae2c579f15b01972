"""Products of few rows with matrices in few bits on NVIDIA GPUs, in Triton: the part that all kinds of matrices share.

A program computes some outputs of up to `TILE_ROWS` rows for a part of the inputs, which it goes through in order.
Another kernel adds up the parts, in order. The parts depend only on the matrix, so the bits of a row do not depend on
the other rows or on their number. Nothing here waits for the GPU, so a call can be captured in a CUDA graph.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention import ceil_div
from .launch import launch

if TYPE_CHECKING:
    from ..quantised import Choice, QuantisedMatrix

TILE_ROWS = 16

PROGRAMS, LEAST_INPUTS = 640, 512
"""The inputs are divided into parts until a product has `PROGRAMS` programs, which keeps all multiprocessors of a GPU
busy. But a part has at least `LEAST_INPUTS` inputs."""

ROWS_AT_ONCE = 32
"""How many rows, or products with chosen matrices, have their sums of parts in memory at a time."""

TILE_SUMS = 1024
"""The number of outputs of a program that adds up parts."""

_INTERPRETED: tl.constexpr = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def product_triton(
    x: Tensor, matrix: QuantisedMatrix, bias: Tensor | None = None, onto: Tensor | None = None
) -> Tensor:
    """The product of `x` `[n, inputs]`, contiguous, with a matrix `[outputs, inputs]`, plus a bias `[outputs]`, in
    `x`'s dtype; see `layers.linear` for `onto`."""
    out = x.new_empty(x.shape[0], matrix.shape[0]) if onto is None else onto
    if len(x) == 0:
        return out
    for some, out_of_some in zip(x.split(ROWS_AT_ONCE), out.split(ROWS_AT_ONCE), strict=True):
        _finish(matrix.sums_triton(some), bias, out_of_some, add=onto is not None)
    return out


def chosen_triton(x: Tensor, matrix: QuantisedMatrix, choice: Choice) -> Tensor:
    """See `kernels.quantised.chosen_products`; `x` is contiguous."""
    out = x.new_empty(len(choice.ids), choice.outputs)
    if len(x):
        rows = max(1, ROWS_AT_ONCE // choice.each)
        pieces = zip(x.split(rows), choice.ids.split(rows * choice.each), out.split(rows * choice.each), strict=True)
        for some, ids, out_of_some in pieces:
            _finish(matrix.sums_triton(some, replace(choice, ids=ids)), None, out_of_some, add=False)
    return out


def _finish(sums: Tensor, bias: Tensor | None, out: Tensor, *, add: bool) -> None:
    """Adds up the sums of parts `[parts, n, outputs]` and the bias, and writes the result to `out` `[n, outputs]`, or
    adds it to `out`."""
    parts, n, outputs = sums.shape
    launch(
        _finish_kernel, (ceil_div(outputs, TILE_SUMS), n),
        sums, sums if bias is None else bias, out, outputs, n * outputs, out.stride(0), parts,
        BIAS=bias is not None, ADD=add, OUTPUTS=TILE_SUMS,
    )  # fmt: skip


def sums_of(
    x: Tensor, shape: tuple[int, int], of_program: int, choice: Choice | None
) -> tuple[Tensor, int, tuple[int, int, int]]:
    """Allocates the sums for the product of `x` `[n, inputs]` with a matrix `[outputs, inputs]`, or with chosen
    matrices in it.

    Args:
        of_program: the number of outputs of a program.

    Returns:
        The sums, float32 `[parts, n, outputs]`; the number of inputs of a part; and the numbers of programs.
    """
    (outputs, inputs), n = shape, len(x)
    if choice:  # parts, and so bits, are the same as for a product with the chosen matrix alone
        outputs, n = choice.outputs, len(choice.ids)
    tiles = ceil_div(outputs, of_program)
    part = ceil_div(ceil_div(inputs, ceil_div(PROGRAMS, tiles)), LEAST_INPUTS) * LEAST_INPUTS
    sums = torch.empty(ceil_div(inputs, part), n, outputs, dtype=torch.float32, device=x.device)
    return sums, part, (tiles, n if choice else ceil_div(n, TILE_ROWS), len(sums))


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """Rounds to the nearest numbers of a dtype, ties to even. Triton's interpreter truncates to bfloat16, where a GPU
    rounds."""
    if _INTERPRETED and DTYPE == tl.bfloat16:  # noqa: SIM300
        bits = x.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        x = tl.where(x == x, ((bits >> 16) << 16).to(tl.float32, bitcast=True), x)  # all bits of a NaN may be set
    return x.to(DTYPE)


@triton.jit
def loaded(pointers, there, WHOLE: tl.constexpr):
    """Loads from `pointers`; 0 where `there` is false. With WHOLE, `there` is true everywhere."""
    if WHOLE:  # noqa: SIM108 (Triton compiles both sides of an expression)
        found = tl.load(pointers)
    else:
        found = tl.load(pointers, mask=there, other=0)
    return found


@triton.jit
def rows_of_program(n, ROWS: tl.constexpr, EACH: tl.constexpr):
    """The results `[ROWS]` that a program of a product computes, the rows of `x` that they belong to, and whether they
    exist. If EACH matrices are chosen for a row, a program computes one result."""
    place = tl.arange(0, ROWS)
    if EACH == 0:
        result = tl.program_id(1) * ROWS + place
        of_row = result
        there = result < n
    else:
        result = tl.program_id(1) + place
        of_row = result // EACH
        there = place < 1
    return result, of_row, there


@triton.jit
def first_output(ids, outputs, OUTPUTS: tl.constexpr, EACH: tl.constexpr):
    """The first output of a program, counted in its matrix and in the larger matrix that contains it, in 64 bits.
    Places in the tile are counted from it, in 32 bits."""
    first = (tl.program_id(0) * OUTPUTS).to(tl.int64)
    held = first
    if EACH > 0:
        held += tl.load(ids + tl.program_id(1)) * outputs
    return first, held


@triton.jit(do_not_specialize=["parts"])
def _finish_kernel(
    sums,  # [parts, n, outputs]
    bias,  # [outputs], if BIAS
    out,  # [n, outputs]
    outputs,
    part_stride,
    row_stride,
    parts,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    there = output < outputs
    total = tl.zeros([OUTPUTS], tl.float32)
    sums += row * outputs
    for _ in range(parts):
        total += tl.load(sums + output, mask=there, other=0.0)
        sums += part_stride
    if BIAS:
        total += tl.load(bias + output, mask=there, other=0.0).to(tl.float32)
    DTYPE: tl.constexpr = out.dtype.element_ty
    product = rounded(total, DTYPE)
    if ADD:
        before = tl.load(out + row * row_stride + output, mask=there, other=0.0).to(tl.float32)
        product = rounded(before + product.to(tl.float32), DTYPE)
    tl.store(out + row * row_stride + output, product, mask=there)
