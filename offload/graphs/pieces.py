"""Passes over full caches, of which everything but attention to these is captured.

Where a full cache's keys are, and how many, changes from pass to pass; all else of a pass is the same for every cache.
It is captured in pieces: the first one ends where layer 0 attends, each further one goes from there to where the next
layer does, the last one to the logits. A host then starts a few kernels a layer instead of some dozens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ...tp.decoder import Cache, Decoder
from ...tp.model.config import ModelConfig
from ...tp.rope import RopeRows
from ..held import Held
from .capture import Capture, first_reason

PIECES_ROWS = 32
"""Tokens of a pass that is captured in pieces, at most."""


@runtime_checkable
class AttendedCache(Cache, Protocol):
    """A cache whose `attend` can be had in its parts."""

    def rotation(self) -> RopeRows:
        """What the tokens of the pass that is prepared are rotated by."""
        ...

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Adds tokens to a layer, with rotated keys."""
        ...

    def attend_rotated(self, layer: int, q: Tensor) -> Tensor:
        """`attend` for the rotated queries of the tokens that were appended last."""
        ...


class Pieces:
    """The pieces of a decoder's passes. They know no cache: all sequences of a run have the same."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._room: _Room | None = None
        self._pool: object = None
        self._passes: dict[tuple[int, int, bool], _PassInPieces] = {}
        self.prepared = 0
        """Passes so far that did more than a pass."""
        self.failure: str | None = None
        """Why one could not be captured, in a line."""

    def held(self) -> Held:
        """See `passes.Passes`."""
        if self._room:
            yield from (("captured", tensor) for tensor in self._room.tensors())

    def clear(self) -> None:
        """Drops what was captured."""
        for one in self._passes.values():
            one.clear()
        self._passes.clear()
        self._room = self._pool = None

    def forward(
        self, capture: Capture, token_ids: Tensor, cache: Cache, num_logits: int, *, padded: bool
    ) -> Tensor | None:
        """`Decoder.forward`; `None` where the pass is not captured, and did not take place.

        Args: `padded` says whether rows are padded, as `kernels.selection.padded_rows` has it.
        """
        n = len(token_ids)
        if n > PIECES_ROWS or not capture.in_pieces or not isinstance(cache, AttendedCache):
            return None
        if self._decoder.ranks.size > 1:  # one that fails between two sums would leave the others waiting
            return None
        if self._room is None:
            self._room, self._pool = _Room(self._decoder), capture.pool()
        found = self._passes.setdefault(
            (n, num_logits, padded), _PassInPieces(self._decoder, self._room, n, num_logits)
        )
        if not found.is_captured:
            self.prepared += 1
            found.passes += 1
            if found.passes <= capture.passes_before:
                return None
            self.failure = found.capture(capture, self._pool)
            if self.failure:
                return None
        return found.run(token_ids, cache)


class _Room:
    """What pieces read and write beside what they compute on the way, of the tokens of a pass."""

    def __init__(self, decoder: Decoder) -> None:
        config, dtype, device = decoder.part, decoder.dtype, decoder.device

        def rows(*width: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(PIECES_ROWS, *width, dtype=dtype, device=device)

        self.token_ids = rows(dtype=torch.int64)
        self.rotation = tuple(rows(config.head_dim, dtype=torch.float32) for _ in range(2))
        self.q, self.out = (rows(config.num_heads, config.head_dim) for _ in range(2))
        self.k, self.v = (rows(config.num_kv_heads, config.head_dim) for _ in range(2))
        self.logits = rows(decoder.config.vocab_size, dtype=torch.float32)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.token_ids, *self.rotation, self.q, self.out, self.k, self.v, self.logits


def pieces_bytes(config: ModelConfig, dtype: torch.dtype, row_bytes: int) -> int:
    """Bytes of what pieces read and write, and of what they compute on the way, of which `row_bytes` are a row's inside
    a layer."""
    heads = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim * dtype.itemsize
    room = 8 + 2 * 4 * config.head_dim + heads + 4 * config.vocab_size
    on_the_way = row_bytes + config.hidden_size * dtype.itemsize + (4 + dtype.itemsize) * config.vocab_size
    return PIECES_ROWS * (room + on_the_way)


class _PassInPieces:
    """A pass over `n` tokens."""

    def __init__(self, decoder: Decoder, room: _Room, n: int, num_logits: int) -> None:
        self._decoder, self._room, self._n, self._num_logits = decoder, room, n, num_logits
        self._replays: list[Callable[[], None]] = []
        self.passes = 0
        """Those that came before it was captured, and the one it is captured for."""

    @property
    def is_captured(self) -> bool:
        return bool(self._replays)

    def run(self, token_ids: Tensor, cache: AttendedCache) -> Tensor:
        """The pass itself; its logits, which hold until the next one."""
        n, room = self._n, self._room
        cache.prepare(n)
        room.token_ids[:n].copy_(token_ids)
        for place, turned in zip(room.rotation, cache.rotation(), strict=True):
            place[:n].copy_(turned)
        q, k, v, out = (place[:n].transpose(0, 1) for place in (room.q, room.k, room.v, room.out))
        *before_attention, last = self._replays
        for layer, replay in enumerate(before_attention):
            replay()
            cache.append(layer, k, v)
            out.copy_(cache.attend_rotated(layer, q))
        last()
        return room.logits[: self._num_logits]

    def capture(self, capture: Capture, pool: object) -> str | None:
        """Captures it; if that fails, why."""
        try:
            capture.warm_up(self._in_one_piece)
            self._replays, _ = capture.capture(self._in_pieces, pool)
        except RuntimeError as error:
            return first_reason(error)
        return None

    def _in_one_piece(self) -> Tensor:
        return self._in_pieces(lambda: None)

    def _in_pieces(self, cut: Callable[[], None]) -> Tensor:
        """What is captured, without attention; logits."""
        room, between = self._room, _BetweenPieces(self._decoder, self._room, self._n, cut)
        logits = self._decoder.forward(room.token_ids[: self._n], between, num_logits=self._num_logits)
        return room.logits[: self._num_logits].copy_(logits)

    def clear(self) -> None:
        """Drops what was captured."""
        self._replays = []


class _BetweenPieces:
    """Stands for a cache while a pass is captured. See `tp.decoder.Cache` for the interface."""

    length = 0

    def __init__(self, decoder: Decoder, room: _Room, n: int, cut: Callable[[], None]) -> None:
        self._rope, self._room, self._n, self._cut = decoder.rope, room, n, cut

    def prepare(self, n: int) -> None:
        pass

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        room, n = self._room, self._n
        cos, sin = room.rotation
        self._rope.rotate(q, (cos[:n], sin[:n]), out=room.q[:n].transpose(0, 1))
        self._rope.rotate(k, (cos[:n], sin[:n]), out=room.k[:n].transpose(0, 1))
        room.v[:n].transpose(0, 1).copy_(v)
        self._cut()
        return room.out[:n].transpose(0, 1)

    def rollback(self, length: int) -> None:
        raise NotImplementedError("nothing is kept")
