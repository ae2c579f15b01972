"""Small caches of a tiny decoder, and feeding tokens to them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tiny import random_tokens
from triforce.offload.caches.full import FullCache
from triforce.offload.caches.retrieval import RetrievalCache
from triforce.offload.caches.streaming import StreamingCache
from triforce.tp.model.decoder import Cache, Decoder


def full_cache(decoder: Decoder) -> FullCache:
    """Room for 500 tokens, in chunks of 4."""
    return FullCache.on_device(
        decoder.config, decoder.rope, dtype=torch.float32, device=decoder.device, capacity=500, chunk_size=4
    )


def streaming_cache(decoder: Decoder) -> StreamingCache:
    """4 sinks and a window of 20 tokens."""
    return StreamingCache(decoder, sinks=4, window=20)


def retrieval_cache(decoder: Decoder) -> RetrievalCache:
    """A budget of 24 tokens in chunks of 4, of 90 random tokens."""
    full = full_cache(decoder)
    append(decoder, full, random_tokens(90, seed=1))
    cache = RetrievalCache(full, decoder.rope, budget=24, chunk_size=4)
    cache.refresh()
    return cache


def append(decoder: Decoder, cache: Cache, tokens: Sequence[int]) -> None:
    """Runs `tokens`, if there are any, through the decoder into `cache`."""
    if tokens:
        decoder.forward(torch.tensor(tokens), cache)
