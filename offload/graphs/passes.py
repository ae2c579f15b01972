"""The passes of a tier. Where possible, a pass is captured once and then replayed.

A pass over a few tokens has about a hundred small kernels. A host takes longer to start them one by one than a GPU
takes to run them. If they are captured as a CUDA graph, one call starts all of them. A graph repeats the same kernels
on the same addresses. So there is one graph for each number of tokens, and what changes from pass to pass (the tokens,
their rotation, their slots) is first copied to tensors at fixed addresses. Passes that cannot be captured run normally,
with the same result.

Passes of drafting tiers are captured as a whole. In a pass over a full cache, the places and the number of keys change
from pass to pass. Everything else is the same for every cache, and is captured in pieces. The first piece ends at the
attention of layer 0. Each further piece goes from there to the attention of the next layer, the last one to the logits.
So fewer than half as many kernels are started one by one, and a CPU loses less time between two attentions.

The protocol `capture.Capture` hides how passes are captured.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import zip_longest
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.attention import StepRows
from ...kernels.delta_rule import DeltaWeights
from ...kernels.layers import copy_rows
from ...kernels.selection import STEP_ROWS, padded_rows
from ...tp.decoder import Cache, Decoder
from ...tp.model.config import ModelConfig
from ...tp.parallel.ranks import ALONE, Ranks
from ...tp.rope import RopeRows, rope_bytes
from ..caches.full import FullCache
from ..caches.shared_attention import rows_of
from ..caches.steps import put_rows
from ..caches.together import JoinedFullCache, JoinedRetrievalCache, together
from ..caches.token_slots import TokenSlots
from ..held import Held
from .capture import Capture, first_reason
from .cpu import CpuCapture

MOST_PIECES_SIZES = 16
"""Maximum number of kinds of passes (by number of tokens and of logits, and by padding) that are captured in pieces.
CUDA takes some memory for each."""

JOINED = 2
"""Joint passes are captured for sets of sequences. This factor, times the number of running sequences, is the maximum
number of members in all sets together. One set has all running sequences. The others have those that still draft when
some have drafted as many tokens as they were asked for."""


@runtime_checkable
class Replayable(Cache, Protocol):
    """A cache in which passes with the same number of tokens differ only in the places of these tokens."""

    at: TokenSlots | None
    """The places of the current pass's tokens in tensors, if the pass reads them on the device; otherwise `None`."""

    @property
    def memory(self) -> object:
        """An object that stays the same as long as passes use the same memory."""
        ...

    def before_growth(self, drop: Callable[[], None]) -> None:
        """Registers `drop`, a method. It is called once before memory that passes use is replaced, because captured
        passes may hold this memory."""
        ...

    def token_slots(self, n: int) -> TokenSlots | None:
        """The places of the next `n` tokens, as numbers; `None` if a pass over them differs from other passes. To be
        called after `prepare`."""
        ...

    def advance(self, length: int) -> None:
        """Sets the length, after a pass up to `length` was replayed, or after a longer pass did not take place."""
        ...


class Graphs:
    """The captures of a run: whether it captures passes, and if not, why."""

    def __init__(self, capture: Capture | None = None, ranks: Ranks = ALONE) -> None:
        """Args:
        capture: the object that captures passes; `None`: no passes are captured.
        ranks: the ranks of the run. All of them replay a pass, or none: a collective in one rank's graph must be in the
            graphs of all ranks.
        """
        self._capture, self._ranks = capture, ranks
        self._passes: weakref.WeakSet[_Captures | Pieces] = weakref.WeakSet()
        self._pieces: dict[Decoder, Pieces] = {}
        if capture is not None and ranks.size > 1:
            ranks.before_leaving(self.clear)
        self.failure: str | None = None
        """The reason in one line, if capturing was given up; otherwise `None`."""

    @property
    def warnings(self) -> list[str]:
        """A warning for each kind of passes that could not be captured, with the reason."""
        found = []
        if self.failure is not None:
            found.append(f"drafting runs without captured passes, and is slower: {self.failure}")
        for pieces in self._pieces.values():
            if pieces.failure is not None:
                found.append(f"verifications run without captured passes, and are slower: {pieces.failure}")
        return found

    @property
    def capture(self) -> Capture | None:
        """The object that captures passes; `None` after capturing failed."""
        return None if self.failure else self._capture

    def pieces_of(self, decoder: Decoder) -> Pieces:
        """The captured pieces of the passes of `decoder` over full caches."""
        if decoder not in self._pieces:
            self._pieces[decoder] = Pieces(decoder)
            self.register(self._pieces[decoder])
        return self._pieces[decoder]

    def held(self) -> Held:
        """See `offload.held`: the memory of pieces, which does not depend on the sequences, and on a CPU the memory in
        which captured passes compute."""
        for pieces in self._pieces.values():
            yield from pieces.held()
        if isinstance(self._capture, CpuCapture):
            yield from self._capture.held()

    def register(self, passes: _Captures | Pieces) -> None:
        """Registers `passes`, which will hold captured passes, for `drop` and `clear`."""
        self._passes.add(passes)

    def clear(self) -> None:
        """Frees all captured passes, even those of runs that are still referenced. Later passes are not captured.

        It must be called before the ranks end: NCCL's communicator can only end when all graphs with its collectives
        are gone.
        """
        if self._capture:
            self._capture.clear()  # waits for a replay in progress
        self._capture = None
        self.drop()

    def drop(self) -> None:
        """Drops all captured passes, so that their memory becomes free."""
        for passes in self._passes:
            passes.clear()

    def replayed(self, device: torch.device) -> None:
        """Records that a captured pass was given to `device`. Its collectives are not noticed otherwise."""
        self._ranks.note_replay(device)

    def agree(self, failure: str | None) -> bool:
        """Whether all ranks have captured a pass. If not, no more passes are captured. All ranks call it.

        Args: `failure` is the reason why this rank could not capture the pass; `None` if it could.
        """
        failed = torch.tensor([0.0 if failure is None else 1.0])
        if self._ranks.sum(failed, "all_reduce_graphs").item() == 0:
            return True
        self.failure = failure or "another rank could not capture it"
        return False


class Passes:
    """The passes of one tier over one sequence."""

    def __init__(self, decoder: Decoder, cache: Cache, graphs: Graphs | None = None, *, padded: bool = False) -> None:
        """Args:
        decoder: the model of the tier.
        cache: the cache of the sequence.
        graphs: captures passes over few tokens: as a whole if `cache` is `Replayable`, in pieces for a full cache;
            `None`: no passes are captured.
        padded: whether rows are padded, see `kernels.selection.padded_rows`.
        """
        self.padded = padded
        self.decoder, self.cache = decoder, cache
        self.graphs = graphs or Graphs()
        self._captures = _Captures(decoder, [cache], self.graphs)

    def held(self) -> Held:
        """See `offload.held`: the memory of captured passes of this sequence alone, without the cache."""
        return self._captures.held()

    def was_steady(self) -> bool:
        """Whether all passes since the last call of this method were normal ones: none was a GPU's first pass, which
        also compiles kernels, and none was captured or ran before a capture."""
        return self._captures.was_steady()

    def drop(self) -> None:
        """Drops the captured passes of this sequence alone, because its cache's memory may be replaced before they are
        used again."""
        self._captures.clear()

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, num_logits: int = 1) -> Tensor:
        """`Decoder.forward` with the tier's cache.

        Returns:
            The logits of the last `num_logits` tokens, `[num_logits, vocab_size]`, float32. They are valid until the
            next pass of this tier, even one over another sequence.
        """
        with padded_rows(self.padded):
            logits = self._captures.replay(token_ids, [token_ids.shape[0]], [num_logits])
            if logits is None:
                logits = self._captures.in_pieces(self.graphs, token_ids, self.cache, num_logits, padded=self.padded)
        return logits


class JoinedPasses:
    """The joint passes of one tier over several sequences."""

    def __init__(self, members: Sequence[Passes], *, captures: bool = True) -> None:
        """Args:
        members: the passes of each sequence, all with the same decoder.
        captures: whether passes over few tokens are captured as a whole, like those of the members.
        """
        self.members, self.captures = list(members), captures
        first, caches = members[0], [passes.cache for passes in members]
        self._decoder, self._padded = first.decoder, first.padded
        self._cache = together(caches)
        self._graphs = first.graphs
        self._captures = _Captures(first.decoder, caches, first.graphs if captures else Graphs())
        if first.graphs.capture and not first.graphs.capture.joins:
            for passes in members:
                passes.drop()

    def held(self) -> Held:
        """See `offload.held`: the memory of captured passes, and the memory that the joined caches share."""
        yield from self._captures.held()
        if isinstance(self._cache, JoinedFullCache | JoinedRetrievalCache):
            yield from self._cache.held()

    def was_steady(self) -> bool:
        """See `Passes`."""
        return self._captures.was_steady()

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, counts: Sequence[int], rows: Sequence[int]) -> Tensor:
        """Runs one pass over the next `counts[i]` tokens of each sequence.

        Args: `token_ids` has the tokens of the first sequence, then those of the second, and so on.

        Returns:
            Logits `[sum(rows), vocab_size]`, float32: those of each sequence's last `rows[i]` tokens. They are valid
            until the next pass of this tier.
        """
        with padded_rows(self._padded):
            logits = self._captures.replay(token_ids, counts, rows)
            if logits is not None:
                return logits
            self._cache.counts = counts
            n = token_ids.shape[0]
            logits = self._captures.in_pieces(self._graphs, token_ids, self._cache, n, padded=self._padded)
        if list(counts) == list(rows):
            return logits
        parts = zip(logits.split(list(counts)), rows, strict=True)
        return torch.cat([part[-wanted:] for part, wanted in parts])


class _Captures:
    """The captured passes over the same sequences.

    There is one graph for each number of tokens per sequence. All sequences have this number: those with fewer tokens
    get additional ones after them. The results of these are not used, and later tokens overwrite them.
    """

    def __init__(self, decoder: Decoder, caches: Sequence[Cache], graphs: Graphs) -> None:
        self._decoder, self._graphs, self._given = decoder, graphs, caches
        self._memory: list[object] = []
        self._pool: Any = None
        self._captured: dict[int, _CapturedPass] = {}  # by number of tokens per sequence
        self.prepared = self._noted = 0
        """Passes so far that were not normal ones, and how many of them `was_steady` has counted; see
        `Passes.was_steady`."""
        graphs.register(self)

    @cached_property
    def _caches(self) -> list[Replayable]:
        """The caches; none if not all of them can be replayed. They are checked late, because the check is slow and
        many sequences never need it."""
        replayable = [cache for cache in self._given if isinstance(cache, Replayable)]
        return replayable if len(replayable) == len(self._given) else []

    def held(self) -> Held:
        """See `Passes`."""
        for captured in self._captured.values():
            yield from captured.held()

    def was_steady(self) -> bool:
        """See `Passes`."""
        before, self._noted = self._noted, self.prepared
        return before == self._noted

    def clear(self) -> None:
        """Drops the captured passes."""
        for captured in self._captured.values():
            captured.clear()
        self._captured.clear()
        self._memory, self._pool = [], None

    def replay(self, token_ids: Tensor, counts: Sequence[int], rows: Sequence[int]) -> Tensor | None:
        """Replays, warms up or captures a pass. Returns the logits of each sequence's last `rows[i]` tokens; `None` if
        the pass cannot be replayed. Then it has not taken place."""
        capture, n = self._graphs.capture, max(counts)
        possible = capture and _can_be_captured(capture, counts, rows)
        if capture and possible and (caches := self._caches) and capture.takes(self._decoder):
            for cache in caches:
                cache.prepare(n)
            slots = [found for cache in caches if (found := cache.token_slots(n)) is not None]
            if len(slots) == len(caches):
                memory = [cache.memory for cache in caches]
                if any(new is not old for new, old in zip_longest(memory, self._memory)):
                    self._memory, self._pool, self._captured = memory, capture.pool(), {}
                    for cache in caches:
                        cache.before_growth(self.clear)
                logits = self._replay(capture, _evenly(token_ids, counts, n), slots, counts, n)
                if logits is not None:
                    return _last_rows(logits, counts, rows, n)
        if not self.prepared and self._decoder.device.type != "cpu":
            self.prepared = 1
        return None

    def in_pieces(self, graphs: Graphs, token_ids: Tensor, cache: Cache, num_logits: int, *, padded: bool) -> Tensor:
        """`Decoder.forward` for a pass that is not replayed as a whole. Its pieces are replayed if possible. All
        sequences of `graphs` share the pieces."""
        pieces, capture, logits = graphs.pieces_of(self._decoder), graphs.capture, None
        if capture is not None:
            before = pieces.prepared
            logits = pieces.forward(capture, token_ids, cache, num_logits, padded=padded)
            self.prepared += pieces.prepared - before
        return self._decoder.forward(token_ids, cache, num_logits=num_logits) if logits is None else logits

    def _replay(
        self, capture: Capture, token_ids: Tensor, slots: list[TokenSlots], counts: Sequence[int], n: int
    ) -> Tensor | None:
        """The logits of all tokens; `None` if the pass could not be captured. Then it has not taken place."""
        starts = [cache.length for cache in self._caches]
        captured = self._captured.get(n)
        if captured is None:
            captured = self._captured[n] = _CapturedPass(self._decoder, self._caches, n)
        captured.place(token_ids, slots)
        if captured.replay is not None:
            captured.replay()
            self._graphs.replayed(self._decoder.device)
        elif captured.passes < capture.passes_before:
            captured.passes += 1
            self.prepared += 1
            logits = capture.warm_up(captured.run)
            self._advance(starts, counts)
            return logits
        else:
            self.prepared += 1
            failure = captured.capture(capture, self._pool)
            self._advance(starts, [0] * len(starts))
            if not self._graphs.agree(failure):
                self._graphs.drop()
                return None
            assert captured.replay is not None
            if not capture.runs:
                captured.replay()
                self._graphs.replayed(self._decoder.device)
        self._advance(starts, counts)
        assert captured.logits is not None
        return captured.logits

    def _advance(self, starts: Sequence[int], counts: Sequence[int]) -> None:
        for cache, start, count in zip(self._caches, starts, counts, strict=True):
            cache.advance(start + count)


def _can_be_captured(capture: Capture, counts: Sequence[int], rows: Sequence[int]) -> bool:
    """Whether a pass over `counts[i]` tokens of each sequence, with logits of the last `rows[i]`, may be captured as a
    whole."""
    n = max(counts)
    return (
        n <= capture.most_tokens
        and n * len(counts) <= STEP_ROWS
        and (capture.joins or len(counts) == 1)
        and all(wanted <= count for wanted, count in zip(rows, counts, strict=True))
    )


def _evenly(token_ids: Tensor, counts: Sequence[int], n: int) -> Tensor:
    """The token ids, with additional ones (0) after those of each sequence that has fewer than `n`."""
    if all(count == n for count in counts):
        return token_ids
    return torch.cat([F.pad(part, (0, n - part.shape[0])) for part in token_ids.split(list(counts))])


def _last_rows(logits: Tensor, counts: Sequence[int], rows: Sequence[int], n: int) -> Tensor:
    """From logits of `n` tokens per sequence, selects those of the last `rows[i]` of the first `counts[i]` tokens."""
    if len(counts) == 1:
        return logits[-rows[0] :]
    if all(wanted == n for wanted in rows):
        return logits
    parts = zip(logits.split(n), counts, rows, strict=True)
    return torch.cat([part[count - wanted : count] for part, count, wanted in parts])


class _CapturedPass:
    """A pass over `n` tokens of each sequence that reads the token ids and their places from memory."""

    def __init__(self, decoder: Decoder, caches: Sequence[Replayable], n: int) -> None:
        self._decoder, self._caches, self._n = decoder, list(caches), n
        self._rows = rows_of([n] * len(caches))
        self._steps = torch.arange(n, device=decoder.device)
        total = len(caches) * n
        self._token_ids, self._slots = (torch.zeros(total, dtype=torch.int64, device=decoder.device) for _ in range(2))
        self._rotation = tuple(rows.new_zeros(total, rows.shape[1]) for rows in decoder.rope.rows(0, n))
        self._table: RopeRows | None = None
        self.replay: Callable[[], None] | None = None
        self.logits: Tensor | None = None
        self.passes = 0
        """Number of such passes that ran before the capture."""

    def place(self, token_ids: Tensor, slots: Sequence[TokenSlots]) -> None:
        """Sets the token ids and places for the next run or replay. It copies on the device and waits for nothing."""
        self._token_ids.copy_(token_ids)
        for at, rows in zip(slots, self._rows, strict=True):
            assert isinstance(at.rotation, int) and isinstance(at.slot, int)
            torch.add(self._steps, at.slot, out=self._slots[rows])
            for ours, turned in zip(self._rotation, self._decoder.rope.rows(at.rotation, self._n), strict=True):
                ours[rows].copy_(turned)

    def run(self) -> Tensor:
        """Runs the pass. Returns the logits of all its tokens."""
        for cache, rows in zip(self._caches, self._rows, strict=True):
            cache.at = TokenSlots(tuple(table[rows] for table in self._rotation), self._slots[rows])
        try:
            cache: Cache = self._caches[0]
            if len(self._caches) > 1:
                cache = together(self._caches)
                cache.counts = [self._n] * len(self._caches)
            return self._decoder.forward(self._token_ids, cache, num_logits=len(self._token_ids))
        finally:
            for cache in self._caches:
                cache.at = None

    def held(self) -> Held:
        """See `Passes`."""
        kept = [self._steps, self._token_ids, self._slots, *self._rotation, *(self._table or ()), self.logits]
        yield from (("captured", tensor) for tensor in kept if tensor is not None)

    def capture(self, capture: Capture, pool: Any) -> str | None:
        """Captures the pass. Returns the reason if this fails, otherwise `None`."""
        self._table = self._decoder.rope.rows(0, 1)  # a view that keeps the table alive: a graph may have its address
        try:
            (self.replay,), self.logits = capture.capture(lambda _: self.run(), pool)
        except RuntimeError as error:
            return first_reason(error)
        return None

    def clear(self) -> None:
        """Drops the graph and its result."""
        self.replay = self.logits = None


class Pieces:
    """The captured pieces of a decoder's passes. They do not depend on a cache, so all sequences of a run share
    them."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._buffers: _PieceBuffers | None = None
        self._pool: object = None
        self._passes: dict[tuple[int, int, bool], _PassInPieces] = {}
        self.prepared = 0
        """Passes so far that were not normal ones; see `Passes.was_steady`."""
        self.failure: str | None = None
        """The reason in one line, if a pass could not be captured. Then no more passes are captured."""

    def held(self) -> Held:
        """See `offload.held`: the buffers of the pieces, which do not depend on the sequence."""
        if self._buffers:
            yield from (("captured", tensor) for tensor in self._buffers.tensors())

    def clear(self) -> None:
        """Drops the captured pieces."""
        for one in self._passes.values():
            one.clear()
        self._passes.clear()
        self._buffers = self._pool = None

    def forward(
        self, capture: Capture, token_ids: Tensor, cache: Cache, num_logits: int, *, padded: bool
    ) -> Tensor | None:
        """`Decoder.forward` with captured pieces; `None` if the pass is not captured. Then it has not taken place.
        Logits are valid until the next pass, even one over another sequence.

        Args: `padded` is whether rows are padded, see `kernels.selection.padded_rows`.
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
        if self._decoder.ranks.size > 1:  # if one failed between two sums, the others would wait up to the time limit
            return None
        key = n, num_logits, padded
        found = self._passes.get(key)
        if found is None:
            if len(self._passes) == MOST_PIECES_SIZES:
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
        """Captures a pass. Returns the reason if this fails, otherwise `None`."""
        try:
            if self._buffers is None:
                self._buffers, self._pool = _PieceBuffers(self._decoder, capture.pieces_rows), capture.pool()
            one.capture(capture, self._pool, self._buffers)
        except (RuntimeError, MemoryError) as error:
            return first_reason(error)
        return None


def pieces_bytes(
    config: ModelConfig, dtype: torch.dtype, row_bytes: int, capture: type[Capture], own_rows: int | None = None
) -> int:
    """Bytes of the buffers of pieces, and of their intermediate results.

    Args:
        row_bytes: bytes of a row inside a layer.
        capture: the class that captures the pieces.
        own_rows: if each pass has its own memory for intermediate results, the rows of all passes together.
    """
    most = capture.pieces_rows
    heads = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim * dtype.itemsize
    buffers = 8 + rope_bytes(config, 1) + heads + 4 * (config.num_heads + config.vocab_size)
    on_the_way = row_bytes + config.hidden_size * dtype.itemsize + (4 + dtype.itemsize) * config.vocab_size
    return most * buffers + (most if own_rows is None else own_rows) * on_the_way


class _PieceBuffers:
    """The buffers of pieces, at fixed addresses. They have, for each token: its id, rotation, query, key and value, the
    result and log-sum-exps of attention, and logits."""

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
        """The parts of the buffers for `n` tokens."""
        q, k, v, out = (buffer[:n].transpose(0, 1) for buffer in (self.q, self.k, self.v, self.out))
        return StepRows(q, k, v, out, self.lse[: n * len(q)])

    def tensors(self) -> tuple[Tensor, ...]:
        return self.token_ids, *self.rotation, self.q, self.out, self.k, self.v, self.lse, self.logits


class _PassInPieces:
    """A pass over `n` tokens in full caches that is captured without its attention: the pieces before the attention of
    each layer, and the piece from the last layer's attention to the logits."""

    def __init__(self, decoder: Decoder, n: int, num_logits: int) -> None:
        self._decoder, self._n, self._num_logits = decoder, n, num_logits
        self._buffers: _PieceBuffers | None = None
        self._replays: list[Callable[[], None]] = []
        self.passes = 0
        """Number of such passes before the capture, including the pass for which it is captured."""

    @property
    def is_captured(self) -> bool:
        return bool(self._replays)

    def capture(self, capture: Capture, pool: object, buffers: _PieceBuffers) -> None:
        """Captures the pass.

        Raises:
            RuntimeError: it cannot be captured.
        """
        self._buffers = buffers
        if not capture.runs:  # otherwise earlier passes have already warmed up everything
            capture.warm_up(self._in_one_piece)
        self._replays, _ = capture.capture(self._in_pieces, pool)

    def run(self, token_ids: Tensor, cache: FullCache | JoinedFullCache) -> Tensor:
        """Runs the pass with the captured pieces. Returns its logits."""
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
        """Runs the pass without attention, for the capture. Returns its logits."""
        assert self._buffers is not None
        between = _BetweenPieces(self._decoder, self._buffers, self._n, cut)
        token_ids = self._buffers.token_ids[: self._n]
        logits = self._decoder.forward(token_ids, between, num_logits=self._num_logits)
        return self._buffers.logits[: self._num_logits].copy_(logits)

    def clear(self) -> None:
        """Drops the captured pieces."""
        self._replays, self._buffers = [], None


class _BetweenPieces:
    """Takes the place of a cache while a pass is captured in pieces. Its `attend` ends a piece. See `tp.decoder.Cache`
    for the interface."""

    length = 0

    def __init__(self, decoder: Decoder, buffers: _PieceBuffers, n: int, cut: Callable[[], None]) -> None:
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
        """Does nothing. A pass whose hidden states are needed is not captured in pieces."""

    def hidden_before(self, n: int) -> Tensor:
        raise NotImplementedError("passes of a multi-token-prediction head are not captured")

    def rollback(self, length: int) -> None:
        raise NotImplementedError("nothing is kept")
