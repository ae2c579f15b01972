"""The numbers of matrices in ggml's formats of blocks on NVIDIA GPUs, in Triton.

A program has some outputs and the inputs of one block, or of as many small ones as have as many inputs. Nothing here
waits for the GPU, so a call can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention import ceil_div
from .launch import launch
from .quantised import _rounded

if TYPE_CHECKING:
    from ..quantised import BlockForm, BlockMatrix

TILE_OUTPUTS, TILE_INPUTS = 8, 256
NUM_WARPS = 4

_EIGHT_BITS: tl.constexpr = tl.constexpr(1)
_ONE_AND_LEAST: tl.constexpr = tl.constexpr(2)
_SIX_BITS_AND_LEAST: tl.constexpr = tl.constexpr(3)
_SCALES = {"Q5_0": 0, "Q6_K": 1, "Q4_1": 2, "Q5_1": 2, "Q4_K": 3, "Q5_K": 3}
"""How blocks hold scales: 0 one float16; 1 one times eight bits of each run; 2 one and a least number; 3 both times six
bits of each run."""


def expand_blocks_triton(matrix: BlockMatrix, out: Tensor) -> None:
    """Writes the numbers of a matrix to `out` `[outputs, inputs]`, contiguous."""
    (outputs, inputs), held = matrix.shape, matrix.blocks
    launch(
        _expand_blocks_kernel, (ceil_div(outputs, TILE_OUTPUTS), ceil_div(inputs, TILE_INPUTS)),
        *(held, held.view(torch.float16), out, inputs, outputs, held.stride(0)),
        **constants_of(matrix.form, matrix.layout),
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,  # products and differences are rounded one by one
    )  # fmt: skip


def constants_of(form: str, of: BlockForm) -> dict[str, int]:
    """What the kernel is compiled for."""
    high_start, high_bits, high_run = (0, 0, 1) if of.high is None else (of.high.start, of.high.bits, of.high.run)
    constants = {"IN_BLOCK": of.inputs, "BYTES": of.bytes, "RUN": of.run, "SCALES": _SCALES[form], "ZERO": of.zero}
    constants |= {"LOW_START": of.low.start, "LOW_RUN": of.low.run}
    constants |= {"HIGH_START": high_start, "HIGH_BITS": high_bits, "HIGH_RUN": high_run}
    return constants | {"TILE_OUTPUTS": TILE_OUTPUTS, "TILE_INPUTS": TILE_INPUTS}


@triton.jit
def _field(blocks, place, input, there, START: tl.constexpr, BITS: tl.constexpr, RUN: tl.constexpr):
    """A `Field` of some inputs of the blocks at `place`."""
    IN_A_BYTE: tl.constexpr = 8 // BITS
    byte = START + input // (RUN * IN_A_BYTE) * RUN + input % RUN
    held = tl.load(blocks + place + byte, mask=there, other=0).to(tl.int32)
    return (held >> (input // RUN % IN_A_BYTE * BITS)) & ((1 << BITS) - 1)  # pyright: ignore[reportOperatorIssue]


@triton.jit
def _expand_blocks_kernel(
    blocks,  # [outputs, bytes of a row] uint8
    halves,  # the same as float16
    out,  # [outputs, inputs]
    inputs,
    outputs,
    row_stride,  # in bytes, an even number as that of a block is
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
    TILE_OUTPUTS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
):
    first = (tl.program_id(0) * TILE_OUTPUTS).to(tl.int64)  # within the tile, counted from there, 32 bits suffice
    blocks += first * row_stride
    halves += first * (row_stride // 2)
    out += first * inputs
    output = tl.arange(0, TILE_OUTPUTS)
    run = tl.program_id(1) * (TILE_INPUTS // RUN) + tl.arange(0, TILE_INPUTS // RUN)  # of the row
    there = (output < (outputs - first).to(tl.int32))[:, None] & (run * RUN < inputs)[None, :]
    place = output[:, None] * row_stride + (run * RUN // IN_BLOCK * BYTES)[None, :]
    in_block = run % (IN_BLOCK // RUN)
    if SCALES == _EIGHT_BITS:
        held = tl.load(blocks + place + 192 + in_block[None, :], mask=there, other=0).to(tl.int8, bitcast=True)
        scale = tl.load(halves + place // 2 + 104, mask=there, other=0).to(tl.float32) * held.to(tl.float32)
    else:
        scale = tl.load(halves + place // 2, mask=there, other=0).to(tl.float32)
    if SCALES == _ONE_AND_LEAST:
        least = -tl.load(halves + place // 2 + 1, mask=there, other=0).to(tl.float32)
    if SCALES == _SIX_BITS_AND_LEAST:
        least = tl.load(halves + place // 2 + 1, mask=there, other=0).to(tl.float32)
        sixth = blocks + place + (4 + in_block % 4)[None, :]
        of_scale = tl.load(sixth, mask=there, other=0).to(tl.int32)
        of_least = tl.load(sixth + 4, mask=there, other=0).to(tl.int32)
        both = tl.load(sixth + 8, mask=there, other=0).to(tl.int32)
        early = (in_block < 4)[None, :]
        scale *= tl.where(early, of_scale & 63, (both & 15) | ((of_scale >> 2) & 48)).to(tl.float32)
        least *= tl.where(early, of_least & 63, (both >> 4) | ((of_least >> 2) & 48)).to(tl.float32)
    within = tl.arange(0, RUN)[None, None, :]
    input, of_values = (in_block * RUN)[None, :, None] + within, there[:, :, None]
    value = _field(blocks, place[:, :, None], input, of_values, LOW_START, 4, LOW_RUN)
    if HIGH_BITS > 0:
        value |= _field(blocks, place[:, :, None], input, of_values, HIGH_START, HIGH_BITS, HIGH_RUN) << 4
    numbers = (value - ZERO).to(tl.float32) * scale[:, :, None]
    if SCALES >= _ONE_AND_LEAST:
        numbers -= least[:, :, None]  # pyright: ignore[reportPossiblyUnboundVariable]
    to = out + output[:, None, None] * inputs + (run * RUN)[None, :, None] + within
    tl.store(to, _rounded(numbers, out.dtype.element_ty), mask=of_values)
