"""Chunks of keys: their means, how relevant a query finds them, which ones to keep, and fetching those.

A chunk is a run of consecutive tokens (8 by default) that is kept or dropped whole, per layer and per KV head; its
mean key stands for it (the retrieval cache of TriForce, arXiv 2404.11912, section 4.2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .packages import usable_packages


def chunk_means(k: Tensor, chunk_size: int) -> Tensor:
    """Means of the whole chunks of `k` `[num_kv_heads, m, head_dim]` -> `[num_kv_heads, m // chunk_size, head_dim]`.

    The ragged end, if any, belongs to no chunk. Means are accumulated in float32 and returned in `k`'s dtype.
    """
    whole = k.shape[1] // chunk_size
    chunks = k[:, : whole * chunk_size].unflatten(1, (whole, chunk_size))
    return chunks.mean(dim=2, dtype=torch.promote_types(k.dtype, torch.float32)).to(k.dtype)


def chunk_scores(q: Tensor, means: Tensor, scale: float) -> Tensor:
    """How much attention mass the queries would give each chunk if its mean stood for all its keys.

    Args:
        q: `[num_heads, n, head_dim]`, the recent queries, rotated to their true positions.
        means: `[num_kv_heads, num_chunks, head_dim]`, from rotated keys.
        scale: the attention scale.

    Returns:
        `[num_kv_heads, num_chunks]` float32: the softmax over chunks, averaged over the rows and over the query
        heads that share a KV head, so that a row with large scores does not drown the others.
    """
    if means.dtype != torch.float64 and "triton" in usable_packages(means.device):
        from .triton_chunks import chunk_scores_triton

        return chunk_scores_triton(q, means, scale)
    num_kv_heads = means.shape[0]
    grouped = q.reshape(num_kv_heads, -1, q.shape[-1]).to(means.dtype)
    scores = torch.bmm(grouped, means.transpose(1, 2)).float() * scale
    return scores.softmax(dim=-1).mean(dim=1)


def select_chunks(scores: Tensor, count: int) -> Tensor:
    """The `count` best chunks of each KV head, always with the first (the attention sink) and the newest.

    Args:
        scores: `[num_kv_heads, num_chunks]`.
        count: chunks to keep, at least 1; all are kept where there are fewer.

    Returns:
        Ascending chunk indices `[num_kv_heads, min(count, num_chunks)]`, int64.
    """
    num_kv_heads, num_chunks = scores.shape
    if count >= num_chunks:
        return torch.arange(num_chunks, device=scores.device).expand(num_kv_heads, -1)
    if count == 1:
        return scores.new_full((num_kv_heads, 1), num_chunks - 1, dtype=torch.int64)
    forced = scores.clone()
    forced[:, 0] = float("inf")
    forced[:, -1] = float("inf")
    return forced.topk(count, dim=-1).indices.sort(dim=-1).values


def gather_chunks(blocks: Tensor, indices: Tensor, chunk_size: int) -> Tensor:
    """Copies chunks out of a blocked cache.

    Args:
        blocks: `[num_blocks, num_kv_heads, block_size, head_dim]`, keys or values; `block_size` is a multiple of
            `chunk_size`.
        indices: `[num_kv_heads, count]` chunk indices counted over all blocks.

    Returns:
        `[num_kv_heads, count * chunk_size, head_dim]`.
    """
    if "triton" in usable_packages(blocks.device):
        from .triton_chunks import gather_chunks_triton

        return gather_chunks_triton(blocks, indices, chunk_size)
    num_kv_heads, count = indices.shape
    chunked = blocks.unflatten(2, (-1, chunk_size))  # [num_blocks, num_kv_heads, chunks a block, chunk_size, head_dim]
    per_block = chunked.shape[2]
    heads = torch.arange(num_kv_heads, device=indices.device).unsqueeze(1)
    picked = chunked[indices // per_block, heads, indices % per_block]
    return picked.reshape(num_kv_heads, count * chunk_size, blocks.shape[-1])
