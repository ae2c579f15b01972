"""The attention that recent tokens gave to each chunk of a full cache, its *mass*: a retrieval cache selects by it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from ...kernels.cpu.mass import add_mass_compiled, adds_mass_compiled
from ..held import Held

RECENT_ROWS = 8
"""A pass of so many tokens replaces the mass; of a prefill the last so many count."""


@dataclass(frozen=True)
class MassPart:
    """The shares that some consecutive chunks got of the attention of a pass's last rows."""

    first: int
    """The first chunk."""
    shares: Tensor
    """`[num_heads, rows, chunks]`, of each row's attention over the keys that `lse` is over."""
    lse: Tensor
    """`[num_heads, rows]`, log-sum-exp of each row over the part, or over it and those before."""


class Shares:
    """Memory for the shares that the pieces of a layer get, which hold until those of the next layer do: one buffer, as
    large as all pieces of a layer were together at most. A buffer for each would in time be as large as the largest
    piece there was in its place, as an open stretch moves on."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self._taken = self._most = 0  # numbers in the layer under way, and in any before

    def begin(self) -> None:
        """Begins a layer."""
        self._most, self._taken = max(self._most, self._taken), 0
        if self._buffer is not None and self._buffer.numel() < self._most:
            self._buffer = None  # before a larger one is taken

    def get(self, q: Tensor, rows: int, chunks: int) -> Tensor:
        """For the next piece, uninitialised: `[num_heads, rows, chunks]`, of some of the queries `q` `[num_heads, any,
        head_dim]`, in the dtype of sums."""
        shape = q.shape[0], rows, chunks
        first, self._taken = self._taken, self._taken + math.prod(shape)
        if self._buffer is None:
            dtype = torch.promote_types(q.dtype, torch.float32)
            self._buffer = torch.empty(max(self._most, self._taken), dtype=dtype, device=q.device)
        if self._taken > self._buffer.numel():  # from the next layer on there is room for it
            return torch.empty(shape, dtype=self._buffer.dtype, device=q.device)
        return self._buffer[first : self._taken].view(shape)

    def held(self) -> Held:
        """See `offload.held`."""
        if self._buffer is not None:
            yield "mass", self._buffer


class RecentMass:
    """The shares of attention that the last tokens gave to chunks, by layer: one mean over tokens and the query heads
    of a KV head. A pass of `RECENT_ROWS` tokens or more takes the place of what was there, a shorter one counts by its
    tokens. Those that are rejected later count too: they ask for much the same chunks as what follows in their place.
    """

    def __init__(self, num_layers: int, num_kv_heads: int, max_chunks: int, chunk_size: int) -> None:
        self._num_kv_heads, self._max_chunks, self._chunk_size = num_kv_heads, max_chunks, chunk_size
        self._means = [torch.empty(num_kv_heads, 0)] * num_layers  # [num_kv_heads, max_chunks], once there is one
        self._is_known = [False] * num_layers

    def recent(self, layer: int, length: int) -> Tensor:
        """What each whole chunk of the first `length` tokens got, `[num_kv_heads, length // chunk_size]`, float32;
        there must have been an `add`."""
        assert self._is_known[layer]
        return self._means[layer][:, : length // self._chunk_size]

    def add(self, layer: int, start: int, parts: Sequence[MassPart], lse: Tensor) -> None:
        """Adds the last rows of a pass over tokens from position `start` on.

        Args:
            parts: in the order of chunks; chunks that they leave out got nothing.
            lse: `[num_heads, rows]`, of each row over all keys.
        """
        shares = parts[0].shares
        if not self._means[layer].numel():
            shape = self._num_kv_heads, self._max_chunks
            self._means[layer] = torch.empty(shape, dtype=torch.float32, device=shares.device)
        mean, weight = self._means[layer], min(1.0, shares.shape[1] / RECENT_ROWS)
        if not self._is_known[layer]:
            weight, self._is_known[layer] = 1.0, True
        if adds_mass_compiled(shares):
            kept = 0 if weight == 1.0 else min(-(-start // self._chunk_size), self._max_chunks)
            add_mass_compiled(mean, [(one.first, one.shares, one.lse) for one in parts], lse, kept, weight)
            return
        # What is not finite, of a draft token that is rejected for that, must not stay: hence `nan_to_num`.
        found = [(first, self._by_head(shares)) for first, shares in _joined(parts, lse)]
        kept = 0 if weight == 1.0 else -(-start // self._chunk_size)  # behind them are those that were rolled back
        if len(found) > 1 or found[0][0]:
            mean[:, kept:] = 0
            mean[:, :kept] *= 1 - weight
            for first, new in found:
                there = mean[:, first : first + new.shape[1]]
                there.add_(new[:, : there.shape[1]].nan_to_num_(), alpha=weight)
            return
        new = found[0][1]  # of all chunks so far
        mean[:, kept or new.shape[1] :] = 0
        if kept:
            mean[:, : new.shape[1]].lerp_(new.nan_to_num_(), weight)
        else:
            torch.nan_to_num(new, out=mean[:, : new.shape[1]])

    def _by_head(self, shares: Tensor) -> Tensor:
        """The mean over rows and the query heads of a KV head."""
        by_head = shares.unflatten(0, (self._num_kv_heads, -1)).mean(dim=(1, 2), dtype=torch.float32)
        return by_head[:, : self._max_chunks]

    def held(self) -> Held:
        """See `offload.held`."""
        yield from (("mass", mean) for mean in self._means)

    def forget(self) -> None:
        """Drops what was given so far; its memory stays."""
        self._is_known = [False] * len(self._is_known)


def _joined(parts: Sequence[MassPart], lse: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The shares of consecutive parts put together, of each row's attention over all keys: the first chunk and
    `[num_heads, rows, chunks]`. One operation for many parts, as a pass that streams has one for each block."""
    if len(parts) == 1:  # then it has all keys
        yield parts[0].first, parts[0].shares
        return
    shares = torch.cat([part.shares for part in parts], dim=-1)
    factors = torch.stack([part.lse for part in parts], dim=-1).sub_(lse.unsqueeze(-1)).exp_()
    done = chunks = 0
    for size, alike in groupby(parts, key=lambda part: part.shares.shape[-1]):  # hardly ever more than three kinds
        count = len(list(alike))
        some = shares[..., chunks : chunks + count * size].unflatten(-1, (count, size))
        some *= factors[..., done : done + count].unsqueeze(-1)
        done, chunks = done + count, chunks + count * size
    first = at = 0
    for i, part in enumerate(parts):
        stop = at + part.shares.shape[-1]
        if i + 1 == len(parts) or parts[i + 1].first != part.first + stop - at:  # the next one is not behind it
            yield part.first - (at - first), shares[..., first:stop]
            first = stop
        at = stop
