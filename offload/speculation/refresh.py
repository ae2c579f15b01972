"""When the retrieval cache chooses its chunks anew: after which rounds it is refreshed."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...tp.errors import UsageError

_FREE_SHARE = 0.03
"""A refresh that takes a smaller share of its round than this is made every round."""

_DROP = 0.8
"""Recent acceptance below this share of the acceptance right after the last refresh counts as a drop."""

_RECENT = 0.97
"""Factor on the weight of earlier acceptance with each tested token, so that one short round changes little."""

_FADING = 0.8
"""Factor on the remembered cost of a refresh with each round."""


@dataclass
class RefreshPolicy:
    """Refresh every `round`, `never`, every so many rounds (a number), or `auto`: every round while that takes hardly
    any time, else when acceptance drops.

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
        if isinstance(self.mode, str) and self.mode.isdecimal():
            self.mode = int(self.mode)
        if self.mode not in ("auto", "round", "never") and not (isinstance(self.mode, int) and self.mode >= 1):
            raise UsageError(f"refresh is {self.mode!r}; it is auto, round, never or a number of rounds from 1")

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
