"""The full cache as the verifications of a run see it: the blocks that a pass streams also refresh a retrieval cache.

This object lives as long as the run. The full cache, which outlives runs, holds no reference to what a run made.
"""

from __future__ import annotations

from torch import Tensor

from .full import FullCache
from .retrieval import RetrievalCache


class RefreshingCache:
    """A full cache whose blocks, as they pass, leave in `retrieval` the chunks it has chosen. See `tp.decoder.Cache`
    for the interface."""

    def __init__(self, full: FullCache, retrieval: RetrievalCache) -> None:
        self._full, self._retrieval = full, retrieval

    @property
    def length(self) -> int:
        return self._full.length

    def prepare(self, n: int) -> None:
        self._full.prepare(n)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._full.attend(layer, q, k, v, collector=self._retrieval.collector)

    def rollback(self, length: int) -> None:
        self._full.rollback(length)
