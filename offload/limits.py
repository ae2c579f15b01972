"""Sizes that plans, caches and streaming blocks keep to. They are a part of `System`."""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels.selection import STEP_ROWS
from ..tp.decoder import TILING, Tiling

MOST_TOGETHER = 8
"""The maximum number of blocks in one copy over the link. Host memory is page-locked in pieces, whose number of blocks
is a multiple of this. No copy crosses a multiple."""


@dataclass(frozen=True)
class ProcessMemory:
    """Bytes of host memory that every process takes, by their use. Resident set, measured with Python 3.11 and PyTorch
    2.13 for CPUs on Linux (x86-64)."""

    python: int = 219 * 2**20
    """Python (11 MiB) with PyTorch (208 MiB)."""
    program: int = 55 * 2**20
    """Transformers (20 MiB), the tokenizer of the embedded pair (8 MiB), this program's modules (8 MiB), and their code
    that is loaded when a run first uses it (19 MiB)."""
    kept: int = 76 * 2**20
    """Memory that kernels and allocators keep between calls. Loading leaves 9 MiB. Tokenizing a text of 130,000 tokens
    leaves up to 53 MiB; `malloc_trim` gives 40 of them back. Attention on a CPU keeps up to 32 MiB per thread
    (`KEPT_ROOM` in kernels/cpu/source/attention/attention.c), but hardly any for a step. The rest, about 10 MiB, is an
    estimate. With the other parts, it is 350 MiB. Runs of the embedded pair over 1,073 and 41,880 tokens took 296 and
    331 MiB beside their planned memory."""

    @property
    def total(self) -> int:
        """The sum of the parts."""
        return self.python + self.program + self.kept


@dataclass(frozen=True)
class Limits:
    """Sizes and limits. Tests may use smaller ones."""

    ring_buffers: int = 3
    """The number of ring buffers for streamed blocks on the device: one in use, one arriving, and one spare for a block
    whose attention takes longer than its copy."""
    ring_bytes: int = 24 * 2**20
    """Bytes of a ring buffer on a GPU, unless a block is larger. Smaller packed blocks are copied several at a time.
    Each copy takes a host up to 0.3 ms (`docs/gpu-results.md`). In this time, a PCIe 5.0 link carries 16 MB, less than
    24 MiB take when they are packed (19 MB)."""
    staging_buffers: int = 6
    """The number of buffers for blocks from host memory that is not page-locked: one in use, one being copied on, and
    four being copied."""
    disk_buffers: int = 12
    """The number of buffers in host memory for blocks from a disk. Six are for blocks that are being read; a disk
    reaches its full speed with four reads at once. The others are for the blocks that the disk reads while attention
    uses a layer's blocks in memory (over 131,072 tokens, a quarter of them in memory, a verification took 340 ms with
    12, 390 with 6)."""
    open_slack: int = 512
    """Tokens of room behind a block that is being filled: more than a pass of `step_rows` rows adds. A longer pass uses
    the workspace."""
    window_slack: int = 2048
    """Tokens beside their windows that layers with sliding windows keep, if other layers have no windows. This
    number of tokens can be rolled back, or shared with another sequence of the same beginning."""
    largest_block: int = 4096
    """The maximum number of tokens in a block. Short contexts have smaller blocks, so that the partly filled last block
    costs little."""
    kept_texts: int = 256
    """The maximum number of texts of ended sequences that stay in memory. Each new prompt is compared with all of them,
    and each plan counts the memory of all: 10 µs per text (AMD EPYC, Zen 4). Many short questions would fill the memory
    with thousands."""
    step_rows: int = STEP_ROWS
    """The maximum number of rows of a pass that attends to streamed blocks one after another; it must not exceed
    `STEP_ROWS`. A pass with more rows is a prefill, which collects one layer at a time."""
    streamed_draft_tokens: tuple[int, ...] = (128, 96, 64, 48, 32, 24)
    """Values for the maximum number of draft tokens of a verification if blocks stream. The verification then takes as
    long as the blocks take to cross the link. The first value with a small attention mass is used."""
    spare_share: float = 1 / 32
    """The share of a GPU's memory for which host memory has spare room. Resident blocks of this size can leave the GPU
    when other programs take memory there."""
    free_varies: float = 1 / 100
    """The share of a GPU's memory by which free memory varies from run to run. A run that reuses a cache may take this
    much of the plan's reserve."""
    process: ProcessMemory = ProcessMemory()
    """Bytes of host memory that a process takes besides a run."""
    cuda_host_bytes: int = 1122 * 2**20
    """Bytes of host memory that CUDA takes in a process that computes on a GPU, when the first tensor is put there
    (github.com/pytorch/pytorch, issue 12873). With `process`, this is 1.44 GiB. On an H200 with PyTorch 2.11, runs of a
    small model took 1.07 to 1.27 GiB in all, and `bench` 1.44 (`docs/gpu-results.md`)."""
    tiling: Tiling = TILING
    """How many rows of a prompt are computed together."""


LIMITS = Limits()
