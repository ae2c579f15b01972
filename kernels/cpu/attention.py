"""Attention by the compiled CPU kernels (`kernels/cpu/attention.c`), behind `attend` and `attend_blocks`.

A row comes out the same, bit by bit, however many rows come with it and however many threads there are.
"""

from __future__ import annotations

import ctypes
import functools
import struct

import torch
from torch import Tensor

from ..chunks import chunk_mass
from .library import attention_level, loaded

_TYPES = {torch.float32: 0, torch.bfloat16: 1}

_CALL = struct.Struct("=27qd")
"""`Attention` of attention.h."""

_FOREVER = 1 << 60

TILE = 64
"""Keys that are taken together; blocks of keys must be whole tiles. `TILE` of attention.h."""


@functools.cache
def compiled_attention(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the kernels are there and take such heads."""
    return dtype in _TYPES and head_dim % 32 == 0 and head_dim <= 256 and attention_level() > 0


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernels take these tensors, where `compiled_attention` says yes to their dtype: rows must be
    contiguous."""
    return k.dtype == v.dtype == q.dtype and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1


def attend_compiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    diagonal: int | None = None,
    window: int | None = None,
    mass: Tensor | None = None,
    m: int | None = None,
    level: int | None = None,
) -> tuple[Tensor, Tensor]:
    """See `attend`. Keys and values may also be blocks, `[num_blocks, num_kv_heads, block_size, head_dim]` with whole
    tiles in a block, of which the first `m` keys count.

    Args:
        mass: contiguous, of chunks that divide a tile; see `sums_mass`.
        level: instructions to use, at most `attention_level()`, which is the default.
    """
    num_heads, n, head_dim = q.shape
    if k.dim() == 4:
        num_blocks, num_kv_heads, block_size, _ = k.shape
        k_block, k_head, k_row, _ = k.stride()
        v_block, v_head, v_row, _ = v.stride()
        keys = num_blocks * block_size if m is None else m
    else:
        num_kv_heads, block_size, _ = k.shape
        k_head, k_row, _ = k.stride()
        v_head, v_row, _ = v.stride()
        k_block = v_block = 0
        keys = block_size
    q_head, q_row, _ = q.stride()
    out = torch.empty(num_heads, n, head_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(num_heads, n, dtype=torch.float32, device=q.device)
    call = _CALL.pack(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        out.data_ptr(),
        lse.data_ptr(),
        0 if mass is None else mass.data_ptr(),
        q_head,
        q_row,
        k_block,
        k_head,
        k_row,
        v_block,
        v_head,
        v_row,
        num_heads,
        num_kv_heads,
        n,
        keys,
        head_dim,
        block_size,
        keys if diagonal is None else diagonal,
        _FOREVER if window is None or diagonal is None else window,
        0 if mass is None else mass.shape[1],
        1 if mass is None else keys // mass.shape[2],
        _TYPES[q.dtype],
        torch.get_num_threads(),
        attention_level() if level is None else level,
        scale,
    )
    if _attend()(call):
        raise MemoryError(f"no memory for the temporaries of attention of {n} rows to {keys} keys")
    return out, lse


def takes_blocks(q: Tensor, blocks: Tensor) -> bool:
    """Whether `attend_blocks` can be called with them."""
    return (
        blocks.device.type == "cpu"
        and compiled_attention(q.dtype, q.shape[2])
        and blocks.shape[3] % TILE == 0
        and takes(q, blocks, blocks)
    )


def attend_blocks(
    q: Tensor,
    blocks: Tensor,
    m: int,
    *,
    scale: float,
    diagonal: int,
    window: int | None = None,
    mass: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`attend` to the first `m` keys of a blocked cache, in one call.

    Args:
        blocks: `[num_blocks, 2, num_kv_heads, block_size, head_dim]`.
    """
    k, v = blocks[:, 0], blocks[:, 1]
    fused_mass = mass if mass is not None and sums_mass(mass, m) else None
    out, lse = attend_compiled(q, k, v, m=m, scale=scale, diagonal=diagonal, window=window, mass=fused_mass)
    if mass is not None and fused_mass is None:
        flat = k.transpose(0, 1).flatten(1, 2)[:, :m]
        first = q.shape[1] - mass.shape[1]
        chunk_mass(q[:, first:], flat, lse[:, first:], mass, scale=scale, diagonal=diagonal + first, window=window)
    return out, lse


def sums_mass(mass: Tensor, m: int) -> bool:
    """Whether `attend_compiled` writes `mass` of `m` keys itself."""
    return (
        mass.dtype == torch.float32 and mass.is_contiguous() and mass.shape[2] > 0 and TILE % (m // mass.shape[2]) == 0
    )


@functools.cache
def _attend():
    kernels = loaded()
    assert kernels is not None
    kernels.triforce_attend.argtypes = [ctypes.c_char_p]
    kernels.triforce_attend.restype = ctypes.c_int
    return kernels.triforce_attend
