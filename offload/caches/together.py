"""Joins the caches of several sequences to one cache, for passes over rows of all sequences.

The rows of a pass are those of the first sequence, then those of the second, and so on. Each cache keeps its own keys
and values. Full caches can have a shared prefix. The rows of all its sequences attend to it together, so that each of
its blocks is read, and crosses the link, only once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...kernels.attention import PreparedStep, StepPiece, StepRows, prepared_step
from ...kernels.delta_rule import DeltaWeights
from ...kernels.selection import on_cpu
from ...tp.decoder import Cache
from ...tp.rope import RopeRows
from ..held import Held
from .full import FullCache
from .retrieval import RetrievalCache
from .shared_attention import SharedAttention, rows_of
from .steps import StepOfPass, put_rows


def together(caches: Sequence[Cache]) -> JoinedCache:
    """Joins `caches`, which are of one kind, to one cache for passes over all their sequences."""
    full = [cache for cache in caches if isinstance(cache, FullCache)]
    retrieval = [cache for cache in caches if isinstance(cache, RetrievalCache)]
    if len(full) == len(caches):
        return JoinedFullCache(full)
    return JoinedRetrievalCache(retrieval) if len(retrieval) == len(caches) else JoinedCache(caches)


class JoinedCache:
    """Caches of several sequences. Each sequence attends to its own keys. See `tp.decoder.Cache` for the interface."""

    def __init__(self, caches: Sequence[Cache]) -> None:
        self._caches = list(caches)
        self.counts: Sequence[int] = ()
        """The number of tokens of each sequence in the next pass. To be set before `prepare`."""

    @property
    def length(self) -> int:
        """The length of the longest sequence."""
        return max(cache.length for cache in self._caches)

    def prepare(self, n: int) -> None:
        for cache, count in zip(self._caches, self.counts, strict=True):
            cache.prepare(count)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert q.shape[1] == sum(self.counts), "a pass over several sequences comes in one part"
        outs = [
            cache.attend(layer, q[:, rows], k[:, rows], v[:, rows])
            for cache, rows in zip(self._caches, rows_of(self.counts), strict=True)
        ]
        return torch.cat(outs, dim=1)

    def advance_states(self, layer: int, inputs: Tensor, gates: Tensor, weights: DeltaWeights) -> Tensor:
        outs = [
            cache.advance_states(layer, inputs[rows], gates[rows], weights)
            for cache, rows in zip(self._caches, rows_of(self.counts), strict=True)
        ]
        return torch.cat(outs)

    def keep_hidden(self, hidden: Tensor) -> None:
        for cache, rows in zip(self._caches, rows_of(self.counts), strict=True):
            cache.keep_hidden(hidden[rows])

    def hidden_before(self, n: int) -> Tensor:
        return torch.cat([cache.hidden_before(count) for cache, count in zip(self._caches, self.counts, strict=True)])

    def rollback(self, length: int) -> None:
        raise NotImplementedError("sequences are rolled back one by one")


class JoinedRetrievalCache(JoinedCache):
    """Retrieval caches. If the compiled kernels can, all sequences attend to them in one call."""

    def __init__(self, caches: Sequence[RetrievalCache]) -> None:
        super().__init__(caches)
        self._caches: list[RetrievalCache]
        self._slots: list[int] = []  # in the prepared pass, the slot of each sequence's first token
        self._rotation: RopeRows = ()
        self._step = StepOfPass()

    def held(self) -> Held:
        """See `offload.held`. The memory besides the caches: that of the last pass, and the last step."""
        yield from (("scratch", tensor) for tensor in (*self._rotation, *self._step.tensors()))

    def prepare(self, n: int) -> None:
        super().prepare(n)
        caches, rope = self._caches, self._caches[0].rope
        slots = [cache.slot(count) for cache, count in zip(caches, self.counts, strict=True)]
        self._slots = [slot for slot in slots if slot is not None]
        possible = len(self._slots) == len(caches) and on_cpu(caches[0].source.blocks.device)
        self._step.begin(possible=possible)
        if possible:
            turned = [rope.rows(cache.length, count) for cache, count in zip(caches, self.counts, strict=True)]
            self._rotation = tuple(torch.cat(tables) for tables in zip(*turned, strict=True))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        caches = self._caches
        buffers = [cache.buffers(layer) for cache in caches]
        step = self._step.get(lambda before: self._made_step(q, k, buffers, before))
        if step is None:
            return super().attend(layer, q, k, v)
        rows = put_rows(step.rows, layer, (q, k, v), caches[0].rope, self._rotation)
        step([one.data_ptr() for both in buffers for one in both])
        for cache, count in zip(caches, self.counts, strict=True):
            cache.note_appended(layer, count)
        return rows.out

    def _made_step(
        self, q: Tensor, k: Tensor, buffers: list[tuple[Tensor, Tensor]], before: PreparedStep | None
    ) -> PreparedStep | None:
        rows, own = StepRows.like(q, k, before and before.rows), rows_of(self.counts)
        pieces = [
            StepPiece(some, i, 0, keys.shape[1], slot)
            for i, (some, slot, (keys, _)) in enumerate(zip(own, self._slots, buffers, strict=True))
        ]
        written = [(i, slot, some) for i, (some, slot) in enumerate(zip(own, self._slots, strict=True))]
        scale = self._caches[0].source.config.attention_scale
        return prepared_step(rows, buffers, [pieces], written, scale=scale, before=before)


class JoinedFullCache(JoinedCache):
    """Full caches. Some begin with keys and values that another full cache holds (`FullCache.prefix`)."""

    def __init__(self, caches: Sequence[FullCache]) -> None:
        super().__init__(caches)
        self._caches: list[FullCache]
        self._attention = SharedAttention(caches)

    def held(self) -> Held:
        """See `offload.held`. The memory besides the caches."""
        return self._attention.held()

    @property
    def leaves_hidden_states(self) -> bool:
        """See `FullCache`."""
        return any(cache.leaves_hidden_states for cache in self._caches)

    def prepare(self, n: int) -> None:
        self._attention.prepare(self.counts)
        for cache, count in zip(self._caches, self.counts, strict=True):
            cache.begin(count)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rope, rotation = self._caches[0].rope, self.rotation()
        if take := self._attention.step(layer, lambda before: StepRows.like(q, k, before)):
            return take((q, k, v)).out
        q = rope.rotate(layer, q, rotation)
        self.append(layer, rope.rotate(layer, k, rotation), v)
        return self.attend_rotated(layer, q)

    def rotation(self) -> RopeRows:
        """See `FullCache.rotation`. Here and in the methods below, rows are in the order of the sequences."""
        return self._attention.rotation

    def steps(self, rows: StepRows) -> list[Callable[[], object] | None]:
        """See `FullCache`."""
        return [self._attention.step(layer, lambda _: rows) for layer in range(self._caches[0].config.kv_layers)]

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """See `FullCache`."""
        for cache, rows in zip(self._caches, self._attention.rows, strict=True):
            cache.append(layer, k[:, rows], v[:, rows])

    def attend_rotated(self, layer: int, q: Tensor) -> Tensor:
        """See `FullCache`."""
        return self._attention.attend(layer, q)
