"""Runs jobs on several ranks: torchrun starts this file as every rank, and each prints what it got as JSON.

A job is {"model", "draft", "device", "dtype", "prompt", "new_tokens", "temperature", "seed", "settings"}, the last for
`Engine.load`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

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


def main() -> None:
    import torch
    from triforce.offload import Engine, Sampling

    torch.set_num_threads(1)
    for index, job in enumerate(json.loads(sys.argv[1])):
        device = job.get("device", "cpu")
        engine = Engine.load(
            Path(job["model"]),
            job.get("draft"),
            device=device,
            dtype=job.get("dtype", "float32"),
            **job.get("settings", {}),
        )
        ranks = engine.target.ranks
        sampling = Sampling(job.get("temperature", 0.0), 1.0, 0, job.get("seed"))
        before = Counter(ranks.collectives)
        forwards = count_calls(engine.target, "forward")
        result = engine.generate(job["prompt"], sampling, job["new_tokens"])
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
        os.write(1, (json.dumps(report) + "\n").encode())  # one write, so that ranks do not mix their lines


if __name__ == "__main__":
    main()
