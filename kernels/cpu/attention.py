"""Attention by the compiled CPU kernels (`source/attention`), which `attend` and `attend_blocks` call.

A row's result is the same, bit by bit, however many rows come with it, however many threads there are, and whether its
keys lie in one place or come in blocks of whole splits (256 keys, `SPLIT` of attention.h).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .calls import call as call_kernel
from .calls import threads
from .library import AttentionCall, Level, cpu_level, loaded

_TYPES = {torch.float32: 0, torch.bfloat16: 1}

_NO_WINDOW = 1 << 60
"""A window that hides no key."""

TILE = 64
"""Keys that are processed together; a block of keys must be a multiple. `TILE` of attention.h."""


@functools.cache
def compiled_attention(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether this processor has the kernels, and they support such heads."""
    return dtype in _TYPES and head_dim % 32 == 0 and head_dim <= 256 and cpu_level() > Level.NONE


def has_plain_rows(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the tensors have one dtype and contiguous rows, as the kernels require."""
    return k.dtype == v.dtype == q.dtype and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1


def attend_compiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    diagonal: int | Tensor | None = None,
    window: int | None = None,
    mass: Tensor | None = None,
    running: Tensor | None = None,
    rounded: bool = False,
    m: int | None = None,
    level: int | None = None,
) -> tuple[Tensor, Tensor]:
    """See `attend`. Keys and values may also be blocks, `[num_blocks, num_kv_heads, block_size, head_dim]` with
    `block_size` a multiple of `TILE`; the first `m` keys count.

    Args:
        diagonal: a tensor is of one int64, and read when the kernel runs.
        mass: contiguous float32; see `sums_mass`.
        level: the instructions to use, at most `cpu_level()`, which is the default.

    Raises:
        MemoryError: no memory for the temporaries.
    """
    num_heads, n, head_dim = q.shape
    call = AttentionCall()
    if k.dim() == 4:
        num_blocks, num_kv_heads, block_size, _ = k.shape
        call.k_block, call.k_head, call.k_row, _ = k.stride()
        call.v_block, call.v_head, call.v_row, _ = v.stride()
        keys = num_blocks * block_size if m is None else m
    else:
        num_kv_heads, block_size, _ = k.shape
        call.k_head, call.k_row, _ = k.stride()
        call.v_head, call.v_row, _ = v.stride()
        keys = block_size
    dtype = q.dtype if rounded else torch.float32
    out = torch.empty(n, num_heads, head_dim, dtype=dtype, device=q.device).transpose(0, 1)
    call.out_head, call.out_row, _ = out.stride()
    call.rounded = dtype == torch.bfloat16
    lse = torch.empty(num_heads, n, dtype=torch.float32, device=q.device)
    call.q, call.k, call.v = q.data_ptr(), k.data_ptr(), v.data_ptr()
    call.out, call.lse = out.data_ptr(), lse.data_ptr()
    call.q_head, call.q_row, _ = q.stride()
    call.num_heads, call.num_kv_heads, call.head_dim = num_heads, num_kv_heads, head_dim
    call.n, call.m, call.block_size = n, keys, block_size
    if isinstance(diagonal, Tensor):
        call.diagonal_at = diagonal.data_ptr()
    else:
        call.diagonal = keys if diagonal is None else diagonal
    call.window = _NO_WINDOW if window is None or diagonal is None else window
    call.chunk_size = 1
    if mass is not None:
        call.mass, call.mass_rows, call.chunk_size = mass.data_ptr(), mass.shape[1], keys // mass.shape[2]
    if running is not None:
        call.running = running.data_ptr()
    call.type = _TYPES[q.dtype]
    call.threads = threads()
    call.level = cpu_level() if level is None else level
    call.scale = scale
    if call_kernel(_attend(), call):
        raise MemoryError(f"no memory for the temporaries of attention of {n} rows to {keys} keys")
    return out, lse


def sums_mass(mass: Tensor, m: int) -> bool:
    """Whether `attend_compiled` can write `mass` of `m` keys: contiguous float32, of chunks that divide a tile."""
    return (
        mass.dtype == torch.float32 and mass.is_contiguous() and mass.shape[2] > 0 and TILE % (m // mass.shape[2]) == 0
    )


@functools.cache
def _attend() -> Callable[[AttentionCall], Any]:
    kernels = loaded()
    assert kernels is not None
    return kernels.triforce_attend
