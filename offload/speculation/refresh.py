"""When the retrieval cache chooses its chunks anew."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...tp.errors import UsageError

_FREE_SHARE = 0.03
"""A refresh that takes less of a round than this is worth making every time."""

_DROP = 0.8
"""Recent acceptance below this share of what followed the last refresh counts as a drop."""

_RECENT = 0.97
"""Weight of what was known after one more tested token: a single short round says next to nothing."""

_FADING = 0.8
"""What is left of a refresh's cost after one more round."""


@dataclass
class RefreshPolicy:
    """`round`, `never`, a number of rounds, or `auto`: every round while that costs next to nothing, else on a drop.

    Raises:
        UsageError: another word, or a number below 1.
    """

    mode: str | int = "auto"
    _rounds: int = field(default=0, init=False)
    _fresh: float = field(default=1.0, init=False)
    """Running acceptance of the rounds right after a refresh."""
    _recent: float = field(default=1.0, init=False)
    """Running acceptance since the last refresh, starting at `_fresh`."""
    _cost_share: float = field(default=0.0, init=False)
    """A refresh's share of its round; fades while there is none, so that one slow refresh is not for ever."""

    def __post_init__(self) -> None:
        if isinstance(self.mode, str) and self.mode.isdecimal():
            self.mode = int(self.mode)
        if self.mode not in ("auto", "round", "never") and not (isinstance(self.mode, int) and self.mode >= 1):
            raise UsageError(f"refresh is {self.mode!r}; it is auto, round, never or a number of rounds from 1")

    def due(self, accepted: int, proposed: int) -> bool:
        """Whether to refresh after a round that kept `accepted` of `proposed` tokens."""
        self._rounds += 1
        self._cost_share *= _FADING
        if proposed:
            tested = min(accepted + 1, proposed)  # nothing after the first rejection was
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
        """Notes a refresh that took `seconds` after a round of `round_seconds`; 0 leaves its cost out of account."""
        self._rounds = 0
        self._cost_share = seconds / max(round_seconds, 1e-9)
