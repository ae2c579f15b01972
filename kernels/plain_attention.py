"""The plain implementation of attention, in PyTorch operations. Every other implementation is tested against it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .partials import accumulation_dtype
from .selection import TILE_ROWS

_TILE_ROWS = 128
"""Query rows that are processed together. Limits the size of the matrix of scores."""


def scratch_bytes(
    num_heads: int, num_kv_heads: int, keys: int, head_dim: int, dtype: torch.dtype, *, is_step: bool
) -> int:
    """Bytes that `attend_plain` keeps for calls with up to `keys` keys: scores, and 16-bit keys or values in
    float32."""
    sums = accumulation_dtype(dtype)
    wide = num_kv_heads * keys * head_dim if dtype != sums else 0
    return (num_heads * (TILE_ROWS if is_step else _TILE_ROWS) * keys + wide) * sums.itemsize


class Scratch:
    """Buffers for temporaries of several MB that are reused between calls; new memory costs a page fault per 4 KiB.

    A cache owns one and passes it to `attend`. A buffer is valid until the next request under the same name.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def get(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns an uninitialised contiguous tensor of `shape`. It takes the memory of an earlier tensor of this name
        if that is large enough and has this dtype and device."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size or buffer.dtype != dtype or buffer.device != device:
            buffer = torch.empty(size, dtype=dtype, device=device)
            self._buffers[name] = buffer
        return buffer[:size].view(*shape)

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the name of each buffer, and the buffer, `[size]`."""
        yield from self._buffers.items()


def attend_plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    diagonal: int | Tensor | None,
    window: int | None,
    scratch: Scratch,
    mass: Tensor | None = None,
    tile_rows: int | None = None,
    padded: bool = False,
) -> tuple[Tensor, Tensor]:
    """`attend` for `q` `[num_kv_heads, group, n, head_dim]`, some rows at a time.

    Args:
        mass: `[num_heads, n, chunks]`, see `attend`: that of all `n` rows. Only if `n` is at most `STEP_ROWS`.
        tile_rows: rows that are processed together, if `n` is at most `STEP_ROWS`; `None` for more rows.
        padded: whether fewer rows than a tile are filled up to a whole tile. Ignored without `tile_rows`.

    Returns:
        The output `[num_kv_heads, group, n, head_dim]` and the log-sum-exp `[num_kv_heads, group, n]`, in the dtype of
        the sums.
    """
    n = q.shape[2]
    padded = padded and tile_rows is not None
    size = tile_rows or _TILE_ROWS
    if n <= size and not padded:
        return _attend_few_rows(q, k, v, scale, diagonal, window, scratch, mass)
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    for first in range(0, n, size):
        tile = q[:, :, first : first + size]
        rows = tile.shape[2]
        if padded:
            tile = F.pad(tile, (0, 0, 0, size - rows))
        seen = None if diagonal is None else diagonal + first
        shares = None
        if mass is not None:
            shares = scratch.get("tile mass", (mass.shape[0], tile.shape[2], mass.shape[2]), mass.dtype, mass.device)
        out, lse = _attend_few_rows(tile, k, v, scale, seen, window, scratch, shares)
        if mass is not None and shares is not None:
            mass[:, first : first + rows] = shares[:, :rows]
        outs.append(out[:, :, :rows])
        lses.append(lse[:, :, :rows])
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


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
    # Whether there may be rows that see no key.
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
        # A product with ones, because a sum over a short dimension takes several times as long.
        chunks = scores.view(num_kv_heads, group * n, mass.shape[-1], -1)
        torch.div(chunks @ chunks.new_ones(chunks.shape[-1]), norm, out=mass.view(num_kv_heads, group * n, -1))
    lse = peak.add_(total.log_())
    return out.view(num_kv_heads, group, n, head_dim), lse.view(num_kv_heads, group, n)


def _widen(x: Tensor, dtype: torch.dtype, scratch: Scratch) -> Tensor:
    if x.dtype == dtype:
        return x
    return scratch.get("wide", x.shape, dtype, x.device).copy_(x)
