"""Chunks of keys: computes the attention that queries give to them, selects the chunks to keep, and copies these.

A chunk is a run of consecutive tokens (8 by default) that is kept or dropped whole, per layer and per KV head (the
retrieval cache of TriForce, arXiv 2404.11912, section 4.2). TriForce scores a chunk by its mean key. Here, a chunk is
scored by the attention that it received, because a mean hides the one token that matters.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .packages import usable_packages

_KEYS_AT_ONCE = 4096
"""Keys that PyTorch's operations score together, as scores take memory: the maximum size of a streamed block."""


def chunk_mass(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    mass: Tensor,
    *,
    scale: float,
    diagonal: int | Tensor | None = None,
    window: int | None = None,
) -> None:
    """Computes the share of each row's attention that goes to each chunk of keys, from the row's log-sum-exp.

    Args:
        q: `[num_heads, n, head_dim]`, rotated.
        k: `[num_kv_heads, m, head_dim]`, rotated.
        lse: `[num_heads, n]`, of each row over all keys that it attends to: `k`, or `k` and others.
        mass: `[num_heads, n, m // chunk_size]`, contiguous, in the dtype of `lse`, written. `m` is a multiple of
            `chunk_size`.
        scale, diagonal, window: as in `attend`; keys that a row does not see get no share.

    PyTorch's operations round scores to `k`'s dtype, which changes a share by about a percent in 16-bit formats.
    """
    num_heads, n, head_dim = q.shape
    num_kv_heads, m, _ = k.shape
    if lse.dtype == torch.float32 and "triton" in usable_packages(k.device):
        from .triton.chunks import chunk_mass_triton, takes_chunks

        if takes_chunks(m // mass.shape[-1], num_heads // num_kv_heads, head_dim, q.dtype):
            chunk_mass_triton(q, k, lse, mass, scale=scale, diagonal=diagonal, window=window)
            return
    chunk_size = m // mass.shape[-1]
    count = max(1, _KEYS_AT_ONCE // chunk_size)
    if mass.shape[-1] > count:  # limits the memory of scores
        for first in range(0, mass.shape[-1], count):
            some, keys = slice(first, first + count), slice(first * chunk_size, (first + count) * chunk_size)
            part = mass.new_empty(*mass.shape[:2], len(range(mass.shape[-1])[some]))
            seen = None if diagonal is None else diagonal - keys.start
            chunk_mass(q, k[:, keys], lse, part, scale=scale, diagonal=seen, window=window)
            mass[..., some] = part
        return
    grouped = q.reshape(num_kv_heads, -1, head_dim).to(k.dtype)
    scores = torch.bmm(grouped, k.transpose(1, 2)).to(lse.dtype).view(num_heads, n, m).mul_(scale)
    if diagonal is not None:
        last = (diagonal + torch.arange(n, device=q.device)).unsqueeze(1)
        columns = torch.arange(m, device=q.device)
        hidden = columns > last
        if window is not None:
            hidden |= columns <= last - window
        scores.masked_fill_(hidden, float("-inf"))
    scores.sub_(lse.clamp_min(torch.finfo(lse.dtype).min).unsqueeze(-1)).exp_()  # a row may see no key
    chunks = scores.view(num_heads, n, mass.shape[-1], -1)
    torch.matmul(chunks, chunks.new_ones(chunks.shape[-1]), out=mass)


def chunk_scores(mass: Tensor) -> Tensor:
    """Computes how useful each chunk is expected to be for the next tokens.

    If a chunk received less attention than the chunk before it, its score is the mass of the chunk before it.
    A head that continues an earlier passage moves on by one token at each step, so it will next attend to the tokens
    that follow its present place.

    Args:
        mass: `[num_kv_heads, num_chunks]`, the mean over recent rows.

    Returns:
        `[num_kv_heads, num_chunks]`: the mass of the chunk or of its predecessor, whichever is larger.
    """
    return torch.maximum(mass, F.pad(mass[:, :-1], (1, 0)))


def select_chunks(scores: Tensor, count: int) -> Tensor:
    """Selects the `count` chunks of each KV head with the highest scores.

    The newest chunk is always among them. If `count` is at least 2, so is the first chunk (the attention sink).

    Args:
        scores: `[num_kv_heads, num_chunks]`.
        count: chunks to keep, at least 1; if there are fewer, all are kept.

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


def copy_chunks(block: Tensor, first: int, chunks: Tensor, k: Tensor, v: Tensor, chunk_size: int) -> None:
    """Copies the chunks that are in `block` to their places in `k` and `v`. Other places stay unchanged.

    Args:
        block: `[2, num_kv_heads, m, head_dim]`, keys and values; `m` is a multiple of `chunk_size`.
        first: index of the first chunk of the block.
        chunks: `[num_kv_heads, count]` chunk indices.
        k, v: `[num_kv_heads, count * chunk_size, head_dim]`, written in part.
    """
    if "triton" in usable_packages(block.device):
        from .triton.chunks import copy_chunks_triton

        copy_chunks_triton(block, first, chunks, k, v, chunk_size)
        return
    inside = (chunks >= first) & (chunks < first + block.shape[2] // chunk_size)
    heads, places = inside.nonzero(as_tuple=True)
    picked = chunks[heads, places] - first
    for part, out in zip(block.unflatten(2, (-1, chunk_size)), (k, v), strict=True):
        out.unflatten(1, (-1, chunk_size))[heads, places] = part[heads, picked]


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
        from .triton.chunks import gather_chunks_triton

        return gather_chunks_triton(blocks, indices, chunk_size)
    num_kv_heads, count = indices.shape
    chunked = blocks.unflatten(2, (-1, chunk_size))  # [num_blocks, num_kv_heads, chunks a block, chunk_size, head_dim]
    per_block = chunked.shape[2]
    heads = torch.arange(num_kv_heads, device=indices.device).unsqueeze(1)
    picked = chunked[indices // per_block, heads, indices % per_block]
    return picked.reshape(num_kv_heads, count * chunk_size, blocks.shape[-1])
