"""Runs jobs on several ranks, each of which prints what it got as JSON: torchrun starts this file as every rank, or
ranks on CPUs are forks of this process, which has PyTorch already.

A job is {"model", "draft", "device", "dtype", "prompt", "new_tokens", "temperature", "seed", "settings"}, the last for
`Engine.load`. With "store", the directory of saved contexts, and the names "read" or "context": the prompt is read into
the first before the run, which starts from the second; the report then has "kv", see `kv_digests`.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
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
    """What each of `ranks` ranks reports of each job, by job, then rank. Ranks with a GPU are started by torchrun, as a
    fork cannot use CUDA."""
    if any(job.get("device", "cpu") != "cpu" for job in jobs):
        command = torchrun("--standalone", "--nproc-per-node", ranks, __file__, json.dumps(jobs))
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | ENVIRONMENT)
        assert done.returncode == 0, done.stderr
        printed = done.stdout
    else:
        printed = run_forks(lambda: work(jobs), ranks)
    reports = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert len(reports) == ranks * len(jobs), printed
    return [sorted((r for r in reports if r["job"] == i), key=lambda r: r["rank"]) for i in range(len(jobs))]


def run_forks(call: Callable[[], object], ranks: int, seconds: float = 300) -> str:
    """What forks of this process print that call `call` as the ranks of one run, with torchrun's environment.

    Raises:
        AssertionError: one failed, or they run after `seconds`.
    """
    from command import Fork

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    forks: list[Fork] = []
    with open(os.devnull, "rb") as nothing, tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        try:
            for rank in range(ranks):
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
                streams = nothing.fileno(), out.fileno(), err.fileno()
                forks.append(Fork(lambda: as_rank(call), streams, {**os.environ, **ENVIRONMENT, **shared, **place}))
            end = time.monotonic() + seconds
            while any(fork.ended() is None for fork in forks) and not any(fork.returncode for fork in forks):
                assert time.monotonic() < end, "the ranks still run"
                time.sleep(0.01)
        finally:
            for fork in forks:
                fork.kill()
            out.seek(0)
            err.seek(0)
        assert not any(fork.returncode for fork in forks), err.read()
        return out.read()


def as_rank(call: Callable[[], object]) -> None:
    """`call`, and the leaving of the group that an interpreter does at its exit, which a fork skips."""
    from triforce.tp.parallel import ranks

    call()
    ranks._leave()


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

    assert engine.contexts and engine._kept.cache
    blocks, ranks = engine._kept.cache.blocks, engine.target.ranks
    held = engine.contexts._heads_of(ranks.rank)
    blocks.drain()
    layers = [
        torch.cat(blocks.export(layer, 0, tokens)(), dim=2).view(torch.uint8)
        for layer in range(engine.target.config.num_layers)
    ]
    return {
        str(head): xxhash.xxh3_128_hexdigest(torch.stack([kv[:, head - held.start] for kv in layers]).numpy().tobytes())
        for head in range(held.start, held.stop)
    }


def work(jobs: list[dict[str, Any]]) -> None:
    """A rank's part of `jobs`, in order."""
    import torch
    from triforce.offload import ContextRequest, ContextStore, Engine, Sampling
    from triforce.offload.caches.recent_mass import RECENT_ROWS

    torch.set_num_threads(1)
    for index, job in enumerate(jobs):
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
        passes = count_calls(engine.target, "slices")
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
            "passes": len(passes),
            "world_size": result.stats["world_size"],
            "collectives": dict(ranks.collectives - before),
        }
        if "store" in job:
            reused = len(job["prompt"]) - RECENT_ROWS  # the others were computed again, by all ranks together
            report |= {"kv": kv_digests(engine, reused), "reused_tokens": result.stats["reused_tokens"]}
        os.write(1, (json.dumps(report) + "\n").encode())  # one write, so that ranks do not mix their lines


if __name__ == "__main__":
    work(json.loads(sys.argv[1]))
