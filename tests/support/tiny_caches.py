"""Small caches of a tiny decoder, and feeding tokens to them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from oracles import kv_block
from tiny import random_tokens
from triforce.offload.caches.full import FullCache
from triforce.offload.caches.retrieval import RetrievalCache
from triforce.offload.caches.streaming import StreamingCache
from triforce.offload.transfer.placement import Placement
from triforce.offload.transfer.streamed_blocks import StreamedBlocks
from triforce.tp.decoder import Cache, Decoder

SIZE, CHUNK, CAPACITY = 128, 8, 1500
"""Of the blocks of `Twins`, in tokens."""


def full_cache(decoder: Decoder) -> FullCache:
    """Room for 500 tokens, in chunks of 4."""
    return FullCache.on_device(
        decoder.config, decoder.rope, dtype=torch.float32, device=decoder.device, capacity=500, chunk_size=4
    )


def streaming_cache(decoder: Decoder) -> StreamingCache:
    """4 sinks and a window of 20 tokens."""
    return StreamingCache(decoder, sinks=4, window=20)


def moving_cache(decoder: Decoder) -> StreamingCache:
    """The same with so little slack that the window moves every dozen tokens, and rollbacks reach beyond it."""
    return StreamingCache(decoder, sinks=4, window=20, slack=12)


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


def bits(values):
    return values.contiguous().view(torch.int16)


@dataclass(frozen=True)
class Twin:
    """How blocks stream."""

    packed: bool = False
    disk: int = 0
    """Blocks of a layer on a disk."""
    spare: int = 0
    """Of the resident blocks of a layer, those that can leave the device, and do at random."""
    together: int = 1
    """Packed blocks that cross the link at once."""


class Twins:
    """The same keys and values, in bfloat16, in blocks that stream in different ways: packed and raw, if nothing else
    is said."""

    def __init__(self, part, link, resident, kind, seed, twins=(Twin(packed=True), Twin()), space=None):
        self.part, self.rng, self.length = part, random.Random(seed), 0
        self.link, self.resident, self.twins, self.space = link, resident, twins, space
        shape = (2, part.num_layers, part.num_kv_heads, CAPACITY, part.head_dim)
        self.kv = kv_block(kind, shape, seed)
        self.all = [self.make(CAPACITY, twin) for twin in twins]

    def make(self, capacity, twin) -> Any:
        packing = {"packed": twin.packed, "together": twin.together}
        placement = Placement.streaming(capacity, SIZE, self.resident, CHUNK, **packing)
        spare = min(twin.spare, placement.num_resident)
        placement = replace(placement, num_disk=min(twin.disk, placement.num_host), num_spare=spare)
        given = {"dtype": torch.bfloat16, "device": torch.device("cpu"), "disk": self.space}
        return StreamedBlocks(self.part, self.link, placement, **given)

    def same(self, what):
        """What all give is the same."""
        for one, *others in zip(*map(what, self.all), strict=True):
            assert all(torch.equal(bits(one), bits(other)) for other in others)

    def add(self, n):
        """A pass over so many tokens, a prefill if they are many."""
        n = min(n, CAPACITY - self.length)
        for blocks in self.all:
            blocks.prepare(self.length, n)
        for layer in range(self.part.num_layers):
            k, v = self.kv[:, layer, :, self.length : self.length + n]
            for blocks in self.all:
                blocks.append(layer, self.length, k, v)
            # Each is asked once: what streams passes once. Blocks that lie together may come as one.
            joined = self.rng.choice([False, True])

            def keys_and_values(blocks: Any, layer: int = layer, joined: bool = joined) -> list[torch.Tensor]:
                pieces = [(at, b.clone()) for at, b in blocks.pieces(layer, 0, self.length + n, joined=joined)]
                assert [at for at, _ in pieces] == [0, *accumulate(b.shape[2] for _, b in pieces[:-1])]
                return [torch.cat([b for _, b in pieces], dim=2)[:, :, : self.length + n]]

            self.same(keys_and_values)
        self.length += n

    def step(self):
        kind = self.rng.choice(
            ["few", "few", "few", "many", "rollback", "gather", "export", "restore", "grow", "offload"]
        )
        layer = self.rng.randrange(self.part.num_layers)
        if kind in ("few", "many") or not self.length:
            self.add(self.rng.randint(1, 90) if kind == "few" else self.rng.randint(513, 700))
        elif kind == "rollback":
            self.length = max(0, self.length - self.rng.choice([1, 60, 200, 500]))
            for blocks in self.all:
                blocks.rollback(self.length)
        elif kind == "gather" and self.length >= CHUNK:
            g = torch.Generator().manual_seed(self.rng.randrange(2**31))
            chunks = torch.randint(self.length // CHUNK, (self.part.num_kv_heads, 9), generator=g)
            self.same(lambda blocks: blocks.gather(layer, chunks, CHUNK))
        elif kind in ("export", "restore"):
            for blocks in self.all:
                blocks.drain()
            start = self.rng.randint(0, self.length) if kind == "export" else 0
            self.same(lambda blocks: [torch.cat(blocks.export(layer, start, self.length)(), dim=2)])
            if kind == "restore":
                self.restore(self.rng.randint(1, self.length))
        elif kind == "offload":
            for blocks in self.all:
                before = blocks.footprint.spare
                assert blocks.offload(self.rng.choice([0, 1, before // 2])) == before - blocks.footprint.spare
        elif kind == "grow":
            grown = [self.make(CAPACITY, twin) for twin in self.twins]
            for blocks, old in zip(grown, self.all, strict=True):
                assert blocks.move_from(old, self.length)
            self.all = grown

    def restore(self, stop):
        self.length = stop
        for layer in range(self.part.num_layers):

            def read(pieces, of=self.kv[:, layer]):
                at = 0
                for piece in pieces:
                    piece.copy_(of[:, :, at : at + piece.shape[2]])
                    at += piece.shape[2]
                assert at == stop

            for blocks in self.all:
                blocks.restore(layer, stop, read)
