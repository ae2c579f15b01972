"""The retrieval cache: the most relevant chunks of a full cache, up to a fixed budget, and all later tokens.

A drafting tier runs the target's own weights on this cache. Chunks are chosen for each layer and KV head, by the
attention that the last tokens gave them in the full cache. Keys keep the rotation of their true position. The tokens
after the last choice are the *tail*. Their keys and values come from the drafting tier, until the full cache has
processed these tokens; then they are copied from the full cache. Chunks and tail are in one buffer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.attention import Scratch, attend
from ...kernels.chunks import chunk_scores, copy_chunks, select_chunks
from ...kernels.delta_rule import DeltaWeights
from ...tp.pages import lasting_memory
from ...tp.rope import Rope
from ..held import Held, held_scratch
from .full import BlockCollector, FullCache
from .states import LEAST_ROWS, States
from .token_slots import TokenSlots

COPIED = 1024
"""Tokens of a layer that are copied at a time if a refresh copies chunks itself. It limits the size of the buffer in
which they are gathered."""


@dataclass(frozen=True)
class _Selection:
    """Chunks that the next pass of the full cache copies to the retrieval cache while their blocks stream."""

    chunks: list[Tensor]
    """`[num_kv_heads, count]` by layer."""
    base: int
    """The end of the last chunk that could be chosen: the position at which the tail begins."""


class RetrievalCache:
    """Chunks of `source` up to a budget, followed by the tail. See `tp.decoder.Cache` for the interface.

    `refresh` must be called before the first `attend`.
    """

    def __init__(
        self,
        source: FullCache,
        rope: Rope,
        *,
        budget: int,
        chunk_size: int,
        tail: int = 64,
        headroom: int = 0,
        state_rows: int = LEAST_ROWS,
        join: Callable[[list[Tensor]], list[Tensor]] = list,
    ) -> None:
        """Args:
        source: the full cache from which chunks are chosen.
        rope: the rotation of queries and keys.
        budget: maximum number of tokens in chunks. Only whole chunks of `chunk_size` tokens are kept, at least one.
        tail: tokens for which there is room after the chunks. More tokens take new memory.
        headroom: tokens that may be added before the chunks that are chosen after the next round are in place.
        state_rows: tokens of a round whose states can be taken back.
        join: averages the attention mass of chunks over the ranks that hold the same KV head, for all layers at once.
        """
        self.source = source
        self._join = join
        self.select: Callable[[Tensor, int], Tensor] = select_chunks
        """Chooses chunks by their scores, in ascending order for each head."""
        self._selected: _Selection | None = None
        self.chunk_size = chunk_size
        self.max_chunks = max(1, budget // chunk_size)
        self._tail, self._headroom = tail, headroom
        self.rope = rope
        self._scale = source.config.attention_scale
        self._scratch = Scratch()
        self._states: States | None = None  # made at the first choice of chunks, if `source` has states
        self._state_rows = state_rows
        num_layers = source.config.kv_layers
        self._buffers: list[tuple[Tensor, Tensor]] = []  # keys, values [num_kv_heads, room, head_dim] per layer
        self._kept = 0  # tokens in chunks, at the front of a buffer
        self._tail_start = 0  # position of the first token of the tail
        self._verified = 0  # tokens before this position have the full cache's keys and values
        self._filled = [0] * num_layers
        self.at: TokenSlots | None = None
        self._memory = object()  # a new object whenever buffers are replaced
        self._drop_passes: list[weakref.WeakMethod[Callable[[], None]]] = []
        source.hand_blocks_to(self.collector)

    @property
    def length(self) -> int:
        return self._filled[-1]

    @property
    def memory(self) -> object:
        return self._memory

    def held(self) -> Held:
        """See `offload.held`."""
        yield from (("retrieval", buffer) for layer in self._buffers for buffer in layer)
        if self._selected:
            yield from (("retrieval", chunks) for chunks in self._selected.chunks)
        yield from (("retrieval", tensor) for tensor in (self._states.tensors() if self._states else ()))
        yield from held_scratch(self._scratch)

    @property
    def tail_is_full(self) -> bool:
        """Whether chunks must be chosen now, because the tail may have no room until the next choice. To be asked
        between a pass of `source` and `update_tail`."""
        base = self._selected.base if self._selected else self._tail_start
        return self.source.length - base + self._headroom > self._tail

    def before_growth(self, drop: Callable[[], None]) -> None:
        self._drop_passes = [known for known in self._drop_passes if known()]
        self._drop_passes.append(weakref.WeakMethod(drop))

    def token_slots(self, n: int) -> TokenSlots | None:
        return None if self.source.states else self._slots_from(self.length)

    def _slots_from(self, start: int) -> TokenSlots:
        return TokenSlots(start, self._kept + start - self._tail_start)

    def advance(self, length: int) -> None:
        self._filled = [length] * len(self._filled)

    def prepare(self, n: int) -> None:
        self._make_room(self._kept + self.length - self._tail_start + n)
        if self.source.states:
            assert self._states
            self._states.begin(self.length, n)

    def advance_states(self, layer: int, inputs: Tensor, gates: Tensor, weights: DeltaWeights) -> Tensor:
        assert self._states
        return self._states.advance(layer, inputs, gates, weights)

    def keep_hidden(self, hidden: Tensor) -> None:
        if states := self.source.hidden_states:
            states.keep(self.length, hidden)

    def hidden_before(self, n: int) -> Tensor:
        raise NotImplementedError("the target is no multi-token-prediction head")

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        start, n = self._filled[layer], q.shape[1]
        at = self.at or self._slots_from(start)
        q = self.rope.rotate(layer, q, at.rotation)
        keys, values = self._buffers[layer]
        at.put(keys, k, self.rope.angles(layer, at.rotation, n))
        at.put(values, v)
        self._filled[layer] = start + n
        # The window counts slots here. Two slots are never further apart than their positions, so no key is hidden that
        # the window covers.
        window = self.source.config.sliding_window(layer)
        if window is not None and isinstance(at.slot, int) and window >= at.slot + n:
            window = None
        scratch = None if self.at else self._scratch  # a captured pass needs memory at fixed addresses
        return attend(
            q,
            keys,
            values,
            scale=self._scale,
            diagonal=at.diagonal,
            window=window,
            scratch=scratch,
            rounded=True,
        )[0]

    def buffers(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values, `[num_kv_heads, room, head_dim]`."""
        return self._buffers[layer]

    def slot(self, n: int) -> int | None:
        """The slot of the first of the next `n` tokens, if a pass over them attends to all earlier slots in every
        layer; otherwise `None`. To be called after `prepare`."""
        slot = self._slots_from(self.length).slot
        windows, rooms = self.source.config.sliding_windows, {keys.shape[1] for keys, _ in self._buffers}
        if not isinstance(slot, int) or self.at or any(window and window < slot + n for window in windows):
            return None
        if len(rooms) > 1:  # memory ran out while the buffers grew
            return None
        return slot

    def note_appended(self, layer: int, n: int) -> None:
        """Counts `n` more tokens in a layer, whose keys and values were already written."""
        self._filled[layer] += n

    def rollback(self, length: int) -> None:
        """Forgets tokens from `length` on. If `length` is before the tail, `refresh` must be called before `attend`."""
        self._filled = [min(filled, length) for filled in self._filled]
        self._verified = min(self._verified, length)
        if states := self.source.hidden_states:
            states.cut(length)

    def begin_anew(self) -> None:
        """Forgets all tokens, because `source` continues with another prompt. The memory and captured passes stay."""
        self._selected, self._kept, self._tail_start = None, 0, 0
        self.rollback(0)
        self.source.hand_blocks_to(self.collector)

    @torch.inference_mode()
    def refresh(self, *, at_once: bool = False) -> None:
        """Chooses the chunks again, by the attention of the last tokens in `source`, and copies the tail after them.

        The chunks are copied immediately if this is the first refresh, or if all of `source` is on the device. If
        blocks stream, the next pass of `source` copies them (see `collector`). So nothing crosses the link for a
        refresh.

        Args: `at_once`: copy the chunks immediately in any case. Then the present content does not matter, nor how long
            ago it was updated.
        """
        length = self.source.length
        base = length // self.chunk_size * self.chunk_size
        chosen = self._choose(length)
        if self._buffers and not self.source.all_on_device and not at_once:
            self.update_tail()
            self._make_room(chosen[0].shape[1] * self.chunk_size)
            self._selected = _Selection(chosen, base)
            return
        self._selected = None
        self._kept = chosen[0].shape[1] * self.chunk_size
        self._tail_start = self._verified = base
        self._make_room(self._kept)
        for layer in range(len(self._buffers) if self._kept else 0):
            together = max(1, COPIED // self.chunk_size)
            for first in range(0, chosen[layer].shape[1], together):
                self._copy(layer, chosen[layer][:, first : first + together], first * self.chunk_size)
        self._filled = [self._tail_start] * len(self._filled)
        self.update_tail()

    def reserve(self) -> None:
        """Allocates memory for the whole budget and the tail."""
        self._make_room(1)

    @torch.inference_mode()
    def update_tail(self) -> None:
        """Replaces the tail's keys and values by those of the full cache, up to its last token."""
        length = self.source.length
        if self._selected:  # the last pass has copied these chunks
            self._kept = self._selected.chunks[0].shape[1] * self.chunk_size
            self._tail_start = self._verified = self._selected.base
            self._selected = None
        start, stop = self._kept + self._verified - self._tail_start, self._kept + length - self._tail_start
        self._make_room(stop)
        for layer, (keys, values) in enumerate(self._buffers):
            if stop > start:
                keys[:, start:stop], values[:, start:stop] = self.source.slice(layer, self._verified, length)
        self._verified = length
        self._filled = [max(filled, length) for filled in self._filled]

    def collector(self) -> BlockCollector | None:
        """The function to which the next pass of `source` passes its blocks, see `FullCache.hand_blocks_to`; `None` if
        no chunks wait to be copied."""
        return self._collect if self._selected else None

    def _choose(self, length: int) -> list[Tensor]:
        """Chooses the chunks of each layer, `[num_kv_heads, count]`. `count` is 0 if there is no whole chunk yet."""
        num_chunks = length // self.chunk_size
        if not num_chunks:
            shape = (self.source.config.num_kv_heads, 0)
            return [torch.zeros(shape, dtype=torch.int64, device=self.source.blocks.device)] * len(self._filled)
        layers = range(len(self._filled))
        masses = self._join([self.source.recent_mass(layer) for layer in layers])
        starts = [self._first_chunk(layer, length) for layer in layers]
        return [
            self.select(chunk_scores(mass)[:, start:], self.max_chunks) + start
            for mass, start in zip(masses, starts, strict=True)
        ]

    def _copy(self, layer: int, chunks: Tensor, first: int) -> None:
        """Copies `chunks` `[num_kv_heads, count]` to a layer's buffer, from slot `first` on."""
        place = slice(first, first + chunks.shape[1] * self.chunk_size)
        for buffer, tokens in zip(self._buffers[layer], self.source.gather(layer, chunks), strict=True):
            buffer[:, place] = tokens

    def _collect(self, layer: int, position: int, block: Tensor) -> None:
        """Copies the chosen chunks of a block over the old chunks. Nothing reads these during a pass of `source`."""
        assert self._selected is not None
        keys, values = self._buffers[layer]
        chunks = self._selected.chunks[layer]
        kept = slice(0, chunks.shape[1] * self.chunk_size)
        copy_chunks(block, position // self.chunk_size, chunks, keys[:, kept], values[:, kept], self.chunk_size)

    def _first_chunk(self, layer: int, length: int) -> int:
        """The first chunk that may be chosen. In a layer with a sliding window, this is the first chunk in the window
        of the token at `length`, or an earlier one if the chunks from there on would not fill the budget. `attend`
        hides what is before the window."""
        window = self.source.config.sliding_window(layer) or length + 1
        return max(0, min((length + 1 - window) // self.chunk_size, length // self.chunk_size - self.max_chunks))

    def _make_room(self, slots: int) -> None:
        """Allocates room for at least `slots` tokens in each layer; the first time for the whole budget and the tail.
        Grows one layer after another, because a copy of all layers may not fit into memory beside them."""
        room = min((keys.shape[1] for keys, _ in self._buffers), default=0)
        if slots <= room:
            return
        wanted = max(slots, room + self._tail, self.max_chunks * self.chunk_size + self._tail)
        for known in self._drop_passes:
            if drop := known():
                drop()
        self._drop_passes = []
        self._memory = object()
        c, blocks = self.source.config, self.source.blocks
        if not self._buffers:
            empty = torch.empty(c.num_kv_heads, 0, c.head_dim, dtype=blocks.dtype, device=blocks.device)
            self._buffers = [(empty, empty)] * c.kv_layers
            self._states = self.source.states and self.source.states.drafting(self._state_rows)
        for layer, (keys, values) in enumerate(self._buffers):
            if keys.shape[1] < wanted:
                self._buffers[layer] = _grown(keys, wanted), _grown(values, wanted)


def _grown(buffer: Tensor, room: int) -> Tensor:
    """A copy of the buffer that is extended with zeros to `[num_kv_heads, room, head_dim]`."""
    num_heads, filled, head_dim = buffer.shape
    grown = lasting_memory((num_heads, room, head_dim), buffer.dtype, buffer.device)
    grown[:, :filled] = buffer
    grown[:, filled:].zero_()
    return grown
