"""What a run is asked to do and what memory it may take: the one input of a run plan."""

from __future__ import annotations

from dataclasses import asdict, dataclass
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

    Memory that the run holds already (loaded weights, a cache that will be replaced) counts as available: a plan says
    what the whole run takes, not what is still to come.

    Raises:
        UsageError: keys and values are to be packed, and their number format cannot be.
    """

    target: ModelConfig
    draft: ModelConfig | None
    dtype: torch.dtype
    context: int
    """Tokens that the full cache has room for: the prompt and the generated ones."""
    settings: Settings
    gpus: int = 1
    """Ranks; processes where the CPU computes."""
    gpu_bytes: int | None = None
    """Memory of each GPU that the run may take; `None` where the CPU computes."""
    gpu_total_bytes: int | None = None
    """All memory of each GPU, of which a share stays free; default `gpu_bytes`."""
    gpu_bytes_beside: int = 0
    """Memory of each GPU that this process has and the run may not take, as that of sequences that are running."""
    host_bytes: int | None = None
    """Host memory that `ranks_per_host` ranks may take together; `None` leaves it unchecked."""
    disk_bytes: int | None = None
    """Disk space that `ranks_per_host` ranks may take together for blocks that exceed host memory; `None`: none do."""
    local_ranks: int | None = None
    """Ranks that share one host's memory; default `gpus`."""
    kernels: bool = True
    """Whether the device has kernels of this project: compiled ones on a CPU, or on a GPU Triton's, of which attention
    reads a layer of many blocks as one."""
    makes_numbers: bool = False
    """Whether a step makes numbers of matrices in few bits within its products, and takes no memory for them."""
    locks_embedding: bool = True
    """Whether the system locks host memory for embeddings, and the device reads it; see `host_embedding`."""
    shared: int = 0
    """Tokens of the context that the cache of another sequence holds."""
    shared_streams: bool = False
    """Whether that one's blocks stream: then a prefill collects them a layer at a time."""
    beside: int = 0
    """Sequences that run already: rounds are of all together, and the prompt is read in slices between them."""
    unallocated_bytes: int = 0
    """Bytes that these may still take on the device, and keep."""
    sequences: int = 1
    """That are decoded together, each with an answer of its own to the same text."""
    answer: int | None = None
    """Tokens of the context that are generated, at most; `None`: any may be."""
    limits: Limits = LIMITS

    def __post_init__(self) -> None:
        if self.settings.pack == "on" and self.dtype != torch.bfloat16:
            raise UsageError(
                f"pack is 'on', but keys and values would be in {str(self.dtype).removeprefix('torch.')}, and only "
                "bfloat16 is packed; give --dtype bfloat16, or --pack auto"
            )

    @property
    def own(self) -> int:
        """Tokens that take memory of their own."""
        return self.context - self.shared

    @property
    def on_gpu(self) -> bool:
        return self.gpu_bytes is not None

    @property
    def host_embedding(self) -> bool:
        """Whether embeddings that are not output heads too are in host memory, and a kernel reads rows from there."""
        return self.on_gpu and self.kernels and self.locks_embedding

    @property
    def process_parts(self) -> dict[str, int]:
        """Bytes of host memory that a rank's process takes besides the run: the parts of `ProcessMemory`, and `cuda`
        where a GPU computes."""
        return asdict(self.limits.process) | ({"cuda": self.limits.cuda_host_bytes} if self.on_gpu else {})

    @property
    def process_bytes(self) -> int:
        """The sum of `process_parts`."""
        return sum(self.process_parts.values())

    @property
    def taken_by_others(self) -> int:
        """Bytes of a GPU that other processes have; 0 where it is not known what there is in all."""
        if self.gpu_bytes is None:
            return 0
        return max(0, (self.gpu_total_bytes or 0) - self.gpu_bytes - self.gpu_bytes_beside)

    @property
    def ranks_per_host(self) -> int:
        return self.local_ranks or self.gpus

    @cached_property
    def split(self) -> Split:
        """The last rank's part of the target: where parts differ, no other is larger, but of the output head.

        Raises:
            UsageError: so many ranks cannot share the model's heads.
        """
        return _rank_of(self.target, self.gpus)[0]

    @cached_property
    def part(self) -> ModelConfig:
        """See `split`."""
        return _rank_of(self.target, self.gpus)[1]

    @cached_property
    def matrices(self) -> ModelMatrices:
        """What a rank holds of the target's weights."""
        return _rank_of(self.target, self.gpus)[2]

    @cached_property
    def small(self) -> ModelConfig | None:
        """The draft model, where three tiers run: every rank has all of it, or its part of a multi-token-prediction
        head."""
        draft = self.draft if self.settings.tiers == 3 else None
        return self.split.config(draft) if draft and draft.is_head else draft

    @cached_property
    def small_matrices(self) -> ModelMatrices | None:
        """What a rank holds of the draft model's weights, where three tiers run."""
        draft = self.draft if self.settings.tiers == 3 else None
        if draft is None or draft.is_head:
            return draft and ModelMatrices.of(draft, self.split)
        return _rank_of(draft, 1)[2]

    def packs(self, *, on_disk: bool) -> bool:
        """Whether blocks that stream are packed: by themselves where kernels do it, and blocks have a link or a disk to
        cross.

        Args: `on_disk`: whether it is all of them that are on a disk.
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
        """The same in one layer."""
        return self.part.kv_bytes_per_token(self.dtype) // self.part.kv_layers


@lru_cache(maxsize=16)
def _rank_of(config: ModelConfig, gpus: int) -> tuple[Split, ModelConfig, ModelMatrices]:
    """The last of so many ranks: its part of a model, and what it holds of the weights. A run is planned several times
    for each of its sequences, of the same models."""
    split = Split.of(config, Ranks(gpus - 1, gpus, gpus))
    return split, split.config(config), ModelMatrices.of(config, split)
