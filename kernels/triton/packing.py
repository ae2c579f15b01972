"""Packing keys and values on NVIDIA GPUs in Triton: one program for each tile. `packing` documents the format.

Nothing here waits for the GPU, so a call can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..slots import FARTHEST, GROUP, Layout
from .attention import power_of_two
from .launch import launch

_GROUP: tl.constexpr = tl.constexpr(GROUP)
_FARTHEST: tl.constexpr = tl.constexpr(FARTHEST)


def pack_triton(blocks: Tensor, slots: Tensor, layout: Layout) -> None:
    """`packing.pack_plain` in Triton. The channels of `blocks` are contiguous."""
    words = slots.view(torch.int32)
    words[:, layout.exceptions // 4 :] = 0  # the largest exponents, which are behind the exceptions, are written later
    starts = words[:, layout.starts // 4 : layout.exceptions // 4]
    _launch(_pack_kernel, blocks, slots, layout)
    starts[:, :1] = 0
    starts.copy_(starts.cumsum(1, dtype=torch.int32))
    _launch(_exceptions_kernel, blocks, slots, layout)


def unpack_triton(slots: Tensor, blocks: Tensor, layout: Layout) -> None:
    """`packing.unpack_plain` in Triton; see `pack_triton`."""
    _launch(_unpack_kernel, blocks, slots, layout)


def _launch(kernel: Any, blocks: Tensor, slots: Tensor, layout: Layout) -> None:
    """Starts one program of `kernel` for each tile."""
    tile_dim = power_of_two(layout.head_dim)
    offsets = layout.below, layout.starts // 4, layout.exceptions // 4, layout.largest, layout.capacity
    places = layout.tiles, layout.tokens // GROUP, *offsets, slots.stride(0), *blocks.stride()[:3]
    launch(
        kernel,
        (len(blocks) * layout.tiles,),
        *(blocks.view(torch.int16), slots, slots.view(torch.int32), *places),
        HEAD_DIM=layout.head_dim,
        TILE_DIM=tile_dim,
        num_warps=warps_of(tile_dim),
    )


def warps_of(tile_dim: int) -> int:
    """The number of warps of a program, so that a thread has 32 values; from 2 to 16."""
    return min(16, max(2, GROUP * tile_dim // 1024))


@triton.jit
def _exponent_of(bits):
    return (bits >> 7) & 0xFF


@triton.jit
def _byte_of(bits):
    return ((bits >> 8) & 0x80) | (bits & 0x7F)


@triton.jit
def _value_of(byte, exponent):
    return (((byte & 0x80) << 8) | ((exponent & 0xFF) << 7) | (byte & 0x7F)).to(tl.int16)


@triton.jit(do_not_specialize=["tiles", "tiles_per_head", "capacity"])
def _pack_kernel(
    blocks,  # [num_blocks, num_kv_heads, tokens, HEAD_DIM] int16
    slots,  # [num_blocks, slot_bytes] uint8
    words,  # the same as int32
    tiles,
    tiles_per_head,
    below_at,
    starts_at,
    exceptions_at,
    largest_at,
    capacity,
    slot_stride,
    block_stride,
    head_stride,
    token_stride,
    HEAD_DIM: tl.constexpr,
    TILE_DIM: tl.constexpr,
):
    """Writes everything except the exceptions. The number of exceptions is written behind the tile's place in
    `starts`."""
    block, tile = (tl.program_id(0) // tiles).to(tl.int64), (tl.program_id(0) % tiles).to(tl.int64)
    first = blocks + block * block_stride + tile // tiles_per_head * head_stride
    first += tile % tiles_per_head * _GROUP * token_stride
    slot = slots + block * slot_stride
    pairs, dims = tl.arange(0, _GROUP // 2), tl.arange(0, TILE_DIM)
    inside = (pairs >= 0)[:, None] & (dims < HEAD_DIM)[None, :]
    source = first + (pairs.to(tl.int64) * 2 * token_stride)[:, None] + dims[None, :]
    even = tl.load(source, mask=inside, other=0).to(tl.int32)
    odd = tl.load(source + token_stride, mask=inside, other=0).to(tl.int32)
    largest = tl.maximum(tl.max(_exponent_of(even), 0), tl.max(_exponent_of(odd), 0))
    even_below = largest[None, :] - _exponent_of(even)
    odd_below = largest[None, :] - _exponent_of(odd)

    bytes_at = slot + tile * (_GROUP * HEAD_DIM) + (pairs * (2 * HEAD_DIM))[:, None] + dims[None, :]
    tl.store(bytes_at, _byte_of(even).to(tl.uint8), mask=inside)
    tl.store(bytes_at + HEAD_DIM, _byte_of(odd).to(tl.uint8), mask=inside)
    both = tl.minimum(even_below, _FARTHEST) | (tl.minimum(odd_below, _FARTHEST) << 4)
    pairs_at = slot + below_at + tile * (_GROUP // 2 * HEAD_DIM) + (pairs * HEAD_DIM)[:, None] + dims[None, :]
    tl.store(pairs_at, both.to(tl.uint8), mask=inside)
    tl.store(slot + largest_at + tile * HEAD_DIM + dims, largest.to(tl.uint8), mask=dims < HEAD_DIM)
    exceptions = (even_below > _FARTHEST).to(tl.int32) + (odd_below > _FARTHEST).to(tl.int32)
    tl.store(words + block * (slot_stride // 4) + starts_at + tile + 1, tl.sum(tl.sum(exceptions, 1), 0))


@triton.jit(do_not_specialize=["tiles", "tiles_per_head", "capacity"])
def _exceptions_kernel(
    blocks,  # see _pack_kernel
    slots,
    words,
    tiles,
    tiles_per_head,
    below_at,
    starts_at,
    exceptions_at,
    largest_at,
    capacity,
    slot_stride,
    block_stride,
    head_stride,
    token_stride,
    HEAD_DIM: tl.constexpr,
    TILE_DIM: tl.constexpr,
):
    """Writes the exceptions at the places that `starts` gives."""
    block, tile = (tl.program_id(0) // tiles).to(tl.int64), (tl.program_id(0) % tiles).to(tl.int64)
    slot_words = words + block * (slot_stride // 4)
    place = tl.load(slot_words + starts_at + tile)
    if tl.load(slot_words + starts_at + tile + 1) > place:
        ROWS: tl.constexpr = _GROUP if TILE_DIM <= 64 else 4096 // TILE_DIM  # that are in registers at a time
        first = blocks + block * block_stride + tile // tiles_per_head * head_stride
        first += tile % tiles_per_head * _GROUP * token_stride
        dims = tl.arange(0, TILE_DIM)
        largest_of_tile = slots + block * slot_stride + largest_at + tile * HEAD_DIM
        largest = tl.load(largest_of_tile + dims, mask=dims < HEAD_DIM, other=0).to(tl.int32)
        for part in range(0, _GROUP, ROWS):
            rows = part + tl.arange(0, ROWS)
            inside = (rows >= 0)[:, None] & (dims < HEAD_DIM)[None, :]
            source = first + (rows.to(tl.int64) * token_stride)[:, None] + dims[None, :]
            exponents = _exponent_of(tl.load(source, mask=inside, other=0).to(tl.int32))
            exceptional = (largest[None, :] - exponents > _FARTHEST) & inside
            entries = (((rows * HEAD_DIM)[:, None] + dims[None, :]) << 8) | exponents
            one = tl.reshape(exceptional.to(tl.int32), [ROWS * TILE_DIM])
            places = place + tl.cumsum(one, 0) - one
            kept = (one > 0) & (places < capacity)
            tl.store(slot_words + exceptions_at + places, tl.reshape(entries, [ROWS * TILE_DIM]), mask=kept)
            place += tl.sum(one, 0)


@triton.jit(do_not_specialize=["tiles", "tiles_per_head", "capacity"])
def _unpack_kernel(
    blocks,  # see _pack_kernel
    slots,
    words,
    tiles,
    tiles_per_head,
    below_at,
    starts_at,
    exceptions_at,
    largest_at,
    capacity,
    slot_stride,
    block_stride,
    head_stride,
    token_stride,
    HEAD_DIM: tl.constexpr,
    TILE_DIM: tl.constexpr,
):
    block, tile = (tl.program_id(0) // tiles).to(tl.int64), (tl.program_id(0) % tiles).to(tl.int64)
    slot_words = words + block * (slot_stride // 4)
    total = tl.load(slot_words + starts_at + tiles)
    if (total >= 0) & (total <= capacity):
        first = blocks + block * block_stride + tile // tiles_per_head * head_stride
        first += tile % tiles_per_head * _GROUP * token_stride
        slot = slots + block * slot_stride
        bytes_of_tile = slot + tile * (_GROUP * HEAD_DIM)
        pairs, dims = tl.arange(0, _GROUP // 2), tl.arange(0, TILE_DIM)
        inside = (pairs >= 0)[:, None] & (dims < HEAD_DIM)[None, :]
        bytes_at = bytes_of_tile + (pairs * (2 * HEAD_DIM))[:, None] + dims[None, :]
        even = tl.load(bytes_at, mask=inside, other=0).to(tl.int32)
        odd = tl.load(bytes_at + HEAD_DIM, mask=inside, other=0).to(tl.int32)
        pairs_at = slot + below_at + tile * (_GROUP // 2 * HEAD_DIM) + (pairs * HEAD_DIM)[:, None] + dims[None, :]
        both = tl.load(pairs_at, mask=inside, other=0).to(tl.int32)
        largest = tl.load(slot + largest_at + tile * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0)
        largest = largest.to(tl.int32)[None, :]
        target = first + (pairs.to(tl.int64) * 2 * token_stride)[:, None] + dims[None, :]
        tl.store(target, _value_of(even, largest - (both & 15)), mask=inside)
        tl.store(target + token_stride, _value_of(odd, largest - (both >> 4)), mask=inside)

        start = tl.maximum(tl.load(slot_words + starts_at + tile), 0)
        stop = tl.minimum(tl.load(slot_words + starts_at + tile + 1), capacity)
        if start < stop:
            tl.debug_barrier()  # the following stores overwrite some values that other threads have written
            for i in range(start, stop, 128):
                places = i + tl.arange(0, 128)
                entry = tl.load(slot_words + exceptions_at + places, mask=places < stop, other=-1)
                position = entry >> 8  # negative where there is none
                valid = (position >= 0) & (position < _GROUP * HEAD_DIM)
                byte = tl.load(bytes_of_tile + position, mask=valid, other=0).to(tl.int32)
                value = _value_of(byte, entry)
                row = (position // HEAD_DIM).to(tl.int64)
                tl.store(first + row * token_stride + position % HEAD_DIM, value, mask=valid)
