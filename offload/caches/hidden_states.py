"""The target's hidden states of a sequence's last tokens: the input of a multi-token-prediction head."""

from __future__ import annotations

import torch
from torch import Tensor

from ...tp.decoder import Decoder
from ...tp.model.config import ModelConfig
from ..held import Held

KEPT_TOKENS = 512
"""Tokens of a sequence whose hidden states are kept. The head's window and the tokens of a round do not need more,
unless nothing was drafted for a long time."""


def hidden_state_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of `HiddenStates` of one sequence."""
    return (KEPT_TOKENS + 1) * config.hidden_size * dtype.itemsize


class HiddenStates:
    """The hidden states of one sequence's last tokens, after the target's last norm.

    All passes of the target store them, over any cache. A result with the full cache replaces that with the retrieval
    cache. If drafting continues after tokens that the target has not processed, the head's own result is used for the
    last of them.
    """

    def __init__(self, target: Decoder) -> None:
        self._target = target
        size = target.config.hidden_size
        # Position p is in row p mod `KEPT_TOKENS`. The last row has the head's own result.
        self._rows = torch.zeros(KEPT_TOKENS + 1, size, dtype=target.dtype, device=target.device)
        self._own = -1  # the position of this result
        self.known = range(0)
        """The positions whose hidden states of the target are stored."""

    def held(self) -> Held:
        """See `offload.held`."""
        yield "draft_kv", self._rows

    def keep(self, stop: int, hidden: Tensor) -> None:
        """Stores the hidden states of the `n` tokens before position `stop`.

        Args: `hidden` is the output of the target's last layer, `[n, hidden]`.
        """
        last = hidden[-KEPT_TOKENS:]
        start = stop - len(last)
        self._rows[self._slots(range(start, stop))] = self._target.normed(last)
        first = self.known.start if self.known.start <= start <= self.known.stop else start
        self.known = range(max(first, stop - KEPT_TOKENS), stop)
        self._own = -1

    def cut(self, stop: int) -> None:
        """Forgets the hidden states of tokens from position `stop` on."""
        self.known = range(min(self.known.start, stop), min(self.known.stop, stop))

    def keep_own(self, position: int, result: Tensor) -> None:
        """Stores the head's own result for a token, `[1, hidden]`, until the target has a result."""
        self._rows[-1:] = result
        self._own = position

    def before(self, start: int, n: int) -> Tensor:
        """The hidden states of the tokens before each of the `n` tokens from position `start` on, `[n, hidden]`. Those
        that are not stored are zeros, which only lowers acceptance."""
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
