"""What a decoder computes besides attention: projections with the norm before them, the gated MLP, and rotation.

Each is PyTorch operations or, for the at most `FEW_ROWS` rows of a step on a CPU, one call of a compiled kernel
(`cpu/source/layers`), because dispatching PyTorch operations would take most of the time. With the compiled kernels a
row's result is the same, bit by bit, however many rows come with it; PyTorch's products choose another arithmetic for
another number of rows, unless rows are padded (`selection.padded_rows`).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .cpu.attention import compiled_attention
from .cpu.library import Level, cpu_level, loaded
from .selection import FEW_ROWS, TILE_ROWS, selected


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, norm: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """`x` or, with `norm`, its RMS norm, times `weight`.

    Args:
        x: `[n, inputs]`.
        weight: `[outputs, inputs]`, contiguous.
        bias: `[outputs]`.
        norm: `[inputs]`, the weight of an RMS norm over `x` with `eps`.

    Returns:
        `[n, outputs]` in `x`'s dtype.
    """
    kernels = _kernels_for(x, weight, bias, norm)
    if kernels is None:
        return _by_tiles(
            lambda rows: F.linear(rows if norm is None else F.rms_norm(rows, norm.shape, norm, eps), weight, bias), x
        )
    outputs, inputs = weight.shape
    out = torch.empty((x.shape[0], outputs), dtype=x.dtype, device=x.device)
    return _normed(kernels.triforce_linear, x, norm, eps, weight, bias, out, (inputs, outputs))


def gated_mlp(x: Tensor, norm: Tensor, eps: float, gate_up: Tensor, down: Tensor) -> Tensor:
    """The MLP of Llama, with the RMS norm before it: `down · (silu(gate · y) * (up · y))`.

    Args:
        x: `[n, hidden]`.
        norm: `[hidden]`.
        gate_up: `[2 * intermediate, hidden]`, contiguous.
        down: `[hidden, intermediate]`, contiguous.

    Returns:
        `[n, hidden]` in `x`'s dtype.
    """
    kernels = _kernels_for(x, gate_up, norm) if down.is_contiguous() and down.dtype == x.dtype else None
    if kernels is None:

        def plain(rows: Tensor) -> Tensor:
            gate, up = F.linear(F.rms_norm(rows, norm.shape, norm, eps), gate_up).chunk(2, dim=-1)
            return F.linear(F.silu(gate) * up, down)

        return _by_tiles(plain, x)
    hidden, width = down.shape
    out = torch.empty((x.shape[0], hidden), dtype=x.dtype, device=x.device)
    return _normed(kernels.triforce_gated_mlp, x, norm, eps, gate_up, down, out, (hidden, width))


def _by_tiles(compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`compute(x)`, row by row; where rows are padded, for `TILE_ROWS` rows at a time, always so many."""
    n = x.shape[0]
    if not selected().padded or n > FEW_ROWS:
        return compute(x)
    outs = [compute(F.pad(tile, (0, 0, 0, TILE_ROWS - tile.shape[0]))) for tile in x.split(TILE_ROWS)]
    return (outs[0] if len(outs) == 1 else torch.cat(outs))[:n]


def rows_are_independent(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether a row of a step (at most `FEW_ROWS` rows) has the same result, bit by bit, whatever rows come with it:
    where the compiled kernels compute products and attention, or where rows are padded."""
    compiled = _kernels(device, dtype, selected().layers) is not None and compiled_attention(dtype, head_dim)
    return compiled or selected().padded


def _normed(
    kernel: Any,
    x: Tensor,
    norm: Tensor | None,
    eps: float,
    weight: Tensor,
    second: Tensor | None,
    out: Tensor,
    sizes: tuple[int, int],
) -> Tensor:
    """Calls `triforce_linear` or `triforce_gated_mlp`, which take the same arguments but for `second`: the bias of the
    former, the second matrix of the latter."""
    failed = kernel(
        x.data_ptr(),
        x.stride(0),
        None if norm is None else norm.data_ptr(),
        eps,
        weight.data_ptr(),
        None if second is None else second.data_ptr(),
        out.data_ptr(),
        x.shape[0],
        *sizes,
        x.dtype == torch.bfloat16,
        cpu_level(),
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError(f"no memory for the temporaries of {x.shape[0]} rows")
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None = None) -> Tensor:
    """Rotary embedding in the half-split layout: `x * cos + roll(x, head_dim / 2) * sin`, computed in float32.

    Args:
        x: `[heads, n, head_dim]`.
        cos, sin: `[n, head_dim]`, or `[head_dim]` for the same angles in every row; float32. `sin` includes the sign of
            `rotate_half`.
        out: as `x`, written; it may be a slice of a cache.

    Returns:
        `out`, or a new tensor if that is not given.
    """
    heads, n, head_dim = x.shape
    if out is None:
        out = torch.empty((heads, n, head_dim), dtype=x.dtype, device=x.device)
    fits = n <= FEW_ROWS and x.stride(2) == out.stride(2) == 1 and out.dtype == x.dtype and cos.is_contiguous()
    kernels = _kernels(x.device, x.dtype, selected().layers) if fits and cos.dtype == torch.float32 else None
    if kernels is None:
        return out.copy_(torch.addcmul(x * cos, x.roll(head_dim // 2, dims=-1), sin))
    (head_stride, row_stride, _), (out_head_stride, out_row_stride, _) = x.stride(), out.stride()
    kernels.triforce_rotate(
        x.data_ptr(),
        head_stride,
        row_stride,
        cos.data_ptr(),
        sin.data_ptr(),
        0 if cos.dim() == 1 else head_dim,
        out.data_ptr(),
        out_head_stride,
        out_row_stride,
        heads,
        n,
        head_dim,
        x.dtype == torch.bfloat16,
    )
    return out


def _kernels_for(x: Tensor, weight: Tensor, *vectors: Tensor | None) -> ctypes.CDLL | None:
    """The compiled kernels, if they can multiply rows `x` by the matrix `weight` with such `vectors`."""
    if x.shape[0] > FEW_ROWS or x.stride(1) != 1 or x.shape[1] != weight.shape[1]:
        return None
    for given in (weight, *vectors):
        if given is not None and (given.dtype != x.dtype or not given.is_contiguous()):
            return None
    return _kernels(x.device, x.dtype, selected().layers)


@functools.cache
def _kernels(device: torch.device, dtype: torch.dtype, wanted: Literal["plain"] | None) -> ctypes.CDLL | None:
    """The compiled kernels, if this processor has them for such tensors and they are wanted."""
    if wanted == "plain" or device.type != "cpu" or dtype not in (torch.bfloat16, torch.float32):
        return None
    return loaded() if cpu_level() >= Level.AVX512_BF16 else None
