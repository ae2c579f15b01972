"""How fast a run would be, from bytes, bandwidths and a few published constants: modelled, never measured.

A pass takes as long as the slowest of four things that go on at once:

* the **link**: bytes of keys and values that do not live on the GPU, over the link's bandwidth. Nothing hides it;
* the **disk**: bytes of those that exceed host memory, of all GPUs of a host, over the disk's bandwidth;
* the **GPU**: weights and keys and values read from its memory (or multiplied, if that takes longer), and on several
  GPUs the two sums of every layer;
* the **launches**: Python and PyTorch starting each layer's kernels, while the GPU waits or works.

Speculation is the sum of `lengths`: draft tokens and one pass, over the tokens that this pass is expected to accept.
Sampling, the refresh of the retrieval cache, sliding windows that all layers have and what the sums of the layers take
of the link are left out.
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
    def disk_bandwidth(self) -> float:
        """Bytes a second of large reads from the disk that a host's ranks share."""
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
    disk_bandwidth: float = DISK_BANDWIDTH

    @classmethod
    def of(cls, card: Card) -> Machine:
        return cls(card.memory_gb_per_s * 1e9, card.tflops * 1e12, card.link_gb_per_s * 1e9)

    def pass_seconds(self, read: float, multiplied: float, layers: int, gpus: int) -> float:
        work = max(read / (EFFICIENCY * self.memory_bandwidth), multiplied / (EFFICIENCY * self.flops))
        if gpus > 1:
            work += 2 * layers * (SUM_SECONDS[0] + SUM_SECONDS[1] * math.log2(gpus))
        return max(work, layers * self.launch_seconds)

    def draft_step_seconds(self, read: float, layers: int) -> float:
        return max(read / (EFFICIENCY * self.memory_bandwidth), layers * self.launch_seconds)


@dataclass(frozen=True)
class HostMachine:
    """Two cores of a server and the memory they read, where the CPU computes: a start for lengths that adapt.

    Unlike on a GPU, dispatch, reading and multiplying follow one another.
    """

    link_bandwidth: float = math.inf
    """Of the modelled link within host memory."""
    memory_bandwidth: float = 40e9
    flops: float = 400e9
    launch_seconds: float = 0.1e-3
    """Per layer."""
    round_seconds: float = 0.0
    disk_bandwidth: float = DISK_BANDWIDTH

    def pass_seconds(self, read: float, multiplied: float, layers: int, gpus: int) -> float:
        return layers * self.launch_seconds + read / self.memory_bandwidth + multiplied / self.flops

    def draft_step_seconds(self, read: float, layers: int) -> float:
        return layers * self.launch_seconds + read / self.memory_bandwidth


def hardware_of(
    device: torch.device, name: str, link_gbps: float | None = None, measured_link: float | None = None
) -> Hardware:
    """What is modelled of the device that a run computes on, before its passes were measured.

    Args:
        name: the device's name; a GPU that is not in the table of cards is taken for the default one.
        link_gbps: on a CPU, what the link to streamed blocks may carry, in gigabytes a second.
        measured_link: what the link was found to carry, in bytes a second; it takes the place of what is modelled.
    """
    if device.type == "cpu":
        host = HostMachine(link_gbps * 1e9 if link_gbps else math.inf)
        return replace(host, link_bandwidth=measured_link or host.link_bandwidth)
    card = Machine.of(card_named(name))
    return replace(card, link_bandwidth=measured_link or card.link_bandwidth)


@dataclass(frozen=True)
class Assumptions:
    """What depends on model and text, and only a run can tell."""

    acceptance: float = 0.9
    """Chance that a draft token of the retrieval cache is accepted, given that those before it were. Above 0.9 is what
    TriForce publishes for all temperatures up to 1 (infini-ai-lab.github.io/TriForce)."""
    draft_acceptance: float = Acceptance().rate
    """The same for the draft model's tokens: where the engine starts before it has measured."""

    @classmethod
    def of(cls, acceptance: float | None, draft_acceptance: float | None) -> Assumptions:
        """The given chances; the default in place of `None`."""
        given = {"acceptance": acceptance, "draft_acceptance": draft_acceptance}
        return cls(**{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True)
class Estimate:
    """Modelled seconds for so many tiers. Lengths are 0 where nothing drafts."""

    tiers: int
    floor_s: float
    """The time of one pass over the full cache on the link, or on the disk: no verification is faster."""
    verify_s: float
    retrieval_s: float
    """One pass on the retrieval cache; 0 without."""
    draft_s: float
    block_length: int
    draft_length: int
    tokens_per_round: float
    tbt_s: float
    """Time between tokens of a sequence."""
    tokens_per_second: float
    """Of all sequences together."""


STATES_MOVED = 3
"""Of layers with linear attention, the states that a pass reads or writes: the one it begins with, the one behind the
tokens that stay, and the one behind its own."""


def pass_work(request: RunRequest, rows: float, kv_tokens: float, kv_read: float | None = None) -> tuple[float, float]:
    """Bytes read and operations multiplied on each rank by one pass of the target over `rows` rows that see `kv_tokens`
    tokens of keys and values each; in all `kv_read` tokens of them are read, which is as many unless it is given."""
    part, matrices = request.part, request.matrices
    read_tokens = kv_tokens if kv_read is None else kv_read
    seen = sum(min(kv_tokens, window) for window in part.kept_windows.values())  # in all layers that keep no more
    sequences = read_tokens / kv_tokens if kv_tokens else 1
    read = matrices.bytes_of_a_pass(request.dtype, rows)
    read += read_tokens * request.token_bytes + sequences * seen * request.layer_token_bytes
    if part.linear:  # what a pass begins with, and writes for the next ones
        read += sequences * STATES_MOVED * part.linear.state_bytes(request.dtype)
    attended = kv_tokens * part.full_layers.num_layers + seen
    return read, 2 * rows * matrices.numbers_of_a_row + 4 * rows * attended * part.num_heads * part.head_dim


@dataclass(frozen=True)
class PassTimes:
    """Modelled seconds of each tier's passes in a run."""

    plan: RunPlan
    hardware: Hardware

    @property
    def floor(self) -> float:
        """The time of one pass over the full cache on the link, or on the disk if that is longer: no verification is
        faster."""
        of_host = self.plan.disk_per_pass * self.plan.request.ranks_per_host
        return max(self.plan.streamed_per_pass / self.hardware.link_bandwidth, of_host / self.hardware.disk_bandwidth)

    def verify(self, rows: int) -> float:
        """A pass over the full cache, whose streamed blocks arrive while it works; `rows` of each sequence."""
        context = self.plan.request.context
        return max(self.floor, self._target(rows, context, context))

    def retrieval(self, rows: int) -> float:
        """A pass over the retrieval cache; `rows` of each sequence."""
        return self._target(rows, self.plan.budget, self.plan.request.sequences * self.plan.budget)

    def draft(self, rows: int = 1) -> float:
        """A step of the draft model, or of a multi-token-prediction head, or a token that is looked up; 0 without
        any. Further rows cost nothing."""
        request, draft, matrices = self.plan.request, self.plan.request.small, self.plan.request.small_matrices
        if draft is None or matrices is None:
            return LOOKUP_SECONDS if request.settings.lookup else 0.0
        read = float(matrices.bytes_of_a_pass(request.dtype))
        read += request.sequences * DRAFT_TOKENS * draft.kv_bytes_per_token(request.dtype)
        return self.hardware.draft_step_seconds(read, draft.num_layers)

    def filling(self) -> float:
        """Filling a sequence's drafting caches: the draft model's with the last tokens, the retrieval cache by
        copies."""
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
        """Lines through these times, by tier: what a run starts from before it has measured its own."""
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
    """The speed of a planned run; lengths that its settings leave open are those that are fastest."""
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
