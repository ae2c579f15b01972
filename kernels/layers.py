"""What a decoder computes beside attention: projections with the norm before them, the gated MLP, and rotation.

Each is plain PyTorch or, for the `FEW_ROWS` rows of a step on a CPU, one call of a compiled kernel
(`kernels/cpu/layers.c`): dispatch would take most of the time. There a row comes out the same to the last bit however
many rows come with it.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import FEW_ROWS
from .cpu.library import library


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
        return F.linear(x if norm is None else F.rms_norm(x, norm.shape, norm, eps), weight, bias)
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
        gate, up = F.linear(F.rms_norm(x, norm.shape, norm, eps), gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, down)
    hidden, width = down.shape
    out = torch.empty((x.shape[0], hidden), dtype=x.dtype, device=x.device)
    return _normed(kernels.triforce_gated_mlp, x, norm, eps, gate_up, down, out, (hidden, width))


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
    """Calls `triforce_linear` or `triforce_gated_mlp`, whose arguments are alike: `second` is the bias of the one and a
    matrix of the other."""
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
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError(f"no memory for the temporaries of {x.shape[0]} rows")
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None = None) -> Tensor:
    """Rotary embedding in the half-split layout: `x * cos + roll(x, head_dim / 2) * sin`, computed in float32.

    Args:
        x: `[heads, n, head_dim]`.
        cos, sin: `[n, head_dim]`, or `[head_dim]` for the same angles in every row; float32. The sign of `rotate_half`
            is in `sin`.
        out: where to write it, as `x`; perhaps a slice of a cache.

    Returns:
        `out`, or a new tensor.
    """
    heads, n, head_dim = x.shape
    if out is None:
        out = torch.empty((heads, n, head_dim), dtype=x.dtype, device=x.device)
    fits = n <= FEW_ROWS and x.stride(2) == out.stride(2) == 1 and out.dtype == x.dtype and cos.is_contiguous()
    kernels = _kernels(x.device, x.dtype) if fits and cos.dtype == torch.float32 else None
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
    """The compiled kernels, if they take rows `x`, the matrix `weight` for them, and such `vectors`."""
    if x.shape[0] > FEW_ROWS or x.stride(1) != 1 or x.shape[1] != weight.shape[1]:
        return None
    for given in (weight, *vectors):
        if given is not None and (given.dtype != x.dtype or not given.is_contiguous()):
            return None
    return _kernels(x.device, x.dtype)


@functools.cache
def _kernels(device: torch.device, dtype: torch.dtype) -> ctypes.CDLL | None:
    """The compiled kernels with their arguments declared, if they are for tensors of such a kind."""
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float32):
        return None
    kernels = library()
    if kernels is None:
        return None
    pointer, count, real, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
    for kernel in (kernels.triforce_linear, kernels.triforce_gated_mlp):
        kernel.argtypes = [
            *(pointer, count, pointer, real, pointer, pointer, pointer),
            *(count, count, count, flag, flag),
        ]
    kernels.triforce_rotate.argtypes = [
        *(pointer, count, count, pointer, pointer, count),
        *(pointer, count, count, count, count, count, flag),
    ]
    kernels.triforce_rotate.restype = None
    return kernels
