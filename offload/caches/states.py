"""States of layers with linear attention, of one sequence and one tier.

A state cannot be cut back, so each layer has two: one behind tokens that stay (*committed*), and one behind the newest
(*working*). Of the tokens between them what goes into the layer is kept: where some are taken back, the others pass
again, on the way of the next pass. A drafting tier has a working state alone, and begins with what the full cache's
tier has.

Copies of a few earlier states stay in host memory: where a prompt ends, and where others that begin alike may part
from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.delta_rule import DeltaWeights, delta_chunks, delta_steps
from ...kernels.selection import STEP_ROWS
from ...tp.model.config import ModelConfig
from ...tp.model.linear_attention import LinearAttention

KEPT = 3
"""Copies of earlier states, at most."""

_BROKEN = -1
"""The position of a state that is being written, or was when something failed."""

LEAST_ROWS = 32
"""Tokens of a layer that can be taken back, where it is not known how many may have to."""


@dataclass
class _State:
    """Of a layer, behind the tokens before a position."""

    position: int
    state: Tensor
    """`[value_heads, key_dim, value_dim]` float32."""
    past: Tensor
    """What the convolution sees of the last tokens, `[kernel - 1, channels]`."""

    @classmethod
    def empty(cls, linear: LinearAttention, dtype: torch.dtype, device: torch.device) -> _State:
        past = torch.zeros(linear.kernel - 1, linear.channels, dtype=dtype, device=device)
        return cls(0, torch.zeros(linear.state_shape, device=device), past)

    def take(self, other: _State) -> None:
        """Becomes a copy of another one; a broken one, if that is interrupted."""
        self.position = _BROKEN
        self.state.copy_(other.state)
        self.past.copy_(other.past)
        self.position = other.position

    def copy_on_host(self) -> _State:
        return _State(self.position, *(x.clone().cpu() for x in (self.state, self.past)))

    def clear(self, position: int = 0) -> None:
        """Has seen nothing, and goes on at a position."""
        self.position = position
        self.state.zero_()
        self.past.zero_()


class _Rows:
    """What went into a layer of some tokens that follow one another, so that they can pass again."""

    def __init__(self, room: int, linear: LinearAttention, dtype: torch.dtype, device: torch.device) -> None:
        self.inputs = torch.zeros(room, linear.channels, dtype=dtype, device=device)
        self.gates = torch.zeros(room, 2 * linear.value_heads, dtype=dtype, device=device)
        self.first = self.stop = 0

    def has(self, start: int, stop: int) -> bool:
        """Whether it has the tokens from one position to another."""
        return start == stop or self.first <= start <= stop <= self.stop

    def between(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Inputs and gates of the tokens from one position to another."""
        part = slice(start - self.first, stop - self.first) if stop > start else slice(0)
        return self.inputs[part], self.gates[part]

    def put(self, start: int, inputs: Tensor, gates: Tensor, first: int) -> None:
        """Has tokens from `start` on, behind those from `first` on that are there already. Those that there is no room
        for are not kept."""
        if first != self.first:
            kept = tuple(x.clone() for x in self.between(first, start)) if self.has(first, start) else ()
            self.first = self.stop = first
            if kept:
                self.put(first, kept[0], kept[1], first)
        stop = start + inputs.shape[0]
        if not first <= start <= self.stop or self.first + len(self.inputs) < stop:
            self.first = self.stop = stop
            return
        place = slice(start - self.first, stop - self.first)
        self.inputs[place], self.gates[place], self.stop = inputs, gates, stop


class States:
    """Those of all such layers of a model, or of a rank's part of it."""

    def __init__(
        self,
        linear: LinearAttention,
        dtype: torch.dtype,
        device: torch.device,
        *,
        rows: int = LEAST_ROWS,
        source: States | None = None,
        certain: Callable[[], int] | None = None,
    ) -> None:
        """Args:
        rows: tokens that can be taken back.
        source: of the full cache, where these are a drafting tier's of the same weights.
        certain: how many tokens are not taken back any more; `None`: those before a pass.
        """
        self._linear, self._dtype, self._device = linear, dtype, device
        self._source, self._certain = source, certain
        count = len(linear.layers)
        self._working = [_State.empty(linear, dtype, device) for _ in range(count)]
        self._committed = [] if source else [_State.empty(linear, dtype, device) for _ in range(count)]
        self._rows = [_Rows(rows, linear, dtype, device) for _ in range(count)]
        self._kept: dict[int, list[_State]] = {}  # by position, of layers so far
        self._wanted: frozenset[int] = frozenset()  # positions whose states are to be kept
        self._begin = self._stop = 0  # of the pass under way, or of the last one
        self._passed = [0] * count  # tokens of it, by layer
        self._version = 0  # another one whenever a pass begins or tokens are taken back
        self._of_source = -1  # the source's, when these began with it

    @classmethod
    def of(cls, config: ModelConfig, dtype: torch.dtype, device: torch.device, rows: int = LEAST_ROWS) -> States | None:
        """Those of a model's full cache; `None` for one without such layers."""
        return cls(config.linear, dtype, device, rows=rows) if config.linear else None

    def drafting(self, rows: int) -> States:
        """Those of a drafting tier of the same weights."""
        return States(self._linear, self._dtype, self._device, rows=rows, source=self)

    def tensors(self) -> Iterator[Tensor]:
        """What is held on the device."""
        for state in (*self._working, *self._committed):
            yield from (state.state, state.past)
        for rows in self._rows:
            yield from (rows.inputs, rows.gates)

    @property
    def length(self) -> int:
        """Tokens that all layers have seen."""
        return self._begin + self._passed[-1]

    def keep_rows(self, rows: int) -> None:
        """Has room for so many tokens that can be taken back, or for those that are there, if they are more; between
        two passes."""
        for i, old in enumerate(self._rows):
            room = max(rows, old.stop - old.first)
            if room != len(old.inputs):
                self._rows[i] = _Rows(room, self._linear, self._dtype, self._device)
                self._rows[i].put(old.first, *old.between(old.first, old.stop), old.first)

    def begin(self, length: int, n: int) -> None:
        """Announces a pass over `n` tokens behind the first `length`."""
        self._begin, self._stop = length, length + n
        self._passed = [0] * len(self._passed)
        self._version += 1
        if self._source is not None and self._of_source != self._source._version:
            self._of_source = self._source._version
            for working, rows in zip(self._working, self._rows, strict=True):
                working.position, rows.first, rows.stop = _BROKEN, length, length

    def advance(self, layer: int, inputs: Tensor, gates: Tensor, weights: DeltaWeights) -> Tensor:
        """See `tp.decoder.Cache.advance_states`."""
        start = self._begin + self._passed[layer]
        self._passed[layer] += inputs.shape[0]
        if self._source is None and start == self._begin:
            self._commit(layer, start, weights)
        if self._stop - self._begin > STEP_ROWS:
            return self._advance_far(layer, start, inputs, gates, weights)
        origin, (again, gates_again) = self._origin(layer, start)
        working, rows, count = self._working[layer], self._rows[layer], inputs.shape[0]
        whole, all_gates = torch.cat((origin.past, again, inputs)), torch.cat((gates_again, gates))
        working.position, saved = _BROKEN, [(len(all_gates), working.state)]
        out = delta_steps(whole, all_gates, weights, origin.state, wanted=count, saved=saved)
        working.past.copy_(whole[-weights.past :])
        working.position = start + count
        rows.put(start, inputs, gates, rows.first if self._source else self._committed[layer].position)
        return out

    def _advance_far(self, layer: int, start: int, inputs: Tensor, gates: Tensor, weights: DeltaWeights) -> Tensor:
        """`advance` in a pass over many tokens, which are taken back all together or not at all."""
        working = self._working[layer]
        if working.position != start:
            origin, again = self._origin(layer, start)
            if len(again[0]):
                self._pass_again(origin, again, weights, working)
            else:
                working.take(origin)
        whole = torch.cat((working.past, inputs))
        working.position = _BROKEN
        out = delta_chunks(whole, gates, weights, working.state, start)
        working.past.copy_(whole[-weights.past :])
        working.position = start + inputs.shape[0]
        self._rows[layer].first = self._rows[layer].stop = working.position
        self._keep(layer, working)
        return out

    def _commit(self, layer: int, start: int, weights: DeltaWeights) -> None:
        """Moves the committed state behind the tokens that stay, where a pass begins at `start`."""
        committed, working, rows = self._committed[layer], self._working[layer], self._rows[layer]
        certain = start if self._certain is None else min(start, self._certain())
        if certain <= committed.position:
            return
        if working.position != certain and rows.has(committed.position, certain):
            # The committed one stays what it is until the other is whole.
            self._pass_again(committed, rows.between(committed.position, certain), weights, working)
        if working.position == certain:
            self._committed[layer], self._working[layer], committed.position = working, committed, _BROKEN
        elif self._certain is None:
            raise RuntimeError(f"the state behind token {certain} is gone")
        else:  # of a draft, which may be anything
            committed.position = certain
        self._keep(layer, self._committed[layer])

    @staticmethod
    def _pass_again(origin: _State, again: tuple[Tensor, Tensor], weights: DeltaWeights, state: _State) -> None:
        """Has `state` become what another one is once tokens that were kept have passed."""
        inputs, gates = again
        whole, position = torch.cat((origin.past, inputs)), origin.position
        state.position = _BROKEN
        delta_steps(whole, gates, weights, origin.state, wanted=0, saved=[(len(gates), state.state)])
        state.past.copy_(whole[-weights.past :])
        state.position = position + len(gates)

    def _origin(self, layer: int, start: int) -> tuple[_State, tuple[Tensor, Tensor]]:
        """A state to begin with at position `start`, and the inputs and gates of the tokens that pass again before."""
        working, rows = self._working[layer], self._rows[layer]
        if self._source is None:
            found = self._known_origin(layer, start)
            if found is None and self._certain is None:
                raise RuntimeError(f"the state behind token {start} is gone")
            return found or (self._committed[layer], rows.between(start, start))
        if working.position == start:
            return working, rows.between(start, start)
        behind = min(rows.first, start)
        origin, theirs = self._source._known_origin(layer, behind) or (
            self._source._committed[layer],
            rows.between(start, start),
        )
        if not rows.has(behind, start):  # more than there is room for: a draft may be anything
            return origin, theirs
        ours = rows.between(behind, start)
        return origin, (torch.cat((theirs[0], ours[0])), torch.cat((theirs[1], ours[1])))

    def _known_origin(self, layer: int, start: int) -> tuple[_State, tuple[Tensor, Tensor]] | None:
        """`_origin` of what has committed states; `None`: what it should begin with is gone, of which a draft, that may
        be anything, has the committed state as it is."""
        working, committed, rows = self._working[layer], self._committed[layer], self._rows[layer]
        if working.position == start:
            return working, rows.between(start, start)
        if rows.has(committed.position, start):
            return committed, rows.between(committed.position, start)
        return None

    def _keep(self, layer: int, state: _State) -> None:
        """Copies a state to host memory, if it is wanted."""
        if state.position in self._wanted:
            kept = self._kept.setdefault(state.position, [])
            if len(kept) == layer:
                kept.append(state.copy_on_host())

    def keep_at(self, positions: Sequence[int], start: int) -> None:
        """Has the states behind so many tokens kept, as they come; and those behind the first `start`, with which the
        next pass begins, if fewer than `KEPT` of the others are there or will be."""
        found = [one for one in positions if one > start or one in self._kept]
        self._wanted = frozenset([*found, *([start] if start and len(found) < KEPT else [])])
        more = len(self._kept.keys() | self._wanted) - KEPT
        for position in sorted(self._kept.keys() - self._wanted)[: max(0, more)]:
            del self._kept[position]
        for layer, committed in enumerate(self._committed):
            self._keep(layer, committed)

    @property
    def bytes_on_host(self) -> int:
        """What copies of earlier states take."""
        return sum(x.nbytes for kept in self._kept.values() for one in kept for x in (one.state, one.past))

    def reachable(self, length: int) -> int:
        """The most tokens, up to so many, whose state is there, or can be computed from what is."""
        states = *self._working, *self._committed
        known = {length, *self._kept, *(state.position for state in states), *(rows.stop for rows in self._rows)}
        return max((one for one in known if 0 <= one <= length and self._reaches(one)), default=0)

    def _reaches(self, length: int) -> bool:
        return len(self._kept.get(length, ())) == len(self._working) or self._can_go_on(length)

    def _can_go_on(self, length: int) -> bool:
        """Whether a pass can begin behind so many tokens."""
        every = zip(self._working, self._committed, self._rows, strict=True)
        return all(working.position == length or rows.has(state.position, length) for working, state, rows in every)

    def _behind(self, layer: int, position: int) -> _State | None:
        """The state of a layer behind so many tokens, if it is there itself."""
        kept = self._kept.get(position, ())
        if len(kept) == len(self._working):
            return kept[layer]
        both = self._working[layer], self._committed[layer]
        return next((state for state in both if state.position == position), None)

    def holds(self, position: int) -> bool:
        """Whether the states behind so many tokens are there themselves, so that they can be exported."""
        return all(self._behind(layer, position) for layer in range(len(self._working)))

    def export(self, layer: int, position: int) -> Callable[[], Tensor]:
        """Copies the state of a layer behind so many tokens, which it `holds`. What it gives can be called in another
        thread.

        Returns:
            What gives `[key_heads, key_head_numbers]` float32 in host memory: of each key head the states of its value
            heads, then of the tokens that the convolution still sees its query, its key and its values.
        """
        state = self._behind(layer, position)
        assert state, "it is gone"
        copy, linear = state.copy_on_host(), self._linear

        def by_key_head() -> Tensor:
            order, widths = linear.by_key_head, (linear.keys, linear.keys, linear.values)
            q, k, v = copy.past.float().split(widths, dim=1)
            v = v.unflatten(1, (linear.value_heads, -1))[:, order].flatten(1)
            parts = [part.unflatten(1, (linear.key_heads, -1)) for part in (q, k, v)]
            past = torch.cat(parts, dim=2).transpose(0, 1)  # [key_heads, kernel - 1, channels of one]
            return torch.cat((copy.state[order].reshape(linear.key_heads, -1), past.flatten(1)), dim=1)

        return by_key_head

    def restore(self, layer: int, position: int, numbers: Tensor) -> None:
        """Takes what `export` gave of a layer behind so many tokens; `restored` follows once all layers have theirs."""
        linear, state = self._linear, self._committed[layer]
        together = linear.value_heads // linear.key_heads
        past_numbers = (linear.kernel - 1) * (linear.channels // linear.key_heads)
        of_state, of_past = numbers.split((numbers.shape[1] - past_numbers, past_numbers), dim=1)
        past = of_past.unflatten(1, (linear.kernel - 1, -1)).transpose(0, 1)  # [kernel - 1, key_heads, any]
        widths = linear.key_dim, linear.key_dim, together * linear.value_dim
        q, k, v = (part.flatten(1) for part in past.split(widths, dim=2))
        order = torch.tensor(linear.by_key_head).argsort()
        v = v.unflatten(1, (linear.value_heads, -1))[:, order].flatten(1)
        state.position = position
        state.state.copy_(of_state.reshape(linear.state_shape)[order])
        state.past.copy_(torch.cat((q, k, v), dim=1))

    def restored(self, position: int) -> None:
        """Says that every layer has the state behind so many tokens now, put there by `restore`, and nothing else."""
        self._kept = {}
        self._drop_others(position)
        self._went_to(position)

    def rollback(self, length: int) -> None:
        """Takes back all tokens from position `length` on, which is reachable."""
        if not self._can_go_on(length):
            if length:
                self._begin_with(self._kept[length])
            else:
                self.restart(0)
        self._went_to(length)

    def restart(self, position: int) -> None:
        """Has seen nothing, and goes on at `position`."""
        for state in self._committed:
            state.clear(position)
        self._drop_others(position)
        self._went_to(position)

    def copy_from(self, other: States, length: int) -> None:
        """Becomes what another sequence's are behind its first `length` tokens, which it reaches, or of none."""
        if not length:
            self.restart(0)
            return
        kept = other._kept.get(length, [])
        if len(kept) == len(self._working):
            self._begin_with(kept)
        else:
            both = zip(other._working, other._committed, strict=True)
            self._begin_with([working if working.position == length else committed for working, committed in both])
            self.keep_rows(max(len(self._rows[0].inputs), *(length - state.position for state in self._committed)))
            for mine, state, theirs in zip(self._rows, self._committed, other._rows, strict=True):
                mine.put(state.position, *theirs.between(state.position, length), state.position)
        self._kept = {at: [one.copy_on_host() for one in states] for at, states in other._kept.items() if at <= length}
        self._went_to(length)

    def _begin_with(self, states: Sequence[_State]) -> None:
        """Takes the committed states of all layers."""
        for committed, state, working, rows in zip(self._committed, states, self._working, self._rows, strict=True):
            committed.take(state)
            working.position = _BROKEN
            rows.first = rows.stop = state.position

    def _drop_others(self, position: int) -> None:
        """Has nothing but committed states."""
        for working, rows in zip(self._working, self._rows, strict=True):
            working.position, rows.first, rows.stop = _BROKEN, position, position

    def _went_to(self, length: int) -> None:
        self._version += 1
        self._kept = {position: kept for position, kept in self._kept.items() if position <= length}
        self._begin = self._stop = length
        self._passed = [0] * len(self._passed)
