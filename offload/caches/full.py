"""The full cache: the exact keys and values of every token.

This module also computes attention to the cache's blocks, and the *mass* of each chunk: the share of their attention
that recent tokens gave to it. A retrieval cache chooses its chunks by the mass.

`device_blocks` or `streamed_blocks` store the blocks. Keys are rotated by their true positions. A layer with a sliding
window attends only to blocks that its window reaches. If other layers of the model have no window, the layer also
stores no more than that (`windows`). If all layers have windows, they store every token.

Attention takes the blocks one by one, in the order of their positions. In a step, each call continues the sum of the
call before. If the compiled kernels can take all blocks of a layer, there is a single call. Both ways give the same
bits, except for the many rows of a prefill if flash kernels or PyTorch's operations compute them.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby, pairwise

import torch
from torch import Tensor

from ...kernels.attention import (
    PreparedStep,
    Scratch,
    StepPiece,
    StepRows,
    accumulates,
    attend,
    attend_blocks,
    merge_partials,
    new_running,
    prepared_step,
    takes_blocks,
    takes_joined,
)
from ...kernels.cpu.library import arithmetic
from ...kernels.cpu.mass import add_mass_compiled, adds_mass_compiled
from ...kernels.delta_rule import DeltaWeights
from ...kernels.selection import STEP_ROWS
from ...tp.model.config import ModelConfig
from ...tp.rope import Rope, RopeRows
from ..held import Held, held_bytes, held_scratch
from ..transfer.device_blocks import Blocks, DeviceBlocks, PausedPass
from ..transfer.link import Traffic
from ..transfer.placement import block_size_for
from .hidden_states import HiddenStates
from .states import States
from .windows import WindowBlocks

MASS_ROWS = 32
"""Rows of the longest verification, if the run does not say."""

RECENT_ROWS = 8
"""A pass of this number of tokens, or more, replaces the mass. In a prefill, only this number of last tokens counts."""

BlockCollector = Callable[[int, int, Tensor], None]
"""A function that is called for each block that a pass attends to. Its arguments: the layer, the position of the
block's first token, and the block's keys and values `[2, num_kv_heads, any, head_dim]`, which stay on the device until
the call returns."""


@dataclass
class ReadCounter:
    """Bytes of the keys and values that attention has read, and the time it took."""

    num_bytes: int = 0
    seconds: float = 0.0
    """0 on a GPU: it computes asynchronously, so the time is not known."""


class FullCache:
    """The keys and values of every token, except those that windows no longer reach. See `tp.decoder.Cache` for the
    interface."""

    def __init__(
        self,
        config: ModelConfig,
        rope: Rope,
        blocks: Blocks,
        *,
        chunk_size: int = 1,
        prefix: FullCache | None = None,
        start: int = 0,
        step_rows: int = STEP_ROWS,
        windows: WindowBlocks | None = None,
        states: States | None = None,
    ) -> None:
        """Args:
        config: the configuration of the rank's part of the model.
        rope: the rotation of queries and keys.
        blocks: the empty blocks for keys and values from position `start` on. A block consists of whole chunks. They
            have no place for layers that keep only the last tokens.
        chunk_size: tokens of a chunk. The attention to a chunk is summed.
        prefix: the cache of another sequence that holds the first `start` tokens of this sequence, too. It must keep
            them as long as this cache exists.
        start: the number of these tokens: whole chunks, and whole splits of the attention kernels.
        step_rows: see `Limits`.
        windows, states: the empty memory for layers that keep only the last tokens, and for states; `None`: new memory.
        """
        self.config = config
        self.places: Sequence[int | None] = config.full_places
        """For each layer, its place in `blocks`; `None`: the layer is in `windows`."""
        self.blocks = blocks
        self.windows = windows or WindowBlocks(config, dtype=blocks.dtype, device=blocks.device, chunk_size=chunk_size)
        self.states = states or States.of(config, blocks.dtype, blocks.device)
        self.prefix, self.start = prefix, start
        self.chunk_size = chunk_size
        self.reads, self._kv_bytes = ReadCounter(), config.kv_bytes_per_token(blocks.dtype)
        self._mass_rows, self._step_rows = MASS_ROWS, step_rows
        self.rope = rope
        self.end_run()
        self._filled = [start] * config.kv_layers
        self._begin = self._stop = start  # positions of the current pass
        self._restored = 0  # the number of first tokens that were restored
        self._restored_with: tuple[int | None, ...] = ()  # the numbers of their arithmetic
        rope.reserve(self.capacity)

    @property
    def length(self) -> int:
        return min(self._filled[-1], self.states.length) if self.states else self._filled[-1]

    @classmethod
    def on_device(
        cls,
        config: ModelConfig,
        rope: Rope,
        *,
        dtype: torch.dtype,
        device: torch.device,
        capacity: int,
        chunk_size: int = 1,
    ) -> FullCache:
        """A cache with room for `capacity` tokens, all of them on the compute device."""
        size = block_size_for(capacity, chunk_size)
        blocks = DeviceBlocks(config.full_layers, dtype=dtype, device=device, capacity=capacity, block_size=size)
        return cls(config, rope, blocks, chunk_size=chunk_size)

    @property
    def capacity(self) -> int:
        """The maximum number of tokens."""
        return self.start + self.blocks.capacity

    @property
    def holders(self) -> list[FullCache]:
        """The caches that hold this sequence's tokens, in the order of positions. This cache is the last."""
        return [*(self.prefix.holders if self.prefix else []), self]

    @property
    def all_on_device(self) -> bool:
        """See `Blocks`."""
        return all(holder.blocks.all_on_device for holder in self.holders)

    def held(self) -> Held:
        """See `offload.held`. Only this cache's own memory, not that of its prefix."""
        yield from self.blocks.held()
        yield from self._held_beside()
        yield from self.mass.held()
        yield from self._attention.held()
        yield from (("captured", tensor) for step in self._steps.values() if step for tensor in step.tensors())

    @property
    def kept_bytes(self) -> int:
        """Bytes that this cache's own keys, values and states take on the device, including the buffers through which
        blocks stream."""
        return held_bytes([*self.blocks.held(), *self._held_beside()])

    def _held_beside(self) -> Held:
        """The memory besides blocks that a cache keeps from run to run: windows and states."""
        yield from self.windows.held()
        yield from (("states", tensor) for tensor in (self.states.tensors() if self.states else ()))

    @property
    def bytes_on_host(self) -> int:
        """Bytes of this cache's own memory on the host, if the device is not the host."""
        return self.blocks.footprint.host + (self.states.bytes_on_host if self.states else 0)

    def read_so_far(self) -> ReadCounter:
        """What attention has read so far of the tokens of this cache and of its prefix."""
        reads = [holder.reads for holder in self.holders]
        return ReadCounter(sum(one.num_bytes for one in reads), sum(one.seconds for one in reads))

    def traffic(self) -> Traffic:
        """What crossed the link over which the blocks of this cache, or of its prefix, stream, and what was read from a
        disk and written to it, so far. It includes the traffic of other caches."""
        return max((holder.blocks.traffic() for holder in self.holders), key=lambda traffic: traffic.bytes_in)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers that keep every token."""
        return self.config.full_layers.kv_bytes_per_token(self.blocks.dtype)

    def end_run(self) -> None:
        """Frees the memory that only a run needs: what attention keeps from pass to pass, and what a pass took that was
        broken off. Tokens stay."""
        self.blocks.release()
        self.windows.release()
        self._hidden_states: weakref.ref[HiddenStates] | None = None
        self._collector: weakref.WeakMethod[Callable[[], BlockCollector | None]] | None = None
        self.is_set_aside = False
        """Whether the prefill of this cache goes on after that of other sequences. Until then, no sequence can share
        its tokens, apart from those of its prefix: some layers may have moved their last tokens to other places."""
        config, max_chunks = self.config, -(-self.capacity // self.chunk_size)
        self._attention = BlockAttention(config.attention_scale, self.chunk_size)
        self._steps: dict[int | None, PreparedStep | None] = {}  # the steps of the last pass, by window
        self.mass = RecentMass(config.kv_layers, config.num_kv_heads, max_chunks, self.chunk_size)
        """The attention mass of chunks in this run."""

    def keep_mass(self, rows: int) -> None:
        """Sets whether the following passes record the attention mass by which chunks are chosen.

        Args:
            rows: the rows of the run's longest verification; 0: no mass is recorded. A pass of up to this number of
                rows records the attention of all its rows, because it is not yet known which are accepted. A longer
                pass is a prefill, and records the attention of its last `RECENT_ROWS` rows.
        """
        if not rows:  # the recorded mass would become outdated
            self.mass.forget()
        self._mass_rows = rows

    def hand_blocks_to(self, collector: Callable[[], BlockCollector | None]) -> None:
        """Passes each block that a pass attends to on to a collector, for a cache whose blocks are not all on the
        device.

        Args: `collector` is a method. It is called in each pass, and returns the collector or `None`. It is used until
            `end_run`, and only as long as its object exists.
        """
        self._collector = weakref.WeakMethod(collector)

    def leave_hidden_states_in(self, states: HiddenStates) -> None:
        """Stores the hidden states of the following passes in `states`, for a multi-token-prediction head: until
        `end_run`, and only as long as `states` exists."""
        self._hidden_states = weakref.ref(states)

    @property
    def hidden_states(self) -> HiddenStates | None:
        """The object in which passes store their hidden states; `None` if no multi-token-prediction head drafts."""
        return self._hidden_states and self._hidden_states()

    @property
    def leaves_hidden_states(self) -> bool:
        """Whether passes store their hidden states for a multi-token-prediction head."""
        return self.hidden_states is not None

    @property
    def collector(self) -> BlockCollector | None:
        """The collector to which the next pass must pass its blocks; `None`: no collector."""
        collector = self._collector and self._collector()
        return collector() if collector else None

    def prepare(self, n: int) -> None:
        for holder, next_one in pairwise(self.holders):
            first_row, stop = self.length - holder.start, next_one.start - holder.start
            holder.blocks.prepare(holder.length - holder.start, 0, rows=n, first_row=first_row, stop=stop)
        self.begin(n)
        self.blocks.prepare(self._begin - self.start, n)

    def begin(self, n: int) -> None:
        """Announces a pass over the next `n` tokens. Several caches may take part in the pass."""
        self._begin, self._stop = self.length, self.length + n
        if self.states:
            self.states.begin(self.length, n)

    def advance_states(self, layer: int, inputs: Tensor, gates: Tensor, weights: DeltaWeights) -> Tensor:
        assert self.states
        return self.states.advance(layer, inputs, gates, weights)

    def keep_hidden(self, hidden: Tensor) -> None:
        if states := self.hidden_states:
            states.keep(self.length, hidden)

    def hidden_before(self, n: int) -> Tensor:
        raise NotImplementedError("the target is no multi-token-prediction head")

    def pausable(self, n: int) -> bool:
        """Whether a pass over `n` tokens can be paused between two layers. A step whose blocks stream cannot."""
        return n > self._step_rows or self.all_on_device

    def pause(self) -> list[PausedPass | None]:
        """Pauses the current pass. Until `resume`, passes of other sequences may run, even of those that share tokens
        with this one."""
        return [holder.blocks.pause() for holder in self.holders]

    def resume(self, paused: Sequence[PausedPass | None]) -> None:
        """Continues a paused pass.

        Args: `paused` is what `pause` returned.
        """
        for holder, one in zip(self.holders, paused, strict=True):
            holder.blocks.resume(one)

    @property
    def under_way(self) -> bool:
        """Whether a pass has begun and is not complete."""
        return self.length < self._stop

    def break_off(self) -> None:
        """Gives up the current pass if it is not complete. The tokens before it stay. May be called between two layers,
        or between two parts of a layer."""
        self.rollback(self._begin if self.under_way else self._stop)

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Adds tokens to a layer without computing attention.

        Args:
            layer: layers are called in ascending order after `prepare`, each with the same tokens in one or several
                parts.
            k, v: `[num_kv_heads, n, head_dim]`, keys rotated by their positions.

        Raises:
            ValueError: the cache has no room for these tokens.
        """
        start, place = self._filled[layer], self.places[layer]
        if place is None:
            self.windows.append(layer, start, k, v)
        else:
            self.blocks.append(place, start - self.start, k, v)
        self._filled[layer] += k.shape[1]

    def note_appended(self, layer: int, n: int) -> None:
        """Counts `n` more tokens of a layer, whose keys and values were already written to their places."""
        self._filled[layer] += n

    def room_in_block(self) -> int:
        """How many more tokens fit into the last block; 0 if it is full."""
        return -(self.length - self.start) % self.blocks.block_size

    def recent_mass(self, layer: int) -> Tensor:
        """The attention mass of each whole chunk, see `RecentMass.recent`."""
        return self.mass.recent(layer, self.length)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        start = self._filled[layer]
        q = self.rope.rotate(layer, q, start)
        self.append(layer, self.rope.rotate(layer, k, start), v)
        return self.attend_rotated(layer, q)

    def rotation(self) -> RopeRows:
        """The rotation of the tokens in the prepared pass."""
        return self.rope.rows(self._begin, self._stop - self._begin)

    def attend_rotated(self, layer: int, q: Tensor) -> Tensor:
        """Attention of the tokens that were appended last to all tokens so far.

        Args: `q` is `[num_heads, n, head_dim]`, rotated.

        Returns:
            `[num_heads, n, head_dim]` in `q`'s dtype.
        """
        n = q.shape[1]
        start = self._filled[layer] - n
        began = time.perf_counter()
        window = self.config.sliding_window(layer) or start + n
        rows = QueryRows(q, start, window, self.mass_rows_of(n))
        place = self.places[layer]
        blocks = None if self.prefix or place is None else self.blocks.at_once(place)
        if blocks is not None and takes_blocks(rows.q, blocks):
            self.count_read(rows.stop - rows.first_key)
            out, lse, parts = self._attention.together(rows, blocks)
        else:
            pieces = self._passing(layer, rows)
            if self.prefix and place is not None and q.dtype.itemsize == 2:
                pieces = self._attention.in_one_piece(rows, pieces)
            out, lse, parts = self._attention.one_by_one(rows, pieces)
        if parts:
            self.mass.add(layer, start, parts, lse)
        if self.blocks.device.type == "cpu":
            self.reads.seconds += time.perf_counter() - began
        return out

    def steps(self, rows: StepRows) -> list[Callable[[], object] | None] | None:
        """For each layer, a function that does `append` and `attend_rotated` for the rows of a step in one call, see
        `kernels.attention.PreparedStep`. An entry is `None` if this is not possible in a layer. The result is `None` if
        it is not possible in the prepared pass."""
        n = rows.q.shape[1]
        if self.prefix or self.mass_rows_of(n) or n > self.room_in_block():
            return None
        if self.blocks.device.type != "cpu" or any(filled != self._begin for filled in self._filled):
            return None
        start, stop = self._begin, self._begin + n
        piece = StepPiece(slice(0, n), 0, 0, -(-stop // self.chunk_size) * self.chunk_size, start)
        made: dict[int | None, PreparedStep | None] = {}
        steps: list[Callable[[], object] | None] = []
        for layer in range(len(self._filled)):
            place, window = self.places[layer], self.config.sliding_window(layer)
            blocks = None if place is None else self.blocks.at_once(place)
            if blocks is None:
                steps.append(None)
                continue
            if window not in made:
                given = rows, [(blocks[:, 0], blocks[:, 1])], [[piece]], [(0, start, piece.rows)]
                scale, before = self.config.attention_scale, self._steps.get(window)
                made[window] = prepared_step(*given, scale=scale, window=window, before=before)
            at, step = blocks.data_ptr(), made[window]
            addresses = [at, at + blocks.stride(1) * blocks.element_size()]
            steps.append(partial(self._take_step, layer, step, addresses, n) if step else None)
        self._steps = made
        return steps

    def _take_step(self, layer: int, step: PreparedStep, addresses: Sequence[int], n: int) -> None:
        """Runs a prepared step of `n` rows in a layer."""
        began = time.perf_counter()
        step(addresses)
        start, stop = self._filled[layer], self._filled[layer] + n
        self._filled[layer] = stop
        self.count_read(stop - max(0, start + 1 - (self.config.sliding_window(layer) or stop)))
        self.reads.seconds += time.perf_counter() - began

    def mass_rows_of(self, n: int) -> int:
        """How many last rows of a pass over `n` tokens have their attention recorded as mass."""
        if not self._mass_rows:
            return 0
        return n if n <= self._mass_rows else min(n, RECENT_ROWS)

    def _passing(self, layer: int, rows: QueryRows) -> Iterator[tuple[int, Tensor]]:
        """Yields the blocks that `rows` attend to. Passes each to the collector, and counts it as read."""
        collector = self.collector
        joined = takes_joined(rows.q, self.blocks.block_size)
        for position, block in self._pieces(layer, rows.first_key, rows.stop, joined):
            if collector is not None:
                collector(layer, position, block)
            self.count_read(min(block.shape[2], rows.stop - position))
            yield position, block
        if self.prefix and layer == len(self._filled) - 1 and rows.stop == self._stop:
            self.release_prefix()

    def _pieces(self, layer: int, first: int, stop: int, joined: bool) -> Iterator[tuple[int, Tensor]]:
        """See `Blocks.pieces`. The blocks of the prefix come first, cut off at position `start`."""
        place = self.places[layer]
        if place is None:
            yield from self.windows.pieces(layer, first, stop)
            return
        if self.prefix:  # all blocks of a layer must be taken from a ring, even those that are not needed
            for position, block in self.prefix._pieces(layer, min(first, self.start), self.start, joined):
                if position < self.start and first < self.start:
                    yield position, block[:, :, : self.start - position]
        for position, block in self.blocks.pieces(place, max(0, first - self.start), stop - self.start, joined=joined):
            yield self.start + position, block

    def release_prefix(self) -> None:
        """Frees the memory that a pass over many tokens took to attend to tokens of the prefix."""
        for holder in self.holders[:-1]:
            holder.blocks.release()

    def gather(self, layer: int, chunks: Tensor) -> tuple[Tensor, Tensor]:
        """See `Blocks.gather`. The chunks of each head must be in ascending order."""
        place = self.places[layer]
        if place is None:
            return self.windows.gather(layer, chunks, self.chunk_size)
        return self._gather(place, chunks, self.length // self.chunk_size)

    def _gather(self, place: int, chunks: Tensor, stop: int) -> tuple[Tensor, Tensor]:
        """`gather` from this cache and its prefix. For chunks after the cache's own tokens, the result has keys and
        values of any other chunks. The cache that holds them replaces these.

        Args: `stop` is the number of whole chunks of the text from which chunks are gathered.
        """
        size, border = self.chunk_size, self.start // self.chunk_size
        own = self.length // size - border
        if self.prefix is None:
            return self.blocks.gather(place, chunks.clamp(max=own - 1) if stop > own else chunks, size)
        found = self.prefix._gather(place, chunks, stop)
        last = chunks[:, max(0, chunks.shape[1] - (stop - border)) :]  # only these can be in this cache
        if own and last.shape[1]:
            ours = self.blocks.gather(place, (last - border).clamp_(0, own - 1), size)
            here = (last >= border).repeat_interleave(size, dim=1).unsqueeze(-1)
            for both, some in zip(found, ours, strict=True):
                end = both[:, both.shape[1] - some.shape[1] :]
                end.copy_(torch.where(here, some, end))
        return found

    def slice(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """See `Blocks.slice`. Only for this cache's own tokens."""
        place = self.places[layer]
        if place is None:
            return self.windows.slice(layer, start, stop)
        return self.blocks.slice(place, start - self.start, stop - self.start)

    def count_read(self, tokens: int, layers: int = 1) -> None:
        """Counts the keys and values of `tokens` tokens in each of this number of layers as read."""
        self.reads.num_bytes += tokens * self._kv_bytes // self.config.kv_layers * layers

    def move_from(self, other: FullCache, length: int) -> None:
        """Moves the first `length` tokens of `other` into this empty cache, if the blocks can be moved. `other` must
        not be used afterwards."""
        if self.blocks.move_from(other.blocks, length):
            self._copy_others(other, length)
            self._filled = [length] * len(self._filled)
            self._begin = self._stop = length
            self._restored, self._restored_with = min(length, other._restored), other._restored_with

    def copy_from(self, other: FullCache, length: int) -> None:
        """Copies the first `length` tokens of `other` into this empty cache, except those that this cache's prefix
        holds.

        `length` must be reachable in `other` (`reachable`). The prefix of `other` must not be longer than this cache's.
        """
        start = self.start
        self._copy_others(other, length)
        if length == start:
            return
        other.blocks.drain()  # blocks may still be on their way to the place from which they are read
        with torch.inference_mode():
            for place in range(self.config.full_layers.num_layers):
                found = torch.cat(other.blocks.export(place, start - other.start, length - other.start)(), dim=2)

                def read(pieces: list[Tensor], found: Tensor = found) -> None:
                    for piece, part in zip(pieces, found.split([piece.shape[2] for piece in pieces], 2), strict=True):
                        piece.copy_(part)

                self.blocks.restore(place, length - start, read)
        self.restored(length, other.computed_with(start, length))

    def _copy_others(self, other: FullCache, length: int) -> None:
        """Copies what the first `length` tokens have outside of blocks: windows and states."""
        self.windows.copy_from(other.windows, length)
        if self.states and other.states:
            self.states.copy_from(other.states, length)

    def export(self, layer: int, start: int, stop: int) -> Callable[[], list[Tensor]]:
        """See `Blocks.export`. Only for this cache's own tokens. Tokens that a layer no longer keeps are zeros."""
        place = self.places[layer]
        if place is None:
            return self.windows.export(layer, start, stop)
        return self.blocks.export(place, start - self.start, stop - self.start)

    def first_restored(self, layer: int, stop: int) -> int:
        """Position of the first token that `restore` needs to fill a layer with what it keeps of `stop` tokens."""
        return 0 if self.places[layer] is not None else self.windows.first_seen(layer, stop)

    def restore(self, layer: int, start: int, stop: int, read: Callable[[list[Tensor]], None]) -> None:
        """See `Blocks.restore`. Only for a cache without a prefix.

        Args: `start` is the position of the first token that is restored. The layer keeps no tokens before it.
        """
        place = self.places[layer]
        if place is None:
            self.windows.restore(layer, start, stop, read)
        else:
            self.blocks.restore(place, stop, read)

    def restored(self, length: int, computed_with: Sequence[int | None] = (None,)) -> None:
        """Sets the length after `restore` has put the first `length` tokens into every layer. All other tokens are
        gone. The states must already be those after these tokens, or `length` must be 0.

        Args: `computed_with` has the numbers of the arithmetic that computed them, see the method `computed_with`.
        """
        self._filled = [length] * len(self._filled)
        self._begin = self._stop = length
        self._restored, self._restored_with = length, tuple(computed_with)
        self.mass.forget()
        if self.states and not length:
            self.states.restart(0)

    def computed_with(self, first: int, stop: int) -> tuple[int | None, ...]:
        """The numbers of the arithmetic that computed the tokens from `first` to `stop`; `None` is an unknown number.

        If some of these tokens were restored, the result has the numbers of all restored tokens. If some were computed
        in this process, it has the number of this process.
        """
        restored = self._restored_with if first < self._restored else ()
        here = (arithmetic(self.blocks.device.type),) if stop > self._restored else ()
        return tuple(dict.fromkeys((*restored, *here)))

    def reachable(self, length: int) -> int:
        """The maximum number of tokens, up to `length`, to which this cache can be rolled back, or which can be copied.
        In every layer, all that the next token attends to must still be present."""
        if self.states:
            length = self.states.reachable(length)
        return length if self.windows.reaches(length) else 0

    def holds_segment(self, first: int, stop: int) -> bool:
        """Whether the tokens from `first` to `stop` can be saved as a segment: layers with windows must still have what
        their windows cover before the end, and before a few tokens earlier; and there must be the states after the end.
        """
        seen = (one for one in (stop, max(first, stop - RECENT_ROWS)) if one)
        return all(map(self.windows.reaches, seen)) and (not self.states or self.states.holds(stop))

    def keep_states_at(self, positions: Sequence[int], start: int) -> None:
        """See `States.keep_at`."""
        if self.states:
            self.states.keep_at(positions, start)

    def rollback(self, length: int) -> None:
        length = min(length, self.length)
        if self.reachable(length) < length:  # a long pass was broken off
            self.windows.forget()
            length = self.start
            if self.states and self.states.reachable(length) < length:
                raise RuntimeError(f"the states after the {length:,} tokens of the prefix are gone")
        if not length:  # windows may hold only later tokens
            self.windows.forget()
        if self.states:
            self.states.rollback(length)
        self._filled = [min(filled, length) for filled in self._filled]
        self._restored = min(self._restored, length)
        self._begin = self._stop = self.length
        self.blocks.rollback(self.length - self.start)
        if states := self.hidden_states:
            states.cut(self.length)


@dataclass(frozen=True)
class QueryRows:
    """The query rows of a pass, and how many of them have their attention mass recorded."""

    q: Tensor
    """`[num_heads, n, head_dim]`, rotated."""
    start: int
    """Position of the first row. Each row attends to the keys up to its own position."""
    window: int
    """The maximum number of keys to which a row attends, including its own."""
    mass_rows: int
    """How many last rows have their attention summed by chunk; 0: none."""

    @property
    def stop(self) -> int:
        """Position of the last row plus 1."""
        return self.start + self.q.shape[1]

    @property
    def first_key(self) -> int:
        """Position of the first key to which any row attends."""
        return max(0, self.start + 1 - self.window)

    def of_mass(self, lse: Tensor) -> Tensor:
        """The part of `lse` `[num_heads, n]` that belongs to the last `mass_rows` rows. It is a copy if there are other
        rows, because the parts of all blocks are kept until the last block."""
        rest = lse.shape[1] - self.mass_rows
        return lse[:, rest:].clone() if rest and self.mass_rows else lse[:, rest:]


class BlockAttention:
    """Attention of a pass's rows to the blocks of a layer.

    `together` and `one_by_one` both return the output, `[num_heads, n, head_dim]` in the rows' dtype; the log-sum-exp
    of the last rows, `[num_heads, mass_rows]`; and the shares of attention that these rows give to chunks, in parts,
    which are valid until the next call.
    """

    def __init__(self, scale: float, chunk_size: int) -> None:
        """Args: `scale` is the factor on scores. `chunk_size` is in tokens; a block consists of whole chunks."""
        self._scale = scale
        self._chunk_size = chunk_size
        self._scratch, self._shares = Scratch(), Shares()

    def held(self) -> Held:
        """See `offload.held`."""
        yield from held_scratch(self._scratch)
        yield from self._shares.held()

    def together(self, rows: QueryRows, blocks: Tensor) -> tuple[Tensor, Tensor, list[MassPart]]:
        """Attends to all `blocks` in one call. Only if `takes_blocks` is true.

        Args: `blocks` is `[num_blocks, 2, num_kv_heads, block_size, head_dim]`, from the first token on.
        """
        chunks = -(-rows.stop // self._chunk_size)
        self._shares.begin()
        mass = self._shares.get(rows.q, rows.mass_rows, chunks) if rows.mass_rows else None
        visible = chunks * self._chunk_size  # the diagonal hides positions after the last token
        out, lse = attend_blocks(
            rows.q, blocks, visible, scale=self._scale, diagonal=rows.start, window=rows.window, mass=mass, rounded=True
        )
        lse = rows.of_mass(lse)
        return out, lse, [] if mass is None else [MassPart(0, mass, lse)]

    def one_by_one(
        self, rows: QueryRows, blocks: Iterable[tuple[int, Tensor]]
    ) -> tuple[Tensor, Tensor, list[MassPart]]:
        """Attends to `blocks` one after another.

        Args: `blocks` are in the order of positions: the position of the first token, and keys and values
            `[2, num_kv_heads, any, head_dim]`.
        """
        self._shares.begin()
        parts: list[MassPart] = []
        running: Tensor | None = None
        whole: tuple[Tensor, Tensor] | None = None  # output and log-sum-exp over the blocks so far
        for position, block in blocks:
            if whole is None and accumulates(rows.q, block):
                running = new_running(rows.q)
            in_every_window = position > rows.stop - 1 - rows.window
            chunks = block.shape[2] // self._chunk_size
            mass = self._shares.get(rows.q, rows.mass_rows, chunks) if rows.mass_rows else None
            out, lse = attend(
                rows.q,
                block[0],
                block[1],
                scale=self._scale,
                diagonal=rows.start - position,
                window=None if in_every_window else rows.window,
                scratch=self._scratch,
                mass=mass,
                running=running,
            )
            if mass is not None:
                parts.append(MassPart(position // self._chunk_size, mass, rows.of_mass(lse)))
            if running is None and whole is not None:
                out, lse = merge_partials((whole[0], out), (whole[1], lse))
            whole = out, lse
        assert whole is not None
        out, lse = whole
        return out.to(rows.q.dtype), rows.of_mass(lse), parts

    @staticmethod
    def in_one_piece(rows: QueryRows, blocks: Iterable[tuple[int, Tensor]]) -> Iterable[tuple[int, Tensor]]:
        """Joins `blocks` to a single piece (a copy) for flash kernels: in 16 bits, their result depends on where pieces
        end. For other implementations, returns the blocks unchanged."""
        coming = iter(blocks)
        position, block = next(coming)
        if accumulates(rows.q, block):
            return chain([(position, block)], coming)
        parts = [block.clone(), *(block.clone() for _, block in coming)]  # each is valid until the next is requested
        return [(position, torch.cat(parts, dim=2))]


@dataclass(frozen=True)
class MassPart:
    """The shares of attention that a pass's last rows gave to some consecutive chunks."""

    first: int
    """The first chunk."""
    shares: Tensor
    """`[num_heads, rows, chunks]`: shares of each row's attention to the keys that `lse` covers."""
    lse: Tensor
    """`[num_heads, rows]`, the log-sum-exp of each row over this part, or over this part and those before."""


class Shares:
    """Memory for the shares of all pieces of a layer, which are valid until the next layer begins.

    It is one buffer, as large as all pieces of a layer together ever were. With one buffer for each piece, each buffer
    would grow to the largest piece that was ever in its place, because the open stretch moves on.
    """

    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self._taken = self._most = 0  # values in the current layer, and the maximum of earlier layers

    def begin(self) -> None:
        """Begins a layer."""
        self._most, self._taken = max(self._most, self._taken), 0
        if self._buffer is not None and self._buffer.numel() < self._most:
            self._buffer = None  # freed before a larger one is taken

    def get(self, q: Tensor, rows: int, chunks: int) -> Tensor:
        """Uninitialised memory for the next piece: `[num_heads, rows, chunks]`, at least float32.

        Args: `q` is `[num_heads, any, head_dim]`; it gives the number of heads, the device and the dtype.
        """
        shape = q.shape[0], rows, chunks
        first, self._taken = self._taken, self._taken + math.prod(shape)
        if self._buffer is None:
            dtype = torch.promote_types(q.dtype, torch.float32)
            self._buffer = torch.empty(max(self._most, self._taken), dtype=dtype, device=q.device)
        if self._taken > self._buffer.numel():  # the buffer is larger from the next layer on
            return torch.empty(shape, dtype=self._buffer.dtype, device=q.device)
        return self._buffer[first : self._taken].view(shape)

    def held(self) -> Held:
        """See `offload.held`."""
        if self._buffer is not None:
            yield "mass", self._buffer


class RecentMass:
    """The attention mass of chunks, by layer: a mean over recent tokens and over the query heads of a KV head.

    A pass of `RECENT_ROWS` tokens or more replaces the mean. A shorter pass is averaged in, with a weight in proportion
    to its tokens. Tokens that are rejected later count too: they attend to much the same chunks as the tokens that take
    their place.
    """

    def __init__(self, num_layers: int, num_kv_heads: int, max_chunks: int, chunk_size: int) -> None:
        self._num_kv_heads, self._max_chunks, self._chunk_size = num_kv_heads, max_chunks, chunk_size
        self._means = [torch.empty(num_kv_heads, 0)] * num_layers  # [num_kv_heads, max_chunks], once there is one
        self._is_known = [False] * num_layers

    def recent(self, layer: int, length: int) -> Tensor:
        """The mass of each whole chunk of the first `length` tokens, `[num_kv_heads, length // chunk_size]`, float32.
        Only after an `add` for this layer."""
        assert self._is_known[layer]
        return self._means[layer][:, : length // self._chunk_size]

    def add(self, layer: int, start: int, parts: Sequence[MassPart], lse: Tensor) -> None:
        """Adds the attention of the last rows of a pass over the tokens from position `start` on.

        Args:
            parts: in the order of chunks. Chunks that are in no part got no attention.
            lse: `[num_heads, rows]`, the log-sum-exp of each row over all keys.
        """
        shares = parts[0].shares
        if not self._means[layer].numel():
            shape = self._num_kv_heads, self._max_chunks
            self._means[layer] = torch.empty(shape, dtype=torch.float32, device=shares.device)
        mean, weight = self._means[layer], min(1.0, shares.shape[1] / RECENT_ROWS)
        if not self._is_known[layer]:
            weight, self._is_known[layer] = 1.0, True
        # The mass of later chunks belongs to tokens that were rolled back.
        kept = 0 if weight == 1.0 else min(-(-start // self._chunk_size), self._max_chunks)
        if adds_mass_compiled(shares):
            add_mass_compiled(mean, [(one.first, one.shares, one.lse) for one in parts], lse, kept, weight)
            return
        # A draft token whose attention is not finite is rejected for that. `nan_to_num` keeps its values out of the
        # mass.
        found = [(first, self._by_head(shares)) for first, shares in _consecutive_shares(parts, lse)]
        if len(found) > 1 or found[0][0]:
            mean[:, kept:] = 0
            mean[:, :kept] *= 1 - weight
            for first, new in found:
                there = mean[:, first : first + new.shape[1]]
                there.add_(new[:, : there.shape[1]].nan_to_num_(), alpha=weight)
            return
        new = found[0][1]  # covers all chunks so far
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
        """Discards the mass of all layers. The memory stays."""
        self._is_known = [False] * len(self._is_known)


def _consecutive_shares(parts: Sequence[MassPart], lse: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Joins the shares of adjacent parts, and converts them to shares of each row's attention to all keys.

    Yields the first chunk and `[num_heads, rows, chunks]`. Many parts are converted in one operation, because a pass
    that streams has one part for each block.
    """
    if len(parts) == 1:  # this part covers all keys
        yield parts[0].first, parts[0].shares
        return
    shares = torch.cat([part.shares for part in parts], dim=-1)
    factors = torch.stack([part.lse for part in parts], dim=-1).sub_(lse.unsqueeze(-1)).exp_()
    done = chunks = 0
    for size, alike in groupby(parts, key=lambda part: part.shares.shape[-1]):  # rarely more than three sizes
        count = len(list(alike))
        some = shares[..., chunks : chunks + count * size].unflatten(-1, (count, size))
        some *= factors[..., done : done + count].unsqueeze(-1)
        done, chunks = done + count, chunks + count * size
    first = at = 0
    for i, part in enumerate(parts):
        stop = at + part.shares.shape[-1]
        if i + 1 == len(parts) or parts[i + 1].first != part.first + stop - at:  # the next part is not adjacent
            yield part.first - (at - first), shares[..., first:stop]
            first = stop
        at = stop
