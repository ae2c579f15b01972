"""Small caches of each kind, over a tiny decoder on the CPU."""

from __future__ import annotations

import torch
from tiny import random_tokens
from triforce.offload.caches.full import FullCache
from triforce.offload.caches.retrieval import RetrievalCache
from triforce.offload.caches.streaming import StreamingCache
from triforce.tp.model.decoder import Cache, Decoder


def full_cache(decoder: Decoder) -> FullCache:
    return FullCache.on_device(
        decoder.config, decoder.rope, dtype=torch.float32, device=torch.device("cpu"), capacity=500, chunk_size=4
    )


def streaming_cache(decoder: Decoder) -> StreamingCache:
    return StreamingCache(decoder, sinks=4, window=20)


def retrieval_cache(decoder: Decoder) -> RetrievalCache:
    """Of 90 random tokens."""
    full = full_cache(decoder)
    append(decoder, full, random_tokens(90, seed=1))
    cache = RetrievalCache(full, decoder.rope, budget=24, chunk_size=4)
    cache.refresh()
    return cache


def append(decoder: Decoder, cache: Cache, tokens: list[int]) -> None:
    """Runs the decoder over `tokens`, if there are any."""
    if tokens:
        decoder.forward(torch.tensor(tokens), cache)
