"""What a round does for the retrieval caches, and when their chunks are chosen anew.

While tokens are drafted a round takes in the new tokens, and chooses the chunks of a sequence anew where the
`RefreshPolicy` says so. While nothing is drafted it does as little as possible (`next_work`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from ..caches.retrieval import RetrievalCache
from ..settings import refresh_mode

_FREE_SHARE = 0.03
"""A refresh that takes a smaller share of its round than this is made every round."""

_DROP = 0.8
"""Recent acceptance below this share of the acceptance right after the last refresh counts as a drop."""

_RECENT = 0.97
"""Factor on the weight of earlier acceptance with each tested token, so that one short round changes little."""

_FADING = 0.8
"""Factor on the remembered cost of a refresh with each round."""


class RetrievalWork(IntEnum):
    """What a round does for the retrieval caches."""

    NONE = 0
    TAIL = 1
    """The new tokens' keys and values, but not the attention that chunks are chosen by."""
    REBUILD = 2
    """The attention, and all chunks at once: what comes next is drafted."""
    FULL = 3
    """The attention, new tokens, and, if drafts come, chunks as the refresh policy says."""


def next_work(last: RetrievalWork, drafts: bool, may_skip: bool) -> RetrievalWork:
    """What the next round does, after a round that did `last`.

    Args:
        drafts: whether something is to be drafted; after `REBUILD`, which comes first, the round after that.
        may_skip: whether caches may be left alone.
    """
    if last is RetrievalWork.NONE:  # the newest tokens may be on their way to host memory: all is taken in at once
        return RetrievalWork.REBUILD if drafts or not may_skip else RetrievalWork.NONE
    if drafts:
        return RetrievalWork.FULL
    if last is RetrievalWork.TAIL and may_skip:
        return RetrievalWork.NONE
    return RetrievalWork.TAIL  # which also takes in chunks that were on their way


@dataclass
class RefreshPolicy:
    """Refresh every `round`, `never`, every so many rounds (a number), or `auto`: every round while that takes hardly
    any time, else when acceptance drops, or some rounds later: the fewer the less the last one took.

    Raises:
        UsageError: anything else, or a number below 1.
    """

    mode: str | int = "auto"
    _rounds: int = field(default=0, init=False)
    _fresh: float = field(default=1.0, init=False)
    """Running acceptance of the rounds right after a refresh."""
    _recent: float = field(default=1.0, init=False)
    """Running acceptance since the last refresh, starting at `_fresh`."""
    _cost_share: float = field(default=0.0, init=False)
    """The last refresh's share of its round's time, less with every round, so that one slow refresh is forgotten."""

    def __post_init__(self) -> None:
        self.mode = refresh_mode(self.mode)

    def due(self, accepted: int, proposed: int) -> bool:
        """Whether to refresh after a round that accepted `accepted` of `proposed` tokens."""
        self._rounds += 1
        self._cost_share *= _FADING
        if proposed:
            tested = min(accepted + 1, proposed)  # nothing after the first rejection is tested
            known = _RECENT**tested
            if self._rounds == 1:
                self._recent = self._fresh
            self._recent = known * self._recent + (1 - known) * accepted / tested
            if self._rounds == 1:
                self._fresh = self._recent
        if self.mode == "auto":
            return self._cost_share < _FREE_SHARE or self._recent < _DROP * self._fresh
        if isinstance(self.mode, int):
            return self._rounds >= self.mode
        return self.mode == "round"

    def done(self, seconds: float, round_seconds: float) -> None:
        """Notes a refresh that took `seconds` after a round of `round_seconds`; with 0 seconds it counts as free."""
        self._rounds = 0
        self._cost_share = seconds / max(round_seconds, 1e-9)


@dataclass(eq=False)
class RetrievalRefresh:
    """The retrieval cache of one sequence, as rounds bring it up to date."""

    retrieval: RetrievalCache
    policy: RefreshPolicy
    mass_rows: int
    """Rows of a pass whose attention is kept where chunks are to be chosen by it; see `FullCache.keep_mass`."""

    def begin_round(self, work: RetrievalWork) -> None:
        """Has the next pass of the full cache keep the attention that chunks are chosen by, or not."""
        self.retrieval.source.keep_mass(self.mass_rows if work >= RetrievalWork.REBUILD else 0)

    def is_due(self, work: RetrievalWork, proposed: int, accepted: int, *, drafts: bool) -> bool:
        """Whether a cache that is kept up to date gets other chunks with the round under way, which accepted so many of
        the `proposed` tokens. Asked once a round: it counts them.

        Args: `drafts` says whether tokens are drafted from here on: if not, the choice waits.
        """
        if work is not RetrievalWork.FULL:
            return False
        due = self.policy.due(accepted, proposed)
        return (due and drafts) or self.retrieval.tail_is_full

    def end_round(self, work: RetrievalWork, due: bool) -> None:
        """Takes in what was verified."""
        if work is RetrievalWork.REBUILD:
            self.retrieval.refresh(at_once=True)
        elif due:
            self.retrieval.refresh()
        else:
            self.retrieval.update_tail()


def end_round(
    work: RetrievalWork,
    caches: Sequence[RetrievalRefresh],
    due: Sequence[bool],
    round_s: Callable[[], float],
    synchronize: Callable[[], None] | None,
) -> float:
    """Brings the retrieval caches of all sequences up to what was verified; the seconds that took.

    Args:
        due: of each, whether its chunks are chosen anew.
        round_s: seconds since the round began.
        synchronize: waits for the device, where what a refresh took is to decide when the next one comes; `None` where
            it must not, and each counts as free.
    """
    if work is RetrievalWork.NONE or not caches:
        return 0.0
    before = round_s()
    for one, is_due in zip(caches, due, strict=True):
        one.end_round(work, is_due)
    refreshed = [one.policy for one, is_due in zip(caches, due, strict=True) if is_due and work is RetrievalWork.FULL]
    if refreshed and synchronize and refreshed[0].mode == "auto":
        synchronize()
    seconds = round_s() - before
    for policy in refreshed:
        policy.done(seconds if synchronize else 0.0, before)
    return seconds
