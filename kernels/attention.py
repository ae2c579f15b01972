"""The one attention entry: `attend` over a stretch of keys, and `merge_partials` to join stretches.

Attention over keys that live in several places (blocks of a streamed cache, sinks and a window) is computed place by
place; each part returns its output and the log-sum-exp of its scores, from which the exact whole follows
(the split-KV identity of FlashDecoding). Scores and sums are float32 (float64 for float64 inputs) and parts are merged
in that; only flash kernels, for more than `FEW_ROWS` rows, round their output to the inputs' dtype first.

The plain path in this file is what every other one is tested against. `choose_backend` says which one is taken.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from .chunks import chunk_mass
from .cpu.attention import attend_compiled, compiled_attention, sums_mass, takes
from .flash import FlashKernel, flash_cpu, flash_cuda, flash_package
from .packages import OLDEST_GPU, usable_packages

FEW_ROWS = 32
"""Up to this many rows a pass is a decoding step: on a CPU two batched matmuls take no longer than PyTorch's flash
kernel, nor the products of `layers` longer than general ones. A verification has no more, unless `--block-length`
asks for it, so that its rows go through the arithmetic of a step."""

Backend = Literal["plain", "compiled", "flash_cpu", "flash_cuda", "flash_package", "triton"]

_FLASH: dict[str, FlashKernel] = {"flash_cpu": flash_cpu, "flash_cuda": flash_cuda, "flash_package": flash_package}

_TILE_ROWS = 128
"""Rows per tile of the plain path; bounds the score matrix."""


class Scratch:
    """Reused buffers for temporaries of several MB, which otherwise cost a page fault per 4 KiB on every call.

    Owned by a cache and handed to `attend`. A buffer is valid until the next request under the same name.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def get(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns an uninitialised contiguous tensor of `shape`, reusing earlier memory where it suffices."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size or buffer.dtype != dtype or buffer.device != device:
            buffer = torch.empty(size, dtype=dtype, device=device)
            self._buffers[name] = buffer
        return buffer[:size].view(*shape)


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
) -> tuple[Tensor, Tensor]:
    """Attends `n` query rows to `m` keys.

    Args:
        q: `[num_heads, n, head_dim]`.
        k, v: `[num_kv_heads, m, head_dim]`; `num_heads` is a multiple of `num_kv_heads` (grouped queries).
        scale: factor on the scores, usually `head_dim ** -0.5`.
        diagonal: row `i` sees keys `j <= diagonal + i`; `None` shows every key to every row. Keys past the last
            visible one may hold anything in `k`, but must be finite in `v`. A tensor of one int32 or int64 on `q`'s
            device is read when the kernels run and the call never waits for it: a captured CUDA graph can be replayed
            after the tensor was set to another position.
        window: with `diagonal`, row `i` sees only the last `window` of those keys: `j > diagonal + i - window`.
        scratch: buffers to reuse between calls.
        mass: `[num_heads, r, m // chunk_size]`, written: the share of its attention that each of the last `r` rows
            gives to each chunk of `chunk_size` keys (see `chunk_mass`). A few rows get it from the scores at hand.

    Returns:
        `out` `[num_heads, n, head_dim]` and `lse` `[num_heads, n]`, the natural log of the summed exponentials of
        the scaled scores. A row that sees no key has `out` 0 and `lse` -inf.

    Raises:
        ValueError: the head counts do not divide.
    """
    num_heads, n, head_dim = q.shape
    num_kv_heads, m, _ = k.shape
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads cannot share {num_kv_heads} key/value heads evenly")
    if isinstance(diagonal, int) and diagonal >= m - 1 and window is None:
        diagonal = None
    flash_mask = window is None and not isinstance(diagonal, Tensor)
    backend = _backend(q.device, q.dtype, head_dim, n <= FEW_ROWS, flash_mask, takes(q, k, v))
    fused_mass = None  # mass that is summed from the scores at hand
    if backend == "compiled":
        fused_mass = mass if mass is not None and sums_mass(mass, m) else None
        known = int(diagonal) if isinstance(diagonal, Tensor) else diagonal  # on a CPU there is nothing to wait for
        out, lse = attend_compiled(q, k, v, scale=scale, diagonal=known, window=window, mass=fused_mass)
    elif backend == "triton":
        from .triton.attention import attend_triton  # only where it is used: a CPU has no need of Triton

        out, lse = attend_triton(q, k, v, scale=scale, diagonal=diagonal, window=window, split=n <= FEW_ROWS)
    elif backend != "plain" and not isinstance(diagonal, Tensor):
        out, lse = _attend_flash(_FLASH[backend], q, k, v, scale, diagonal)
    else:
        fused_mass = mass if mass is not None and mass.shape[1] == n <= FEW_ROWS else None
        grouped = q.reshape(num_kv_heads, num_heads // num_kv_heads, n, head_dim)
        out, lse = _attend_tiled(grouped, k, v, scale, diagonal, window, scratch or Scratch(), fused_mass)
        out, lse = out.reshape(num_heads, n, head_dim), lse.reshape(num_heads, n)
    if mass is not None and fused_mass is None:
        first = n - mass.shape[1]
        seen = None if diagonal is None else diagonal + first
        chunk_mass(q[:, first:], k, lse[:, first:], mass, scale=scale, diagonal=seen, window=window)
    return out, lse


@functools.cache
def _backend(
    device: torch.device, dtype: torch.dtype, head_dim: int, few_rows: bool, flash_mask: bool, plain_rows: bool
) -> Backend:
    """`choose_backend` for this machine, once for each kind of call."""
    packages = usable_packages(device)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    compiled = device.type == "cpu" and plain_rows and compiled_attention(dtype, head_dim)
    return choose_backend(capability, packages, dtype, head_dim, few_rows, flash_mask, compiled)


def choose_backend(
    capability: tuple[int, int] | None,
    packages: frozenset[str],
    dtype: torch.dtype,
    head_dim: int,
    few_rows: bool,
    flash_mask: bool,
    compiled: bool = False,
) -> Backend:
    """Which implementation `attend` takes.

    Args:
        capability: the CUDA device's compute capability; `None` is a CPU.
        packages: which of `flash_attn` and `triton` can be used on it.
        few_rows: at most `FEW_ROWS` query rows.
        flash_mask: no window, and the diagonal is known to the host.
        compiled: whether the compiled kernels for CPUs are there and take these tensors.
    """
    if compiled:
        return "compiled"
    if capability is None:
        return "flash_cpu" if flash_mask and not few_rows else "plain"
    if capability < OLDEST_GPU or head_dim > 256:
        return "plain"
    if not few_rows and dtype == torch.float32:
        return "plain"  # tensor cores would round it, so large products are left to cuBLAS
    if not few_rows and flash_mask and dtype in (torch.float16, torch.bfloat16):
        if "flash_attn" in packages:
            return "flash_package"
        if head_dim % 8 == 0:
            return "flash_cuda"
    if "triton" in packages and dtype in (torch.float16, torch.bfloat16, torch.float32):
        return "triton"
    return "plain"


def merge_partials(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Joins attention over disjoint sets of keys into attention over their union.

    Args:
        outs: partial outputs, each `[num_heads, n, head_dim]`.
        lses: their log-sum-exps, each `[num_heads, n]`.

    Returns:
        The output and log-sum-exp over all keys; rows that see no key anywhere stay 0 and -inf.
    """
    if len(outs) == 1:
        return outs[0], lses[0]
    stacked = torch.stack(tuple(lses))  # [parts, num_heads, n]
    peak = stacked.amax(dim=0)
    peak.masked_fill_(peak == float("-inf"), 0.0)  # a row that sees nothing
    weights = torch.exp(stacked - peak)
    total = weights[0].clone()
    out = outs[0] * weights[0].unsqueeze(-1)
    for part, weight in zip(outs[1:], weights[1:], strict=True):  # in one order, however many rows there are
        total += weight
        out.addcmul_(part.to(out.dtype), weight.unsqueeze(-1))
    out /= total.clamp_min(torch.finfo(total.dtype).tiny).unsqueeze(-1)
    return out, peak.add_(total.log_())


def _accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _attend_few_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    diagonal: int | Tensor | None,
    window: int | None,
    scratch: Scratch,
    mass: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Two batched matmuls over the whole block; 16-bit keys and values are widened into reused memory first.

    The block is masked, never sliced: a sliced operand makes `bmm` copy it.
    """
    num_kv_heads, group, n, head_dim = q.shape
    m = k.shape[1]
    dtype = _accumulate_dtype(q.dtype)
    wide_q = (q.to(dtype) * scale).reshape(num_kv_heads, group * n, head_dim)
    scores = scratch.get("scores", (num_kv_heads, group * n, m), dtype, q.device)
    torch.bmm(wide_q, _widen(k, dtype, scratch).transpose(1, 2), out=scores)
    # Whether some rows may see no key.
    blind_rows = isinstance(diagonal, Tensor) or (diagonal is not None and (diagonal < 0 or window is not None))
    if diagonal is not None:
        columns = torch.arange(m, device=q.device)
        last = torch.arange(n, device=q.device).unsqueeze(1) + diagonal
        hidden = columns > last  # [n, m]
        if window is not None:
            hidden |= columns <= last - window
        scores.view(num_kv_heads, group, n, m).masked_fill_(hidden, float("-inf"))
    peak = scores.amax(dim=-1, keepdim=True)
    if blind_rows:
        peak.masked_fill_(peak == float("-inf"), 0.0)
    total = scores.sub_(peak).exp_().sum(dim=-1, keepdim=True)
    out = torch.bmm(scores, _widen(v, dtype, scratch))
    norm = total.clamp_min(torch.finfo(dtype).tiny) if blind_rows else total
    out /= norm
    if mass is not None:
        # A product with ones: a sum over so short a dimension takes several times as long.
        chunks = scores.view(num_kv_heads, group * n, mass.shape[-1], -1)
        torch.div(chunks @ chunks.new_ones(chunks.shape[-1]), norm, out=mass.view(num_kv_heads, group * n, -1))
    lse = peak.add_(total.log_())
    return out.view(num_kv_heads, group, n, head_dim), lse.view(num_kv_heads, group, n)


def _widen(x: Tensor, dtype: torch.dtype, scratch: Scratch) -> Tensor:
    if x.dtype == dtype:
        return x
    return scratch.get("wide", x.shape, dtype, x.device).copy_(x)


def _attend_flash(
    flash: FlashKernel, q: Tensor, k: Tensor, v: Tensor, scale: float, diagonal: int | None
) -> tuple[Tensor, Tensor]:
    """A flash kernel on rectangles and one triangle, merged: rows that see nothing, rows that the diagonal passes
    through, rows that see every key."""
    (num_heads, n, _), m = q.shape, k.shape[1]
    dtype = _accumulate_dtype(q.dtype)
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
            out, lse = merge_partials([out.to(dtype), wide.to(dtype)], [lse, wide_lse])
        outs.append(out.to(dtype))
        lses.append(lse)
    if n > corner:
        out, lse = flash(q[:, corner:], k, v, scale, False)
        outs.append(out.to(dtype))
        lses.append(lse)
    return (torch.cat(outs, dim=1), torch.cat(lses, dim=1)) if len(outs) > 1 else (outs[0], lses[0])


def _attend_tiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    diagonal: int | Tensor | None,
    window: int | None,
    scratch: Scratch,
    mass: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The plain path tile by tile."""
    if q.shape[2] <= _TILE_ROWS:
        return _attend_few_rows(q, k, v, scale, diagonal, window, scratch, mass)
    tiles = [
        _attend_few_rows(tile, k, v, scale, None if diagonal is None else diagonal + i * _TILE_ROWS, window, scratch)
        for i, tile in enumerate(q.split(_TILE_ROWS, dim=2))
    ]
    return torch.cat([out for out, _ in tiles], dim=2), torch.cat([lse for _, lse in tiles], dim=2)
