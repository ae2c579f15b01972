"""What a run would hold, and where, before anything is loaded: bytes of one GPU and of the host.

The rules are the engine's own (`memory`, `placement`), applied to a GPU that need not be here. Pure arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...tp.model.config import ModelConfig
from ...tp.parallel.ranks import Ranks
from ...tp.parallel.split import Split
from ..settings import Settings
from ..transfer.streamed_blocks import OPEN_SLACK, RING_BUFFERS
from .memory import RUNTIME_BYTES, plan_memory
from .placement import RESERVE, Placement, plan_placement, resident_bytes

CUDA_CONTEXT = 2**29
"""Bytes that a process takes on a GPU besides PyTorch's tensors. On an RTX 4090 0.49 GiB: what an out-of-memory message
of PyTorch says a process has, less what it says PyTorch has (github.com/3DTopia/Phidias-Diffusion, issue 8)."""


@dataclass(frozen=True)
class Setup:
    """A run that might be: models, lengths, and GPUs that share the target (tensor parallelism)."""

    target: ModelConfig
    draft: ModelConfig | None
    dtype: torch.dtype
    context: int
    """Tokens that the full cache holds, the generated ones included."""
    settings: Settings
    gpus: int
    gpu_bytes: int
    """Memory of each GPU."""
    host_bytes: int | None = None
    """Memory of the host that is free; `None` if that is not to be checked."""

    @property
    def part(self) -> ModelConfig:
        """The last GPU's part of the target: where parts differ, no other is larger."""
        return Split.of(self.target, self.ranks).config(self.target)

    @property
    def kv_token(self) -> int:
        """Bytes of one token's keys and values on one GPU, over all layers."""
        return self.part.kv_bytes_per_token(self.dtype)

    @property
    def budget(self) -> int:
        """Tokens of the retrieval cache, at most the context; 0 for one tier."""
        return min(self.settings.budget_for(self.context), self.context)

    @property
    def ranks(self) -> Ranks:
        return Ranks(self.gpus - 1, self.gpus, self.gpus)


@dataclass(frozen=True)
class Layout:
    """Bytes by purpose: on each GPU, and in host memory for each GPU."""

    placement: Placement
    weights: int
    """Of a GPU's part of the target and of the whole draft."""
    resident_kv: int
    retrieval: int
    """The retrieval cache and what chunks are chosen by."""
    ring: int
    open_stretches: int
    prefill: int
    """Activations of a long forward, and the layer it works on. Never there together with the retrieval cache."""
    cuda_context: int
    reserve: int
    """What stays free: fragmentation, libraries."""
    streamed_kv: int
    """In host memory."""
    runtime: int
    """In host memory: the process itself."""
    streamed_per_pass: int
    """What one verification moves over a GPU's link: the last block, which is not full yet, stays on the device."""

    @property
    def device_total(self) -> int:
        """The most that one GPU must have."""
        held = self.weights + self.resident_kv + self.ring + self.open_stretches + max(self.retrieval, self.prefill)
        return held + self.cuda_context + self.reserve

    @property
    def host_total(self) -> int:
        """What the host must have for each GPU."""
        return self.streamed_kv + self.runtime


def lay_out(setup: Setup) -> Layout:
    """Places a run as `Engine` would on GPUs that nothing else uses.

    Raises:
        UsageError: so many GPUs cannot share the model's heads.
    """
    settings, part = setup.settings, setup.part
    plan = plan_memory(
        setup.target,
        setup.draft if settings.tiers == 3 else None,
        dtype=setup.dtype,
        context=setup.context,
        budget=setup.budget,
        chunk_size=settings.planned_chunk_size,
        ranks=setup.ranks,
    )

    def place(resident: float) -> Placement:
        return plan_placement(
            part,
            dtype=setup.dtype,
            capacity=setup.context,
            chunk_size=settings.planned_chunk_size,
            resident_bytes=resident,
            on_gpu=True,
        )

    if settings.resident is None:
        free = setup.gpu_bytes - CUDA_CONTEXT - plan.weights
        room = resident_bytes(free, setup.gpu_bytes, plan, place(0.0), setup.kv_token, part.num_layers)
    else:
        room = settings.resident * 2**30
    placement = place(room)
    block = placement.block_size * setup.kv_token // part.num_layers  # of one layer
    away = placement.num_blocks - placement.num_resident
    chunk = settings.planned_chunk_size
    open_tokens = -(-(placement.block_size + OPEN_SLACK) // chunk) * chunk
    whole = setup.context // placement.block_size
    return Layout(
        placement=placement,
        weights=plan.weights,
        resident_kv=placement.num_resident * block * part.num_layers,
        retrieval=plan.retrieval,
        ring=min(RING_BUFFERS, placement.num_blocks) * block if placement.streams else 0,
        open_stretches=open_tokens * setup.kv_token if placement.streams else 0,
        prefill=plan.prefill + (placement.num_blocks * block if placement.streams else 0),
        cuda_context=CUDA_CONTEXT,
        reserve=int(RESERVE * setup.gpu_bytes),
        streamed_kv=away * block * part.num_layers,
        runtime=RUNTIME_BYTES,
        streamed_per_pass=max(0, whole - placement.num_resident) * block * part.num_layers if placement.streams else 0,
    )
