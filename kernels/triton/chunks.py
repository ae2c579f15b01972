"""Chunk selection on NVIDIA GPUs in Triton: computes the attention mass of chunks, and copies chunks. See `chunks`."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention import ceil_div, power_of_two, tile_sizes
from .launch import launch


def chunk_mass_triton(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    mass: Tensor,
    *,
    scale: float,
    diagonal: int | Tensor | None = None,
    window: int | None = None,
) -> None:
    """Computes the share of each row's attention that goes to each chunk of keys, from the row's log-sum-exp.

    Args:
        q: `[num_heads, n, head_dim]`.
        k: `[num_kv_heads, m, head_dim]`, of the same dtype.
        lse: `[num_heads, n]` float32, of each row over all keys that it attends to: `k`, or `k` and others.
        mass: `[num_heads, n, m // chunk_size]` float32, contiguous, written. `m` is a multiple of
            `chunk_size`, which `takes_chunks` accepts.
        scale, diagonal, window: as in `attend_triton`; keys that a row does not see get no share.
    """
    num_heads, n, head_dim = q.shape
    num_kv_heads, m, _ = k.shape
    group = num_heads // num_kv_heads
    tile_rows, tile_keys, tile_dim = tile_sizes(group, head_dim, q.dtype)
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    # Only the first dimension may have more than 65,535 programs, and a million keys may be more tiles than that.
    launch(
        _mass_kernel,
        (ceil_div(m, tile_keys), num_kv_heads, ceil_div(n * group, tile_rows)),
        q,
        k,
        lse.contiguous(),
        mass,
        m - 1 if diagonal is None else diagonal,
        window or 0,
        n,
        m,
        scale * math.log2(math.e),
        *q.stride()[:2],
        *k.stride()[:2],
        GROUP=group,
        HEAD_DIM=head_dim,
        CHUNK=m // mass.shape[-1],
        TILE_ROWS=tile_rows,
        TILE_KEYS=tile_keys,
        TILE_DIM=tile_dim,
        WINDOWED=window is not None,
        ON_DEVICE=isinstance(diagonal, Tensor),
        num_warps=4,
    )


def takes_chunks(chunk_size: int, group: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether `chunk_mass_triton` can sum chunks of this size: a tile of keys must be a multiple of it."""
    return tile_sizes(group, head_dim, dtype)[1] % chunk_size == 0


def gather_chunks_triton(blocks: Tensor, indices: Tensor, chunk_size: int) -> Tensor:
    """`chunks.gather_chunks`, one program for each chunk."""
    num_kv_heads, count = indices.shape
    _, _, block_size, head_dim = blocks.shape
    blocks = blocks if blocks.stride(-1) == 1 else blocks.contiguous()
    out = blocks.new_empty(num_kv_heads, count * chunk_size, head_dim)
    launch(
        _gather_kernel,
        (count, num_kv_heads),
        blocks,
        indices.contiguous(),
        out,
        count,
        block_size // chunk_size,
        *blocks.stride()[:3],
        **_constants(chunk_size, head_dim),
    )
    return out


def copy_chunks_triton(block: Tensor, first: int, chunks: Tensor, k: Tensor, v: Tensor, chunk_size: int) -> None:
    """`chunks.copy_chunks`, one program per chunk of keys or values. The host need not know which chunks are in the
    block."""
    num_kv_heads, count = chunks.shape
    _, _, m, head_dim = block.shape
    assert k.stride() == v.stride() and k.stride(-1) == block.stride(-1) == 1
    launch(
        _copy_kernel,
        (count, num_kv_heads, 2),
        block,
        chunks.contiguous(),
        k,
        v,
        count,
        first,
        m // chunk_size,
        *block.stride()[:3],
        *k.stride()[:2],
        **_constants(chunk_size, head_dim),
    )


def _constants(chunk_size: int, head_dim: int) -> dict[str, int]:
    """The compile-time constants of the kernels that copy chunks."""
    tile = {"TILE_CHUNK": power_of_two(chunk_size), "TILE_DIM": power_of_two(head_dim)}
    return {"CHUNK": chunk_size, "HEAD_DIM": head_dim, "num_warps": 2} | tile


@triton.jit(do_not_specialize=["diagonal", "window", "n", "m"])
def _mass_kernel(
    q,
    k,
    lse,  # [num_heads, n]
    mass,  # [num_heads, n, m // CHUNK]
    diagonal,
    window,
    n,
    m,
    scale_log2,
    q_head_stride,
    q_row_stride,
    k_head_stride,
    k_row_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    TILE_DIM: tl.constexpr,
    WINDOWED: tl.constexpr,
    ON_DEVICE: tl.constexpr,
):
    run, kv_head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    packed = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    real = packed < n * GROUP
    row = packed // GROUP
    head = (kv_head * GROUP + packed % GROUP).to(tl.int64)
    dims = tl.arange(0, TILE_DIM)
    in_head = dims < HEAD_DIM
    last_seen = (tl.load(diagonal).to(tl.int32) if ON_DEVICE else diagonal.to(tl.int32)) + row
    keys = run * TILE_KEYS + tl.arange(0, TILE_KEYS)
    there = keys < m

    q_rows = q + head * q_head_stride + row.to(tl.int64) * q_row_stride
    q_tile = tl.load(q_rows[:, None] + dims[None, :], mask=real[:, None] & in_head[None, :], other=0.0)
    k_columns = k + kv_head.to(tl.int64) * k_head_stride + keys.to(tl.int64) * k_row_stride
    k_tile = tl.load(k_columns[None, :] + dims[:, None], mask=in_head[:, None] & there[None, :], other=0.0)
    row_lse = tl.load(lse + head * n + row, mask=real, other=0.0) * 1.4426950408889634  # for powers of two
    scores = tl.dot(q_tile, k_tile, input_precision="ieee") * scale_log2
    visible = there[None, :] & (keys[None, :] <= last_seen[:, None])
    if WINDOWED:
        visible = visible & (keys[None, :] > last_seen[:, None] - window)
    shares = tl.where(visible, tl.exp2(scores - row_lse[:, None]), 0.0)
    sums = tl.sum(tl.reshape(shares, [TILE_ROWS, TILE_KEYS // CHUNK, CHUNK]), 2)
    chunks = run * (TILE_KEYS // CHUNK) + tl.arange(0, TILE_KEYS // CHUNK)
    num_chunks = m // CHUNK
    index = (head * n + row)[:, None] * num_chunks + chunks[None, :]
    tl.store(mass + index, sums, mask=real[:, None] & (chunks < num_chunks)[None, :])


@triton.jit(do_not_specialize=["count", "chunks_per_block"])
def _gather_kernel(
    blocks,
    indices,  # [num_kv_heads, count]
    out,  # [num_kv_heads, count * CHUNK, HEAD_DIM]
    count,
    chunks_per_block,
    block_stride,
    head_stride,
    token_stride,
    CHUNK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_CHUNK: tl.constexpr,
    TILE_DIM: tl.constexpr,
):
    place, kv_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    chunk = tl.load(indices + kv_head * count + place).to(tl.int64)
    tokens, dims = tl.arange(0, TILE_CHUNK), tl.arange(0, TILE_DIM)
    inside = (tokens < CHUNK)[:, None] & (dims < HEAD_DIM)[None, :]
    first = blocks + chunk // chunks_per_block * block_stride + kv_head * head_stride
    rows = (chunk % chunks_per_block * CHUNK + tokens) * token_stride
    tile = tl.load(first + rows[:, None] + dims[None, :], mask=inside)
    place_out = out + (kv_head * count + place) * (CHUNK * HEAD_DIM)
    tl.store(place_out + tokens[:, None] * HEAD_DIM + dims[None, :], tile, mask=inside)


@triton.jit(do_not_specialize=["count", "first", "chunks_per_block"])
def _copy_kernel(
    block,  # [2, num_kv_heads, chunks_per_block * CHUNK, HEAD_DIM]
    indices,  # [num_kv_heads, count]
    k,  # [num_kv_heads, count * CHUNK, HEAD_DIM]
    v,
    count,
    first,
    chunks_per_block,
    part_stride,
    head_stride,
    token_stride,
    out_head_stride,
    out_token_stride,
    CHUNK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_CHUNK: tl.constexpr,
    TILE_DIM: tl.constexpr,
):
    place, kv_head, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    chunk = tl.load(indices + kv_head * count + place).to(tl.int64) - first
    here = (chunk >= 0) & (chunk < chunks_per_block)
    tokens, dims = tl.arange(0, TILE_CHUNK), tl.arange(0, TILE_DIM)
    inside = (tokens < CHUNK)[:, None] & (dims < HEAD_DIM)[None, :] & here
    source = block + part * part_stride + kv_head * head_stride
    rows = (chunk * CHUNK + tokens) * token_stride
    tile = tl.load(source + rows[:, None] + dims[None, :], mask=inside)
    place_rows = (place.to(tl.int64) * CHUNK + tokens) * out_token_stride
    target = kv_head * out_head_stride + place_rows[:, None] + dims[None, :]
    if part == 0:
        tl.store(k + target, tile, mask=inside)
    else:
        tl.store(v + target, tile, mask=inside)
