"""The states of layers with linear attention, for one sequence and one tier.

A state cannot be cut back to an earlier token. So each layer has two states: the *committed* state after the last token
that stays, and the *working* state after the newest token. The layer's inputs for the tokens between the two are kept.
If some of these tokens are taken back, the next pass processes the others again. A drafting tier has only a working
state. It begins with the state of the tier on the full cache.

Copies of a few earlier states are kept in host memory: at the end of a prompt, and where another prompt with the same
beginning may differ from it.
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
"""Maximum number of positions for which copies of earlier states are kept."""

_BROKEN = -1
"""The position of a state that is being written, or whose writing failed."""

LEAST_ROWS = 32
"""Tokens that can be taken back, if the run does not say how many."""


@dataclass
class _State:
    """The state of a layer after the first `position` tokens."""

    position: int
    state: Tensor
    """`[value_heads, key_dim, value_dim]` float32."""
    past: Tensor
    """The inputs of the last tokens that the convolution still needs, `[kernel - 1, channels]`."""

    @classmethod
    def empty(cls, linear: LinearAttention, dtype: torch.dtype, device: torch.device) -> _State:
        past = torch.zeros(linear.kernel - 1, linear.channels, dtype=dtype, device=device)
        return cls(0, torch.zeros(linear.state_shape, device=device), past)

    def take(self, other: _State) -> None:
        """Becomes a copy of another state. If the copying is interrupted, the position is `_BROKEN`."""
        self.position = _BROKEN
        self.state.copy_(other.state)
        self.past.copy_(other.past)
        self.position = other.position

    def copy_on_host(self) -> _State:
        return _State(self.position, *(x.clone().cpu() for x in (self.state, self.past)))

    def clear(self, position: int = 0) -> None:
        """Becomes an empty state that continues at a position."""
        self.position = position
        self.state.zero_()
        self.past.zero_()


class _Rows:
    """A layer's inputs for some consecutive tokens, so that the layer can process them again."""

    def __init__(self, room: int, linear: LinearAttention, dtype: torch.dtype, device: torch.device) -> None:
        self.inputs = torch.zeros(room, linear.channels, dtype=dtype, device=device)
        self.gates = torch.zeros(room, 2 * linear.value_heads, dtype=dtype, device=device)
        self.first = self.stop = 0

    def has(self, start: int, stop: int) -> bool:
        """Whether the inputs of tokens `start` to `stop` are kept."""
        return start == stop or self.first <= start <= stop <= self.stop

    def between(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """The inputs and gates of tokens `start` to `stop`."""
        part = slice(start - self.first, stop - self.first) if stop > start else slice(0)
        return self.inputs[part], self.gates[part]

    def put(self, start: int, inputs: Tensor, gates: Tensor, first: int) -> None:
        """Keeps the tokens from `first` on: those before `start` that are kept already, and the given ones from `start`
        on. If there is no room for all of them, or if some are missing, none is kept."""
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
    """The states of all layers with linear attention of a model, or of a rank's part of it."""

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
        rows: maximum number of tokens that can be taken back.
        source: the states of the full cache, if these are the states of a drafting tier with the same weights.
        certain: a function that returns how many first tokens can no longer be taken back; `None`: all tokens before a
            pass.
        """
        self._linear, self._dtype, self._device = linear, dtype, device
        self._source, self._certain = source, certain
        count = len(linear.layers)
        self._working = [_State.empty(linear, dtype, device) for _ in range(count)]
        self._committed = [] if source else [_State.empty(linear, dtype, device) for _ in range(count)]
        self._rows = [_Rows(rows, linear, dtype, device) for _ in range(count)]
        self._kept: dict[int, list[_State]] = {}  # copies by position; each has the layers so far
        self._wanted: frozenset[int] = frozenset()  # positions whose states must be kept
        self._begin = self._stop = 0  # positions of the current pass, or of the last one
        self._passed = [0] * count  # tokens of this pass that each layer has processed
        self._version = 0  # changes whenever a pass begins or tokens are taken back
        self._of_source = -1  # the version of `source` with which these states began

    @classmethod
    def of(cls, config: ModelConfig, dtype: torch.dtype, device: torch.device, rows: int = LEAST_ROWS) -> States | None:
        """The states for a model's full cache; `None` if the model has no linear attention."""
        return cls(config.linear, dtype, device, rows=rows) if config.linear else None

    def drafting(self, rows: int) -> States:
        """The states for a drafting tier with the same weights."""
        return States(self._linear, self._dtype, self._device, rows=rows, source=self)

    def tensors(self) -> Iterator[Tensor]:
        """The tensors that are held on the device."""
        for state in (*self._working, *self._committed):
            yield from (state.state, state.past)
        for rows in self._rows:
            yield from (rows.inputs, rows.gates)

    @property
    def length(self) -> int:
        """Number of tokens that all layers have processed."""
        return self._begin + self._passed[-1]

    def keep_rows(self, rows: int) -> None:
        """Sets how many tokens can be taken back: `rows`, or the number of those that are kept, if that is larger. To
        be called between two passes."""
        for i, old in enumerate(self._rows):
            room = max(rows, old.stop - old.first)
            if room != len(old.inputs):
                self._rows[i] = _Rows(room, self._linear, self._dtype, self._device)
                self._rows[i].put(old.first, *old.between(old.first, old.stop), old.first)

    def begin(self, length: int, n: int) -> None:
        """Announces a pass over `n` tokens after the first `length` tokens."""
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
        """`advance` in a pass over many tokens. These can only be taken back all together."""
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
        """Moves the committed state to the end of the tokens that stay. To be called when a pass begins at `start`."""
        committed, working, rows = self._committed[layer], self._working[layer], self._rows[layer]
        certain = start if self._certain is None else min(start, self._certain())
        if certain <= committed.position:
            return
        if working.position != certain and rows.has(committed.position, certain):
            # The committed state does not change until the working state is complete.
            self._pass_again(committed, rows.between(committed.position, certain), weights, working)
        if working.position == certain:
            self._committed[layer], self._working[layer], committed.position = working, committed, _BROKEN
        elif self._certain is None:
            raise RuntimeError(f"the state after {certain} tokens is gone")
        else:  # only in a draft model, whose states need not be exact
            committed.position = certain
        self._keep(layer, self._committed[layer])

    @staticmethod
    def _pass_again(origin: _State, again: tuple[Tensor, Tensor], weights: DeltaWeights, state: _State) -> None:
        """Sets `state` to the state `origin`, advanced by tokens whose inputs were kept (`again`)."""
        inputs, gates = again
        whole, position = torch.cat((origin.past, inputs)), origin.position
        state.position = _BROKEN
        delta_steps(whole, gates, weights, origin.state, wanted=0, saved=[(len(gates), state.state)])
        state.past.copy_(whole[-weights.past :])
        state.position = position + len(gates)

    def _origin(self, layer: int, start: int) -> tuple[_State, tuple[Tensor, Tensor]]:
        """The state from which a pass at position `start` begins, and the inputs and gates of the tokens that must be
        processed again first."""
        working, rows = self._working[layer], self._rows[layer]
        if self._source is None:
            found = self._known_origin(layer, start)
            if found is None and self._certain is None:
                raise RuntimeError(f"the state after {start} tokens is gone")
            return found or (self._committed[layer], rows.between(start, start))
        if working.position == start:
            return working, rows.between(start, start)
        behind = min(rows.first, start)
        origin, theirs = self._source._known_origin(layer, behind) or (
            self._source._committed[layer],
            rows.between(start, start),
        )
        if not rows.has(behind, start):  # too many tokens to keep; a draft's states need not be exact
            return origin, theirs
        ours = rows.between(behind, start)
        return origin, (torch.cat((theirs[0], ours[0])), torch.cat((theirs[1], ours[1])))

    def _known_origin(self, layer: int, start: int) -> tuple[_State, tuple[Tensor, Tensor]] | None:
        """`_origin` for states that have a committed state. `None` if the needed state is gone. A draft then begins
        with the committed state as it is, because its states need not be exact."""
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
        """Sets at which positions copies of the states are kept, when a pass reaches them.

        Args:
            positions: the numbers of tokens after which the states are wanted.
            start: the position at which the next pass begins. Its states are kept, too, if there are or will be fewer
                than `KEPT` of the others.
        """
        found = [one for one in positions if one > start or one in self._kept]
        self._wanted = frozenset([*found, *([start] if start and len(found) < KEPT else [])])
        more = len(self._kept.keys() | self._wanted) - KEPT
        for position in sorted(self._kept.keys() - self._wanted)[: max(0, more)]:
            del self._kept[position]
        for layer, committed in enumerate(self._committed):
            self._keep(layer, committed)

    @property
    def bytes_on_host(self) -> int:
        """Bytes of the copies of earlier states in host memory."""
        return sum(x.nbytes for kept in self._kept.values() for one in kept for x in (one.state, one.past))

    def reachable(self, length: int) -> int:
        """The maximum number of tokens, up to `length`, after which the states are stored, or can be computed from what
        is stored."""
        states = *self._working, *self._committed
        known = {length, *self._kept, *(state.position for state in states), *(rows.stop for rows in self._rows)}
        return max((one for one in known if 0 <= one <= length and self._reaches(one)), default=0)

    def _reaches(self, length: int) -> bool:
        return len(self._kept.get(length, ())) == len(self._working) or self._can_go_on(length)

    def _can_go_on(self, length: int) -> bool:
        """Whether a pass can begin after `length` tokens without a copy of earlier states."""
        every = zip(self._working, self._committed, self._rows, strict=True)
        return all(working.position == length or rows.has(state.position, length) for working, state, rows in every)

    def _behind(self, layer: int, position: int) -> _State | None:
        """The state of a layer after `position` tokens; `None` if it is not stored."""
        kept = self._kept.get(position, ())
        if len(kept) == len(self._working):
            return kept[layer]
        both = self._working[layer], self._committed[layer]
        return next((state for state in both if state.position == position), None)

    def holds(self, position: int) -> bool:
        """Whether the states of all layers after `position` tokens are stored, so that they can be exported."""
        return all(self._behind(layer, position) for layer in range(len(self._working)))

    def export(self, layer: int, position: int) -> Callable[[], Tensor]:
        """Copies the state of a layer after `position` tokens. Only if `holds` is true for this position.

        Returns:
            A function, which another thread may call. It returns `[key_heads, key_head_numbers]` float32 in host
            memory. For each key head these are the states of its value heads, then its query, its key and its values
            for the tokens that the convolution still needs.
        """
        state = self._behind(layer, position)
        assert state, "the state is gone"
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
        """Sets the state of a layer after `position` tokens to what `export` returned. `restored` must be called when
        all layers are restored."""
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
        """Sets the position after `restore` has set the states of all layers. All other states are forgotten."""
        self._kept = {}
        self._drop_others(position)
        self._went_to(position)

    def rollback(self, length: int) -> None:
        """Takes back all tokens from position `length` on. `length` must be reachable (`reachable`)."""
        if not self._can_go_on(length):
            if length:
                self._begin_with(self._kept[length])
            else:
                self.restart(0)
        self._went_to(length)

    def restart(self, position: int) -> None:
        """Forgets everything, and continues at `position` with empty states."""
        for state in self._committed:
            state.clear(position)
        self._drop_others(position)
        self._went_to(position)

    def copy_from(self, other: States, length: int) -> None:
        """Copies the states of another sequence after its first `length` tokens. `length` must be 0, or reachable in
        `other` (`reachable`)."""
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
        """Sets the committed states of all layers to copies of `states`. All other states are invalid then."""
        for committed, state, working, rows in zip(self._committed, states, self._working, self._rows, strict=True):
            committed.take(state)
            working.position = _BROKEN
            rows.first = rows.stop = state.position

    def _drop_others(self, position: int) -> None:
        """Invalidates the working states and the kept inputs."""
        for working, rows in zip(self._working, self._rows, strict=True):
            working.position, rows.first, rows.stop = _BROKEN, position, position

    def _went_to(self, length: int) -> None:
        self._version += 1
        self._kept = {position: kept for position, kept in self._kept.items() if position <= length}
        self._begin = self._stop = length
        self._passed = [0] * len(self._passed)
