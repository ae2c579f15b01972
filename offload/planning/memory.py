"""What a run needs in bytes, checked against what there is before anything is allocated."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from ...kernels.attention import FEW_ROWS
from ...tp.errors import CapacityError
from ...tp.model.config import ModelConfig
from ...tp.model.decoder import PREFILL_ROWS
from ...tp.parallel.ranks import ALONE, Ranks
from ...tp.parallel.split import Split
from ...tp.units import gib
from ..caches.full import RECENT_ROWS, block_size_for

RUNTIME_BYTES = 400 * 2**20
"""Python, PyTorch, the tokenizer and small buffers, as an idle process holds them (PyTorch 2.13 for CPUs)."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose. `kv` is the full cache; `prefill` is a long forward's activations and RoPE's tables."""

    weights: int
    kv: int
    retrieval: int
    prefill: int
    runtime: int = RUNTIME_BYTES

    @property
    def total(self) -> int:
        """The most that is held at a time: the retrieval cache comes when a prefill's activations are gone."""
        return self.weights + self.kv + max(self.retrieval, self.prefill) + self.runtime


def plan_memory(
    target: ModelConfig,
    draft: ModelConfig | None,
    *,
    dtype: torch.dtype,
    context: int,
    budget: int,
    chunk_size: int,
    ranks: Ranks = ALONE,
) -> MemoryPlan:
    """The memory of one rank in a run over `context` tokens, generated ones included, with a retrieval cache of
    `budget` tokens (0 for none)."""
    target = Split.of(target, ranks).config(target)  # whose output head is counted whole
    models = [m for m in (target, draft) if m]
    kv_token = target.kv_bytes_per_token(dtype)
    block_size = block_size_for(context, chunk_size)
    heads = 2 * target.num_heads + target.num_kv_heads
    width = target.hidden_size + 3 * target.intermediate_size + heads * target.head_dim * 3 // 2
    rows = min(PREFILL_ROWS, context)
    mass = target.num_layers * target.num_kv_heads * (FEW_ROWS + RECENT_ROWS) * (context // chunk_size)
    return MemoryPlan(
        weights=sum(m.num_parameters for m in models) * dtype.itemsize,
        kv=-(-context // block_size) * block_size * kv_token,
        retrieval=(min(budget, context) * kv_token + mass * dtype.itemsize) if budget else 0,
        prefill=context * (target.hidden_size * dtype.itemsize + target.head_dim * 8) + rows * width * 4,
    )


def check_memory(
    plan: MemoryPlan, context: int, device: torch.device, ranks: Ranks = ALONE, *, resident: float | None = None
) -> None:
    """Checks what a rank needs against what is free; a KV cache that does not fit on a GPU goes to host memory.

    Args: `resident` is what of the KV cache is to stay on a GPU, in GiB; `None` is what fits.

    Raises:
        CapacityError: it does not fit; the message gives parts and a remedy.
    """
    host = psutil.virtual_memory().available // ranks.local_size
    if device.type == "cpu":
        _check(plan, context, host, "memory", ranks)
        return
    free = available_bytes(device)
    on_device = replace(plan, runtime=0)
    rest = replace(on_device, kv=0)
    _check(rest, context, free, "GPU memory", ranks)
    room = free - rest.total if resident is None else min(free - rest.total, resident * 2**30)
    streamed = plan.kv - int(room)
    if streamed > 0:
        _check(replace(plan, weights=0, kv=streamed, retrieval=0, prefill=0), context, host, "host memory", ranks)


def _check(plan: MemoryPlan, context: int, available: int, where: str, ranks: Ranks) -> None:
    if plan.total <= available:
        return
    fixed = plan.weights + plan.runtime
    fits = max(0, int(context * (available - fixed) / max(1, plan.total - fixed)))
    per_rank = " on each rank" if ranks.size > 1 else ""
    raise CapacityError(
        f"a context of {context:,} tokens needs {gib(plan.total)} of {where}{per_rank} (weights {gib(plan.weights)}, "
        f"KV cache {gib(plan.kv)}, the rest {gib(plan.total - plan.weights - plan.kv)}), "
        f"but {gib(available)} is available; "
        + (
            f"about {fits:,} tokens would fit: shorten the prompt (--truncate) or free memory"
            if fits > 0
            else "free memory or choose a smaller model"
        )
    )


@contextmanager
def shortage_explained(device: torch.device) -> Iterator[None]:
    """Turns PyTorch's failure to allocate, within, into an error that says what is taken and what helps.

    Raises:
        CapacityError: memory ran out.
    """
    try:
        yield
    except RuntimeError as error:  # a CPU's allocator has no class of its own for it
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            raise CapacityError(
                f"GPU memory ran out: {gib(total - free)} of {gib(total)} are taken, "
                f"{gib(device_peak_bytes(device))} at most by this run; keep less of the KV cache there (--resident), "
                "lower --budget, shorten the prompt (--truncate), or free memory"
            ) from error
        raise CapacityError(
            f"memory ran out: this process takes {gib(host_peak_bytes())} and {gib(available_bytes(device))} are "
            "available in all; shorten the prompt (--truncate), lower --budget, or free memory"
        ) from error


def available_bytes(device: torch.device) -> int:
    """Free memory where tensors of `device` live; on a GPU with what PyTorch keeps of tensors that are gone."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    return psutil.virtual_memory().available


def host_peak_bytes() -> int:
    """The largest resident set of this process so far."""
    try:  # Linux; what getrusage says there includes the process that started this one
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def device_peak_bytes(device: torch.device) -> int:
    """The most memory tensors took on an accelerator; 0 on a CPU, where it is part of the host's."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
