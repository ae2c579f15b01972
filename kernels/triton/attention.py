"""Attention on NVIDIA GPUs in Triton: split over the keys, several query rows at once, with log-sum-exp.

The method is FlashDecoding: each program attends one tile of query rows to one split of the keys, and a second kernel
merges the splits. The query heads that share a key/value head are in the same tile, so that keys and values are read
once for all of them.

The bits of a row depend only on that row and on the keys that it sees. Splits and tiles have fixed sizes, counted from
the first key of a call, and are merged one after another. So neither other rows nor keys that no row sees change
anything. The result of a split is relative to a peak that is a whole power of two, so it can be related to a higher
peak without rounding. Therefore keys may come in several calls, if each call begins at a multiple of `KEYS_PER_SPLIT`.

Scores and sums are float32. Probabilities are rounded to the dtype of 16-bit values before they are multiplied, as
flash kernels do. Nothing here waits for the GPU, so a call can be captured in a CUDA graph.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..partials import EMPTY, new_running
from ..selection import KEYS_PER_SPLIT, MOST_PARTS
from .launch import launch

LARGEST_HEAD_DIM = 256
"""Larger heads would not fit in shared memory with these tiles."""

_MOST_SPLITS = 65535
"""Maximum number of programs in the last dimension of a launch (CUDA)."""

_EMPTY: tl.constexpr = tl.constexpr(EMPTY)

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
    running: Tensor | None = None,
    most_parts: int = MOST_PARTS,
) -> tuple[Tensor, Tensor]:
    """`attention.attend` for tensors on a CUDA device (on the CPU under Triton's interpreter, `TRITON_INTERPRET=1`).

    Args:
        q: `[num_heads, n, head_dim]`, float32, float16 or bfloat16; `head_dim` at most `LARGEST_HEAD_DIM`.
        k, v: `[num_kv_heads, m, head_dim]`, of the same dtype.
        diagonal, window: as in `attend`. A tensor is read by the kernel when it runs, so that a captured CUDA graph
            uses its value at the time of the replay.
        split: whether to split the keys. This is faster for few rows. Many rows fill the GPU without splits, and their
            partial results would be large. The bits of a row differ with and without splits.
        running: as in `attend`: `[num_heads, n, head_dim + 16]`, float32, contiguous. Its peaks are in powers of two.
        most_parts: maximum number of bytes of partial results; longer calls are several launches.

    Returns:
        `out` `[num_heads, n, head_dim]` and `lse` `[num_heads, n]`, both float32.
    """
    num_heads, n, head_dim = q.shape
    num_kv_heads, m, _ = k.shape
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    group = num_heads // num_kv_heads
    tile_rows, tile_keys, tile_dim = tile_sizes(group, head_dim, q.dtype)
    out = q.new_empty(num_heads, n, head_dim, dtype=torch.float32)
    lse = q.new_empty(num_heads, n, dtype=torch.float32)
    if n == 0:
        return out, lse
    if diagonal is None:
        diagonal, window = m - 1, None
    if isinstance(diagonal, int):
        m = min(m, max(0, diagonal + n))
    keys_per_split = KEYS_PER_SPLIT if split else max(1, m)
    floats = out.numel() + 2 * lse.numel()
    first, stop, at_once = splits_to_launch(m, diagonal, window, keys_per_split, floats, most_parts)
    if running is None and stop - first > at_once:
        running = new_running(q)
    merges = split or running is not None
    for begin in range(first, stop, at_once):
        splits = min(at_once, stop - begin)
        parts = out.new_empty(splits, num_heads, n, head_dim) if merges else out
        peaks = lse.new_empty(splits, num_heads, n) if merges else lse
        totals = torch.empty_like(peaks)
        launch(
            _attend_kernel,
            (ceil_div(n * group, tile_rows), num_kv_heads, splits),
            q,
            k,
            v,
            parts,
            peaks,
            totals,
            diagonal,
            window or 0,
            n,
            m,
            begin,
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
            WHOLE=not merges,
            num_warps=warps_of(tile_rows, tile_keys, tile_dim),
            num_stages=_NUM_STAGES,
        )
        if merges:
            launch(
                _merge_kernel,
                (num_heads * n,),
                parts,
                peaks,
                totals,
                out if running is None else running,
                out,
                lse,
                num_heads * n,
                splits,
                HEAD_DIM=head_dim,
                TILE_DIM=tile_dim,
                RUNNING=running is not None,
                num_warps=1,
            )
    return out, lse


def ceil_div(a: int, b: int) -> int:
    """`a / b`, rounded up."""
    return -(-a // b)


def power_of_two(x: int) -> int:
    """The smallest power of two that is at least `x >= 1`."""
    return 1 << (x - 1).bit_length()


def splits_to_launch(
    m: int, diagonal: int | Tensor, window: int | None, keys_per_split: int, floats_per_split: int, most_parts: int
) -> tuple[int, int, int]:
    """The first split that a row may see, the end of the splits (there is at least one), and how many splits to launch
    at once."""
    lowest = diagonal - window + 1 if isinstance(diagonal, int) and window is not None else 0
    stop = max(1, ceil_div(m, keys_per_split))
    first = min(max(0, lowest) // keys_per_split, stop - 1)
    return first, stop, min(_MOST_SPLITS, max(1, most_parts // (4 * floats_per_split)))


def tile_sizes(group: int, head_dim: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """The numbers of rows, keys and dimensions of a tile: powers of two, and at least 16 as tensor cores require.

    A tile of rows has 16 tokens of up to four query heads each. Larger tiles spill registers when they are compiled for
    sm_80 to sm_120 (`docs/gpu-results.md`). float32, which has no exact tensor cores, spills first.
    """
    tile_dim = max(16, power_of_two(head_dim))
    if dtype == torch.float32:
        return 16, min(128, max(16, 2048 // tile_dim)), tile_dim
    return min(64, power_of_two(16 * group), 8192 // tile_dim), min(128, 8192 // tile_dim), tile_dim


def warps_of(tile_rows: int, tile_keys: int, tile_dim: int) -> int:
    """The number of warps of a program of `_attend_kernel`. With four warps, the largest scores and results take all
    registers, or more."""
    return 8 if tile_rows * max(tile_keys, tile_dim) >= 8192 else 4


@triton.jit(do_not_specialize=["diagonal", "window", "n", "m", "first_split", "keys_per_split"])
def _attend_kernel(
    q,
    k,
    v,
    parts,  # [splits, num_heads, n, head_dim], not normalised; with WHOLE normalised
    peaks,  # [splits, num_heads, n], in powers of two; with WHOLE the log-sum-exp
    totals,  # [splits, num_heads, n]; not written with WHOLE
    diagonal,
    window,
    n,
    m,
    first_split,
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
    WHOLE: tl.constexpr,
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
    begin = (first_split + split) * keys_per_split
    end = tl.minimum(tl.minimum(begin + keys_per_split, m), first + (tile * TILE_ROWS + TILE_ROWS - 1) // GROUP + 1)
    if WINDOWED:
        lowest = first + tile * TILE_ROWS // GROUP - window + 1
        begin += tl.maximum(lowest - begin, 0) // TILE_KEYS * TILE_KEYS

    peak = tl.full([TILE_ROWS], _EMPTY, tl.float32)
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
        probabilities = tl.exp2(scores - higher[:, None])
        decay = tl.exp2(peak - higher)
        total = tl.fma(total, decay, tl.sum(probabilities, 1))
        v_tile = tl.load(
            v + rows_64[:, None] * v_row_stride + dims[None, :], mask=there[:, None] & in_head[None, :], other=0.0
        )
        out = tl.dot(probabilities.to(v_tile.dtype), v_tile, out * decay[:, None], input_precision="ieee")
        peak = higher

    index = (split * num_heads + head).to(tl.int64) * n + row
    if WHOLE:
        seen = total > 0
        total = tl.where(seen, total, 1.0)
        out /= total[:, None]
        peak = tl.where(seen, (peak + tl.log2(total)) * 0.6931471805599453, float("-inf"))
    else:
        whole = tl.ceil(peak)
        decay = tl.exp2(peak - whole)
        tl.store(totals + index, total * decay, mask=real)
        out *= decay[:, None]
        peak = whole
    tl.store(peaks + index, peak, mask=real)
    tl.store(parts + index[:, None] * HEAD_DIM + dims[None, :], out, mask=real[:, None] & in_head[None, :])


@triton.jit(do_not_specialize=["rows", "splits"])
def _merge_kernel(
    parts,  # [splits, rows, head_dim]
    peaks,  # [splits, rows]
    totals,  # [splits, rows]
    running,  # [rows, head_dim + 16], read and written if RUNNING
    out,  # [rows, head_dim]
    lse,  # [rows]
    rows,
    splits,
    HEAD_DIM: tl.constexpr,
    TILE_DIM: tl.constexpr,
    RUNNING: tl.constexpr,
):
    """Adds splits to a row's running result, one after another. All are related to the highest peak before they are
    added; as peaks are whole this is exact, and the sums are as if each had been related to the highest so far."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, TILE_DIM)
    in_head = dims < HEAD_DIM
    running += row * (HEAD_DIM + 16)
    highest = tl.full([64], _EMPTY, tl.float32)
    for start in range(0, splits, 64):
        some = start + tl.arange(0, 64)
        highest = tl.maximum(highest, tl.load(peaks + some.to(tl.int64) * rows + row, mask=some < splits, other=_EMPTY))
    peak = tl.max(highest, 0)
    if RUNNING:
        before = tl.load(running + HEAD_DIM)
        peak = tl.maximum(peak, before)
        weight = tl.exp2(before - peak)
        total = tl.load(running + HEAD_DIM + 1) * weight
        sums = tl.load(running + dims, mask=in_head, other=0.0) * weight
    else:
        total = 0.0
        sums = tl.zeros([TILE_DIM], tl.float32)
    index = row
    for _ in tl.range(0, splits, loop_unroll_factor=8):  # loads of several at a time
        weight = tl.exp2(tl.load(peaks + index) - peak)
        total = tl.fma(tl.load(totals + index), weight, total)
        part = tl.load(parts + index * HEAD_DIM + dims, mask=in_head, other=0.0)
        sums = tl.fma(part, tl.broadcast_to(weight, [TILE_DIM]), sums)
        index += rows
    if RUNNING:
        tl.store(running + dims, sums, mask=in_head)
        tl.store(running + HEAD_DIM, peak)
        tl.store(running + HEAD_DIM + 1, total)
    seen = total > 0
    total = tl.where(seen, total, 1.0)
    tl.store(out + row * HEAD_DIM + dims, sums / total, mask=in_head)
    tl.store(lse + row, tl.where(seen, (peak + tl.log2(total)) * 0.6931471805599453, float("-inf")))
