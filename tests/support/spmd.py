"""Runs jobs on several ranks, each of which prints what it got as JSON: torchrun starts this file as every rank, or
ranks on CPUs are forks of this process, which has PyTorch already.

A job is {"model", "draft", "device", "dtype", "prompt", "new_tokens", "temperature", "seed", "settings"}, the last for
`Engine.load`. With "store", the directory of saved contexts, and the names "read" or "context": the prompt is read into
the first before the run, which starts from the second.
"""

from __future__ import annotations

import json
import os
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


Note = Callable[["Engine", dict[str, Any]], dict[str, Any]]
"""What else of an engine that has done a job is reported."""


def run_jobs(jobs: list[dict[str, Any]], ranks: int, note: Note | None = None) -> list[list[dict[str, Any]]]:
    """What each of `ranks` ranks reports of each job, by job, then rank. Ranks with a GPU are started by torchrun, as a
    fork cannot use CUDA, and take no `note`."""
    if any(job.get("device", "cpu") != "cpu" for job in jobs):
        command = torchrun("--standalone", "--nproc-per-node", ranks, __file__, json.dumps(jobs))
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | ENVIRONMENT)
        assert done.returncode == 0, done.stderr
        printed = done.stdout
    else:
        printed = run_forks(lambda: work(jobs, note), ranks)
    reports = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert len(reports) == ranks * len(jobs), printed
    return [sorted((r for r in reports if r["job"] == i), key=lambda r: r["rank"]) for i in range(len(jobs))]


def run_forks(call: Callable[[], object], ranks: int, seconds: float = 300) -> str:
    """What forks of this process print that call `call` as the ranks of one run, with torchrun's environment.

    Raises:
        AssertionError: one failed, or they run after `seconds`.
    """
    from forks import Fork, meeting

    _store, shared = meeting(ranks)
    forks: list[Fork] = []
    with open(os.devnull, "rb") as nothing, tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        try:
            for rank in range(ranks):
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
                streams = nothing.fileno(), out.fileno(), err.fileno()
                forks.append(Fork(lambda: as_rank(call), streams, {**os.environ, **ENVIRONMENT, **shared, **place}))
            end = time.monotonic() + seconds
            while None in (codes := [fork.ended() for fork in forks]) and not any(codes):
                if time.monotonic() > end:
                    for fork in forks:
                        fork.say_where()
                    err.seek(0)
                    raise AssertionError(f"the ranks still run: {err.read()}")
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
    import torch.distributed as dist

    call()
    if dist.is_initialized():
        dist.destroy_process_group()


def count_collectives() -> Counter[str]:
    """How often functions of `torch.distributed` are called from now on, by name; `all_reduce` of rows alone."""
    import torch.distributed as dist

    calls: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*given: Any, **named: Any) -> object:
            rows = name != "all_reduce" or given[0].dim() == 2
            calls[name if rows else "other sums"] += 1
            return function(*given, **named)

        return call

    for name in ("all_reduce", "all_gather", "broadcast", "broadcast_object_list"):
        setattr(dist, name, counted(name, getattr(dist, name)))
    return calls


def work(jobs: list[dict[str, Any]], note: Note | None = None) -> None:
    """A rank's part of `jobs`, in order."""
    import torch
    from triforce.offload import ContextRequest, ContextStore, Engine, Sampling

    torch.set_num_threads(1)
    calls = count_collectives()
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
        sampling = Sampling(job.get("temperature", 0.0), 1.0, 0, job.get("seed"))
        if "read" in job:
            engine.read(job["prompt"], job["read"])
        before = Counter(calls)
        contexts = ContextRequest(name=job["context"]) if "context" in job else None
        result = engine.generate(
            job["prompt"], sampling, job["new_tokens"], contexts=contexts, grammar=job.get("grammar")
        )
        report = {
            "job": index,
            "rank": int(os.environ["RANK"]),
            "token_ids": result.token_ids,
            "rounds": result.stats["rounds"],
            "prefill_s": result.stats["prefill_s"],
            "warnings": result.stats["warnings"],
            "world_size": result.stats["world_size"],
            "reused_tokens": result.stats["reused_tokens"],
            "collectives": dict(calls - before),
        }
        report |= note(engine, job) if note else {}
        os.write(1, (json.dumps(report) + "\n").encode())  # one write, so that ranks do not mix their lines


if __name__ == "__main__":
    work(json.loads(sys.argv[1]))
