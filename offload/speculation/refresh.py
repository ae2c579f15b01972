"""The work of a round for the retrieval caches, and when their chunks are chosen again.

While tokens are drafted, a round adds the new tokens to the caches, and chooses the chunks of a sequence again if its
`RefreshPolicy` says so. While nothing is drafted, a round does as little as possible (`next_work`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from ..caches.retrieval import RetrievalCache
from ..settings import refresh_mode

_FREE_SHARE = 0.03
"""A refresh is made every round if it takes a smaller share of the round than this."""

_DROP = 0.8
"""Recent acceptance below this share of the acceptance right after the last refresh counts as a drop."""

_RECENT = 0.97
"""Factor on the weight of earlier acceptance with each tested token, so that one short round changes little."""

_FADING = 0.8
"""Factor on the remembered cost of a refresh with each round."""


class RetrievalWork(IntEnum):
    """The work of a round for the retrieval caches."""

    NONE = 0
    """Nothing."""
    TAIL = 1
    """Adds the new tokens' keys and values. Does not keep the attention by which chunks are chosen."""
    REBUILD = 2
    """Keeps the attention, and chooses all chunks at once, because drafting begins after this round."""
    FULL = 3
    """Keeps the attention and adds the new tokens. If drafts follow, chooses chunks as the refresh policy says."""


def next_work(last: RetrievalWork, drafts: bool, may_skip: bool) -> RetrievalWork:
    """The work of the next round, after a round that did `last`.

    Args:
        drafts: whether something is to be drafted. If `REBUILD` has to come first, drafting begins one round later.
        may_skip: whether caches may be left alone.
    """
    if last is RetrievalWork.NONE:  # the newest tokens may be on their way to host memory: all are added at once
        return RetrievalWork.REBUILD if drafts or not may_skip else RetrievalWork.NONE
    if drafts:
        return RetrievalWork.FULL
    if last is RetrievalWork.TAIL and may_skip:
        return RetrievalWork.NONE
    return RetrievalWork.TAIL  # it also adds chunks that are on their way


@dataclass
class RefreshPolicy:
    """Decides when to refresh. `round`: every round. `never`. A number: every so many rounds. `auto`: every round while
    a refresh takes hardly any time; otherwise when acceptance drops, or some rounds later. The less time the last
    refresh took, the fewer these rounds are.

    Raises:
        UsageError: the mode is another one, or a number below 1.
    """

    mode: str | int = "auto"
    _rounds: int = field(default=0, init=False)
    _fresh: float = field(default=1.0, init=False)
    """Running acceptance of the rounds right after a refresh."""
    _recent: float = field(default=1.0, init=False)
    """Running acceptance since the last refresh, starting at `_fresh`."""
    _cost_share: float = field(default=0.0, init=False)
    """The last refresh's share of its round's time. It decreases with every round, so one slow refresh is forgotten."""

    def __post_init__(self) -> None:
        self.mode = refresh_mode(self.mode)

    def due(self, accepted: int, proposed: int) -> bool:
        """Whether to refresh after a round that accepted `accepted` of `proposed` tokens. Call it once a round."""
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
        """Records a refresh that took `seconds` after a round of `round_seconds`. With 0 seconds, it counts as free."""
        self._rounds = 0
        self._cost_share = seconds / max(round_seconds, 1e-9)


@dataclass(eq=False)
class RetrievalRefresh:
    """Updates the retrieval cache of one sequence after each round."""

    retrieval: RetrievalCache
    policy: RefreshPolicy
    mass_rows: int
    """The number of rows of the longest verification, whose attention is kept to choose chunks; see
    `FullCache.keep_mass`."""

    def begin_round(self, work: RetrievalWork) -> None:
        """Sets whether the next pass over the full cache keeps the attention by which chunks are chosen."""
        self.retrieval.source.keep_mass(self.mass_rows if work >= RetrievalWork.REBUILD else 0)

    def is_due(self, work: RetrievalWork, proposed: int, accepted: int, *, drafts: bool) -> bool:
        """Whether the chunks are chosen again with the current round, which accepted `accepted` of the `proposed`
        tokens. Call it once a round, as it counts them.

        Args: `drafts` is whether tokens are drafted from here on. If not, chunks are chosen only if the tail is full.
        """
        if work is not RetrievalWork.FULL:
            return False
        due = self.policy.due(accepted, proposed)
        return (due and drafts) or self.retrieval.tail_is_full

    def end_round(self, work: RetrievalWork, due: bool) -> None:
        """Adds the verified tokens to the cache, and chooses chunks again if `due` or if `work` is `REBUILD`."""
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
    """Adds the verified tokens to the retrieval caches of all sequences. Returns the seconds that this took.

    Args:
        work: the work of this round.
        caches: the retrieval caches.
        due: for each cache, whether its chunks are chosen again.
        round_s: returns the seconds since the round began.
        synchronize: waits for the device, so that the time of a refresh can be measured and decides when the next one
            comes. `None`: the time must not decide, and each refresh counts as free.
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
