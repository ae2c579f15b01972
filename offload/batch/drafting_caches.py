"""The caches that a sequence's drafts come from, which may outlive it."""

from __future__ import annotations

from dataclasses import dataclass

from ..caches.retrieval import RetrievalCache
from ..caches.streaming import StreamingCache
from ..graphs.passes import Passes
from ..held import Held


@dataclass(eq=False)
class DraftingCaches:
    """What the drafting tiers have of a sequence. Its memory stays where it is, so that the next sequence that goes on
    in the same full cache takes it over, with all that was captured."""

    sizes: dict[str, int]
    """What `retrieval` was made with."""
    retrieval: RetrievalCache
    streaming: StreamingCache | None
    passes: dict[str, Passes]
    """By the name of the tier."""

    def begin_anew(self, shared: int) -> None:
        """Forgets the tokens behind the first `shared` ones, and all chunks."""
        self.retrieval.begin_anew()
        if self.streaming:
            self.streaming.rollback(shared)

    def held(self) -> Held:
        """See `offload.held`."""
        for holder in (self.retrieval, self.streaming, *self.passes.values()):
            yield from holder.held() if holder else ()
