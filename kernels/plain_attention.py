"""The plain implementation of attention, in PyTorch operations: what every other one is tested against."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .partials import accumulation_dtype

_TILE_ROWS = 128
"""Query rows that are processed together, which bounds the matrix of scores."""


class Scratch:
    """Buffers for temporaries of several MB that are reused between calls; new memory costs a page fault per 4 KiB.

    A cache owns one and passes it to `attend`. A buffer is valid until the next request under the same name.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def get(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns an uninitialised contiguous tensor of `shape`, in the memory of an earlier one if that suffices."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size or buffer.dtype != dtype or buffer.device != device:
            buffer = torch.empty(size, dtype=dtype, device=device)
            self._buffers[name] = buffer
        return buffer[:size].view(*shape)


def attend_plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    diagonal: int | Tensor | None,
    window: int | None,
    scratch: Scratch,
    mass: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`attend` for `q` `[num_kv_heads, group, n, head_dim]`, `_TILE_ROWS` rows at a time. `mass` is that of all
    rows, and is written only if these are at most `_TILE_ROWS`."""
    if q.shape[2] <= _TILE_ROWS:
        return _attend_few_rows(q, k, v, scale, diagonal, window, scratch, mass)
    tiles = [
        _attend_few_rows(tile, k, v, scale, None if diagonal is None else diagonal + i * _TILE_ROWS, window, scratch)
        for i, tile in enumerate(q.split(_TILE_ROWS, dim=2))
    ]
    return torch.cat([out for out, _ in tiles], dim=2), torch.cat([lse for _, lse in tiles], dim=2)


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
    """Two batched products over all keys; 16-bit keys and values are first converted to float32, in reused memory.

    Hidden keys are masked, not sliced off: `bmm` would copy a slice.
    """
    num_kv_heads, group, n, head_dim = q.shape
    m = k.shape[1]
    dtype = accumulation_dtype(q.dtype)
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
