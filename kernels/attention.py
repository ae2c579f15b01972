"""Attention of query rows to keys, and the choice of its implementation: `attend`; `attend_blocks` and `attend_pieces`
for blocks.

Attention over keys in several places (blocks of a streamed cache, sinks and a window) is computed place by place. Each
part returns its output and the log-sum-exp of its scores, and `merge_partials` joins the parts exactly. Alternatively,
the places come in the order of their positions, and each call continues from the result of the call before (`running`).
Scores and sums are float32 (float64 for float64 inputs), and parts are merged in that dtype. Only flash kernels, which
compute more than `STEP_ROWS` rows, round their output to the inputs' dtype before the merge.

`choose_backend` selects the implementation for a call. All others are tested against `plain_attention`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .chunks import chunk_mass
from .cpu.attention import (
    TILE,
    Piece,
    PreparedStep,
    StepPiece,
    StepRows,
    attend_compiled,
    attend_compiled_pieces,
    compiled_attention,
    has_plain_rows,
    sums_mass,
)
from .cpu.library import Level, cpu_level
from .flash import FlashKernel, attend_flash, flash_cpu, flash_cuda, flash_package
from .layers import steps_are_compiled
from .packages import OLDEST_GPU, usable_packages
from .partials import add_partial, merge_partials, new_running
from .plain_attention import Scratch, attend_plain
from .selection import KEYS_PER_SPLIT, STEP_ROWS, TILE_ROWS, Backend, selected

__all__ = [
    "STEP_ROWS",
    "Piece",
    "PreparedStep",
    "Scratch",
    "StepPiece",
    "StepRows",
    "accumulates",
    "attend",
    "attend_blocks",
    "attend_pieces",
    "choose_backend",
    "merge_partials",
    "new_running",
    "prepared_step",
    "takes_blocks",
    "takes_joined",
]

_SEGMENT = 16384
"""Keys of a blocked cache that are copied together for a flash kernel. Limits the size of the copy."""

_PADDED_SPLIT = 256
"""Keys for each partial result of the plain implementation if rows are padded. Blocks consist of whole splits, so bits
do not depend on where blocks end."""

_FLASH: dict[str, FlashKernel] = {"flash_cpu": flash_cpu, "flash_cuda": flash_cuda, "flash_package": flash_package}


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    diagonal: int | Tensor | None = None,
    window: int | None = None,
    scratch: Scratch | None = None,
    mass: Tensor | None = None,
    running: Tensor | None = None,
    rounded: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attends `n` query rows to `m` keys.

    Args:
        q: `[num_heads, n, head_dim]`.
        k, v: `[num_kv_heads, m, head_dim]`; `num_heads` is a multiple of `num_kv_heads` (grouped queries).
        scale: factor on the scores, above 0, usually `head_dim ** -0.5`.
        diagonal: row `i` sees keys `j <= diagonal + i`; with `None` every row sees every key. Keys that no row sees may
            hold anything in `k`, but must be finite in `v` (the compiled kernels accept anything). A tensor of one
            int32 or int64 on `q`'s device is read when the kernels run, and the call never waits for it. So a captured
            CUDA graph can be replayed after the tensor was set to another position.
        window: with `diagonal`, row `i` sees only the last `window` of those keys: `j > diagonal + i - window`.
        scratch: buffers to reuse between calls.
        mass: `[num_heads, r, m // chunk_size]`, contiguous, in the dtype of `lse`, written: the share of attention that
            each of the last `r` rows gives to each chunk of `chunk_size` keys (see `chunk_mass`).
        running: the result of `new_running`, to which earlier calls may have added the keys before these. It is
            updated. Results, and the shares in `mass`, are then over all keys so far.
        rounded: whether `out` has `q`'s dtype.

    Returns:
        `out` `[num_heads, n, head_dim]`, in the dtype of the sums unless `rounded`, and `lse` `[num_heads, n]`, the
        natural log of the summed exponentials of the scaled scores. A row that sees no key has `out` 0 and `lse` -inf.

    Raises:
        ValueError: `num_heads` is not a multiple of `num_kv_heads`.
        MemoryError: no memory for the temporaries of a compiled kernel.
    """
    num_heads, n, head_dim = q.shape
    num_kv_heads, m, _ = k.shape
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads cannot share {num_kv_heads} key/value heads evenly")
    if isinstance(diagonal, int) and diagonal >= m - 1 and window is None:
        diagonal = None
    flash_mask = window is None and running is None and not isinstance(diagonal, Tensor)
    backend = _backend_of(q, flash_mask, has_plain_rows(q, k, v))
    fused_mass = None  # mass that is summed from the scores that attention computes
    if backend == "compiled":
        fused_mass = mass if mass is not None and sums_mass(mass, m) else None
        known = diagonal.long() if isinstance(diagonal, Tensor) else diagonal
        out, lse = attend_compiled(
            q, k, v, scale=scale, diagonal=known, window=window, mass=fused_mass, running=running, rounded=rounded
        )
    elif backend == "triton":
        from .triton.attention import attend_triton  # not imported where it is not used

        out, lse = attend_triton(
            q, k, v, scale=scale, diagonal=diagonal, window=window, split=n <= STEP_ROWS, running=running
        )
    elif backend != "plain" and not isinstance(diagonal, Tensor):
        out, lse = attend_flash(_FLASH[backend], q, k, v, scale, diagonal)
    else:
        fused_mass = mass if mass is not None and mass.shape[1] == n <= STEP_ROWS else None
        grouped = q.reshape(num_kv_heads, num_heads // num_kv_heads, n, head_dim)
        tile, padded, scratch = TILE_ROWS if n <= STEP_ROWS else None, selected().padded, scratch or Scratch()
        splits = [(k, v)]
        if padded and running is not None:
            splits, fused_mass = list(zip(k.split(_PADDED_SPLIT, 1), v.split(_PADDED_SPLIT, 1), strict=True)), None
        out, lse = q.new_empty(0), q.new_empty(0)
        for i, (keys, values) in enumerate(splits):
            seen = None if diagonal is None else diagonal - i * _PADDED_SPLIT
            out, lse = attend_plain(grouped, keys, values, scale, seen, window, scratch, fused_mass, tile, padded)
            out, here = out.reshape(num_heads, n, head_dim), lse.reshape(num_heads, n)
            out, lse = (out, here) if running is None else add_partial(running, out, here)
            if fused_mass is not None and running is not None:
                fused_mass.mul_(torch.where(here == float("-inf"), 0.0, (here - lse).exp()).unsqueeze(-1))
    if mass is not None and fused_mass is None:
        first = n - mass.shape[1]
        seen = None if diagonal is None else diagonal + first
        chunk_mass(q[:, first:], k, lse[:, first:], mass, scale=scale, diagonal=seen, window=window)
    return out.to(q.dtype) if rounded else out, lse


def accumulates(q: Tensor, block: Tensor) -> bool:
    """Whether calls of `attend` for one block after another should each continue from the call before (`running`).

    True for a step. For more rows, true if the compiled kernels compute them, which then give the same bits as one call
    for all blocks.

    Args:
        q: `[num_heads, n, head_dim]`.
        block: any block of the keys; only its dtype and its last stride matter.
    """
    plain_rows = has_plain_rows(q, block, block)
    return q.shape[1] <= STEP_ROWS or _backend_of(q, flash_mask=True, plain_rows=plain_rows) == "compiled"


def takes_joined(q: Tensor, block_size: int) -> bool:
    """Whether one call of `attend` for several adjacent blocks gives the same bits as one call for each block
    (`running`), and takes no more memory than a run's plan counts for attention.

    True for a step that kernels of this package compute, if the block size is a multiple of `KEYS_PER_SPLIT`.
    """
    if q.shape[1] > STEP_ROWS or block_size % KEYS_PER_SPLIT:
        return False
    return _backend_of(q, False, has_plain_rows(q, q, q)) in ("compiled", "triton")


def takes_blocks(q: Tensor, blocks: Tensor) -> bool:
    """Whether `attend_blocks` and `attend_pieces` can be called with these tensors.

    True on a CPU if the block size is a multiple of `TILE` and the compiled kernels compute `attend` for these rows, or
    would with a window, which PyTorch's flash kernels do not support.

    Args:
        q: `[num_heads, n, head_dim]`.
        blocks: see `attend_blocks`.
    """
    if blocks.device.type != "cpu" or blocks.shape[3] % TILE:
        return False
    return _backend_of(q, flash_mask=False, plain_rows=has_plain_rows(q, blocks, blocks)) == "compiled"


def attend_blocks(
    q: Tensor,
    blocks: Tensor,
    m: int,
    *,
    scale: float,
    diagonal: int,
    window: int | None = None,
    mass: Tensor | None = None,
    rounded: bool = False,
) -> tuple[Tensor, Tensor]:
    """`attend` to the first `m` keys of a blocked cache, in one call. `takes_blocks` must hold.

    Args:
        blocks: `[num_blocks, 2, num_kv_heads, block_size, head_dim]`, keys and values.

    The other arguments, the results and the errors are those of `attend`.
    """
    n = q.shape[1]
    hides = window is not None and window < diagonal + n
    if _backend_of(q, flash_mask=not hides, plain_rows=True) == "flash_cpu":
        out, lse = _attend_flash_segments(q, blocks, m, scale, diagonal)
        fused_mass = None
    else:
        fused_mass = mass if mass is not None and sums_mass(mass, m) else None
        out, lse = attend_compiled(
            q,
            blocks[:, 0],
            blocks[:, 1],
            m=m,
            scale=scale,
            diagonal=diagonal,
            window=window,
            mass=fused_mass,
            rounded=rounded,
        )
    if mass is not None and fused_mass is None:
        first = n - mass.shape[1]
        _mass_of_blocks(
            q[:, first:], blocks[:, 0], m, lse[:, first:], mass, scale=scale, diagonal=diagonal + first, window=window
        )
    return out.to(q.dtype) if rounded else out, lse


def prepared_step(
    rows: StepRows,
    caches: Sequence[tuple[Tensor, Tensor]],
    calls: Sequence[Sequence[StepPiece]],
    written: Sequence[tuple[int, int, slice]],
    *,
    scale: float,
    window: int | None = None,
    before: PreparedStep | None = None,
) -> PreparedStep | None:
    """Prepares a step for the compiled kernels; see `PreparedStep` for the arguments and for what it does.

    The result of each row is that of `attend` with `rounded`. Returns `None` if the compiled kernels cannot compute the
    step.

    Args:
        before: the result for an earlier step. It is used again if only positions differ.
    """
    made_for = (
        tuple(x.data_ptr() for x in rows.tensors()),
        (rows.q.shape, rows.k.shape, scale, window, selected()),
        [(keys.shape[-3:], keys.stride(), values.stride()) for keys, values in caches],
        [[(piece.rows.start, piece.rows.stop, piece.cache) for piece in some] for some in calls],
        [(number, own.start, own.stop) for number, _, own in written],
    )
    if before and before.made_for == made_for:
        before.aim(calls, written)
        return before
    if not _are_compiled(rows) or not has_plain_rows(rows.k, rows.v, rows.out):
        return None
    for keys, values in caches:
        whole, plain_rows = keys.dim() == 3 or keys.shape[2] % TILE == 0, has_plain_rows(rows.q, keys, values)
        if not whole or _backend_of(rows.q, False, plain_rows) != "compiled":
            return None
    return PreparedStep(rows, caches, calls, written, scale, window, made_for)


def _are_compiled(rows: StepRows) -> bool:
    """Whether the compiled kernels accept these rows as a step. The kernel that writes rows into caches needs a higher
    level than attention."""
    q = rows.q
    return q.shape[1] <= STEP_ROWS and rows.k.dtype == q.dtype and steps_are_compiled(q.device, q.dtype, q.shape[2])


def attend_pieces(q: Tensor, pieces: Sequence[Piece], *, scale: float, running: Tensor, out: Tensor) -> list[Tensor]:
    """`attend_blocks` for several pieces in one call. No two pieces may share a row, and `takes_blocks` must hold.

    Args:
        q: `[num_heads, n, head_dim]`, the rows of all pieces.
        running: that of the rows of `q`, see `attend`; the rows of these pieces are updated.
        out: shape and dtype of `q`; the last dimension is contiguous. The rows of these pieces are written.

    Returns:
        The log-sum-exp of the rows of each piece over all keys so far, `[num_heads, rows]`.

    Raises:
        MemoryError: no memory for the temporaries.
    """
    fused = [
        piece if piece.mass is None or sums_mass(piece.mass, piece.m) else replace(piece, mass=None) for piece in pieces
    ]
    lses = attend_compiled_pieces(q, fused, scale=scale, running=running, out=out)
    for piece, one, lse in zip(pieces, fused, lses, strict=True):
        if piece.mass is not one.mass and piece.mass is not None:
            size = piece.blocks.shape[3]
            keys = piece.blocks[piece.first // size :, 0, :, piece.first % size :]
            shown = {"diagonal": piece.diagonal, "window": piece.window}
            _mass_of_blocks(q[:, piece.rows], keys, piece.m, lse, piece.mass, scale=scale, **shown)
    return lses


def _attend_flash_segments(q: Tensor, blocks: Tensor, m: int, scale: float, diagonal: int) -> tuple[Tensor, Tensor]:
    """`attend_blocks` with PyTorch's flash kernel. It needs adjacent keys, so blocks are copied into segments."""
    block_size = blocks.shape[3]
    num_blocks = max(1, _SEGMENT // block_size)
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    for first in range(0, min(m, max(1, diagonal + q.shape[1])), num_blocks * block_size):
        # [2, num_kv_heads, keys, head_dim]; a view where there is one block
        segment = blocks[first // block_size :][:num_blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : m - first]
        seen = diagonal - first
        out, lse = attend_flash(
            flash_cpu, q, segment[0], segment[1], scale, None if seen >= segment.shape[2] - 1 else seen
        )
        outs.append(out)
        lses.append(lse)
        if len(outs) == 2:
            out, lse = merge_partials(outs, lses)
            outs, lses = [out], [lse]
    return outs[0], lses[0]


def _mass_of_blocks(
    q: Tensor, keys: Tensor, m: int, lse: Tensor, mass: Tensor, *, scale: float, diagonal: int, window: int | None
) -> None:
    """`chunk_mass` over the first `m` keys of blocks `[num_blocks, num_kv_heads, block_size, head_dim]`."""
    block_size, chunk_size = keys.shape[2], m // mass.shape[2]
    for first in range(0, m, block_size):
        block = keys[first // block_size, :, : m - first]
        part = mass.new_empty(*mass.shape[:2], block.shape[1] // chunk_size)
        chunk_mass(q, block, lse, part, scale=scale, diagonal=diagonal - first, window=window)
        mass[:, :, first // chunk_size :][:, :, : part.shape[2]] = part


def _backend_of(q: Tensor, flash_mask: bool, plain_rows: bool) -> Backend:
    is_step = q.shape[1] <= STEP_ROWS
    kernels = selected()
    wanted, as_gpu = kernels.backend(is_step), kernels.as_gpu
    return _backend(q.device, q.dtype, q.shape[2], is_step, flash_mask, plain_rows, wanted, as_gpu)


@functools.cache
def _backend(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    is_step: bool,
    flash_mask: bool,
    plain_rows: bool,
    wanted: Backend | None,
    as_gpu: frozenset[str] | None,
) -> Backend:
    """The implementation for a kind of call, determined once: `wanted` if it can compute the call, otherwise the result
    of `choose_backend` for this machine or for the GPU that it stands for (`as_gpu`)."""
    compiled = as_gpu is None and device.type == "cpu" and plain_rows and compiled_attention(dtype, head_dim)
    if wanted is not None and (flash_mask or wanted not in _FLASH) and (compiled or wanted != "compiled"):
        return wanted
    packages = usable_packages(device)
    capability = OLDEST_GPU if as_gpu is not None else None
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
    level = cpu_level() if compiled else Level.NONE
    return choose_backend(capability, packages, dtype, head_dim, is_step, flash_mask, level)


def choose_backend(
    capability: tuple[int, int] | None,
    packages: frozenset[str],
    dtype: torch.dtype,
    head_dim: int,
    is_step: bool,
    flash_mask: bool,
    level: Level = Level.NONE,
) -> Backend:
    """Selects the implementation that computes a call of `attend`.

    The choice depends only on the kind of machine and the kind of call, never on a measurement. So a machine always
    computes in the same way.

    Args:
        capability: the CUDA device's compute capability; `None` is a CPU.
        packages: those of `flash_attn` and `triton` that can be used on the device.
        is_step: whether there are at most `STEP_ROWS` query rows.
        flash_mask: whether there is no window and no `running`, and the host knows the diagonal.
        level: the level of the compiled CPU kernels for these tensors; `Level.NONE` if they cannot compute the call.
    """
    if level > Level.NONE:
        return "compiled"
    if capability is None:
        return "flash_cpu" if flash_mask and not is_step else "plain"
    if capability < OLDEST_GPU or head_dim > 256:
        return "plain"
    if not is_step and dtype == torch.float32:
        return "plain"  # tensor cores would round it, so large products are left to cuBLAS
    if not is_step and flash_mask and dtype in (torch.float16, torch.bfloat16):
        if "flash_attn" in packages:
            return "flash_package"
        if head_dim % 8 == 0:
            return "flash_cuda"
    if "triton" in packages and dtype in (torch.float16, torch.bfloat16, torch.float32):
        return "triton"
    return "plain"
