"""Sizes that plans, caches and streaming blocks keep to, handed in with `System`."""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels.selection import STEP_ROWS
from ..tp.decoder import TILING, Tiling

MOST_TOGETHER = 8
"""Blocks that one copy over the link takes at most. Page-locked memory is locked in pieces of whole multiples of so
many, and no copy takes some from before such a multiple and some from behind it."""


@dataclass(frozen=True)
class ProcessMemory:
    """Bytes of host memory that a process takes whatever it runs, by what takes them: its resident set, measured with
    Python 3.11 and PyTorch 2.13 for CPUs on Linux (x86-64)."""

    python: int = 219 * 2**20
    """Python (11 MiB) with PyTorch (208 MiB)."""
    program: int = 55 * 2**20
    """Transformers (20 MiB), the tokenizer of the embedded pair (8 MiB), this program's modules (8 MiB), and code of
    all of them that a run is the first to touch (19 MiB)."""
    kept: int = 76 * 2**20
    """What kernels and allocators keep between calls. Loading leaves 9 MiB; a text of 130,000 tokens that was
    tokenized up to 53 MiB, 40 of which a `malloc_trim` gives back; attention on a CPU keeps up to 32 MiB a thread
    (`KEPT_ROOM` in kernels/cpu/source/attention/attention.c), and hardly any of that for a step. The rest, some 10 MiB,
    is an estimate. With the other parts it is 350 MiB: runs of the embedded pair over 1,073 and 41,880 tokens took 296
    and 331 MiB beside what was planned of them."""

    @property
    def total(self) -> int:
        """The sum of the parts."""
        return self.python + self.program + self.kept


@dataclass(frozen=True)
class Limits:
    """Numbers that a test may want smaller."""

    ring_buffers: int = 3
    """Blocks on the device through which the others stream: one in use, one arriving, and one to spare for a block
    whose attention takes longer than its copy."""
    ring_bytes: int = 24 * 2**20
    """Of a buffer of a GPU's ring, if a block is not larger: packed blocks that are smaller pass several at a time.
    Each time takes a host up to 0.3 ms (`docs/gpu-results.md`), in which a PCIe 5.0 link carries 16 MB, and 24 MiB are
    packed in 19."""
    staging_buffers: int = 6
    """Blocks on their way from host memory that is not page-locked: one in use, one being copied on, and four being
    copied."""
    disk_buffers: int = 12
    """Blocks in host memory on their way from a disk: those being read (six, of which a disk needs four for its full
    speed), and as many as it reads while a layer's blocks in memory are attended to (over 131,072 tokens of which a
    quarter was there, a verification took 340 ms with 12, 390 with 6)."""
    open_slack: int = 512
    """Tokens of room behind an open block: more than a pass over few tokens brings. A longer one uses the workspace."""
    window_slack: int = 2048
    """Tokens beside their windows that layers with sliding windows keep where others have none: so many can be rolled
    back, or left to another sequence that begins alike."""
    largest_block: int = 4096
    """Tokens of a block at most; short contexts use less, so that the ragged end costs little."""
    step_rows: int = STEP_ROWS
    """Rows up to which blocks stream past in a pass, at most `STEP_ROWS`. One of more is a prefill: it collects a layer
    at a time."""
    streamed_draft_tokens: tuple[int, ...] = (128, 96, 64, 48, 32, 24)
    """Draft tokens for a pass over the full cache at most, where blocks stream, and it takes as long as they take to
    cross the link: the first of these whose attention mass is small."""
    spare_share: float = 1 / 32
    """Of a GPU's memory: resident blocks that host memory has room for as well, so that they can leave the GPU when
    others take memory there."""
    free_varies: float = 1 / 100
    """Of a GPU's memory: what a run that goes on in a cache may take of the plan's reserve, by which what is free
    varies from run to run."""
    process: ProcessMemory = ProcessMemory()
    """Of host memory: what a process takes besides a run."""
    cuda_host_bytes: int = 1122 * 2**20
    """Of host memory: what CUDA takes in a process that computes on a GPU, by the first tensor that was put there
    (github.com/pytorch/pytorch, issue 12873). With `process` 1.44 GiB; on an H200 with PyTorch 2.11 runs of a
    small model took 1.07 to 1.27 GiB in all, and `bench` 1.44 (`docs/gpu-results.md`)."""
    tiling: Tiling = TILING
    """How a prompt's rows are computed together."""


LIMITS = Limits()
