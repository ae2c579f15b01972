"""The streaming cache of the draft model: attention sinks and a recent window (StreamingLLM, arXiv 2309.17453).

Keys are stored without rotation, and positions are counted within the cache. So a model that was trained on short texts
drafts as well at token 128,000 as at token 200. For attention to the sinks, a query at position `t` is rotated to
`min(t, sinks + window - 1)`. For attention to the recent tokens, distances are the true ones. The keys to which a query
attends depend only on the tokens, not on how these were grouped into passes. Layers with linear attention have states.
These begin with the tokens that `prefill_streaming` processes.

A multi-token-prediction head has only a window: attention with output gates needs no sinks (arXiv 2505.06708). And the
hidden states of the first tokens are unknown if a run starts from a saved context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...kernels.attention import Scratch, attend, new_running
from ...kernels.delta_rule import DeltaWeights
from ...tp.decoder import Decoder
from ...tp.devices import to_device
from ...tp.model.config import ModelConfig
from ...tp.pages import in_new_pages, lasting_memory
from ..held import Held, held_scratch
from .hidden_states import HiddenStates, hidden_state_bytes
from .states import LEAST_ROWS, States
from .token_slots import TokenSlots

SINKS, WINDOW = 16, 240
"""The number of sinks, and of tokens in the window."""

SLACK = 256
"""Tokens that are kept besides the window. It is the maximum number of tokens of a rollback, and the number of tokens
after which the window must be moved to the front of its buffer."""

STREAMING_POSITIONS = SINKS + WINDOW + 2 * SLACK
"""The number of positions to which keys may be rotated."""


def sinks_of(config: ModelConfig) -> int:
    """The number of sinks in a `StreamingCache` for a model; 0 for a multi-token-prediction head."""
    return 0 if config.is_head else SINKS


def streaming_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of a `StreamingCache` with the default lengths: keys and values of all tokens, and also rotated keys of all
    tokens except the sinks. For a multi-token-prediction head, the hidden states that it reads are included."""
    rows = 2 * sinks_of(config) + 3 * (WINDOW + 2 * SLACK)
    found = rows * config.kv_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
    return found + hidden_state_bytes(config, dtype) if config.is_head else found


def streaming_prefill(num_layers: int) -> int:
    """The maximum number of tokens in a pass of `prefill_streaming`, for a cache with the default lengths."""
    return SINKS + num_layers * WINDOW + SLACK


class StreamingCache:
    """The first `sinks` tokens and the last `window` tokens. See `tp.decoder.Cache` for the interface."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        sinks: int | None = None,
        window: int = WINDOW,
        slack: int = SLACK,
        certain: Callable[[], int] | None = None,
        state_rows: int = LEAST_ROWS,
        hidden_states: HiddenStates | None = None,
    ) -> None:
        """Args:
        decoder: the draft model.
        sinks: number of sinks; `None`: `sinks_of` the model.
        window: number of last tokens to which a query attends.
        slack: see `SLACK`.
        certain, state_rows: `certain` and `rows` of `States`, if the model has states.
        hidden_states: the input of a multi-token-prediction head; `None` for other models.
        """
        config = decoder.part
        self._decoder, self.hidden_states = decoder, hidden_states
        sinks = sinks_of(config) if sinks is None else sinks
        linear, where = config.linear, (decoder.dtype, decoder.device)
        self._states = States(linear, *where, rows=state_rows, certain=certain) if linear else None
        self.sinks, self.window, self.slack = sinks, window, slack
        self._rope = decoder.rope
        self._num_layers = config.kv_layers
        self._scale = config.attention_scale
        self._scratch = Scratch()
        self._room = window + 2 * slack
        self._rope.reserve(sinks + self._room)

        self.untouched_bytes = 0
        """Bytes that no token has used yet, in new pages. The system counts them as free."""

        def zeros(n: int) -> list[Tensor]:
            shape = (config.kv_layers, config.num_kv_heads, n, config.head_dim)
            # New pages take no time until they are used: many answers end before anything is drafted. (Memory of
            # `reserve_memory` does.)
            memory = lasting_memory(shape, decoder.dtype, decoder.device)
            if not in_new_pages(memory):
                return list(memory.zero_())
            self.untouched_bytes += memory.nbytes
            return list(memory)

        self._sink_keys, self._sink_values = zeros(sinks), zeros(sinks)  # rotated: their position never changes
        self._keys, self._values = zeros(self._room), zeros(self._room)  # recent keys, not rotated
        self._rotated = zeros(self._room)  # recent keys, rotated to their slot
        self._origins = [sinks] * config.kv_layers  # position of slot 0
        self._right_from = [sinks] * config.kv_layers  # recent tokens from this position on are not affected by `skip`
        self._filled = [0] * config.kv_layers
        self.at: TokenSlots | None = None

    @property
    def length(self) -> int:
        return self._filled[-1]

    @property
    def memory(self) -> object:
        return self._keys

    def held(self) -> Held:
        """See `offload.held`."""
        for layers in (self._sink_keys, self._sink_values, self._keys, self._values, self._rotated):
            yield from (("draft_kv", layer) for layer in layers)
        yield from (("draft_kv", tensor) for tensor in (self._states.tensors() if self._states else ()))
        yield from self.hidden_states.held() if self.hidden_states else ()
        yield from held_scratch(self._scratch)

    def before_growth(self, drop: Callable[[], None]) -> None:
        """Does nothing, because this cache never grows."""

    def token_slots(self, n: int) -> TokenSlots | None:
        if self._states or self.hidden_states or not self._steady(n):
            return None
        slot = self.length - self._origins[0]
        return TokenSlots(slot, slot)

    def _steady(self, n: int) -> bool:
        """Whether a pass over the next `n` tokens runs the same operations as all later passes. It does if it begins
        after the position up to which the distance to the sinks grows, and computes attention in one part."""
        return self.length >= self.sinks + self.window and n <= self.slack

    def advance(self, length: int) -> None:
        self._filled = [length] * self._num_layers

    def prepare(self, n: int) -> None:
        if self._states:
            self._states.begin(self.length, n)
        if self._steady(n):  # move the window now, so that the pass itself never does
            for layer in range(self._num_layers):
                self._make_slots(layer, self.length, n)

    def advance_states(self, layer: int, inputs: Tensor, gates: Tensor, weights: DeltaWeights) -> Tensor:
        assert self._states
        return self._states.advance(layer, inputs, gates, weights)

    def keep_hidden(self, hidden: Tensor) -> None:
        if self.hidden_states:
            self.hidden_states.keep_own(self.length - 1, self._decoder.normed(hidden[-1:]))

    def hidden_before(self, n: int) -> Tensor:
        assert self.hidden_states, "a multi-token-prediction head needs a cache with hidden_states"
        return self.hidden_states.before(self.length, n)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.untouched_bytes = 0
        parts = []
        taken, n = 0, q.shape[1]
        while taken < n:
            start = self._filled[layer]
            # A part ends at the last sink, and at the position up to which the distance to the sinks grows.
            borders = [b for b in (self.sinks, self.sinks + self.window) if b > start]
            rows = min([n - taken, self.slack, *(b - start for b in borders)])
            part = slice(taken, taken + rows)
            parts.append(self._attend_part(layer, q[:, part], k[:, part], v[:, part]))
            taken += rows
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _attend_part(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        start, n = self._filled[layer], q.shape[1]
        self._filled[layer] = start + n
        sink_keys, sink_values = self._sink_keys[layer], self._sink_values[layer]
        if start < self.sinks:
            self._rope.rotate(layer, k, start, out=sink_keys[:, start : start + n])
            sink_values[:, start : start + n] = v
        capped = self.sinks + self.window - 1
        rope = self._rope
        scratch = None if self.at else self._scratch  # a captured pass needs memory that stays where it is
        running = None if start < self.sinks else new_running(q)  # attention to the sinks; the window continues it
        if self.sinks:
            sink_q = rope.rotate_to(layer, q, capped) if start > capped else rope.rotate(layer, q, start)
            out, _ = attend(
                sink_q,
                sink_keys,
                sink_values,
                scale=self._scale,
                diagonal=start,
                scratch=scratch,
                running=running,
                rounded=True,
            )
            if running is None:
                return out
        slot = self._make_slots(layer, start, n)
        at = self.at or TokenSlots(slot, slot)
        at.put(self._keys[layer], k)
        at.put(self._rotated[layer], k, self._rope.angles(layer, at.rotation, n))
        at.put(self._values[layer], v)
        return attend(
            self._rope.rotate(layer, q, at.rotation),
            self._rotated[layer],
            self._values[layer],
            scale=self._scale,
            diagonal=at.diagonal,
            window=self.window,
            scratch=scratch,
            running=running,
            rounded=True,
        )[0]

    def _make_slots(self, layer: int, start: int, n: int) -> int:
        """The slot of position `start`. If `n` more tokens would not fit, first moves the window to the front."""
        slot = start - self._origins[layer]
        if slot + n <= self._room:
            return slot
        kept = min(slot, self.window + self.slack)
        for buffer in (self._keys[layer], self._values[layer]):
            buffer[:, :kept] = buffer[:, slot - kept : slot].clone()
        self._rope.rotate(layer, self._keys[layer][:, :kept], 0, out=self._rotated[layer][:, :kept])
        self._origins[layer] = start - kept
        return kept

    def rollback(self, length: int) -> None:
        """Forgets tokens from `length` on. If the window before `length` is gone, forgets all tokens. Exception: a
        multi-token-prediction head continues with the tokens that it has, because it cannot get earlier ones."""
        if self.hidden_states:
            if length < self._origins[0]:
                self.skip(length)
            self._filled = [min(filled, length) for filled in self._filled]
            return
        reach = [max(edges) for edges in zip(self._origins, self._right_from, strict=True)]
        if max(reach) > max(self.sinks, length - self.window + 1):
            length = 0
            if self._states:
                self._states.restart(0)
        self._filled = [min(filled, length) for filled in self._filled]
        if self.length <= self.sinks:
            self._origins = [self.sinks] * self._num_layers
            self._right_from = list(self._origins)

    def skip_unseen(self, length: int) -> None:
        """Prepares a multi-token-prediction head for a pass up to `length`: if more tokens are missing than its window
        covers, skips the first of them."""
        if length - self.length > self.window:
            self.skip(length - self.window)

    def skip(self, position: int) -> None:
        """Continues at `position` without the tokens before it. The input of layer `i` depends on the last `i * window`
        tokens. So from `i * window` tokens after `position` on, the layer is as if nothing had been skipped."""
        if self._states:
            self._states.restart(position)
        self._filled = [position] * self._num_layers
        self._origins = [position] * self._num_layers
        self._right_from = [position + layer * self.window for layer in range(self._num_layers)]


def prefill_streaming(decoder: Decoder, cache: StreamingCache, token_ids: Sequence[int]) -> None:
    """Fills `cache` up to the end of `token_ids`. Only the tokens on which its window depends are processed.

    These are the sinks and the last `num_layers * window` tokens, because each layer depends on one window more, and
    `cache.slack` more tokens, so that the window is complete even after a rollback. If fewer tokens follow after those
    in the cache, these are processed.

    Args: `cache` is empty, or holds the first of `token_ids`.
    """
    start = len(token_ids) - decoder.config.num_layers * cache.window - cache.slack
    if cache.hidden_states:  # the first known hidden state can only be used for the token after it
        start = max(start, cache.hidden_states.known.start + 1)
    parts = [token_ids[cache.length :]]
    if start > max(cache.sinks, cache.length):
        cache.rollback(0)
        parts = [token_ids[: cache.sinks], token_ids[start:]]
    for part in parts:
        if part is not parts[0]:
            cache.skip(start)
        if part:
            decoder.forward(decoder.readable(to_device(part, decoder.device)), cache)
