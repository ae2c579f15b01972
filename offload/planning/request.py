"""The request for a run: what it is to do, and the memory that it may take. It is the only input of a run plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from ...tp.errors import UsageError
from ...tp.matrices import ModelMatrices
from ...tp.model.config import ModelConfig
from ...tp.parallel.ranks import Ranks
from ...tp.parallel.split import Split
from ..limits import LIMITS, Limits
from ..settings import Settings


@dataclass(frozen=True)
class RunRequest:
    """Models, length, settings, the ranks that share the target (tensor parallelism), and their memory in bytes.

    Memory that the run holds already (loaded weights, a cache that will be replaced) counts as available. A plan counts
    the memory of the whole run, not only further allocations.

    Raises:
        UsageError: keys and values are to be packed, but their number format cannot be packed.
    """

    target: ModelConfig
    draft: ModelConfig | None
    dtype: torch.dtype
    context: int
    """Tokens for which the full cache has room: the prompt and the answer."""
    settings: Settings
    gpus: int = 1
    """The number of ranks; of processes if the CPU computes."""
    gpu_bytes: int | None = None
    """Memory of each GPU that the run may take; `None` if the CPU computes."""
    gpu_total_bytes: int | None = None
    """Total memory of each GPU, of which a share stays free; `None`: `gpu_bytes`."""
    gpu_bytes_beside: int = 0
    """Memory of each GPU that this process holds and the run may not take, for example that of running sequences."""
    host_bytes: int | None = None
    """Host memory that `ranks_per_host` ranks may take together; `None`: not checked."""
    disk_bytes: int | None = None
    """Disk space that `ranks_per_host` ranks may take together for blocks that exceed host memory; `None`: no blocks
    are on a disk."""
    local_ranks: int | None = None
    """The number of ranks that share one host's memory; `None`: `gpus`."""
    kernels: bool = True
    """Whether the device has kernels of this project: compiled ones on a CPU, Triton's on a GPU. With Triton's, a layer
    that is wholly on the GPU is planned as a single block where possible; see `place_resident`."""
    makes_numbers: bool = False
    """Whether the products of a step expand the numbers of quantised matrices as they go. Then no memory is taken for
    the expanded numbers."""
    locks_embedding: bool = True
    """Whether the system can page-lock host memory for embeddings and the device reads it; see `host_embedding`."""
    shared: int = 0
    """Tokens of the context that are in the cache of another sequence."""
    shared_streams: bool = False
    """Whether the blocks of the shared tokens stream. A prefill then collects them a layer at a time."""
    beside: int = 0
    """The number of sequences that run already. All have rounds together, and the prompt is read in slices between
    these rounds."""
    unallocated_bytes: int = 0
    """Bytes that the running sequences may still take on the device, and keep."""
    sequences: int = 1
    """The number of sequences that are decoded together, each with its own answer to the same text."""
    answer: int | None = None
    """The maximum number of the context's tokens that are generated; `None`: any number."""
    held_rope_bytes: int = 0
    """Bytes of RoPE's tables that are there already, on each rank. They stay, even if the context is shorter."""
    limits: Limits = LIMITS

    def __post_init__(self) -> None:
        if self.settings.pack == "on" and self.dtype != torch.bfloat16:
            raise UsageError(
                f"pack is 'on', but keys and values would be in {str(self.dtype).removeprefix('torch.')}, and only "
                "bfloat16 is packed; give --dtype bfloat16, or --pack auto"
            )

    @property
    def own(self) -> int:
        """Tokens that take memory of their own: those that are not shared."""
        return self.context - self.shared

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU computes."""
        return self.gpu_bytes is not None

    @property
    def host_embedding(self) -> bool:
        """Whether embeddings are in host memory, from which a kernel reads rows. This excludes embeddings that are also
        output heads."""
        return self.on_gpu and self.kernels and self.locks_embedding

    @property
    def process_parts(self) -> dict[str, int]:
        """Bytes of host memory that a rank's process takes besides the run: the parts of `ProcessMemory`, and `cuda` if
        a GPU computes."""
        return vars(self.limits.process) | ({"cuda": self.limits.cuda_host_bytes} if self.on_gpu else {})

    @cached_property
    def process_bytes(self) -> int:
        """The sum of `process_parts`."""
        return sum(self.process_parts.values())

    @property
    def taken_by_others(self) -> int:
        """Bytes of a GPU that other processes hold; 0 if the total is not known or the CPU computes."""
        if self.gpu_bytes is None:
            return 0
        return max(0, (self.gpu_total_bytes or 0) - self.gpu_bytes - self.gpu_bytes_beside)

    @property
    def ranks_per_host(self) -> int:
        """The number of ranks that share one host's memory."""
        return self.local_ranks or self.gpus

    @cached_property
    def split(self) -> Split:
        """The last rank's share of the target. If shares differ, it is the largest, except for the output head.

        Raises:
            UsageError: this number of ranks cannot share the model's heads.
        """
        return _rank_of(self.target, self.gpus)[0]

    @cached_property
    def part(self) -> ModelConfig:
        """The configuration of the last rank's share of the target; see `split`."""
        return _rank_of(self.target, self.gpus)[1]

    @cached_property
    def matrices(self) -> ModelMatrices:
        """The target's weights on a rank."""
        return _rank_of(self.target, self.gpus)[2]

    @cached_property
    def small(self) -> ModelConfig | None:
        """The draft, with three tiers; else `None`. Every rank has the whole draft model, or its share of a
        multi-token-prediction head."""
        draft = self.draft if self.settings.tiers == 3 else None
        return self.split.config(draft) if draft and draft.is_head else draft

    @cached_property
    def small_matrices(self) -> ModelMatrices | None:
        """The draft's weights on a rank, with three tiers; else `None`."""
        draft = self.draft if self.settings.tiers == 3 else None
        if draft is None or draft.is_head:
            return draft and ModelMatrices.of(draft, self.split)
        return _rank_of(draft, 1)[2]

    def packs(self, *, on_disk: bool) -> bool:
        """Whether blocks that stream are packed. With `--pack auto`, they are if kernels pack and the blocks cross a
        GPU's link or come from a disk.

        Args: `on_disk`: whether all of these blocks are on a disk.
        """
        if self.dtype != torch.bfloat16 or self.settings.pack == "off":
            return False
        return self.settings.pack == "on" or (self.kernels and (self.on_gpu or on_disk))

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values on one rank, over the layers that keep every token."""
        return self.part.full_layers.kv_bytes_per_token(self.dtype)

    @cached_property
    def layer_token_bytes(self) -> int:
        """Bytes of one token's keys and values on one rank, in one layer."""
        return self.part.kv_bytes_per_token(self.dtype) // self.part.kv_layers


@lru_cache(maxsize=16)
def _rank_of(config: ModelConfig, gpus: int) -> tuple[Split, ModelConfig, ModelMatrices]:
    """The share of the last of `gpus` ranks: how the model is split, its configuration and its weights. Cached, as a
    run makes several plans for each of its sequences, with the same models."""
    split = Split.of(config, Ranks(gpus - 1, gpus, gpus))
    return split, split.config(config), ModelMatrices.of(config, split)
