"""Attention by PyTorch's own function in float64, which every implementation is compared with, and random inputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def random_qkv(
    shape: tuple[int, int, int], n: int, m: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """`n` queries, and keys and values of `m` tokens. `shape` is the number of heads, of KV heads, and `head_dim`."""
    num_heads, num_kv_heads, head_dim = shape
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(num_heads, n, head_dim, generator=g).to(dtype)
    k = torch.randn(num_kv_heads, m, head_dim, generator=g).to(dtype)
    v = torch.randn(num_kv_heads, m, head_dim, generator=g).to(dtype)
    return q, k, v


def oracle(
    q: Tensor, k: Tensor, v: Tensor, scale: float, diagonal: int | None, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """What `attend` should return: SDPA in float64, and the log-sum-exp of its scores."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    n, m = q.shape[1], k.shape[1]
    mask = torch.ones(n, m, dtype=torch.bool)
    if diagonal is not None:
        distance = torch.arange(n).unsqueeze(1) + diagonal - torch.arange(m)
        mask = (distance >= 0) & (distance < (window or m + n + abs(diagonal)))
    out = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, scale=scale)[0]
    scores = (q @ k.transpose(1, 2) * scale).masked_fill(~mask, float("-inf"))
    return out.nan_to_num(0.0), scores.logsumexp(-1)


def error_of(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> float:
    """The largest difference of outputs and of log-sum-exps; rows that see no key must agree exactly."""
    (out, lse), (want_out, want_lse) = got, want
    seen = want_lse > float("-inf")
    assert torch.equal(seen, lse > float("-inf"))
    assert (out[~seen] == 0).all()
    return max(
        (out - want_out).abs().max().item(), (lse[seen] - want_lse[seen]).abs().amax().item() if seen.any() else 0.0
    )
