"""What a multi-token-prediction head reads: the hidden states that the target has of a sequence's last tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from ...tp.decoder import Decoder
from ...tp.model.config import ModelConfig
from ..held import Held

KEPT_TOKENS = 512
"""Of a sequence. What the head's window depends on, and the tokens of a round, are no more, unless nothing was drafted
for long."""


def hidden_state_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of `HiddenStates` of one sequence."""
    return (KEPT_TOKENS + 1) * config.hidden_size * dtype.itemsize


class HiddenStates:
    """Of the last tokens of one sequence, behind the target's last norm.

    The target's passes keep them, whatever cache they are over: what the full cache says of a token takes the place of
    what the retrieval cache said. Where a draft goes on from tokens that the target has not seen, the head's own result
    stands for that of the last one.
    """

    def __init__(self, target: Decoder) -> None:
        self._target = target
        size = target.config.hidden_size
        # Of position p in row p mod `KEPT_TOKENS`, and in the last one a result of the head's own.
        self._rows = torch.zeros(KEPT_TOKENS + 1, size, dtype=target.dtype, device=target.device)
        self._own = -1  # the position that this result is of
        self.known = range(0)
        """The positions whose hidden states are there."""

    def held(self) -> Held:
        """See `offload.held`."""
        yield "draft_kv", self._rows

    def keep(self, stop: int, hidden: Tensor) -> None:
        """Keeps what tokens up to position `stop` have behind the target's last layer, `[n, hidden]`."""
        last = hidden[-KEPT_TOKENS:]
        start = stop - len(last)
        self._rows[self._slots(range(start, stop))] = self._target.normed(last)
        first = self.known.start if self.known.start <= start <= self.known.stop else start
        self.known = range(max(first, stop - KEPT_TOKENS), stop)
        self._own = -1

    def cut(self, stop: int) -> None:
        """Forgets those of tokens from position `stop` on."""
        self.known = range(min(self.known.start, stop), min(self.known.stop, stop))

    def keep_own(self, position: int, result: Tensor) -> None:
        """Keeps the head's result for a token, `[1, hidden]`, until the target has one."""
        self._rows[-1:] = result
        self._own = position

    def before(self, start: int, n: int) -> Tensor:
        """Those of the tokens before each of `n` from position `start` on, `[n, hidden]`; zeros where none is kept,
        which lowers acceptance only."""
        wanted = range(start - 1, start - 1 + n)
        found = range(max(wanted.start, self.known.start), min(wanted.stop, self.known.stop))
        rows = self._rows.new_zeros(n, self._rows.shape[1])
        if found:
            first = found.start - wanted.start
            rows[first : first + len(found)] = self._rows[self._slots(found)]
        if self._own in wanted and self._own not in self.known and self._own >= 0:
            rows[self._own - wanted.start] = self._rows[-1]
        return rows

    def _slots(self, positions: range) -> Tensor:
        return torch.arange(positions.start, positions.stop, device=self._rows.device) % KEPT_TOKENS
