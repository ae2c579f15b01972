"""Matrices in ggml's block formats on NVIDIA GPUs, in Triton: products with few rows, which expand the numbers of the
matrix in the tile (see `quantised.py`), and the expansion of a matrix.

A program goes through blocks in order. The layout of a block is a compile-time constant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention import ceil_div
from .launch import launch
from .quantised import TILE_ROWS, TYPES, first_output, loaded, rounded, rows_of_program, sums_of

if TYPE_CHECKING:
    from ..quantised import BlockForm, BlockMatrix, Choice

OUTPUTS = 64
"""The number of outputs of a program."""
EXPANDED_INPUTS = 256
"""The number of inputs of a program that expands a matrix."""

NUM_WARPS = 4
Q5_K_REGISTERS = 128
"""The maximum number of registers of a thread. By default, the assembler takes fewer for Q5_K and spills some."""

_EIGHT_BITS: tl.constexpr = tl.constexpr(1)
_ONE_AND_LEAST: tl.constexpr = tl.constexpr(2)
_SIX_BITS_AND_LEAST: tl.constexpr = tl.constexpr(3)
_SCALES = {"Q5_0": 0, "Q6_K": 1, "Q4_1": 2, "Q5_1": 2, "Q4_K": 3, "Q5_K": 3}
"""How blocks store scales. 0: one float16. 1: one float16, at byte 208 of Q6_K, times eight bits for each run, from
byte 192 on. 2: one float16 for the scale and one for `least`. 3: both, times six bits for each run."""


def block_sums(x: Tensor, matrix: BlockMatrix, choice: Choice | None = None) -> Tensor:
    """See `QuantisedMatrix.sums_triton`."""
    given, constants = _described(matrix, choice.outputs if choice else matrix.shape[0])
    sums, part, grid = sums_of(x, matrix.shape, OUTPUTS, choice)
    launch(
        _product_kernel, grid, *given, x, sums, choice.ids if choice else sums, len(x), x.stride(0),
        ROWS=TILE_ROWS, PART=part, DTYPE=TYPES[x.dtype], EACH=choice.each if choice else 0, **constants,
        **options_of(matrix.form),
    )  # fmt: skip
    return sums


def expand_blocks_triton(matrix: BlockMatrix, out: Tensor) -> None:
    """Writes the numbers of a matrix to `out` `[outputs, inputs]`, contiguous."""
    given, constants = _described(matrix, matrix.shape[0])
    grid = ceil_div(matrix.shape[0], OUTPUTS), ceil_div(matrix.shape[1], EXPANDED_INPUTS)
    launch(_expand_kernel, grid, *given, out, PART=EXPANDED_INPUTS, **constants, **options_of(matrix.form))


def _described(matrix: BlockMatrix, outputs: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of both kernels for a matrix, or for matrices with `outputs` outputs that are joined in it: the
    first arguments, and the compile-time constants."""
    inputs, held = matrix.shape[1], matrix.blocks
    wide = held.view(torch.float16 if _SCALES[matrix.form] < _SIX_BITS_AND_LEAST.value else torch.int32)
    constants = constants_of(matrix.form, matrix.layout, whole=outputs % OUTPUTS == 0)
    return (held, wide, inputs, outputs, held.stride(0)), constants


def constants_of(form: str, of: BlockForm, *, whole: bool) -> dict[str, Any]:
    """The compile-time constants of the kernels.

    Args:
        form: the format.
        of: its layout.
        whole: whether the number of outputs is a multiple of `OUTPUTS`.
    """
    high_start, high_bits, high_run = (0, 0, 1) if of.high is None else (of.high.start, of.high.bits, of.high.run)
    constants = {"IN_BLOCK": of.inputs, "BYTES": of.bytes, "RUN": of.run, "SCALES": _SCALES[form], "ZERO": of.zero}
    constants |= {"LOW_START": of.low.start, "LOW_RUN": of.low.run}
    constants |= {"HIGH_START": high_start, "HIGH_BITS": high_bits, "HIGH_RUN": high_run}
    return constants | {"WHOLE": whole, "OUTPUTS": OUTPUTS, "INPUTS": min(of.run, of.low.run)}


def options_of(form: str) -> dict[str, Any]:
    """The options for Triton. With them, products and differences are rounded one by one."""
    stages = 1 if _SCALES[form] == _SIX_BITS_AND_LEAST.value else 2
    options = {"num_warps": NUM_WARPS, "num_stages": stages, "enable_fp_fusion": False}
    return options | ({"maxnreg": Q5_K_REGISTERS} if form == "Q5_K" else {})


@triton.jit
def _bits(
    blocks, wide, place, there, WHOLE: tl.constexpr, INPUT: tl.constexpr, INPUTS: tl.constexpr, START: tl.constexpr,
    BITS: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """A `Field` of the inputs from INPUT on, of the blocks at `place` `[outputs]`: int32 `[outputs, inputs]`."""
    IN_A_BYTE: tl.constexpr = 8 // BITS
    if RUN == 1:  # 16 inputs have one bit each
        held = loaded(wide + (place // 2 + (START + INPUT // 8) // 2), there, WHOLE).to(tl.int16, bitcast=True)
        bits = (held.to(tl.int32)[:, None] >> tl.arange(0, INPUTS)[None, :]) & 1
    else:
        byte = START + INPUT // (RUN * IN_A_BYTE) * RUN + INPUT % RUN + tl.arange(0, INPUTS)
        held = loaded(blocks + (place[:, None] + byte[None, :]), there[:, None], WHOLE)
        bits = (held >> (INPUT // RUN % IN_A_BYTE * BITS)).to(tl.int32) & ((1 << BITS) - 1)
    return bits


@triton.jit
def _numbers(
    blocks, wide, place, there, INPUT: tl.constexpr, RUN: tl.constexpr, SCALES: tl.constexpr, ZERO: tl.constexpr,
    LOW_START: tl.constexpr, LOW_RUN: tl.constexpr, HIGH_START: tl.constexpr, HIGH_BITS: tl.constexpr,
    HIGH_RUN: tl.constexpr, WHOLE: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """The numbers of the inputs from INPUT on, of the blocks at `place` `[outputs]`, in float32 `[outputs, inputs]`.

    The compiler joins loads of the same bytes for other inputs of a block.
    """
    R: tl.constexpr = INPUT // RUN
    if SCALES == _SIX_BITS_AND_LEAST:
        both = loaded(wide + place // 4, there, WHOLE)  # two float16 numbers
        scale = (both & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        least = ((both >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        of_scale = loaded(wide + (place // 4 + 1), there, WHOLE) >> (R % 4 * 8)
        of_least = loaded(wide + (place // 4 + 2), there, WHOLE) >> (R % 4 * 8)
        if R < 4:
            of_scale, of_least = of_scale & 63, of_least & 63
        else:
            last = loaded(wide + (place // 4 + 3), there, WHOLE) >> (R % 4 * 8)
            of_scale, of_least = (last & 15) | ((of_scale >> 2) & 48), ((last >> 4) & 15) | ((of_least >> 2) & 48)
        scale *= of_scale.to(tl.float32)
        least *= of_least.to(tl.float32)
    elif SCALES == _EIGHT_BITS:
        held = loaded(blocks + (place + (192 + R)), there, WHOLE).to(tl.int8, bitcast=True)
        scale = loaded(wide + (place // 2 + 104), there, WHOLE).to(tl.float32) * held.to(tl.float32)
    else:
        scale = loaded(wide + place // 2, there, WHOLE).to(tl.float32)
        if SCALES == _ONE_AND_LEAST:
            least = -loaded(wide + (place // 2 + 1), there, WHOLE).to(tl.float32)
    value = _bits(blocks, wide, place, there, WHOLE, INPUT, INPUTS, LOW_START, 4, LOW_RUN)
    if HIGH_BITS > 0:
        value |= _bits(blocks, wide, place, there, WHOLE, INPUT, INPUTS, HIGH_START, HIGH_BITS, HIGH_RUN) << 4
    # The bits of 2^23 + value: exact, and faster than a conversion.
    numbers = ((value | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + ZERO)) * scale[:, None]
    if SCALES >= _ONE_AND_LEAST:
        numbers -= least[:, None]  # pyright: ignore[reportPossiblyUnboundVariable]
    return numbers


@triton.jit(do_not_specialize=["n"])
def _product_kernel(
    blocks,  # [outputs, bytes of a row] uint8
    wide,  # the same as float16, or int32 where scales have six bits
    inputs,
    outputs,
    bytes_stride,
    x,  # [n, inputs]
    sums,  # [parts, n, outputs], or [parts, n * EACH, outputs]
    ids,  # [n * EACH], if there are any
    n,
    row_stride,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    DTYPE: tl.constexpr,
    EACH: tl.constexpr,
    IN_BLOCK: tl.constexpr,
    BYTES: tl.constexpr,
    RUN: tl.constexpr,
    SCALES: tl.constexpr,
    ZERO: tl.constexpr,
    LOW_START: tl.constexpr,
    LOW_RUN: tl.constexpr,
    HIGH_START: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    HIGH_RUN: tl.constexpr,
    WHOLE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    first, held_first = first_output(ids, outputs, OUTPUTS, EACH)  # pyright: ignore[reportGeneralTypeIssues]
    blocks += held_first * bytes_stride
    wide += held_first * bytes_stride // (wide.dtype.element_ty.primitive_bitwidth // 8)
    output = tl.arange(0, OUTPUTS)
    there = output < (outputs - first).to(tl.int32)
    result, row, is_row = rows_of_program(n, ROWS, EACH)
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    begin = tl.program_id(2) * PART
    for start in range(begin, tl.minimum(begin + PART, inputs), IN_BLOCK):
        place = output * bytes_stride + start // IN_BLOCK * BYTES
        for input in tl.static_range(0, IN_BLOCK, INPUTS):  # pyright: ignore[reportGeneralTypeIssues]
            of_rows = row[None, :] * row_stride + (start + input + tl.arange(0, INPUTS))[:, None]
            taken = tl.load(x + of_rows, mask=is_row[None, :], other=0)
            numbers = _numbers(
                blocks, wide, place, there, input, RUN, SCALES, ZERO, LOW_START, LOW_RUN, HIGH_START, HIGH_BITS,
                HIGH_RUN, WHOLE, INPUTS,
            )  # fmt: skip
            total = tl.dot(rounded(numbers, DTYPE), taken, total, input_precision="ieee")
    results = n if EACH == 0 else n * EACH
    sums += tl.program_id(2).to(tl.int64) * results * outputs + first
    known = there[:, None] & is_row[None, :]
    tl.store(sums + result.to(tl.int64)[None, :] * outputs + output[:, None], total, mask=known)


@triton.jit
def _expand_kernel(
    blocks,  # see _product_kernel
    wide,
    inputs,
    outputs,
    bytes_stride,
    out,  # [outputs, inputs]
    PART: tl.constexpr,
    IN_BLOCK: tl.constexpr,
    BYTES: tl.constexpr,
    RUN: tl.constexpr,
    SCALES: tl.constexpr,
    ZERO: tl.constexpr,
    LOW_START: tl.constexpr,
    LOW_RUN: tl.constexpr,
    HIGH_START: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    HIGH_RUN: tl.constexpr,
    WHOLE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    first = (tl.program_id(0) * OUTPUTS).to(tl.int64)
    blocks += first * bytes_stride
    wide += first * bytes_stride // (wide.dtype.element_ty.primitive_bitwidth // 8)
    out += first * inputs
    output = tl.arange(0, OUTPUTS)
    there = output < (outputs - first).to(tl.int32)
    begin = tl.program_id(1) * PART
    for start in range(begin, tl.minimum(begin + PART, inputs), IN_BLOCK):
        place = output * bytes_stride + start // IN_BLOCK * BYTES
        for input in tl.static_range(0, IN_BLOCK, INPUTS):  # pyright: ignore[reportGeneralTypeIssues]
            numbers = _numbers(
                blocks, wide, place, there, input, RUN, SCALES, ZERO, LOW_START, LOW_RUN, HIGH_START, HIGH_BITS,
                HIGH_RUN, WHOLE, INPUTS,
            )  # fmt: skip
            to = out + output[:, None] * inputs + (start + input + tl.arange(0, INPUTS))[None, :]
            tl.store(to, rounded(numbers, out.dtype.element_ty), mask=there[:, None])
