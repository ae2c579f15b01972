"""How fast a run would be, from bytes, bandwidths and a few published constants: modelled, never measured.

A pass takes as long as the slowest of three things that go on at once:

* the **link**: bytes of keys and values that do not live on the GPU, over the link's bandwidth. Nothing hides it;
* the **GPU**: weights and keys and values read from its memory (or multiplied, if that takes longer), and on several
  GPUs the two sums of every layer;
* the **launches**: Python and PyTorch starting each layer's kernels, while the GPU waits or works.

Speculation is the sum of `pacing`: drafted tokens and one pass, over the tokens the pass is expected to keep. Sampling,
the refresh of the retrieval cache, sliding windows and what the sums of the layers take of the link are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ...tp.model.config import ModelConfig
from ..settings import LONGEST_BLOCK, LONGEST_DRAFT
from ..speculation.lengths import Acceptance, PassCost, best_length, expected_tokens, seconds_per_token
from .layout import Layout, Setup

EFFICIENCY = 1397.31 / 2039
"""Share of a GPU's data-sheet bandwidth that a decoder reaches as a whole, attention and norms included: gpt-fast reads
Llama-2-7B at 1,397.31 GB/s (its README) on an A100-80GB, whose data sheet says 2,039."""

LAUNCH_SECONDS = 0.8e-3
"""Starting one layer's operations from Python, without CUDA graphs: between the 0.5 ms that a draft's layer takes in
plain PyTorch on two EPYC cores, nearly all of it dispatch (docs/cpu-results.md), and the 1.2 ms of the basic version in
"Accelerating Generative AI with PyTorch II" (pytorch.org, 25.5 tokens/s with 32 layers on an A100's host)."""

SUM_SECONDS = 12.7e-6, 5.4e-6
"""A sum over n GPUs takes the first plus the second times log2(n): what gpt-fast's README gives for Llama-2-7B on 2, 4
and 8 A100 beyond its share of the time on one, by its 64 sums a token. Those had NVLink; two RTX 4090 without peer
access exchange a small message in 12 us (github.com/tinygrad/open-gpu-kernel-modules, issue 17)."""

DRAFT_TOKENS = 256
"""What the streaming cache holds: sinks and window."""


class Hardware(Protocol):
    """What passes take on some hardware, modelled (`Machine`) or measured (`calibration.MeasuredMachine`)."""

    @property
    def link_bandwidth(self) -> float:
        """Bytes a second from page-locked host memory to one GPU, while all others read too."""
        ...

    @property
    def round_seconds(self) -> float:
        """What a round of speculation takes besides its passes."""
        ...

    def pass_seconds(self, read: float, multiplied: float, layers: int, gpus: int) -> float:
        """A pass of the target that reads so many bytes from a GPU's memory and multiplies so many operations there."""
        ...

    def draft_step_seconds(self, read: float, layers: int) -> float:
        """A step of the draft model."""
        ...


@dataclass(frozen=True)
class Machine:
    """What a GPU can do by its data sheet. Bytes and operations a second."""

    memory_bandwidth: float
    flops: float
    """16-bit matrix products, dense."""
    link_bandwidth: float
    """In practice."""
    launch_seconds: float = LAUNCH_SECONDS
    """Per layer; 0 for kernels that are launched as CUDA graphs."""
    round_seconds: float = 0.0

    def pass_seconds(self, read: float, multiplied: float, layers: int, gpus: int) -> float:
        work = max(read / (EFFICIENCY * self.memory_bandwidth), multiplied / (EFFICIENCY * self.flops))
        if gpus > 1:
            work += 2 * layers * (SUM_SECONDS[0] + SUM_SECONDS[1] * math.log2(gpus))
        return max(work, layers * self.launch_seconds)

    def draft_step_seconds(self, read: float, layers: int) -> float:
        return max(read / (EFFICIENCY * self.memory_bandwidth), layers * self.launch_seconds)


@dataclass(frozen=True)
class Assumptions:
    """What depends on model and text, and only a run can tell."""

    acceptance: float = 0.9
    """Chance that a token drafted on the retrieval cache stands, given that those before it did. Above 0.9 is what
    TriForce publishes for all temperatures up to 1 (infini-ai-lab.github.io/TriForce)."""
    draft_acceptance: float = Acceptance().rate
    """The same for the draft model's tokens: where the engine starts before it has measured."""

    @classmethod
    def of(cls, acceptance: float | None, draft_acceptance: float | None) -> Assumptions:
        """These, but what is assumed by default for `None`."""
        given = {"acceptance": acceptance, "draft_acceptance": draft_acceptance}
        return cls(**{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True)
class Estimate:
    """Modelled seconds for so many tiers. Lengths are 0 where nothing drafts."""

    tiers: int
    floor_s: float
    """The link's time of one pass over the full cache: no verification is faster."""
    verify_s: float
    retrieval_s: float
    """One pass on the retrieval cache; 0 without."""
    draft_s: float
    block_length: int
    draft_length: int
    tokens_per_round: float
    tbt_s: float
    """Time between tokens."""


def link_seconds(num_bytes: float, machine: Hardware) -> float:
    """Seconds that `num_bytes` take over one GPU's link."""
    return num_bytes / machine.link_bandwidth


def pass_work(setup: Setup, rows: float, kv_tokens: float) -> tuple[float, float]:
    """Bytes read and operations multiplied on each GPU by one pass of the target over `rows` rows and so many tokens of
    keys and values."""
    part = setup.part
    weights = weights_read(part, setup.gpus)
    read = weights * setup.dtype.itemsize + kv_tokens * setup.kv_token
    multiplied = 2 * rows * weights + 4 * rows * kv_tokens * part.num_layers * part.num_heads * part.head_dim
    return read, multiplied


def pass_seconds(setup: Setup, machine: Hardware, rows: int, kv_tokens: int) -> float:
    """One pass of the target over `rows` rows and `kv_tokens` tokens of keys and values that are on the GPU, or arrive
    while it works."""
    return machine.pass_seconds(*pass_work(setup, rows, kv_tokens), setup.part.num_layers, setup.gpus)


def draft_seconds(setup: Setup, machine: Hardware) -> float:
    """One step of the draft model, which every GPU runs whole."""
    draft = setup.draft
    if draft is None:
        return 0.0
    read = weights_read(draft, 1) * setup.dtype.itemsize + DRAFT_TOKENS * draft.kv_bytes_per_token(setup.dtype)
    return machine.draft_step_seconds(read, draft.num_layers)


def estimate(setup: Setup, layout: Layout, machine: Hardware, assumed: Assumptions) -> Estimate:
    """The speed of `setup`, laid out as `layout`; lengths that its settings leave open are those that are fastest."""
    settings = setup.settings
    floor = link_seconds(layout.streamed_per_pass, machine)

    def verify(rows: int) -> float:
        return max(floor, pass_seconds(setup, machine, rows, setup.context))

    def retrieve(rows: int) -> float:
        return pass_seconds(setup, machine, rows, setup.budget)

    if settings.tiers == 1:
        return Estimate(1, floor, verify(1), 0.0, 0.0, 0, 0, 1.0, verify(1))
    draft_s, draft_length, token_s = 0.0, 0, retrieve(1)
    if settings.tiers == 3:
        draft_s = draft_seconds(setup, machine)
        draft_length, token_s = _level(
            retrieve, draft_s, assumed.draft_acceptance, settings.draft_length, LONGEST_DRAFT
        )

    def finish(rows: int) -> float:
        return verify(rows) + machine.round_seconds

    block_length, tbt = _level(finish, token_s, assumed.acceptance, settings.block_length, LONGEST_BLOCK)
    return Estimate(
        tiers=settings.tiers,
        floor_s=floor,
        verify_s=verify(block_length + 1),
        retrieval_s=retrieve(draft_length + 1),
        draft_s=draft_s,
        block_length=block_length,
        draft_length=draft_length,
        tokens_per_round=expected_tokens(assumed.acceptance, block_length),
        tbt_s=tbt,
    )


def _level(
    seconds: Callable[[int], float], drafted_s: float, rate: float, fixed: int | None, longest: int
) -> tuple[int, float]:
    """The tokens to draft for a pass, and the seconds per token that this gives.

    Args:
        seconds: of a pass over so many rows.
        drafted_s: of one drafted token.
    """
    length = fixed
    if length is None:
        cost = PassCost.through(seconds(1), seconds(longest + 1), longest + 1)
        length, _ = best_length(cost, drafted_s, rate, longest)
    return length, seconds_per_token(length, drafted_s, seconds(length + 1), rate)


def weights_read(part: ModelConfig, gpus: int) -> int:
    """Weights that every pass reads: all but the embedding, of which rows are looked up; of the head, a GPU's part."""
    head = part.vocab_size * part.hidden_size
    heads = head if part.tie_word_embeddings else 2 * head
    return part.num_parameters - heads + -(-head // gpus)
