"""The one attention entry: `attend` over a stretch of keys, and `merge_partials` to join stretches.

Attention over keys that live in several places (blocks of a streamed cache, sinks and a window) is computed place by
place; each part returns its output and the log-sum-exp of its scores, from which the exact whole follows
(the split-KV identity of FlashDecoding). Scores and sums are float32 (float64 for float64 inputs) and parts are merged
in that; only the flash kernel, for more than `FEW_ROWS` rows, rounds its output to the inputs' dtype first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .chunks import chunk_mass

FEW_ROWS = 32
"""Up to this many query rows two batched matmuls take no longer than PyTorch's flash kernel on a CPU. It is more than a
verification has, so that its rows go through the arithmetic of a decoding step."""

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
    diagonal: int | None = None,
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
            visible one may hold anything in `k`, but must be finite in `v`.
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
    if diagonal is not None and diagonal >= m - 1 and window is None:
        diagonal = None
    grouped = q.reshape(num_kv_heads, num_heads // num_kv_heads, n, head_dim)
    at_hand = mass is not None and mass.shape[1] == n <= FEW_ROWS
    if n > FEW_ROWS and window is None and q.device.type == "cpu":
        out, lse = _attend_flash_cpu(grouped, k, v, scale, diagonal)
    else:
        wanted = mass if at_hand else None
        out, lse = _attend_tiled(grouped, k, v, scale, diagonal, window, scratch or Scratch(), wanted)
    out, lse = out.reshape(num_heads, n, head_dim), lse.reshape(num_heads, n)
    if mass is not None and not at_hand:
        first = n - mass.shape[1]
        seen = None if diagonal is None else diagonal + first
        chunk_mass(q[:, first:], k, lse[:, first:], mass, scale=scale, diagonal=seen, window=window)
    return out, lse


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
    total = torch.logsumexp(stacked, dim=0)
    weights = torch.exp(stacked - total).nan_to_num_(0.0)  # -inf - -inf where a row sees nothing
    out = outs[0] * weights[0].unsqueeze(-1)
    for part, weight in zip(outs[1:], weights[1:], strict=True):
        out.addcmul_(part.to(out.dtype), weight.unsqueeze(-1))
    return out, total


def _accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _attend_few_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    diagonal: int | None,
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
    blind_rows = diagonal is not None and (diagonal < 0 or window is not None)  # some rows may see no key
    if diagonal is not None:
        columns = torch.arange(m, device=q.device)
        last = torch.arange(diagonal, diagonal + n, device=q.device).unsqueeze(1)
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


def _attend_flash_cpu(q: Tensor, k: Tensor, v: Tensor, scale: float, diagonal: int | None) -> tuple[Tensor, Tensor]:
    """PyTorch's flash kernel for CPUs, on the part every row sees and on the triangular part, merged."""
    n, m = q.shape[2], k.shape[1]
    if diagonal is None:
        return _flash_cpu(q, k, v, scale, causal=False)
    blind = min(max(-diagonal, 0), n)  # leading rows that see no key
    shared = max(diagonal, 0)  # leading keys that every row sees
    rows = q[:, :, blind:]
    outs, lses = [], []
    if shared:
        part = _flash_cpu(rows, k[:, :shared], v[:, :shared], scale, causal=False)
        outs.append(part[0])
        lses.append(part[1])
    last = min(m, shared + n - blind)
    if last > shared:
        part = _flash_cpu(rows, k[:, shared:last], v[:, shared:last], scale, causal=True)
        outs.append(part[0])
        lses.append(part[1])
    out, lse = merge_partials(outs, lses) if outs else (rows, rows.new_empty(rows.shape[:-1]))
    if blind:
        out = torch.nn.functional.pad(out, (0, 0, blind, 0))
        lse = torch.nn.functional.pad(lse, (blind, 0), value=float("-inf"))
    return out, lse


def _flash_cpu(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    group = q.shape[1]
    k = k.unsqueeze(1).expand(-1, group, -1, -1)
    v = v.unsqueeze(1).expand(-1, group, -1, -1)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = flash(q, k, v, 0.0, causal, scale=scale)
    return out.to(_accumulate_dtype(q.dtype)), lse


def _attend_tiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    diagonal: int | None,
    window: int | None,
    scratch: Scratch,
    mass: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The plain path tile by tile: a few rows, a window, or a device whose flash kernels are not wired in."""
    if q.shape[2] <= _TILE_ROWS:
        return _attend_few_rows(q, k, v, scale, diagonal, window, scratch, mass)
    tiles = [
        _attend_few_rows(tile, k, v, scale, None if diagonal is None else diagonal + i * _TILE_ROWS, window, scratch)
        for i, tile in enumerate(q.split(_TILE_ROWS, dim=2))
    ]
    return torch.cat([out for out, _ in tiles], dim=2), torch.cat([lse for _, lse in tiles], dim=2)
