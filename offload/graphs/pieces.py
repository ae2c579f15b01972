"""Passes over full caches, of which everything but attention to these is captured.

Where a full cache's keys are, and how many, changes from pass to pass; all else of a pass is the same for every cache.
It is captured in pieces: the first one ends where layer 0 attends, each further one goes from there to where the next
layer does, the last one to the logits. So less than half as many kernels are started one by one, and a CPU spends less
of the time between two attentions on finding out what to call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...kernels.attention import StepRows
from ...kernels.delta_rule import DeltaWeights
from ...kernels.layers import copy_rows
from ...tp.decoder import Cache, Decoder
from ...tp.model.config import ModelConfig
from ...tp.rope import rope_bytes
from ..caches.full import FullCache
from ..caches.steps import put_rows
from ..caches.together import JoinedFullCache
from ..held import Held
from .capture import Capture, first_reason

MOST_SIZES = 16
"""Numbers of tokens whose passes are captured, at most: each takes CUDA some memory."""


class Pieces:
    """The pieces of a decoder's passes. They do not depend on a cache, so all sequences of a run share them."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._buffers: _Buffers | None = None
        self._pool: object = None
        self._passes: dict[tuple[int, int, bool], _PassInPieces] = {}
        self.prepared = 0
        """Passes so far that did more than a pass."""
        self.failure: str | None = None
        """Why one could not be captured, in a line: then no other will be."""

    def held(self) -> Held:
        """See `passes.Passes`."""
        if self._buffers:
            yield from (("captured", tensor) for tensor in self._buffers.tensors())

    def clear(self) -> None:
        """Drops what was captured."""
        for one in self._passes.values():
            one.clear()
        self._passes.clear()
        self._buffers = self._pool = None

    def forward(
        self, capture: Capture, token_ids: Tensor, cache: Cache, num_logits: int, *, padded: bool
    ) -> Tensor | None:
        """`Decoder.forward`; `None` where the pass is not captured, and did not take place. Logits hold until the next
        pass, whatever its sequence.

        Args: `padded` says whether rows are padded, as `kernels.selection.padded_rows` has it.
        """
        n = len(token_ids)
        if self.failure or n > capture.pieces_rows or not 1 <= num_logits <= n:
            return None
        if not isinstance(cache, FullCache | JoinedFullCache):
            return None
        if max(cache.counts if isinstance(cache, JoinedFullCache) else (n,)) > capture.pieces_tokens:
            return None
        if not capture.takes(self._decoder):
            return None
        if self._decoder.config.linear or cache.leaves_hidden_states:
            return None
        if self._decoder.ranks.size > 1:  # one that fails between two sums would leave the others waiting
            return None
        key = n, num_logits, padded
        found = self._passes.get(key)
        if found is None:
            if len(self._passes) == MOST_SIZES:
                return None
            found = self._passes[key] = _PassInPieces(self._decoder, n, num_logits)
        if not found.is_captured:
            self.prepared += 1
            found.passes += 1
            if found.passes <= capture.passes_before:
                return None
            self.failure = self._capture(found, capture)
            if self.failure:
                self.clear()
                return None
        return found.run(token_ids, cache)

    def _capture(self, one: _PassInPieces, capture: Capture) -> str | None:
        """Captures a pass; if that fails, why."""
        try:
            if self._buffers is None:
                self._buffers, self._pool = _Buffers(self._decoder, capture.pieces_rows), capture.pool()
            one.capture(capture, self._pool, self._buffers)
        except (RuntimeError, MemoryError) as error:
            return first_reason(error)
        return None


class _Buffers:
    """What pieces read and write, at fixed addresses: of each token its id, rotation, query, key, value, result and
    log-sum-exps of attention, and logits."""

    def __init__(self, decoder: Decoder, most_rows: int) -> None:
        config, dtype, device = decoder.part, decoder.dtype, decoder.device

        def rows(*width: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(most_rows, *width, dtype=dtype, device=device)

        self.token_ids = rows(dtype=torch.int64)
        self.rotation = tuple(rows(config.rotated, dtype=torch.float32) for _ in range(2 * len(config.ropes)))
        self.q, self.out = (rows(config.num_heads, config.head_dim) for _ in range(2))
        self.k, self.v = (rows(config.num_kv_heads, config.head_dim) for _ in range(2))
        self.lse = rows(config.num_heads, dtype=torch.float32).view(-1)
        self.logits = rows(decoder.config.vocab_size, dtype=torch.float32)

    def rows(self, n: int) -> StepRows:
        """Those of `n` tokens."""
        q, k, v, out = (buffer[:n].transpose(0, 1) for buffer in (self.q, self.k, self.v, self.out))
        return StepRows(q, k, v, out, self.lse[: n * len(q)])

    def tensors(self) -> tuple[Tensor, ...]:
        return self.token_ids, *self.rotation, self.q, self.out, self.k, self.v, self.lse, self.logits


def pieces_bytes(
    config: ModelConfig, dtype: torch.dtype, row_bytes: int, capture: type[Capture], own_rows: int | None = None
) -> int:
    """Bytes of what pieces read and write, and of what they compute on the way.

    Args:
        row_bytes: of a row inside a layer.
        capture: what captures them.
        own_rows: where each pass has memory of its own on the way, the rows of all of them.
    """
    most = capture.pieces_rows
    heads = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim * dtype.itemsize
    buffers = 8 + rope_bytes(config, 1) + heads + 4 * (config.num_heads + config.vocab_size)
    on_the_way = row_bytes + config.hidden_size * dtype.itemsize + (4 + dtype.itemsize) * config.vocab_size
    return most * buffers + (most if own_rows is None else own_rows) * on_the_way


class _PassInPieces:
    """A pass over `n` tokens."""

    def __init__(self, decoder: Decoder, n: int, num_logits: int) -> None:
        self._decoder, self._n, self._num_logits = decoder, n, num_logits
        self._buffers: _Buffers | None = None
        self._replays: list[Callable[[], None]] = []
        self.passes = 0
        """Those that came before it was captured, and the one it is captured for."""

    @property
    def is_captured(self) -> bool:
        return bool(self._replays)

    def capture(self, capture: Capture, pool: object, buffers: _Buffers) -> None:
        """Raises:
        RuntimeError: it cannot be captured.
        """
        self._buffers = buffers
        if not capture.runs:  # else passes before this one have done it
            capture.warm_up(self._in_one_piece)
        self._replays, _ = capture.capture(self._in_pieces, pool)

    def run(self, token_ids: Tensor, cache: FullCache | JoinedFullCache) -> Tensor:
        """The pass itself; its logits."""
        n, buffers = self._n, self._buffers
        assert buffers is not None
        cache.prepare(n)
        buffers.token_ids[:n].copy_(token_ids)
        for buffer, rows in zip(buffers.rotation, cache.rotation(), strict=True):
            buffer[:n].copy_(rows)
        rows = buffers.rows(n)
        *before_attention, last = self._replays
        steps = cache.steps(rows)
        for layer, replay in enumerate(before_attention):
            replay()
            step = steps[layer] if steps else None
            if step is not None:
                step()
            else:
                cache.append(layer, rows.k, rows.v)
                copy_rows(cache.attend_rotated(layer, rows.q), rows.out)
        last()
        return buffers.logits[: self._num_logits]

    def _in_one_piece(self) -> Tensor:
        return self._in_pieces(lambda: None)

    def _in_pieces(self, cut: Callable[[], None]) -> Tensor:
        """What is captured, without attention; logits."""
        assert self._buffers is not None
        between = _BetweenPieces(self._decoder, self._buffers, self._n, cut)
        token_ids = self._buffers.token_ids[: self._n]
        logits = self._decoder.forward(token_ids, between, num_logits=self._num_logits)
        return self._buffers.logits[: self._num_logits].copy_(logits)

    def clear(self) -> None:
        """Drops what was captured."""
        self._replays, self._buffers = [], None


class _BetweenPieces:
    """Stands for a cache while a pass is captured. See `tp.decoder.Cache` for the interface."""

    length = 0

    def __init__(self, decoder: Decoder, buffers: _Buffers, n: int, cut: Callable[[], None]) -> None:
        self._rope, self._buffers, self._n, self._cut = decoder.rope, buffers, n, cut

    def prepare(self, n: int) -> None:
        pass

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rotation = tuple(table[: self._n] for table in self._buffers.rotation)
        rows = put_rows(self._buffers.rows(self._n), layer, (q, k, v), self._rope, rotation)
        self._cut()
        return rows.out

    def advance_states(self, layer: int, inputs: Tensor, gates: Tensor, weights: DeltaWeights) -> Tensor:
        raise NotImplementedError("passes with states are not captured")

    def keep_hidden(self, hidden: Tensor) -> None:
        """Who asks for it has passes that are not captured in pieces."""

    def hidden_before(self, n: int) -> Tensor:
        raise NotImplementedError("passes of a multi-token-prediction head are not captured")

    def rollback(self, length: int) -> None:
        raise NotImplementedError("nothing is kept")
