"""Times the steps of speculation for a model's shape, with random weights, and keys and values that are zeros.

The time of a step does not depend on weights, keys and values. The acceptance rate does, so the caller has to assume
one.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ..tp.decoder import Decoder
from ..tp.model.config import ModelConfig
from .batch.kept import KeptCache
from .caches.hidden_states import HiddenStates
from .caches.retrieval import RetrievalCache
from .caches.streaming import StreamingCache
from .caches.synthetic import fill_with_zeros
from .checks import host_locks_embeddings
from .contexts.home import contexts_root
from .graphs.capture import Capture, capture_for
from .graphs.passes import Graphs, Passes
from .held import held_bytes
from .planning.cost_model import Assumptions
from .planning.memory import plan_here
from .planning.request import RunRequest
from .settings import MOST_BLOCK_LENGTH, Settings
from .speculation.lengths import DraftTokens, PassCost, StepCost, seconds_per_token
from .transfer.bandwidth import timed
from .transfer.link import make_link
from .transfer.staged.block_file import DiskSpace

ROOM = MOST_BLOCK_LENGTH + 8
"""Tokens for which a cache has room beyond the context: the rows of a step, which are rolled back."""


class RandomWeights:
    """Replaces a `tp.weights.checkpoint.Checkpoint`: random weights, scaled so that activations stay finite."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device

    def read(
        self,
        name: str,
        *shape: int,
        rows: slice | None = None,
        columns: slice | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """A random tensor of this shape, or the given rows and columns of it."""
        dtype = dtype or self.dtype
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype, device=self.device)
        parts = list(shape)
        for dimension, part in enumerate((rows, columns)):
            if part:
                parts[dimension] = len(range(shape[dimension])[part])
        return torch.randn(parts, dtype=dtype, device=self.device) * shape[-1] ** -0.5

    def has(self, name: str) -> bool:
        """Whether there is an optional tensor of this name: never."""
        return False

    def stored(self, name: str, *shape: int, dtypes: tuple[torch.dtype, ...]) -> Tensor:
        """A tensor of a quantised matrix: random numbers, or scales that are all the same."""
        dtype, where = dtypes[0], self.device
        if dtype == torch.float8_e4m3fn:
            return torch.randn(shape, device=where).to(dtype)
        if dtype.is_floating_point:
            return torch.full(shape, 2**-9, dtype=dtype, device=where)
        limits = torch.iinfo(dtype)
        return torch.randint(limits.min, limits.max, shape, dtype=dtype, device=where)

    def check_all_read(self) -> None:
        pass


@dataclass(frozen=True)
class StepTimes:
    """Seconds of each kind of step at one context length, several measurements each."""

    context: int
    """The context length in tokens."""
    plain: list[float]
    """A pass of 1 row over the full cache: plain decoding."""
    verify: list[float]
    """A pass of `block_length` + 1 rows over the full cache."""
    retrieval: list[float]
    """A pass of `draft_length` + 1 rows over the retrieval cache."""
    draft: list[float]
    """A step of the small model; empty without one."""
    refresh: list[float]
    """A refresh of the retrieval cache. If blocks stream, this excludes copying the chunks, which the next pass over
    the full cache does."""
    block_length: int
    """The number of draft tokens for a pass over the full cache."""
    draft_length: int
    """The number of draft tokens for a pass over the retrieval cache; 0 without a small model."""
    budget: int
    """The size of the retrieval cache in tokens, at most the context."""
    resident_bytes: int
    """Bytes of the resident blocks of the full cache."""
    read_bytes: int
    """Bytes of keys and values that a pass over the full cache reads."""
    streamed_bytes: int
    """The part of `read_bytes` that crosses the link."""
    disk_bytes: int
    """The part of `read_bytes` that is read from a disk."""

    def tbt_s(self, assumed: Assumptions) -> float:
        """The time between tokens in seconds, computed from the medians of these steps and the assumed acceptance."""
        draft_s = median(self.draft) if self.draft else 0.0
        token_s = seconds_per_token(self.draft_length, draft_s, median(self.retrieval), assumed.draft_acceptance)
        return seconds_per_token(self.block_length, token_s, median(self.verify), assumed.acceptance)


class ShapeSteps:
    """A target and a draft, given by their shapes, on one device. Times their steps."""

    def __init__(
        self,
        target: ModelConfig,
        draft: ModelConfig | None,
        settings: Settings,
        *,
        dtype: torch.dtype,
        device: torch.device,
        context: int,
        make_capture: Callable[[torch.device], Capture | None] = capture_for,
    ) -> None:
        """Args:
        context: the maximum context length that will be measured.
        make_capture: makes the object that captures steps, or returns `None` to run steps without capture.

        Raises:
            CapacityError: there is too little memory for the weights or for the longest cache.
        """
        self._request = RunRequest(target, draft, dtype, context + ROOM, settings)
        plan = plan_here(self._request, device, free_disk=DiskSpace(contexts_root()).free_bytes)
        plan.check()
        weights: Any = RandomWeights(dtype, device)
        memory = make_link(device).host_memory if plan.embedding else None
        self.target = Decoder(target, weights, device, host_memory=memory)
        model = self.target if draft and draft.is_head else None
        self.draft = Decoder(draft, weights, device, model=model, host_memory=memory) if draft else None
        self._request = replace(self._request, locks_embedding=host_locks_embeddings(self.target, self.draft))
        capture = make_capture(device)
        self.graphs = Graphs(capture)
        """The captured passes of the steps, replayed as in an engine."""
        self._untimed = 1 + (capture.passes_before if capture else 1)
        """The number of passes before the timed ones: those before the capture, and the captured one."""
        self._device = device
        self._kept = KeptCache(self.target, settings.link_gbps)

    @torch.inference_mode()
    def at(self, context: int, assumed: Assumptions) -> StepTimes:
        """Times every kind of step with `context` tokens in the cache. If the settings leave a draft length open, the
        length is chosen that is fastest by `assumed` and the measured steps.

        Raises:
            CapacityError: there is too little memory.
        """
        self._kept.end_all(broken=True)
        self._kept.forget_all()
        full, plan = self._kept.prepare(array("i", [0]), replace(self._request, context=context + ROOM))
        fill_with_zeros(full, context)
        full.keep_mass(rows=0)
        verifying = Passes(self.target, full, self.graphs)
        before, read = self._kept.traffic(), full.reads.num_bytes
        plain = self._timed(verifying, 1)
        count = len(plain) + self._untimed
        moved = self._kept.traffic().since(before)
        read = (full.reads.num_bytes - read) // count

        full.keep_mass(rows=max(1, plan.mass_rows))
        retrieval = RetrievalCache(
            full, self.target.rope, budget=plan.budget, chunk_size=plan.chunk_size, tail=plan.tail
        )
        self._step(verifying, 1)  # computes the attention by which chunks are chosen
        retrieval.refresh()
        drafting = Passes(self.target, retrieval, self.graphs)
        draft: list[float] = []
        if self.draft is not None:
            hidden_states = HiddenStates(self.target) if self.draft.config.is_head else None
            streaming = StreamingCache(self.draft, hidden_states=hidden_states)
            small = Passes(self.draft, streaming, self.graphs)
            self._step(small, streaming.sinks + streaming.window, keep=True)
            draft = self._timed(small, 1)
        draft_length = self._length(drafting, draft, assumed.draft_acceptance, plan.retrieval_draft)
        of_retrieval = self._timed(drafting, draft_length + 1)
        token_s = seconds_per_token(draft_length, min(draft, default=0.0), min(of_retrieval), assumed.draft_acceptance)
        block_length = self._length(verifying, [token_s], assumed.acceptance, plan.verify_draft)
        verify = self._timed(verifying, block_length + 1)
        refresh = timed(retrieval.refresh, self._device)
        return StepTimes(
            context, plain, verify, of_retrieval, draft, refresh, block_length, draft_length, min(plan.budget, context),
            held_bytes(full.blocks.held(), "resident_kv"), read, moved.bytes_in // count, moved.disk_bytes_in // count,
        )  # fmt: skip

    def _length(self, passes: Passes, drafted: list[float], rate: float, planned: DraftTokens) -> int:
        """The number of tokens to draft for a pass. `drafted` has measured seconds of drafting a token."""
        if not drafted:
            return 0
        if planned.fixed is not None:
            return planned.fixed
        one, many = (min(self._timed(passes, rows)) for rows in (1, planned.most + 1))
        cost = PassCost.through(one, many, planned.most + 1)
        return StepCost(cost, min(drafted), rate).best(0, planned.most)[0]

    def _timed(self, passes: Passes, rows: int) -> list[float]:
        for _ in range(self._untimed - 1):
            self._step(passes, rows)
        return timed(lambda: self._step(passes, rows), self._device)

    def _step(self, passes: Passes, rows: int, *, keep: bool = False) -> None:
        cache = passes.cache
        length = cache.length
        passes.forward(torch.zeros(rows, dtype=torch.int64, device=self._device), rows)
        if not keep:
            cache.rollback(length)
