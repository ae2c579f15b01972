"""The full cache as the verifications of a run see it: the blocks that a pass streams also refresh a retrieval cache.

This object lives as long as the run. The full cache, which outlives runs, holds no reference to what a run made.
"""

from __future__ import annotations

from torch import Tensor

from .full import BlockCollector, FullCache
from .retrieval import RetrievalCache


class RefreshingCache:
    """A full cache whose blocks, as they pass, leave in `retrieval` the chunks it has chosen. See `tp.decoder.Cache`
    for the interface."""

    def __init__(self, full: FullCache, retrieval: RetrievalCache) -> None:
        self.full, self._retrieval = full, retrieval

    @property
    def length(self) -> int:
        return self.full.length

    @property
    def collector(self) -> BlockCollector | None:
        """What the next pass is to hand its blocks to."""
        return self._retrieval.collector

    def prepare(self, n: int) -> None:
        self.full.prepare(n)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.full.attend(layer, q, k, v, collector=self.collector)

    def rollback(self, length: int) -> None:
        self.full.rollback(length)
