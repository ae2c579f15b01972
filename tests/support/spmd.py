"""Runs jobs on several ranks: torchrun starts this file as every rank, and each prints what it got as JSON.

A job is {"model", "draft", "device", "dtype", "prompt", "new_tokens", "temperature", "seed", "settings"}, the last for
`Engine.load`. With "store", the directory of saved contexts, and the names "read" or "context": the prompt is read into
the first before the run, which starts from the second; the report then has "kv", see `kv_digests`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triforce.offload import Engine

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONSAFEPATH": "1",
}


def torchrun(*arguments: object) -> list[str]:
    """The command of torchrun with `arguments`."""
    return [sys.executable, "-m", "torch.distributed.run", *map(str, arguments)]


def run_jobs(jobs: list[dict[str, Any]], ranks: int) -> list[list[dict[str, Any]]]:
    """What each of `ranks` ranks reports of each job, by job, then rank."""
    command = torchrun("--standalone", "--nproc-per-node", ranks, __file__, json.dumps(jobs))
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(reports) == ranks * len(jobs), done.stdout
    return [sorted((r for r in reports if r["job"] == i), key=lambda r: r["rank"]) for i in range(len(jobs))]


def count_calls(owner: object, name: str) -> list[None]:
    """A list that grows by one with every call of `owner`'s method `name` from now on."""
    method, calls = getattr(owner, name), []

    def counted(*given: object, **named: object) -> object:
        calls.append(None)
        return method(*given, **named)

    setattr(owner, name, counted)
    return calls


def kv_digests(engine: Engine, tokens: int) -> dict[str, str]:
    """The hash of the first tokens' keys and values in the full cache, of all layers, by KV head of the model."""
    import torch
    import xxhash

    assert engine.contexts and engine._kept._cache
    blocks, ranks = engine._kept._cache.blocks, engine.target.ranks
    held = engine.contexts._heads_of(ranks.rank)
    blocks.drain()
    layers = [
        torch.cat(blocks.export(layer, 0, tokens), dim=2).view(torch.uint8)
        for layer in range(engine.target.config.num_layers)
    ]
    return {
        str(head): xxhash.xxh3_128_hexdigest(torch.stack([kv[:, head - held.start] for kv in layers]).numpy().tobytes())
        for head in range(held.start, held.stop)
    }


def main() -> None:
    import torch
    from triforce.offload import Engine, Sampling
    from triforce.offload.caches.recent_mass import RECENT_ROWS
    from triforce.offload.contexts.model import ContextRequest
    from triforce.offload.contexts.store import ContextStore

    torch.set_num_threads(1)
    for index, job in enumerate(json.loads(sys.argv[1])):
        device = job.get("device", "cpu")
        engine = Engine.load(
            Path(job["model"]),
            job.get("draft"),
            device=device,
            dtype=job.get("dtype", "float32"),
            store=ContextStore(Path(job["store"]), segment_tokens=64) if "store" in job else None,
            **job.get("settings", {}),
        )
        ranks = engine.target.ranks
        sampling = Sampling(job.get("temperature", 0.0), 1.0, 0, job.get("seed"))
        before = Counter(ranks.collectives)
        forwards = count_calls(engine.target, "forward")
        if "read" in job:
            engine.read(job["prompt"], job["read"])
        contexts = ContextRequest(name=job["context"]) if "context" in job else None
        result = engine.generate(job["prompt"], sampling, job["new_tokens"], contexts=contexts)
        report = {
            "job": index,
            "rank": ranks.rank,
            "token_ids": result.token_ids,
            "rounds": result.stats["rounds"],
            "warnings": result.stats["warnings"],
            "passes": len(forwards),
            "world_size": result.stats["world_size"],
            "collectives": dict(ranks.collectives - before),
        }
        if "store" in job:
            reused = len(job["prompt"]) - RECENT_ROWS  # the others were computed again, by all ranks together
            report |= {"kv": kv_digests(engine, reused), "reused_tokens": result.stats["reused_tokens"]}
        os.write(1, (json.dumps(report) + "\n").encode())  # one write, so that ranks do not mix their lines


if __name__ == "__main__":
    main()
