"""Matrices of groups in four or eight bits on NVIDIA GPUs, in Triton: products with few rows, which expand the numbers
of the matrix in the tile (see `quantised.py`), and the expansion of a matrix."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention import ceil_div
from .launch import launch
from .quantised import TILE_ROWS, TYPES, first_output, loaded, rounded, rows_of_program, sums_of

if TYPE_CHECKING:
    from ..quantised import Choice, GroupedMatrix

TILE_OUTPUTS, TILE_BYTES = 128, 64
"""The outputs, and the bytes of inputs, that a program processes at a time."""
SMALL_OUTPUTS, SMALL_BYTES, SMALL_REGISTERS = 64, 32, 208
"""The same, and the registers of a thread, if tiles are not full or have inputs of several groups: masks and more
scales take registers. By default, the assembler takes fewer and spills some."""
LEAST_BYTES = 16
"""The minimum number of bytes of a tile whose inputs belong to one group."""

NUM_WARPS, NUM_STAGES = 4, 2

_NIBBLES: tl.constexpr = tl.constexpr(0)
_INT8: tl.constexpr = tl.constexpr(2)
_FLOAT8: tl.constexpr = tl.constexpr(3)
"""The values of `GroupedMatrix.kind` whose bytes are not numbers from 0 to 255."""


def group_sums(x: Tensor, matrix: GroupedMatrix, choice: Choice | None = None) -> Tensor:
    """See `QuantisedMatrix.sums_triton`."""
    given, constants = _described(matrix, choice.outputs if choice else matrix.shape[0])
    sums, part, grid = sums_of(x, matrix.shape, constants["OUTPUTS"], choice)
    pairs = x.view(torch.int32 if x.element_size() == 2 else torch.int64) if matrix.bits == 4 else x
    launch(
        _product_kernel, grid, *given, pairs, sums, choice.ids if choice else sums, len(x), pairs.stride(0),
        ROWS=TILE_ROWS, PART=part, DTYPE=TYPES[x.dtype], EACH=choice.each if choice else 0, **constants,
    )  # fmt: skip
    return sums


def expand_groups_triton(matrix: GroupedMatrix, out: Tensor) -> None:
    """Writes the numbers of a matrix to `out` `[outputs, inputs]`, contiguous."""
    outputs, inputs = matrix.shape
    given, constants = _described(matrix, outputs)
    tiles = ceil_div(outputs, constants["OUTPUTS"]), ceil_div(inputs, constants["INPUTS"])
    launch(_expand_kernel, tiles, *given, out, **constants)


def _described(matrix: GroupedMatrix, outputs: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of both kernels for a matrix, or for matrices with `outputs` outputs that are joined in it: the
    first arguments, and the compile-time constants."""
    inputs, groups = matrix.shape[1], matrix.scales.shape[1]
    values = matrix.values.view(torch.uint8) if matrix.values.dtype == torch.float8_e4m3fn else matrix.values
    zeros, group_of, scales, size = matrix.zeros, matrix.group_of, matrix.scales, inputs // groups
    same, ordered = isinstance(zeros, int), group_of is not None
    places = values, scales, scales if same else zeros, group_of if ordered else scales
    of_group = 1 if ordered else math.gcd(size * matrix.bits // 8, TILE_BYTES)
    whole = of_group >= LEAST_BYTES and outputs % TILE_OUTPUTS == 0
    tile = (TILE_OUTPUTS, of_group) if whole else (SMALL_OUTPUTS, SMALL_BYTES)
    constants = {"KIND": matrix.kind, "ZEROS": not same, "ORDERED": ordered, "WHOLE": whole, "OUTPUTS": tile[0]}
    constants |= {"INPUTS": tile[1] * 8 // matrix.bits, "num_warps": NUM_WARPS, "num_stages": NUM_STAGES}
    constants |= {} if whole else {"maxnreg": SMALL_REGISTERS}
    sizes = inputs, outputs, groups, size, values.stride(0)
    return (*places, float(zeros) if same else 0.0, *sizes), constants


@triton.jit
def _float8(byte):
    """The number that a byte encodes in e4m3, float32."""
    magnitude = byte & 127
    number = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    number = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, number)
    number = tl.where(magnitude == 127, float("nan"), number)
    return tl.where(byte > 127, -number, number)


@triton.jit
def _numbers(
    held, scales, zeros, group_of, zero, output, input, there, start, inputs, groups, size,
    KIND: tl.constexpr, ZEROS: tl.constexpr, ORDERED: tl.constexpr, WHOLE: tl.constexpr, ODD: tl.constexpr,
):  # fmt: skip
    """The numbers that `held` `[outputs, inputs]` encodes, in float32; 0 where `there` is false.

    Args:
        start: the first input.
        ODD: if a byte has two numbers, whether to return that of the odd input.
        WHOLE: whether the inputs belong to one group, and all outputs and inputs exist.
    """
    if WHOLE:
        place = output * groups + start // size
    elif ORDERED:
        place = output[:, None] * groups + tl.load(group_of + input, mask=input < inputs, other=0).to(tl.int32)[None, :]
    else:
        place = output[:, None] * groups + (input // size)[None, :]
    scale = loaded(scales + place, there, WHOLE).to(tl.float32)
    if ZEROS:
        zero = loaded(zeros + place, there, WHOLE).to(tl.float32)
    if KIND == _FLOAT8:
        value = _float8(held.to(tl.int32))
    elif KIND == _INT8:
        value = held.to(tl.float32)
    else:
        if KIND == _NIBBLES:  # before widening, because that takes fewer registers
            held = (held >> 4) if ODD else (held & 15)
        # The bits of 2^23 + held: exact, and faster than a conversion.
        value = (held.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)
        zero += 8388608.0
    if WHOLE:
        scale = scale[:, None]
        if ZEROS:
            zero = zero[:, None]
    return (value - zero) * scale


@triton.jit
def _half_of(pair, ODD: tl.constexpr, DTYPE: tl.constexpr):
    """The first or the second of two neighbours that were loaded as one integer."""
    if DTYPE.primitive_bitwidth == 16:  # pyright: ignore[reportAttributeAccessIssue]
        bits = ((pair >> 16) if ODD else pair).to(tl.int16)
    else:
        bits = ((pair >> 32) if ODD else pair).to(tl.int32)
    return bits.to(DTYPE, bitcast=True)


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
    x,  # [n, inputs] in DTYPE, or where values are two in a byte [n, inputs / 2], two in an integer
    sums,  # [parts, n, outputs], or [parts, n * EACH, outputs]
    ids,  # [n * EACH], if there are any
    n,
    row_stride,
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    ORDERED: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    PART: tl.constexpr,
    DTYPE: tl.constexpr,
    EACH: tl.constexpr,
):
    IN_A_BYTE: tl.constexpr = 2 if KIND == _NIBBLES else 1  # pyright: ignore[reportAssignmentType]
    first, held_first = first_output(ids, outputs, OUTPUTS, EACH)  # pyright: ignore[reportGeneralTypeIssues]
    values += held_first * value_stride
    scales += held_first * groups
    zeros += held_first * groups
    output = tl.arange(0, OUTPUTS)
    outputs_left = (outputs - first).to(tl.int32)
    result, row, is_row = rows_of_program(n, ROWS, EACH)
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    begin = tl.program_id(2) * PART
    for start in range(begin, tl.minimum(begin + PART, inputs), INPUTS):
        byte = start // IN_A_BYTE + tl.arange(0, INPUTS // IN_A_BYTE)
        inside = byte * IN_A_BYTE < inputs
        there = (output < outputs_left)[:, None] & inside[None, :]
        held = loaded(values + output[:, None] * value_stride + byte[None, :], there, WHOLE)
        of_rows = is_row[None, :] if WHOLE else inside[:, None] & is_row[None, :]
        taken = tl.load(x + row[None, :] * row_stride + byte[:, None], mask=of_rows, other=0)
        for odd in tl.static_range(IN_A_BYTE):  # pyright: ignore[reportGeneralTypeIssues]
            numbers = _numbers(
                held, scales, zeros, group_of, zero, output, byte * IN_A_BYTE + odd, there, start, inputs, groups,
                size, KIND, ZEROS, ORDERED, WHOLE, odd == 1,
            )  # fmt: skip
            of_them = _half_of(taken, odd == 1, DTYPE) if KIND == _NIBBLES else taken
            total = tl.dot(rounded(numbers, DTYPE), of_them, total, input_precision="ieee")
    results = n if EACH == 0 else n * EACH
    sums += tl.program_id(2).to(tl.int64) * results * outputs + first
    known = (output < outputs_left)[:, None] & is_row[None, :]
    tl.store(sums + result.to(tl.int64)[None, :] * outputs + output[:, None], total, mask=known)


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
    WHOLE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    IN_A_BYTE: tl.constexpr = 2 if KIND == _NIBBLES else 1  # pyright: ignore[reportAssignmentType]
    DTYPE: tl.constexpr = out.dtype.element_ty
    first = (tl.program_id(0) * OUTPUTS).to(tl.int64)
    values += first * value_stride
    scales += first * groups
    zeros += first * groups
    out += first * inputs
    output = tl.arange(0, OUTPUTS)
    outputs_left = (outputs - first).to(tl.int32)
    start = tl.program_id(1) * INPUTS
    byte = start // IN_A_BYTE + tl.arange(0, INPUTS // IN_A_BYTE)
    input = byte * IN_A_BYTE
    there = (output < outputs_left)[:, None] & (input < inputs)[None, :]
    held = loaded(values + output[:, None] * value_stride + byte[None, :], there, WHOLE)
    numbers = rounded(_numbers(
        held, scales, zeros, group_of, zero, output, input, there, start, inputs, groups,
        size, KIND, ZEROS, ORDERED, WHOLE, False,
    ), DTYPE)  # fmt: skip
    if KIND == _NIBBLES:
        numbers = tl.interleave(numbers, rounded(_numbers(
            held, scales, zeros, group_of, zero, output, input + 1, there, start, inputs, groups,
            size, KIND, ZEROS, ORDERED, WHOLE, True,
        ), DTYPE))  # fmt: skip
        input = start + tl.arange(0, INPUTS)
        there = (output < outputs_left)[:, None] & (input < inputs)[None, :]
    tl.store(out + output[:, None] * inputs + input[None, :], numbers, mask=there)
