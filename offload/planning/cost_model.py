"""Models how fast a run would be, from bytes, bandwidths and a few published constants. Nothing is measured.

A pass takes as long as the slowest of four things that run at the same time:

* the **link**: bytes of keys and values that are not on the GPU ÷ the link's bandwidth. Nothing hides this time;
* the **disk**: bytes of keys and values that exceed host memory, of all GPUs of a host ÷ the disk's bandwidth;
* the **GPU**: weights, keys and values read from its memory (or multiplied, if that takes longer), and on several GPUs
  the two sums of every layer;
* the **launches**: Python and PyTorch starting each layer's kernels, while the GPU waits or works.

Speculation is modelled as in `lengths`: the time of the draft tokens and one pass ÷ the expected tokens of this pass.
Four things are left out: sampling, refreshes of the retrieval cache, sliding windows that all layers have, and the
bandwidth of the link that the sums of the layers use.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from ..caches.streaming import streaming_prefill
from ..speculation.lengths import LOOKUP_SECONDS, Acceptance, PassCost, expected_tokens, fastest_length
from .cards import DISK_BANDWIDTH, Card, card_named
from .request import RunRequest
from .run_plan import RunPlan

EFFICIENCY = 1397.31 / 2039
"""The share of a GPU's data-sheet bandwidth that a whole decoder reaches, attention and norms included. gpt-fast reads
Llama-2-7B at 1,397.31 GB/s (its README) on an A100-80GB, whose data sheet says 2,039."""

LAUNCH_SECONDS = 0.8e-3
"""Seconds to start one layer's operations from Python, without CUDA graphs. It lies between two figures. A draft's
layer takes 0.5 ms in plain PyTorch on two EPYC cores, nearly all of it dispatch (docs/cpu-results.md). The basic
version in "Accelerating Generative AI with PyTorch II" takes 1.2 ms (pytorch.org, 25.5 tokens/s with 32 layers on an
A100's host)."""

SUM_SECONDS = 12.7e-6, 5.4e-6
"""A sum over n GPUs takes the first number of seconds plus the second times log2(n). They follow from the times of
Llama-2-7B on 2, 4 and 8 A100 in gpt-fast's README: the time beyond 1/n of the time on one GPU, divided by the 64 sums
per token. These GPUs had NVLink. Two RTX 4090 without peer access exchange a small message in 12 us
(github.com/tinygrad/open-gpu-kernel-modules, issue 17)."""

DRAFT_TOKENS = 256
"""The number of tokens in the streaming cache: sinks and window."""


class Hardware(Protocol):
    """The times of passes on some hardware, modelled (`Machine`) or measured (`calibration.MeasuredMachine`)."""

    @property
    def link_bandwidth(self) -> float:
        """Bytes per second from page-locked host memory to one GPU, while all other GPUs read too."""
        ...

    @property
    def disk_bandwidth(self) -> float:
        """Bytes per second of large reads from the disk that a host's ranks share."""
        ...

    @property
    def round_seconds(self) -> float:
        """Seconds of a round of speculation besides its passes."""
        ...

    def pass_seconds(self, read: float, multiplied: float, layers: int, gpus: int) -> float:
        """Seconds of a pass of the target. On each GPU, it reads `read` bytes from memory and computes `multiplied`
        operations."""
        ...

    def draft_step_seconds(self, read: float, layers: int) -> float:
        """Seconds of a step of the draft model, which reads `read` bytes."""
        ...


@dataclass(frozen=True)
class Machine:
    """A GPU by its data sheet. Bandwidths are in bytes per second."""

    memory_bandwidth: float
    flops: float
    """Operations per second of 16-bit matrix products, dense."""
    link_bandwidth: float
    """The bandwidth of the link in practice."""
    launch_seconds: float = LAUNCH_SECONDS
    """Seconds to launch the kernels of a layer; 0 for kernels that are launched as CUDA graphs."""
    round_seconds: float = 0.0
    disk_bandwidth: float = DISK_BANDWIDTH

    @classmethod
    def of(cls, card: Card) -> Machine:
        """The machine with the figures of a card."""
        return cls(card.memory_gb_per_s * 1e9, card.tflops * 1e12, card.link_gb_per_s * 1e9)

    def pass_seconds(self, read: float, multiplied: float, layers: int, gpus: int) -> float:
        """See `Hardware`."""
        work = max(read / (EFFICIENCY * self.memory_bandwidth), multiplied / (EFFICIENCY * self.flops))
        if gpus > 1:
            work += 2 * layers * (SUM_SECONDS[0] + SUM_SECONDS[1] * math.log2(gpus))
        return max(work, layers * self.launch_seconds)

    def draft_step_seconds(self, read: float, layers: int) -> float:
        """See `Hardware`."""
        return max(read / (EFFICIENCY * self.memory_bandwidth), layers * self.launch_seconds)


@dataclass(frozen=True)
class HostMachine:
    """Two cores of a server and the memory that they read, if the CPU computes. Draft lengths adapt from this start.

    Unlike on a GPU, dispatch, reading and multiplying follow one another.
    """

    link_bandwidth: float = math.inf
    """The bandwidth of the imitated link within host memory, in bytes per second."""
    memory_bandwidth: float = 40e9
    """Bytes per second."""
    flops: float = 400e9
    """Operations per second."""
    launch_seconds: float = 0.1e-3
    """Seconds to dispatch the operations of a layer."""
    round_seconds: float = 0.0
    disk_bandwidth: float = DISK_BANDWIDTH

    def pass_seconds(self, read: float, multiplied: float, layers: int, gpus: int) -> float:
        """See `Hardware`."""
        return layers * self.launch_seconds + read / self.memory_bandwidth + multiplied / self.flops

    def draft_step_seconds(self, read: float, layers: int) -> float:
        """See `Hardware`."""
        return layers * self.launch_seconds + read / self.memory_bandwidth


def hardware_of(
    device: torch.device, name: str, link_gbps: float | None = None, measured_link: float | None = None
) -> Hardware:
    """The model of the device on which a run computes, before its passes were measured.

    Args:
        name: the device's name; a GPU that is not in the table of cards counts as the default card.
        link_gbps: on a CPU, the maximum bandwidth of the link to streamed blocks, in gigabytes a second.
        measured_link: the measured bandwidth of the link, in bytes a second; it replaces the modelled one.
    """
    if device.type == "cpu":
        host = HostMachine(link_gbps * 1e9 if link_gbps else math.inf)
        return replace(host, link_bandwidth=measured_link or host.link_bandwidth)
    card = Machine.of(card_named(name))
    return replace(card, link_bandwidth=measured_link or card.link_bandwidth)


@dataclass(frozen=True)
class Assumptions:
    """Assumed acceptance rates. They depend on model and text, and only a run can measure them."""

    acceptance: float = 0.9
    """The probability that a draft token of the retrieval cache is accepted, if those before it were. TriForce
    publishes rates above 0.9 for all temperatures up to 1 (infini-ai-lab.github.io/TriForce)."""
    draft_acceptance: float = Acceptance().rate
    """The same probability for the draft model's tokens. The default is the engine's start value before it measures."""

    @classmethod
    def of(cls, acceptance: float | None, draft_acceptance: float | None) -> Assumptions:
        """The given probabilities, with the defaults in place of `None`."""
        given = {"acceptance": acceptance, "draft_acceptance": draft_acceptance}
        return cls(**{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True)
class Estimate:
    """The modelled speed of a run. Times are in seconds. Lengths are 0 if nothing drafts."""

    tiers: int
    """The number of tiers."""
    floor_s: float
    """The time of one pass over the full cache on the link, or on the disk. No verification is faster."""
    verify_s: float
    """The time of a verification of `block_length` tokens."""
    retrieval_s: float
    """The time of a pass over the retrieval cache that tests `draft_length` tokens; 0 without a retrieval cache."""
    draft_s: float
    """The time of a step of the draft; 0 without a draft."""
    block_length: int
    """The number of draft tokens for a pass over the full cache."""
    draft_length: int
    """The number of draft tokens for a pass over the retrieval cache."""
    tokens_per_round: float
    """The expected number of tokens in a round."""
    tbt_s: float
    """The time between tokens of a sequence."""
    tokens_per_second: float
    """Tokens per second of all sequences together."""


STATES_MOVED = 3
"""The number of states that a pass reads or writes in each layer with linear attention: the state that it begins with,
the state after the tokens that stay, and the state after its own tokens."""


def pass_work(request: RunRequest, rows: float, kv_tokens: float, kv_read: float | None = None) -> tuple[float, float]:
    """The bytes read and the operations multiplied on each rank by one pass of the target.

    Args:
        rows: the rows of the pass.
        kv_tokens: the tokens whose keys and values each row sees.
        kv_read: the tokens whose keys and values are read in all; `None`: `kv_tokens`.
    """
    part, matrices = request.part, request.matrices
    read_tokens = kv_tokens if kv_read is None else kv_read
    seen = sum(min(kv_tokens, window) for window in part.kept_windows.values())  # in all layers that keep no more
    sequences = read_tokens / kv_tokens if kv_tokens else 1
    read = matrices.bytes_of_a_pass(request.dtype, rows)
    read += read_tokens * request.token_bytes + sequences * seen * request.layer_token_bytes
    if part.linear:  # the states that a pass begins with, and writes for the next passes
        read += sequences * STATES_MOVED * part.linear.state_bytes(request.dtype)
    attended = kv_tokens * part.full_layers.num_layers + seen
    return read, 2 * rows * matrices.numbers_of_a_row + 4 * rows * attended * part.num_heads * part.head_dim


@dataclass(frozen=True)
class PassTimes:
    """The modelled seconds of each tier's passes in a run."""

    plan: RunPlan
    hardware: Hardware

    @property
    def floor(self) -> float:
        """Seconds of one pass over the full cache on the link, or on the disk if that is longer. No verification is
        faster."""
        of_host = self.plan.disk_per_pass * self.plan.request.ranks_per_host
        return max(self.plan.streamed_per_pass / self.hardware.link_bandwidth, of_host / self.hardware.disk_bandwidth)

    def verify(self, rows: int) -> float:
        """Seconds of a pass over the full cache with `rows` rows of each sequence. Streamed blocks arrive during it."""
        context = self.plan.request.context
        return max(self.floor, self._target(rows, context, context))

    def retrieval(self, rows: int) -> float:
        """Seconds of a pass over the retrieval cache, with `rows` rows of each sequence."""
        return self._target(rows, self.plan.budget, self.plan.request.sequences * self.plan.budget)

    def draft(self, rows: int = 1) -> float:
        """Seconds of a step of the draft model or of a multi-token-prediction head, or of drafting a token by lookup; 0
        without any of them. Further rows cost nothing."""
        request, draft, matrices = self.plan.request, self.plan.request.small, self.plan.request.small_matrices
        if draft is None or matrices is None:
            return LOOKUP_SECONDS if request.settings.lookup else 0.0
        read = float(matrices.bytes_of_a_pass(request.dtype))
        read += request.sequences * DRAFT_TOKENS * draft.kv_bytes_per_token(request.dtype)
        return self.hardware.draft_step_seconds(read, draft.num_layers)

    def filling(self) -> float:
        """Seconds of filling a sequence's drafting caches: that of the draft model by a pass over the last tokens, the
        retrieval cache by copies."""
        request, draft, matrices = self.plan.request, self.plan.request.small, self.plan.request.small_matrices
        copied = 2.0 * self.plan.budget * request.token_bytes
        found = self.hardware.pass_seconds(copied, 0.0, request.target.num_layers, 1)
        if draft and matrices:
            rows = streaming_prefill(draft.num_layers)
            work = matrices.bytes_of_a_pass(request.dtype, rows), 2.0 * rows * matrices.numbers_of_a_row
            found += self.hardware.pass_seconds(*work, draft.num_layers, 1)
        return found

    def _target(self, rows: int, kv_tokens: int, kv_read: int) -> float:
        request = self.plan.request
        work = pass_work(request, request.sequences * rows, kv_tokens, kv_read)
        return self.hardware.pass_seconds(*work, request.target.num_layers, request.gpus)

    def costs(self) -> dict[str, PassCost]:
        """The cost of passes by tier, as lines through these times. A run starts from them, before it measures."""
        plan = self.plan
        tiers = {
            "verify": (self.verify, plan.verify_draft.most),
            "retrieval": (self.retrieval, plan.retrieval_draft.most),
            "draft": (self.draft, 1),
        }
        return {
            name: PassCost.through(seconds(1), seconds(most + 1), most + 1) for name, (seconds, most) in tiers.items()
        }


def estimate(plan: RunPlan, hardware: Hardware, assumed: Assumptions) -> Estimate:
    """Models the speed of a planned run. If the settings leave a draft length open, the fastest one is used."""
    settings, times = plan.request.settings, PassTimes(plan, hardware)
    if settings.tiers == 1:
        together = plan.request.sequences / times.verify(1)
        return Estimate(1, times.floor, times.verify(1), 0.0, 0.0, 0, 0, 1.0, times.verify(1), together)
    draft_s, draft_length, token_s = 0.0, 0, times.retrieval(1)
    if settings.tiers == 3:
        draft_s = times.draft()
        draft_length, token_s = fastest_length(times.retrieval, draft_s, assumed.draft_acceptance, plan.retrieval_draft)

    def finish(rows: int) -> float:
        return times.verify(rows) + hardware.round_seconds

    block_length, tbt = fastest_length(finish, token_s, assumed.acceptance, plan.verify_draft)
    return Estimate(
        tiers=settings.tiers,
        floor_s=times.floor,
        verify_s=times.verify(block_length + 1),
        retrieval_s=times.retrieval(draft_length + 1),
        draft_s=draft_s,
        block_length=block_length,
        draft_length=draft_length,
        tokens_per_round=expected_tokens(assumed.acceptance, block_length),
        tbt_s=tbt,
        tokens_per_second=plan.request.sequences / tbt,
    )
