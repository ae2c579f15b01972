"""Caches filled with tokens that no model has read, to measure what a pass takes at some length of context."""

from __future__ import annotations

import torch

from .full import FullCache

_PIECE = 4096
"""Tokens that are appended at a time, as a prefill would."""


@torch.inference_mode()
def fill_with_zeros(cache: FullCache, length: int) -> None:
    """Brings an empty cache to `length` tokens whose keys and values, and states, are zeros.

    Where blocks stream, this takes a prefill's memory on the device: one layer at a time.

    Raises:
        ValueError: there is no room for them.
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
