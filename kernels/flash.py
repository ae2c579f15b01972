"""Flash kernels of other packages, all with the same arguments: no mask, or a square causal mask.

They round their output to the inputs' dtype, and are for many rows (prefill). `attend_flash` computes every other mask
without a window from these two masks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .partials import accumulation_dtype, merge_partials

FlashKernel = Callable[[Tensor, Tensor, Tensor, float, bool], tuple[Tensor, Tensor]]
"""`(q [num_heads, n, head_dim], k and v [num_kv_heads, m, head_dim], scale, causal) -> (out as q, lse [num_heads, n])`,
where `causal` needs `n == m`: row `i` sees keys `j <= i`. `lse` is float32, or float64 for float64 inputs."""


def flash_cpu(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """PyTorch's flash kernel for CPUs."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = flash(*_by_kv_head(q, k, v), 0.0, causal, scale=scale)
    return out.reshape(q.shape), lse.reshape(q.shape[:2])


def flash_cuda(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """PyTorch's own build of flash attention for NVIDIA GPUs: 16-bit, `head_dim` a multiple of 8 up to 256."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse, *_ = flash(*_by_kv_head(q, k, v), 0.0, causal, False, scale=scale)
    return out.reshape(q.shape), lse[..., : q.shape[1]].reshape(q.shape[:2])


def flash_package(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """The flash-attn package (version 2): 16-bit, `head_dim` up to 256."""
    from flash_attn import flash_attn_func  # pyright: ignore[reportMissingImports]

    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, tokens, heads, head_dim]
    out, lse, _ = flash_attn_func(q, k, v, softmax_scale=scale, causal=causal, return_attn_probs=True)
    return out[0].transpose(0, 1), lse[0]


def attend_flash(
    flash: FlashKernel, q: Tensor, k: Tensor, v: Tensor, scale: float, diagonal: int | None
) -> tuple[Tensor, Tensor]:
    """`attend` with a flash kernel.

    There are three kinds of rows: rows that see no key, rows that see some keys, and rows that see every key. For the
    second kind, a rectangle and a triangle of the mask are computed and merged.
    """
    (num_heads, n, _), m = q.shape, k.shape[1]
    dtype = accumulation_dtype(q.dtype)
    blind, shared = (0, m) if diagonal is None else (min(max(-diagonal, 0), n), min(max(diagonal, 0), m))
    corner = blind + min(n - blind, m - shared)
    outs, lses = [], []
    if blind:
        outs.append(q.new_zeros(num_heads, blind, q.shape[2], dtype=dtype))
        lses.append(q.new_full((num_heads, blind), float("-inf"), dtype=dtype))
    if corner > blind:
        rows, edge = q[:, blind:corner], shared + corner - blind
        out, lse = flash(rows, k[:, shared:edge], v[:, shared:edge], scale, True)
        if shared:
            wide, wide_lse = flash(rows, k[:, :shared], v[:, :shared], scale, False)
            out, lse = merge_partials([out, wide], [lse, wide_lse])
        outs.append(out.to(dtype))
        lses.append(lse)
    if n > corner:
        out, lse = flash(q[:, corner:], k, v, scale, False)
        outs.append(out.to(dtype))
        lses.append(lse)
    return (torch.cat(outs, dim=1), torch.cat(lses, dim=1)) if len(outs) > 1 else (outs[0], lses[0])


def _by_kv_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views `[num_kv_heads, group, tokens, head_dim]` of all three: KV heads are the batch."""
    grouped = q.reshape(k.shape[0], -1, *q.shape[1:])
    group = grouped.shape[1]
    return grouped, k.unsqueeze(1).expand(-1, group, -1, -1), v.unsqueeze(1).expand(-1, group, -1, -1)
