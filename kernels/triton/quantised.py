"""Products of few rows with a matrix in four or eight bits on NVIDIA GPUs, in Triton: its numbers are made in the tile;
and the numbers themselves.

A program of a product has some outputs and up to `TILE_ROWS` rows, and goes through the inputs in order, so the bits of
a row do not depend on what other rows there are, nor on how many. Nothing here waits for the GPU, so a call can be
captured in a CUDA graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from ..quantised import GroupedMatrix

TILE_ROWS, TILE_OUTPUTS, TILE_INPUTS = 32, 32, 64
"""Of a program, at a time; the inputs in two halves, the even and the odd ones."""

NUM_WARPS, REGISTERS = 4, 168
"""Left to itself the assembler takes fewer registers and spills some."""

_NIBBLES: tl.constexpr = tl.constexpr(0)
_FLOAT8: tl.constexpr = tl.constexpr(3)
"""Of `GroupedMatrix.kind` those that are no numbers in a byte each."""


def product_triton(x: Tensor, matrix: GroupedMatrix) -> Tensor:
    """`x` `[n, inputs]`, contiguous, times a matrix `[outputs, inputs]`: `[n, outputs]`, float32."""
    n, outputs = x.shape[0], matrix.shape[0]
    out = x.new_empty(n, outputs, dtype=torch.float32)
    if n == 0:
        return out
    given, constants = _described(matrix)
    kernel: Any = _product_kernel
    with torch.cuda.device_of(x):
        kernel[triton.cdiv(outputs, TILE_OUTPUTS), triton.cdiv(n, TILE_ROWS)](
            *given, x, out, n, x.stride(0), ROWS=TILE_ROWS, **constants
        )
    return out


def expand_triton(matrix: GroupedMatrix, out: Tensor) -> None:
    """Writes the numbers of a matrix to `out` `[outputs, inputs]`, contiguous."""
    outputs, inputs = matrix.shape
    given, constants = _described(matrix)
    kernel: Any = _expand_kernel
    with torch.cuda.device_of(out):
        kernel[triton.cdiv(outputs, TILE_OUTPUTS), triton.cdiv(inputs, TILE_INPUTS)](*given, out, **constants)


def _described(matrix: GroupedMatrix) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What both kernels are told of a matrix: the first arguments, and what they are compiled for."""
    (outputs, inputs), groups = matrix.shape, matrix.scales.shape[1]
    values = matrix.values.view(torch.uint8) if matrix.values.dtype == torch.float8_e4m3fn else matrix.values
    zeros, group_of, scales = matrix.zeros, matrix.group_of, matrix.scales
    same = isinstance(zeros, int)
    places = values, scales, scales if same else zeros, scales if group_of is None else group_of
    sizes = inputs, outputs, groups, inputs // groups, values.stride(0)
    constants = {"KIND": matrix.kind, "ZEROS": not same, "ORDERED": group_of is not None}
    tile = {"OUTPUTS": TILE_OUTPUTS, "HALF": TILE_INPUTS // 2, "num_warps": NUM_WARPS, "maxnreg": REGISTERS}
    return (*places, float(zeros) if same else 0.0, *sizes), constants | tile


@triton.jit
def _float8(byte):
    """What a byte stands for in e4m3, float32."""
    magnitude = byte & 127
    number = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    number = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, number)
    number = tl.where(magnitude == 127, float("nan"), number)
    return tl.where(byte > 127, -number, number)


@triton.jit
def _rounded(x):
    """The nearest bfloat16, ties to even, in float32. Triton's interpreter cuts off what a GPU rounds."""
    bits = x.to(tl.uint32, bitcast=True)
    bits += 0x7FFF + ((bits >> 16) & 1)
    return tl.where(x == x, ((bits >> 16) << 16).to(tl.float32, bitcast=True), x)  # all bits of a NaN may be set


@triton.jit
def _numbers(
    values, scales, zeros, group_of, zero, outputs, inputs, there, value_stride, groups, size,
    KIND: tl.constexpr, ZEROS: tl.constexpr, ORDERED: tl.constexpr, ODD: tl.constexpr,
):  # fmt: skip
    """Of some inputs and outputs, `[inputs, outputs]` in float32; of no use where they are not `there`."""
    if KIND == _NIBBLES:
        byte = tl.load(values + outputs[None, :] * value_stride + (inputs // 2)[:, None], mask=there, other=0)
        byte = byte.to(tl.int32)
        value = ((byte >> 4) if ODD else (byte & 15)).to(tl.float32)
    else:
        held = tl.load(values + outputs[None, :] * value_stride + inputs[:, None], mask=there, other=0)
        value = _float8(held.to(tl.int32)) if KIND == _FLOAT8 else held.to(tl.float32)
    group = tl.load(group_of + inputs).to(tl.int32) if ORDERED else inputs // size
    place = outputs[None, :] * groups + group[:, None]
    scale = tl.load(scales + place, mask=there, other=0.0).to(tl.float32)
    if ZEROS:
        return (value - tl.load(zeros + place, mask=there, other=0).to(tl.float32)) * scale
    return (value - zero) * scale


@triton.jit(do_not_specialize=["zero", "n"])
def _product_kernel(
    values,  # see GroupedMatrix
    scales,  # [outputs, groups]
    zeros,  # [outputs, groups], if ZEROS
    group_of,  # [inputs], if ORDERED
    zero,
    inputs,
    outputs,
    groups,
    size,
    value_stride,
    x,  # [n, inputs]
    out,  # [n, outputs]
    n,
    row_stride,
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    ORDERED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    HALF: tl.constexpr,
):
    first = (tl.program_id(0) * OUTPUTS).to(tl.int64)  # what lies within the tile is counted from there, in 32 bits
    values += first * value_stride
    scales += first * groups
    zeros += first * groups
    output = tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    outputs_left = (outputs - first).to(tl.int32)
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, inputs, 2 * HALF):
        for odd in tl.static_range(2):  # pyright: ignore[reportGeneralTypeIssues]
            place = start + 2 * tl.arange(0, HALF) + odd
            inside = place < inputs
            last = tl.minimum(place, inputs - 1)  # what is behind it is read from there, and multiplied by 0
            there = inside[:, None] & (output < outputs_left)[None, :]
            numbers = _numbers(
                values, scales, zeros, group_of, zero, output, last, there, value_stride, groups, size,
                KIND, ZEROS, ORDERED, odd == 1,
            )  # fmt: skip
            known = (row < n)[:, None] & inside[None, :]
            part = tl.load(x + row[:, None] * row_stride + place[None, :], mask=known, other=0.0)
            numbers = tl.where(there, numbers, 0.0)
            if part.dtype == tl.bfloat16:
                numbers = _rounded(numbers)
            numbers = numbers.to(part.dtype)
            total = tl.dot(part, numbers, total, input_precision="ieee")
    known = (row < n)[:, None] & (output < outputs_left)[None, :]
    tl.store(out + first + row.to(tl.int64)[:, None] * outputs + output[None, :], total, mask=known)


@triton.jit(do_not_specialize=["zero"])
def _expand_kernel(
    values,  # see _product_kernel
    scales,
    zeros,
    group_of,
    zero,
    inputs,
    outputs,
    groups,
    size,
    value_stride,
    out,  # [outputs, inputs]
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    ORDERED: tl.constexpr,
    OUTPUTS: tl.constexpr,
    HALF: tl.constexpr,
):
    first = (tl.program_id(0) * OUTPUTS).to(tl.int64)
    values += first * value_stride
    scales += first * groups
    zeros += first * groups
    out += first * inputs
    output = tl.arange(0, OUTPUTS)
    outputs_left = (outputs - first).to(tl.int32)
    for odd in tl.static_range(2):  # pyright: ignore[reportGeneralTypeIssues]
        place = tl.program_id(1) * 2 * HALF + 2 * tl.arange(0, HALF) + odd
        there = (place < inputs)[:, None] & (output < outputs_left)[None, :]
        numbers = _numbers(
            values, scales, zeros, group_of, zero, output, tl.minimum(place, inputs - 1), there, value_stride, groups,
            size, KIND, ZEROS, ORDERED, odd == 1,
        )  # fmt: skip
        if out.dtype.element_ty == tl.bfloat16:
            numbers = _rounded(numbers)
        tl.store(out + output[None, :] * inputs + place[:, None], numbers.to(out.dtype.element_ty), mask=there)
