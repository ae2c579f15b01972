"""Attention on NVIDIA GPUs in Triton: split over the keys, several query rows at once, with log-sum-exp.

The method is FlashDecoding: each program attends one tile of query rows to one run of keys, and a second kernel merges
the runs. The query heads that share a key/value head are in the same tile, so that keys and values are read once for
all of them.

How keys are split and tiled depends on the number of keys, the head counts and the dtype, never on the number of rows:
a row's sums are computed in the same order whether it comes alone (decoding) or with others (verification). Scores
and sums are float32; 16-bit probabilities are rounded to the values' dtype before they are multiplied, as flash kernels
do. Nothing here waits for the GPU, so a call can be captured in a CUDA graph.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST_HEAD_DIM = 256
"""Larger heads would not fit in shared memory with these tiles."""

_FEWEST_KEYS = 256
"""Keys of a run at least: shorter runs cost more to start and to merge than they gain in parallelism."""

_MOST_SPLITS = 64
"""Runs at most: times the key/value heads, these are enough programs for any GPU; more would slow the merge down."""

_NUM_WARPS = 4
_NUM_STAGES = 2


def attend_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    diagonal: int | Tensor | None = None,
    window: int | None = None,
    split: bool = True,
) -> tuple[Tensor, Tensor]:
    """`attention.attend` for tensors on a CUDA device (on the CPU under Triton's interpreter, `TRITON_INTERPRET=1`).

    Args:
        q: `[num_heads, n, head_dim]`, float32, float16 or bfloat16; `head_dim` at most `LARGEST_HEAD_DIM`.
        k, v: `[num_kv_heads, m, head_dim]`, of the same dtype.
        diagonal, window: as in `attend`. A tensor is read by the kernel when it runs, so that a captured CUDA graph
            uses its value at the time of the replay.
        split: whether to split the keys, which is faster for a few rows; many rows fill the GPU without, and their
            partial results would be large.

    Returns:
        `out` `[num_heads, n, head_dim]` and `lse` `[num_heads, n]`, both float32.
    """
    num_heads, n, head_dim = q.shape
    num_kv_heads, m, _ = k.shape
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    group = num_heads // num_kv_heads
    tile_rows, tile_keys, tile_dim = tile_sizes(group, head_dim, q.dtype)
    splits, keys_per_split = split_sizes(m) if split else (1, m)
    parts = q.new_empty(splits, num_heads, n, head_dim, dtype=torch.float32)
    lses = q.new_empty(splits, num_heads, n, dtype=torch.float32)
    if n == 0:
        return parts[0], lses[0]
    if diagonal is None:
        diagonal, window = m - 1, None
    with torch.cuda.device_of(q):
        _attend_kernel[ceil_div(n * group, tile_rows), num_kv_heads, splits](
            q,
            k,
            v,
            parts,
            lses,
            diagonal,
            window or 0,
            n,
            m,
            keys_per_split,
            scale * math.log2(math.e),
            *q.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            GROUP=group,
            HEAD_DIM=head_dim,
            TILE_ROWS=tile_rows,
            TILE_KEYS=tile_keys,
            TILE_DIM=tile_dim,
            WINDOWED=window is not None,
            ON_DEVICE=isinstance(diagonal, Tensor),
            num_warps=_NUM_WARPS,  # pyright: ignore[reportCallIssue]
            num_stages=_NUM_STAGES,  # pyright: ignore[reportCallIssue]
        )
        if splits == 1:
            return parts[0], lses[0]
        out, lse = torch.empty_like(parts[0]), torch.empty_like(lses[0])
        _merge_kernel[num_heads * n,](
            parts,
            lses,
            out,
            lse,
            num_heads * n,
            splits,
            HEAD_DIM=head_dim,
            TILE_SPLITS=power_of_two(splits),
            TILE_DIM=tile_dim,
            num_warps=_NUM_WARPS,  # pyright: ignore[reportCallIssue]
        )
    return out, lse


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def power_of_two(x: int) -> int:
    """The smallest power of two that is at least `x >= 1`."""
    return 1 << (x - 1).bit_length()


def split_sizes(m: int) -> tuple[int, int]:
    """How many runs `m` keys are split into, and the keys of a run: whole tiles, but for the end of the last run."""
    keys = max(_FEWEST_KEYS, ceil_div(m, _MOST_SPLITS * 128) * 128)
    return max(1, ceil_div(m, keys)), keys


def tile_sizes(group: int, head_dim: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Rows, keys and dimensions of a tile, powers of two and at least 16 as tensor cores require.

    A row tile takes 16 tokens of up to four query heads each. Larger tiles than these spill registers when they are
    compiled for sm_80, sm_89 and sm_90; float32, which has no exact tensor cores, spills first.
    """
    tile_dim = max(16, power_of_two(head_dim))
    if dtype == torch.float32:
        return 16, min(128, max(16, 2048 // tile_dim)), tile_dim
    return min(64, power_of_two(16 * group), 8192 // tile_dim), min(128, 8192 // tile_dim), tile_dim


@triton.jit(do_not_specialize=["diagonal", "window", "n", "m", "keys_per_split"])
def _attend_kernel(
    q,
    k,
    v,
    parts,  # [splits, num_heads, n, head_dim]
    lses,  # [splits, num_heads, n]
    diagonal,
    window,
    n,
    m,
    keys_per_split,
    scale_log2,  # the attention scale over ln 2: exponentials are powers of two
    q_head_stride,
    q_row_stride,
    k_head_stride,
    k_row_stride,
    v_head_stride,
    v_row_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    TILE_DIM: tl.constexpr,
    WINDOWED: tl.constexpr,
    ON_DEVICE: tl.constexpr,
):
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_heads = tl.num_programs(1) * GROUP
    packed = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)  # ordered by token, then by head of the group
    real = packed < n * GROUP
    row = packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    dims = tl.arange(0, TILE_DIM)
    in_head = dims < HEAD_DIM
    first = tl.load(diagonal).to(tl.int32) if ON_DEVICE else diagonal.to(tl.int32)
    last_seen = first + row

    q_rows = q + head.to(tl.int64) * q_head_stride + row.to(tl.int64) * q_row_stride
    q_tile = tl.load(q_rows[:, None] + dims[None, :], mask=real[:, None] & in_head[None, :], other=0.0)
    k += kv_head.to(tl.int64) * k_head_stride
    v += kv_head.to(tl.int64) * v_head_stride

    # Tiles that no row of this program sees are skipped; their probabilities would be 0.
    begin = split * keys_per_split
    end = tl.minimum(tl.minimum(begin + keys_per_split, m), first + (tile * TILE_ROWS + TILE_ROWS - 1) // GROUP + 1)
    if WINDOWED:
        lowest = first + tile * TILE_ROWS // GROUP - window + 1
        begin += tl.maximum(lowest - begin, 0) // TILE_KEYS * TILE_KEYS

    peak = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    out = tl.zeros([TILE_ROWS, TILE_DIM], tl.float32)
    for start in range(begin, end, TILE_KEYS):
        keys = start + tl.arange(0, TILE_KEYS)
        there = keys < m
        rows_64 = keys.to(tl.int64)
        k_tile = tl.load(
            k + rows_64[None, :] * k_row_stride + dims[:, None], mask=in_head[:, None] & there[None, :], other=0.0
        )
        scores = tl.dot(q_tile, k_tile, input_precision="ieee") * scale_log2
        visible = there[None, :] & (keys[None, :] <= last_seen[:, None])
        if WINDOWED:
            visible = visible & (keys[None, :] > last_seen[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # no inf - inf while a row has seen no key
        probabilities = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(peak - shift)
        total = total * decay + tl.sum(probabilities, 1)
        v_tile = tl.load(
            v + rows_64[:, None] * v_row_stride + dims[None, :], mask=there[:, None] & in_head[None, :], other=0.0
        )
        out = tl.dot(probabilities.to(v_tile.dtype), v_tile, out * decay[:, None], input_precision="ieee")
        peak = higher

    seen = total > 0
    out /= tl.where(seen, total, 1.0)[:, None]
    lse = tl.where(seen, (peak + tl.log2(tl.where(seen, total, 1.0))) * 0.6931471805599453, float("-inf"))
    index = (split * num_heads + head).to(tl.int64) * n + row
    tl.store(lses + index, lse, mask=real)
    tl.store(parts + index[:, None] * HEAD_DIM + dims[None, :], out, mask=real[:, None] & in_head[None, :])


@triton.jit(do_not_specialize=["rows", "splits"])
def _merge_kernel(
    parts,  # [splits, rows, head_dim]
    lses,  # [splits, rows]
    out,  # [rows, head_dim]
    lse,  # [rows]
    rows,
    splits,
    HEAD_DIM: tl.constexpr,
    TILE_SPLITS: tl.constexpr,
    TILE_DIM: tl.constexpr,
):
    row = tl.program_id(0)
    dims = tl.arange(0, TILE_DIM)
    in_head = dims < HEAD_DIM
    part = tl.arange(0, TILE_SPLITS)
    real = part < splits
    index = part.to(tl.int64) * rows + row
    part_lse = tl.load(lses + index, mask=real, other=float("-inf"))
    peak = tl.max(part_lse, 0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    weights = tl.exp(part_lse - shift)
    total = tl.sum(weights, 0)
    seen = total > 0
    total = tl.where(seen, total, 1.0)
    tile = tl.load(parts + index[:, None] * HEAD_DIM + dims[None, :], mask=real[:, None] & in_head[None, :], other=0.0)
    tl.store(out + row * HEAD_DIM + dims, tl.sum(tile * weights[:, None], 0) / total, mask=in_head)
    tl.store(lse + row, tl.where(seen, shift + tl.log(total), float("-inf")))
