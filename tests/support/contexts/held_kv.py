"""The keys and values that an engine holds, of tests that compare them bit for bit."""

from __future__ import annotations

from typing import Any

import torch
import xxhash
from triforce.offload import Engine
from triforce.offload.caches.full import RECENT_ROWS


def kv_digests(engine: Engine, tokens: int) -> dict[str, str]:
    """The hash of the first tokens' keys and values in the full cache, of all layers, by KV head of the model."""
    assert engine.contexts
    blocks, ranks = engine._kept.caches[-1].blocks, engine.target.ranks
    held = engine.contexts._split_of(ranks.rank).kv_heads
    blocks.drain()
    layers = [
        torch.cat(blocks.export(layer, 0, tokens)(), dim=2).view(torch.uint8)
        for layer in range(engine.target.config.num_layers)
    ]
    return {
        str(head): xxhash.xxh3_128_hexdigest(torch.stack([kv[:, head - held.start] for kv in layers]).numpy().tobytes())
        for head in range(held.start, held.stop)
    }


def reused_kv(engine: Engine, job: dict[str, Any]) -> dict[str, Any]:
    """A note of `run_jobs`: the digests of what was reused; the other tokens were computed again, by all ranks."""
    return {"kv": kv_digests(engine, len(job["prompt"]) - RECENT_ROWS)}
