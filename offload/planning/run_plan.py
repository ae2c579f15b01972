"""The run plan: draft lengths, bytes in each memory, and placement of the KV cache, for a model, machine and request.

It is made once for a run and used by all others: the engine and its caches, memory checks, reports, `triforce models`,
`plan` and `bench --shape`. Every byte of a run is planned here; running code only counts what it has taken.
`cost_model` computes the expected times of passes from the plan. The plan is pure arithmetic: it allocates nothing and
looks nothing up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch

from ...kernels.delta_rule import CHUNK, TOGETHER
from ...kernels.plain_attention import scratch_bytes
from ...kernels.selection import KEYS_PER_SPLIT, MOST_PARTS, STEP_ROWS, TILE_ROWS
from ...tp.errors import CapacityError
from ...tp.model.config import ModelConfig
from ...tp.model.linear_attention import LinearAttention
from ...tp.rope import rope_bytes
from ...tp.units import gib
from ..caches.full import RECENT_ROWS
from ..caches.retrieval import COPIED
from ..caches.states import KEPT, LEAST_ROWS
from ..caches.streaming import STREAMING_POSITIONS, streaming_bytes, streaming_prefill
from ..graphs.cpu import CpuCapture
from ..graphs.cuda import CudaCapture
from ..graphs.passes import JOINED, pieces_bytes
from ..settings import Settings, refresh_mode
from ..speculation.distribution import CPU_NUMBERS, GPU_NUMBERS, SORTING
from ..speculation.lengths import DraftTokens
from ..transfer.placement import Placement, place_resident, place_streamed, window_blocks, window_bytes
from .request import RunRequest

CUDA_CONTEXT = 2**29
"""Bytes that a process takes on a GPU besides PyTorch's tensors. On an RTX 4090, 0.49 GiB: in an out-of-memory message
of PyTorch, the memory of the process minus the memory of PyTorch (github.com/3DTopia/Phidias-Diffusion, issue 8). This
includes the modules of PyTorch's kernels that were loaded by then. A context and the modules of one small operation
take 0.27 GiB; with all of PyTorch's modules, it is 0.62 GiB. PyTorch loads a module when it is first used
(github.com/pytorch/pytorch, pull request 86509). On an H200, which has more multiprocessors, it is 0.60 GiB with the
first tensor and 0.75 GiB after a run (`docs/gpu-results.md`). The difference is taken from the memory that a run leaves
free."""

WORKSPACE = 32 * 2**20
"""Bytes of a workspace of cuBLAS, and of one of cuBLASLt. Each of the two streams that multiply has both: the stream of
passes, and that of passes being captured. On Hopper and later; 8.1 and 4 MiB before (github.com/pytorch/pytorch, pull
request 120925; discuss.pytorch.org/t/178671)."""

NCCL_BUFFERS = 16 * 2 * (4 * 2**20 + 2**20)
"""Bytes of NCCL's buffers: 16 channels with the two connections of a ring (github.com/NVIDIA/nccl, issue 986). Each has
a FIFO of 4 MiB (issue 391), and an estimated 1 MiB for other protocols. NCCL uses few channels over PCIe, 24 or more
over NVLink."""

FRAGMENTED = 1 / 32
"""The share of a GPU's memory that PyTorch's allocator may hold without being able to use it: an estimate. For requests
from 1 to 10 MiB, the allocator takes 20 MiB at a time; for larger ones, multiples of 2 MiB
(c10/cuda/CUDACachingAllocator.cpp). Free memory between them may be too small for the next request."""


VERIFY_DRAFT_TOKENS = 24
RETRIEVAL_DRAFT_TOKENS = 8
"""The maximum numbers of draft tokens for a pass over the full cache and over the retrieval cache, if left open."""

LOOKUP_DRAFT_TOKENS = 31
"""`RETRIEVAL_DRAFT_TOKENS` with lookup: these draft tokens take no time except for their rows."""

LOOKUP_BYTES = 150
"""Maximum bytes per token of the lookup index: an entry of a dictionary and one of each of two arrays."""

TAIL_ROUNDS = 3
"""The number of rounds for which a tail has room until chunks are chosen again, if `--refresh` does not give a number.
All draft tokens may be accepted in each. One more round comes while the chunks are copied."""

LEAST_BUDGET = 256
"""The minimum size of a retrieval cache in tokens, rounded down to whole chunks, if left open."""

RETRIEVAL_SHARE = 1 / 8
"""The maximum share of a GPU's memory for the retrieval caches of several sequences, if the budget is left open."""

TAIL_TOKENS = 2048
"""Tokens that are planned for each further sequence's own question and answer."""

LEFT_TO_OTHERS = 1 / 16
"""The share of the free host memory that stays free if blocks are on a disk, unless the host memory is set by hand.
Other programs need memory, and a system without free memory would write pages to the same disk. Also the share that
`Engine.reserve_memory` leaves free."""

UNPACKED_SHARE = 1 / 64
"""The share of packed blocks for which memory is planned as if they did not fit into their slots."""

SMALL_MASS = 2**28, 1 / 32
"""The maximum size of the attention mass for longer verifications: bytes, or a share of the full cache if larger."""


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run. Lengths are in tokens, all other sizes in bytes of one rank."""

    request: RunRequest
    placement: Placement
    """Where the blocks of the full cache are."""
    budget: int
    """Tokens of the retrieval cache, at most the context; 0 without a retrieval cache."""
    chunk_size: int
    """Tokens of a chunk."""
    weights: int
    """The rank's share of the target, and the whole draft or the share of a multi-token-prediction head; without
    `embedding`."""
    embedding: int
    """Embeddings in page-locked host memory, whole on each rank, unless they are also output heads. 0 if they are part
    of `weights` (see `RunRequest.host_embedding`)."""
    resident_kv: int
    """Blocks of the full cache on the compute device."""
    streamed_kv: int
    """Blocks of the full cache in host memory, from which they stream, and their `room_for_unpacked`."""
    disk_kv: int
    """Blocks of the full cache on a disk, because they exceed host memory."""
    staging: int
    """Buffers in host memory into which blocks on a disk are read; 0 without a disk."""
    room_for_unpacked: int
    """Memory for packed blocks that do not fit into their slots, for streamed blocks and `spare`. If more than
    `UNPACKED_SHARE` of the blocks do not fit, memory for the further ones is allocated as they come."""
    spare: int
    """Room in host memory for the last of the resident blocks, with their `room_for_unpacked`. These blocks can leave a
    GPU on which other programs take memory during the run. It is planned only if nothing else needs this memory."""
    tail: int
    """Tokens for which a retrieval cache has room after its chunks; 0 without a retrieval cache."""
    retrieval: int
    """The retrieval cache, with its own states."""
    mass: int
    """The attention mass by which chunks are chosen, and the buffers from which it is computed."""
    ring: int
    """The ring buffers on the compute device."""
    open_stretches: int
    """The open stretches of streamed layers, and the tails of further sequences over the same text."""
    windows: int
    """The last tokens of layers with sliding windows, if other layers have no windows; on the compute device."""
    states: int
    """The states of layers with linear attention in the full cache, with the rows for rolling tokens back; on the
    compute device."""
    kept_states: int
    """Copies of earlier states, in host memory."""
    prefill: int
    """The activations of a prefill, the attention mass of its last rows and, if blocks stream, the layer it works on.
    This is freed before the retrieval cache of its sequence is allocated, unless that was kept
    (`reads_beside_drafting`). The retrieval caches of other sequences are there at the same time."""
    between_slices: int
    """The part of `prefill` that lasts from one slice to the next, during the rounds of other sequences: hidden states
    and, if blocks stream, the layer."""
    scratch: int
    """The buffers that attention with PyTorch's operations keeps between calls."""
    draft_kv: int
    """The draft's caches: sinks, a recent window, and states; and the inputs of a multi-token-prediction head."""
    rope: int
    """The RoPE tables of target and draft."""
    streamed_per_pass: int
    """Bytes that one verification moves over a rank's link."""
    disk_per_pass: int
    """Bytes that one verification reads from a disk, for one rank."""
    verify_draft: DraftTokens
    """The draft tokens for a pass over the full cache (γ2)."""

    @property
    def retrieval_draft(self) -> DraftTokens:
        """The draft tokens for a pass over the retrieval cache (γ1)."""
        return _retrieval_draft(self.request.settings)

    @property
    def tail_ahead(self) -> int:
        """The maximum number of tokens that are still added to a tail until the chunks that are chosen after the next
        round take its place; see `RetrievalCache`, `headroom`."""
        return _tail_ahead(self.verify_draft, self.retrieval_draft)

    @property
    def state_rows(self) -> int:
        """The maximum number of tokens in a round whose states can be rolled back."""
        return _state_rows(self.verify_draft, self.retrieval_draft, drafts=self.budget > 0)

    @property
    def index(self) -> int:
        """The lookup index of the text, in host memory, on each rank; 0 without lookup."""
        request = self.request
        return request.sequences * request.context * LOOKUP_BYTES if request.settings.lookup else 0

    @property
    def mass_rows(self) -> int:
        """The number of rows of the longest verification, in which the attention mass of every row is kept; 0 without a
        retrieval cache."""
        return self.verify_draft.longest + 1 if self.budget else 0

    @property
    def kv(self) -> int:
        """The whole full cache."""
        return self.resident_kv + self.streamed_kv + self.disk_kv

    def round_bytes(self, sequences: int) -> int:
        """Temporary bytes of a round of this number of sequences. Before a sequence's first round with drafts, these
        may be the activations of the draft, which reads the end of the text while there is no retrieval cache yet."""
        drafting = _draft_activation_bytes(self.request) - self.retrieval // self.request.sequences
        return max(self._step(sequences), drafting if self.budget else 0)

    def _step(self, sequences: int) -> int:
        return _step_bytes(self.request, self.placement, self.verify_draft.longest if self.budget else 0, sequences)

    @property
    def step(self) -> int:
        """Temporary bytes of a round of all sequences together: activations, logits, distributions, chunks that are
        copied."""
        return self._step(self.request.sequences + self.request.beside)

    @property
    def decoding(self) -> int:
        """The maximum bytes of decoding beside the lasting ones: retrieval caches, attention mass, and a pass."""
        return self.retrieval + self.mass + self.round_bytes(self.request.sequences + self.request.beside)

    @property
    def captured(self) -> int:
        """The bytes of passes that a CPU captured, whole or in pieces. On a GPU, they are a part of the reserve."""
        request = self.request
        if request.on_gpu or request.gpus > 1:
            return 0
        models = zip((request.part, request.small), self._captured_rows(CpuCapture.most_tokens), strict=True)
        whole = sum(rows * self._captured_row(part) for part, rows in models if part and rows)
        whole *= request.sequences + request.beside
        return whole + (0 if request.part.linear else self._captured_in_pieces())

    def _captured_in_pieces(self) -> int:
        """The part of `captured` for passes in pieces."""
        request = self.request
        most, of_row = min(CpuCapture.pieces_rows, request.sequences + request.beside), _kept_row(request, request.part)
        return pieces_bytes(request.target, request.dtype, of_row, CpuCapture, most * (most + 1) // 2)

    def _captured_row(self, part: ModelConfig) -> int:
        """Bytes per row of a whole pass that a CPU captured: its token, slot, step and rotation; intermediate results,
        and those of attention to a draft's sinks; and logits, which are rounded first."""
        request, item = self.request, self.request.dtype.itemsize
        given = 3 * 8 + rope_bytes(part, 1)
        sinks = part.num_heads * (part.head_dim * item + (part.head_dim + 2) * 4)
        logits = (4 + item) * request.target.vocab_size
        return given + _kept_row(request, part) + sinks + part.hidden_size * item + logits

    def _captured_rows(self, most_tokens: float = math.inf) -> tuple[int, int]:
        """The total rows of the captured whole passes of a sequence: of the target over its retrieval cache, and of the
        draft. The target has a captured pass of each length, up to the longest."""
        request = self.request
        rows = int(min(self.retrieval_draft.longest + 2, most_tokens)) if self.budget else 0
        if request.part.linear:  # passes with states are not captured, nor those of a head that reads hidden states
            small = request.small
            return 0, rows if small and not (small.linear or small.is_head) else 0
        return rows * (rows + 1) // 2, rows

    @property
    def reading(self) -> int:
        """The maximum bytes of a prefill beside the lasting ones. The prefill of the text comes before decoding. The
        prefill of a further sequence's own tokens comes beside the other sequences, in slices between their rounds."""
        request = self.request
        if request.beside:
            mass = _mass_bytes(request, self.placement, RECENT_ROWS - 1) if self.budget else 0
            return max(self.prefill, self.between_slices + mass + self.round_bytes(request.beside))
        if request.sequences == 1:
            return self.prefill
        others = (self.retrieval + self.mass) * (request.sequences - 1) // request.sequences
        further, between = _further_prefill_bytes(request, streams=self.placement.streams)
        return max(self.prefill, others + max(further, between + self.round_bytes(request.sequences - 1)))

    def prefill_of(self, start: int, stop: int) -> int:
        """Like `prefill`, but for the end of a prompt: its tokens from `start` to `stop`."""
        request, tokens = self.request, stop - start
        whole = _activation_bytes(request, request.own)
        found = self.prefill - whole + _activation_bytes(replace(request, context=stop), tokens)
        if tokens <= request.limits.step_rows:  # a layer that streams is attended to block by block
            found += _partial_bytes(request, tokens) - (self.between_slices - _hidden_bytes(request, request.own))
        return found

    def reads_beside_drafting(self, start: int, stop: int) -> bool:
        """Whether the retrieval cache can be kept while target and draft read the end of a prompt: whether both take at
        most what is planned, the larger of `decoding` and `reading`. Args: see `prefill_of`."""
        passing = max(self.prefill_of(start, stop), self.mass + _draft_activation_bytes(self.request))
        return self.retrieval // self.request.sequences + passing <= max(self.decoding, self.reading)

    @cached_property
    def working(self) -> int:
        """The maximum bytes beside weights and full cache."""
        lasting = (
            self.ring + self.open_stretches + self.windows + self.states + self.rope + self.draft_kv + self.scratch
        )
        return lasting + self.captured + self.request.unallocated_bytes + max(self.decoding, self.reading)

    @property
    def cuda_context(self) -> int:
        """Bytes of the CUDA context; 0 if the CPU computes."""
        return CUDA_CONTEXT if self.request.on_gpu else 0

    @property
    def reserve(self) -> int:
        """The bytes that stay free on a GPU."""
        return sum(self.reserve_parts.values())

    @property
    def reserve_parts(self) -> dict[str, int]:
        """The reserve by its use: `workspaces` of cuBLAS, buffers of `nccl`, outputs and temporaries of captured passes
        (`graphs`), and `fragmentation`. Empty if the CPU computes."""
        request = self.request
        if not request.on_gpu:
            return {}
        rows = self.retrieval_draft.longest + 2 if self.budget else 0
        of_target, of_draft = self._captured_rows()
        logits = 4 * request.target.vocab_size * (of_target + of_draft)
        sequences = request.sequences + request.beside
        times = 1 if sequences == 1 else sequences * (1 + JOINED)  # passes of each sequence, and of several together
        of_row = _row_bytes(request, request.part)
        graphs = times * (logits + (rows * of_row if of_target else 0))
        if request.gpus == 1 and not request.part.linear:
            graphs += pieces_bytes(request.target, request.dtype, of_row, CudaCapture)
        return left_free(request.gpu_total_bytes or request.gpu_bytes or 0, request.gpus) | {"graphs": graphs}

    @property
    def device_total(self) -> int:
        """The bytes that the rank's GPU needs, with the reserve; 0 if the CPU computes."""
        if not self.request.on_gpu:
            return 0
        return self.weights + self.resident_kv + self.working + self.cuda_context + self.reserve

    @property
    def device_needed(self) -> int:
        """The bytes that the rank's GPU needs for the run to begin. If `--resident` is set by hand, the resident blocks
        may take the reserve."""
        return self.device_total - (self.reserve if self.request.settings.resident is not None else 0)

    @property
    def caches(self) -> int:
        """The bytes of `resident_kv`, `streamed_kv`, `retrieval` and `draft_kv` on this rank, in any memory but a
        disk. The target's `windows`, `states`, `kept_states` and `open_stretches` are not counted."""
        return self.resident_kv + self.streamed_kv + self.retrieval + self.draft_kv

    @property
    def host_total(self) -> int:
        """The bytes of host memory that the rank needs."""
        kept = self.embedding + self.streamed_kv + self.spare + self.staging + self.index + self.kept_states
        everywhere = kept + self.request.process_bytes
        return everywhere if self.request.on_gpu else everywhere + self.weights + self.resident_kv + self.working

    @property
    def fits(self) -> bool:
        """Whether all memory of the plan is available."""
        return not self.shortages()

    def shortages(self) -> list[Shortage]:
        """The kinds of memory of which there is too little; empty if the plan fits."""
        request, found = self.request, []
        if request.gpu_bytes is not None and self.device_needed > request.gpu_bytes:
            found.append(Shortage("GPU memory", self.device_needed, request.gpu_bytes))
        if request.host_bytes is not None:
            needed, where = self.host_total * request.ranks_per_host, "host memory" if request.on_gpu else "memory"
            if needed > request.host_bytes:
                found.append(Shortage(where, self.host_total, request.host_bytes // request.ranks_per_host))
        if request.disk_bytes is not None and self.disk_kv * request.ranks_per_host > request.disk_bytes:
            found.append(Shortage("disk space", self.disk_kv, request.disk_bytes // request.ranks_per_host))
        return found

    def check(self) -> None:
        """Checks that the plan fits.

        Raises:
            CapacityError: there is too little memory. The message has the parts and a remedy.
        """
        for shortage in self.shortages():
            raise CapacityError(self._explained(shortage))

    def _explained(self, shortage: Shortage) -> str:
        request = self.request
        per_rank = " on each rank" if request.gpus > 1 else ""
        by_itself = replace(request, settings=replace(request.settings, resident=None))
        by_hand = request.settings.resident is not None and make_plan(by_itself).fits
        if by_hand:
            remedy = "lower --resident, or let the planner choose (--resident auto)"
        elif fitting := largest_context(request):
            cut = "shorten the prompt (triforce generate: --truncate)"
            remedy = f"about {fitting:,} tokens would fit: {cut} or free memory"
        else:
            remedy = "free memory or choose a smaller model"
        if shortage.where == "GPU memory" and not by_hand:
            remedy = f"the minimum with which it works is {least_gpu_memory(by_itself):.2f} GiB{per_rank}; {remedy}"
        if shortage.where == "disk space":
            parts = "the part of the KV cache that exceeds host memory"
        elif shortage.where == "host memory":
            embedding = f"the input embedding {gib(self.embedding)}, " if self.embedding else ""
            parts = f"KV cache {gib(self.streamed_kv)}, {embedding}the process {gib(request.process_bytes)}"
        else:
            kv = self.resident_kv if request.on_gpu else self.resident_kv + self.streamed_kv
            rest = shortage.needed - self.weights - kv
            parts = f"weights {gib(self.weights)}, KV cache {gib(kv)}, the rest {gib(rest)}"
        if self.disk_kv and shortage.where != "disk space":
            parts += f", with {gib(self.disk_kv)} on disk"
        limit = request.settings.host_memory
        if (
            limit is not None
            and shortage.where in ("host memory", "memory")
            and shortage.available >= int(limit * 2**30) // request.gpus
        ):
            least = math.ceil(shortage.needed * request.gpus / 2**30 * 100) / 100
            return (
                f"a context of {request.context:,} tokens needs {gib(shortage.needed)} of {shortage.where}{per_rank} "
                f"({parts}), but --host-memory leaves it {gib(shortage.available)}; give --host-memory {least:.2f} or "
                f"more, or {remedy}"
            )
        taken = ""
        if shortage.where == "GPU memory" and request.taken_by_others:
            taken = f" (other processes have {gib(request.taken_by_others)})"
        return (
            f"a context of {request.context:,} tokens needs {gib(shortage.needed)} of {shortage.where}{per_rank} "
            f"({parts}), but {gib(shortage.available)} is available{taken}; {remedy}"
        )


@dataclass(frozen=True)
class Shortage:
    """A kind of memory of which there is too little. Bytes are for each rank."""

    where: str
    """`GPU memory`, `host memory`, `memory` (if the CPU computes) or `disk space`."""
    needed: int
    available: int


def weight_bytes(request: RunRequest) -> tuple[int, int]:
    """Bytes of a rank's weights on the device that computes, and of the embeddings that are in host memory
    (`RunRequest.host_embedding`)."""
    models = [one for one in (request.matrices, request.small_matrices) if one]
    embedding = sum(one.embedding_bytes(request.dtype) for one in models) if request.host_embedding else 0
    return sum(one.num_bytes(request.dtype) for one in models) - embedding, embedding


def make_plan(request: RunRequest, placement: Placement | None = None) -> RunPlan:
    """Plans a run.

    Args: `placement` is that of an existing full cache, which stays as it is; `None`: a new cache is planned.

    Raises:
        UsageError: this number of ranks cannot share the model's heads.
    """
    settings, part, limits = request.settings, request.part, request.limits
    kept, in_layer = part.full_layers, request.layer_token_bytes
    chunk_size, token_bytes = settings.planned_chunk_size, request.token_bytes
    retrieved = part.kv_bytes_per_token(request.dtype)
    budget = planned_budget(settings, request.context)
    if request.gpu_bytes and request.sequences > 1 and settings.budget is None:
        least = max(1, LEAST_BUDGET // chunk_size) * chunk_size
        while budget > least and request.sequences * budget * retrieved > RETRIEVAL_SHARE * request.gpu_bytes:
            budget = max(least, budget // 2 // chunk_size * chunk_size)
    weights, embedding = weight_bytes(request)
    activations = _activation_bytes(request, request.own)

    def plan(placement: Placement) -> RunPlan:
        block = placement.block_size * token_bytes  # of all layers
        host_block = placement.host_block_bytes(kept, request.dtype) * kept.num_layers
        away = placement.num_host + placement.num_disk

        def room_for(packed: int) -> int:
            """Bytes for blocks that do not fit into their slots, if each layer has `packed` blocks."""
            count = math.ceil(UNPACKED_SHARE * packed * kept.num_layers) if placement.packed else 0
            return count * block // kept.num_layers

        unpacked, spare_unpacked = room_for(away), room_for(placement.num_spare)
        workspace = placement.num_blocks * block // kept.num_layers if placement.streams else 0
        workspace += request.shared * in_layer if request.shared_streams else 0
        joined = _joined_bytes(request) if request.shared else 0
        verify_draft = _verify_draft(request, placement)
        tail = _tail(request, verify_draft) if budget else 0
        mass, shorter = _mass_bytes(request, placement, verify_draft.longest), verify_draft.longest
        if request.sequences > 1:  # all their rows together are at most those of a step
            shorter = min(shorter, STEP_ROWS // request.sequences)
        tails = (request.sequences - 1) * TAIL_TOKENS * token_bytes
        rows = _state_rows(verify_draft, _retrieval_draft(settings), drafts=budget > 0)
        states = partial(_state_bytes, dtype=request.dtype, rows=rows)
        of_draft = streaming_bytes(request.small, request.dtype) if request.small else 0
        of_draft += states(request.small.linear, states=2) if request.small else 0
        retrieval = (max(budget, chunk_size) + tail) * retrieved + states(part.linear, states=1)
        return RunPlan(
            request=request,
            placement=placement,
            budget=budget,
            chunk_size=chunk_size,
            weights=weights,
            embedding=embedding,
            resident_kv=placement.num_resident * block,
            streamed_kv=placement.num_host * host_block + unpacked,
            disk_kv=placement.num_disk * host_block,
            staging=placement.staging_bytes(kept, request.dtype),
            room_for_unpacked=unpacked + spare_unpacked,
            spare=placement.num_spare * host_block + spare_unpacked,
            tail=tail,
            retrieval=request.sequences * retrieval if budget else 0,
            mass=mass + (request.sequences - 1) * _mass_bytes(request, placement, shorter) if budget else 0,
            ring=placement.ring_blocks * block // kept.num_layers,
            open_stretches=placement.open_tokens * token_bytes + tails,
            windows=request.sequences * window_bytes(part, request.dtype, chunk_size, limits),
            states=request.sequences * states(part.linear, states=2),
            kept_states=request.sequences * KEPT * part.linear.state_bytes(request.dtype) if part.linear else 0,
            prefill=activations
            + workspace
            + joined
            + (_mass_bytes(request, placement, RECENT_ROWS - 1) if budget else 0),
            between_slices=_hidden_bytes(request, request.own) + workspace,
            scratch=_scratch_bytes(request, placement, budget + tail),
            draft_kv=request.sequences * of_draft,
            rope=max(
                request.held_rope_bytes,
                rope_bytes(part, request.shared + placement.capacity)
                + (rope_bytes(request.small, STREAMING_POSITIONS) if request.small else 0),
            ),
            streamed_per_pass=placement.streamed_blocks(request.own) * host_block,
            disk_per_pass=placement.disk_blocks(request.own) * host_block,
            verify_draft=verify_draft,
        )

    def streamed(resident_bytes: float, num_disk: int = 0, *, packed: bool = request.packs(on_disk=False)) -> RunPlan:
        sizes = request.own, chunk_size, resident_bytes
        place = place_streamed(kept, request.dtype, *sizes, on_gpu=request.on_gpu, packed=packed, limits=limits)
        spare_bytes = limits.spare_share * (request.gpu_total_bytes or request.gpu_bytes or 0)
        spare = min(place.num_resident, math.ceil(spare_bytes / (place.block_size * token_bytes)))
        return plan(replace(place, num_disk=min(num_disk, place.num_host), num_spare=0 if num_disk else spare))

    def within_host_memory(found: RunPlan) -> RunPlan:
        """`found`, with less spare room, or with blocks on a disk, if it does not fit into host memory otherwise."""
        if request.host_bytes is None:
            return found
        whole = request.host_bytes // request.ranks_per_host
        room = whole - (int(LEFT_TO_OTHERS * whole) if settings.host_memory is None else 0)
        if found.spare and found.host_total > room:
            place = found.placement
            fits = lambda n: plan(replace(place, num_spare=n)).host_total <= room  # noqa: E731
            found = plan(replace(place, num_spare=largest_whole(place.num_spare, fits)))
        if request.disk_bytes is None or found.host_total <= whole:
            return found
        if not (found.placement.streams or not request.on_gpu):
            return found
        if not found.placement.streams:  # the CPU computes: all blocks that are not resident are on the disk
            everything, packed = found.placement.capacity, request.packs(on_disk=True)
            bare = streamed(0.0, everything, packed=packed)
            if packed and bare.host_total > room and settings.pack == "auto":
                packed, bare = False, streamed(0.0, everything, packed=False)  # it takes less other memory
            return streamed(max(0, room - bare.host_total), everything, packed=packed)
        place = found.placement
        one = plan(replace(place, num_disk=min(1, place.num_host)))
        host_block = place.host_block_bytes(kept, request.dtype) * kept.num_layers
        num_disk = 1 + max(0, -(-(one.host_total - room) // host_block))
        return plan(replace(place, num_disk=min(num_disk, place.num_host)))

    if placement:
        return plan(placement)
    one_block = request.on_gpu and request.kernels
    whole = plan(place_resident(kept, request.dtype, request.own, chunk_size, one_block=one_block, limits=limits))
    if request.shared and request.own <= limits.largest_block:
        return whole  # a tail of less than a block is not worth streaming
    if settings.resident is not None:
        wanted = settings.resident * 2**30
        return within_host_memory(whole if wanted >= whole.kv else streamed(wanted))
    if request.gpu_bytes is None or whole.device_total <= request.gpu_bytes:
        return within_host_memory(whole)
    bare = streamed(0.0)
    return within_host_memory(streamed(max(0, request.gpu_bytes - bare.device_total)))


def left_free(gpu_bytes: int, gpus: int) -> dict[str, int]:
    """The bytes that every run leaves free on each of `gpus` GPUs with `gpu_bytes` of memory, by use; see
    `RunPlan.reserve_parts`."""
    fragmentation = int(FRAGMENTED * gpu_bytes)
    return {"workspaces": 4 * WORKSPACE, "nccl": NCCL_BUFFERS if gpus > 1 else 0, "fragmentation": fragmentation}


def planned_budget(settings: Settings, context: int) -> int:
    """The number of tokens in the retrieval cache: as set by hand; else about 3 % of the context, from 256 to 4,096
    (the published setting for one card with everything resident), in whole chunks. At most the context; 0 with one
    tier."""
    if settings.tiers == 1:
        return 0
    chunk_size = settings.planned_chunk_size
    share = min(4096, max(LEAST_BUDGET, context // 32)) // chunk_size * chunk_size
    return min(settings.budget or share or chunk_size, context)


def largest_context(request: RunRequest) -> int:
    """The maximum context in tokens whose plan fits, up to that of the request; 0 if no context fits."""
    shared = request.shared
    own = largest_whole(request.own, lambda tokens: make_plan(replace(request, context=shared + tokens)).fits)
    return shared + own if own else 0


def least_gpu_memory(request: RunRequest) -> float:
    """The minimum GPU memory in GiB with which the plan fits, for each GPU, in steps of 0.01 GiB."""

    def lacks(hundredths: int) -> bool:
        free = hundredths * 2**30 // 100
        plan = make_plan(replace(request, gpu_bytes=free, gpu_total_bytes=max(free, request.gpu_total_bytes or 0)))
        return plan.device_total > free

    most = 1
    while lacks(most):
        most *= 2
    return (1 + largest_whole(most, lacks)) / 100


def largest_whole(most: int, works: Callable[[int], bool]) -> int:
    """The largest number from 1 to `most` for which `works` is true; 0 if there is none. If a number works, all smaller
    ones must work too."""
    least = 0
    while least < most:
        middle = (least + most + 1) // 2
        if works(middle):
            least = middle
        else:
            most = middle - 1
    return least


def _state_bytes(linear: LinearAttention | None, dtype: torch.dtype, states: int, rows: int) -> int:
    """Bytes of `states` states of each layer, and of the rows that are kept for `rows` tokens."""
    return states * linear.state_bytes(dtype) + rows * linear.row_bytes(dtype) if linear else 0


def _state_rows(verify: DraftTokens, retrieval: DraftTokens, *, drafts: bool) -> int:
    """See `RunPlan.state_rows`."""
    return max(LEAST_ROWS, verify.longest + retrieval.longest + 2 if drafts else 0)


def _verify_draft(request: RunRequest, placement: Placement) -> DraftTokens:
    capacity, most = request.shared + placement.capacity, VERIFY_DRAFT_TOKENS
    small = max(SMALL_MASS[0], SMALL_MASS[1] * capacity * request.token_bytes)
    if placement.streams or request.shared_streams:
        most = next(
            (n for n in request.limits.streamed_draft_tokens if _mass_bytes(request, placement, n) <= small), most
        )
    return DraftTokens(request.settings.block_length, most)


def _retrieval_draft(settings: Settings) -> DraftTokens:
    return DraftTokens(settings.draft_length, LOOKUP_DRAFT_TOKENS if settings.lookup else RETRIEVAL_DRAFT_TOKENS)


def _tail_ahead(verify: DraftTokens, retrieval: DraftTokens) -> int:
    """See `RunPlan.tail_ahead`: the tokens of a round, then a draft, and twice the rows of a pass that tests a part of
    the draft. Rows beyond a sequence's own are dropped."""
    return verify.longest + 1 + verify.longest + 2 * (retrieval.longest + 1)


def _tail(request: RunRequest, verify: DraftTokens) -> int:
    """The tokens for which a retrieval cache has room after its chunks: those of the rounds until chunks are chosen
    again, with all draft tokens accepted, and `_tail_ahead`. `--refresh` gives the number of rounds, or it is
    `TAIL_ROUNDS`."""
    settings = request.settings
    refresh = refresh_mode(settings.refresh)
    rounds = refresh if isinstance(refresh, int) else TAIL_ROUNDS
    tokens = request.context if request.answer is None else request.answer
    if refresh != "never":
        tokens = min(tokens, (rounds + 1) * (verify.longest + 1))
    return settings.planned_chunk_size + tokens + _tail_ahead(verify, _retrieval_draft(settings))


def _mass_bytes(request: RunRequest, placement: Placement, draft_tokens: int) -> int:
    """Bytes of the attention mass of all chunks (float32), and of the shares from which a pass computes it in one
    layer. The pass verifies at most `draft_tokens` draft tokens. Every query head has shares (float32), by block and
    joined. An open stretch has shares for all of its room, and a layer with a sliding window for all of its blocks. The
    shares of a prefill's last rows stay."""
    part, verified, chunk_size = request.part, draft_tokens + 1, request.settings.planned_chunk_size
    chunks = _num_chunks(request, placement)
    mass = part.kv_layers * part.num_kv_heads * chunks * 4
    room = max(0, placement.open_tokens - placement.block_size) // chunk_size
    own, others = max(chunks + room, _window_keys(request, placement) // chunk_size), chunks
    if request.sequences + request.beside > 1:  # passes over several sequences have shares of their own
        others += room
    return mass + part.num_heads * max(verified, RECENT_ROWS) * (own + others) * 4


def _num_chunks(request: RunRequest, placement: Placement) -> int:
    return -(-(request.shared + placement.capacity) // request.settings.planned_chunk_size)


def _hidden_bytes(request: RunRequest, tokens: int) -> int:
    """Bytes of the hidden states of those of `tokens` tokens that are read together."""
    tiling = request.limits.tiling
    together = min(tiling.prefill_tokens + tiling.prefill_rows, tokens)
    return together * request.part.hidden_size * request.dtype.itemsize


def _activation_bytes(request: RunRequest, tokens: int) -> int:
    """`_hidden_bytes`, and the bytes of the largest tile of rows inside a layer. The tokens are the last `tokens` of
    the context."""
    tiling = request.limits.tiling
    rows = tiling.prefill_rows if tiling.whole(request.context) > request.context - tokens else tiling.tail_rows
    expanded = request.matrices.expansion_bytes(request.dtype, is_step=False)
    rows = min(max(rows, STEP_ROWS), tokens)
    inside = max(rows * _row_bytes(request, request.part), _states_bytes(request, request.part.linear, rows))
    inside += _window_workspace(request, rows)
    return _hidden_bytes(request, tokens) + inside + expanded


def _states_bytes(request: RunRequest, linear: LinearAttention | None, rows: int) -> int:
    """Temporary bytes while `rows` rows advance the states of a layer: the inputs, twice, and the outputs. Then, in
    float32 and for the rows that are computed together: the result of the convolution; and for each value head keys,
    queries and values, with and without decay, products within chunks, and results."""
    if linear is None:
        return 0
    row = (2 * linear.channels + 3 * linear.values + 2 * linear.value_heads) * request.dtype.itemsize
    of_head = 4 * linear.key_dim + 5 * linear.value_dim + 4 * CHUNK
    return rows * row + min(rows, TOGETHER) * 4 * (4 * linear.channels + linear.value_heads * of_head)


def _window_workspace(request: RunRequest, rows: int) -> int:
    """Bytes of the keys and values that `rows` rows see in a layer with a sliding window that keeps the last tokens
    only."""
    return _seen_in_windows(request, rows) * request.layer_token_bytes


def _window_keys(request: RunRequest, placement: Placement) -> int:
    """The maximum number of keys that a layer with a kept window attends to at once: whole blocks, also for a short
    context."""
    if not request.part.kept_windows:
        return 0
    _, size = window_blocks(0, request.settings.planned_chunk_size, request.limits)
    whole = -(-(request.shared + placement.capacity) // size) * size
    return min(whole, _seen_in_windows(request, max(request.limits.tiling.prefill_rows, STEP_ROWS)))


def _seen_in_windows(request: RunRequest, rows: int) -> int:
    """The number of tokens that `rows` rows see in a layer with a kept window, with whole blocks at both ends; 0 if
    there is no such layer."""
    window = max(request.part.kept_windows.values(), default=0)
    if not window:
        return 0
    _, size = window_blocks(window, request.settings.planned_chunk_size, request.limits)
    return window + rows + 2 * size


def _draft_activation_bytes(request: RunRequest) -> int:
    """Bytes of the activations of the draft while it reads the end of the text. Each rank has the whole draft."""
    small, matrices = request.small, request.small_matrices
    if small is None or matrices is None:
        return 0
    tokens = min(request.context, streaming_prefill(small.num_layers))
    rows = min(max(request.limits.tiling.prefill_rows, STEP_ROWS), tokens)
    hidden = tokens * small.hidden_size * request.dtype.itemsize * (6 if small.is_head else 1)  # with its inputs
    hidden += matrices.expansion_bytes(request.dtype, is_step=False)
    inside = max(rows * _row_bytes(request, small), _states_bytes(request, small.linear, rows))
    return hidden + inside


def _joined_bytes(request: RunRequest) -> int:
    """Bytes of the pieces of a layer, and of the whole layer into which they are copied for flash attention."""
    return 2 * request.context * request.layer_token_bytes


def _further_prefill_bytes(request: RunRequest, *, streams: bool) -> tuple[int, int]:
    """Bytes for reading the own tokens of a further sequence over the same text: in a slice, and between two slices."""
    prefix = request.context * request.layer_token_bytes if streams else 0
    within = prefix + _activation_bytes(request, TAIL_TOKENS) + _joined_bytes(request)
    return within, prefix + _hidden_bytes(request, TAIL_TOKENS)


def _row_bytes(request: RunRequest, part: ModelConfig) -> int:
    """The maximum bytes of a row inside a layer of a model. In the MLP: gate, up, their product and the result. In
    attention: the query with its output gate, key and value, the normed query and key. Beside these: the rotated query
    and results in float32, or, for the output gate, the result, its gate, the gate's sigmoid and their product. Except
    in a CPU's kernels, two results are merged into a third."""
    item = request.dtype.itemsize
    mlp = (3 * part.intermediate_size + part.hidden_size) * item
    if part.experts:  # the normed row, its probabilities in order, and results of experts and their sum in float32
        mlp += part.hidden_size * (2 * item + 3 * 4) + part.experts.count * (3 * 4 + 8) + part.experts.used * 5 * 8
    if part.experts and request.makes_numbers and part.quantisation:
        # In one call, for each of the row's experts: inputs, outputs and intermediate results, and copies in the layout
        # of tiles, which may have twice as many rows.
        mlp += part.experts.used * (4 * part.hidden_size + 5 * part.intermediate_size) * item
    if part.experts and part.experts.shared_width:
        mlp += (3 * part.experts.shared_width + 2 * part.hidden_size) * item
    linear = part.linear
    if linear:  # the inputs; the outputs with their gate and norm; and two temporaries in float32
        mlp = max(mlp, (linear.channels + 5 * linear.values + 2 * linear.value_heads) * item + 8 * linear.values)
    heads, gates = part.num_heads, part.num_heads * part.output_gate
    norms = (heads + part.num_kv_heads) * part.qk_norm
    given = part.head_dim * (heads + gates + 2 * part.num_kv_heads + norms) * item
    results = 1 if request.kernels and not request.on_gpu else 3
    attending = part.head_dim * heads * (item + results * 4)
    return max(mlp, given + max(attending, 4 * part.head_dim * gates * item))


def _partial_bytes(request: RunRequest, rows: int) -> int:
    """Bytes of the partial results of attention in a layer, for a pass of few rows."""
    part, splits = request.part, -(-request.context // KEYS_PER_SPLIT)
    return min(MOST_PARTS, splits * rows * part.num_heads * (part.head_dim + 2) * 4)


def _kept_row(request: RunRequest, part: ModelConfig) -> int:
    """Bytes of a row inside a layer, in a pass that a CPU captured. An MLP without a kernel of its own is activated row
    by row, and does not reuse the memory of attention."""
    mlp = 4 * (part.intermediate_size + part.hidden_size) * request.dtype.itemsize
    return _row_bytes(request, part) + (0 if part.activation == "silu" else mlp)


def _step_bytes(request: RunRequest, placement: Placement, draft_tokens: int, sequences: int) -> int:
    """Temporary bytes of a round of `sequences` sequences, each with at most `draft_tokens` draft tokens. They are the
    maximum of three sizes. (1) The distributions of the draft tokens, and a layer of the verification with partial
    results of its attention. (2) The distributions of the draft tokens, logits, their distributions, and temporaries of
    the rows that are sampled together. (3) If chunks are chosen again, their mass in all layers, and chunks on their
    way to the cache."""
    part, vocab = request.part, request.target.vocab_size
    if sequences > 1:
        draft_tokens = min(draft_tokens, max(0, STEP_ROWS // sequences - 2))  # see `DraftControl.choose_lengths`
    rows = sequences * (draft_tokens + 1)
    layer = rows * _row_bytes(request, part) + _partial_bytes(request, rows)
    if not request.makes_numbers:
        models = [request.matrices, *([request.small_matrices] if request.small_matrices else [])]
        layer += max(one.expansion_bytes(request.dtype, is_step=True) for one in models)
    together = min(rows, max(1, (GPU_NUMBERS if request.on_gpu else CPU_NUMBERS) // vocab))
    sampling = 4 * vocab * (2 * rows + max(SORTING * together, draft_tokens + 1))  # the second: log probabilities
    drafted = 4 * vocab * sequences * draft_tokens
    mass = part.kv_layers * part.num_kv_heads * _num_chunks(request, placement) * 4
    choosing = mass + COPIED * request.layer_token_bytes if request.settings.tiers > 1 else 0
    return max(drafted + max(layer, sampling), choosing)


def _scratch_bytes(request: RunRequest, placement: Placement, retrieved: int) -> int:
    """Bytes of the scratch buffers of attention on a GPU: of full caches, retrieval caches and the draft's caches, and
    of passes over several full caches together. Without kernels of this project, passes over few rows need them. In
    float32, a prefill needs them."""
    if not request.on_gpu:
        return 0
    part, small, dtype = request.part, request.small, request.dtype
    target = part.num_heads, part.num_kv_heads

    def few(keys: int, heads: tuple[int, int] = target, head_dim: int = part.head_dim) -> int:
        return 0 if request.kernels else scratch_bytes(*heads, keys, head_dim, dtype, is_step=True)

    block, piece = placement.block_size, max(placement.block_size * placement.together, placement.open_tokens)
    if part.kept_windows:  # layers with kept windows have blocks of their own
        _, size = window_blocks(0, request.settings.planned_chunk_size, request.limits)
        block, piece = max(block, size), max(piece, size)
    chunks = piece // request.settings.planned_chunk_size if retrieved else 0  # their mass is held by tiles
    own = few(piece) + (0 if request.kernels else 4 * part.num_heads * TILE_ROWS * chunks)
    many = scratch_bytes(*target, block, part.head_dim, dtype, is_step=False) if dtype.itemsize > 2 else 0
    draft = few(STREAMING_POSITIONS, (small.num_heads, small.num_kv_heads), small.head_dim) if small else 0
    together = own if request.sequences + request.beside > 1 else 0
    return request.sequences * (max(many, own) + few(retrieved) + draft) + together
