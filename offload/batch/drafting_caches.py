"""The caches from which a sequence's drafts come. They may outlive the sequence."""

from __future__ import annotations

from dataclasses import dataclass

from ..caches.retrieval import RetrievalCache
from ..caches.streaming import StreamingCache
from ..graphs.passes import Passes
from ..held import Held


@dataclass(eq=False)
class DraftingCaches:
    """The caches and passes of the drafting tiers for one sequence. Their memory does not move, so the next sequence
    that reuses the same full cache can take them over, with the captured passes."""

    sizes: dict[str, int]
    """The sizes with which `retrieval` was made, by the name of its argument."""
    retrieval: RetrievalCache
    streaming: StreamingCache | None
    """The draft's streaming cache, if there is one."""
    passes: dict[str, Passes]
    """The passes, by the name of the tier."""

    def begin_anew(self, shared: int) -> None:
        """Forgets all tokens after the first `shared` ones, and all chunks."""
        self.retrieval.begin_anew()
        if self.streaming:
            self.streaming.rollback(shared)

    def held(self) -> Held:
        """See `offload.held`."""
        for holder in (self.retrieval, self.streaming, *self.passes.values()):
            yield from holder.held() if holder else ()
