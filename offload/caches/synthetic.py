"""Fills caches with artificial tokens, to measure how long a pass takes at a given context length."""

from __future__ import annotations

import torch

from .full import FullCache

_PIECE = 4096
"""Tokens that are appended at a time, as in a prefill."""


@torch.inference_mode()
def fill_with_zeros(cache: FullCache, length: int) -> None:
    """Fills an empty cache with `length` tokens. Their keys, values and states are zeros.

    If blocks stream, this takes the same device memory as a prefill: that for one layer at a time.

    Raises:
        ValueError: the cache has no room for these tokens.
    """
    config, blocks = cache.config, cache.blocks
    zero = torch.zeros(1, dtype=blocks.dtype, device=blocks.device)
    cache.prepare(length)
    for layer in range(config.kv_layers):
        for start in range(0, length, _PIECE):
            zeros = zero.expand(config.num_kv_heads, min(_PIECE, length - start), config.head_dim)
            cache.append(layer, zeros, zeros)
    if cache.states:
        cache.states.restart(length)
