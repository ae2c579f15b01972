"""Rotary position embedding in the half-split layout of Hugging Face's Llama (RoFormer, arXiv 2104.09864)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..kernels.layers import rotate
from .model.config import ModelConfig
from .model.rope_scaling import RopeConfig

Angles = tuple[Tensor, Tensor]
"""Cosines and signed sines of `n` positions, each `[n, rotated dimensions]`, float32."""

RopeRows = tuple[Tensor, ...]
"""The `Angles` of `n` positions for each kind of layer, as one flat tuple: see `Rope.angles`."""


_PIECE = 65536
"""Positions whose angles are computed together. Limits the memory that this takes besides the table itself."""


def rope_bytes(config: ModelConfig, positions: int) -> int:
    """Bytes of the tables for `positions` positions."""
    return 2 * 4 * config.rotated * positions * len(config.ropes)


class Rope:
    """Rotates queries and keys by position, with tables of cosines and sines that grow with the positions in use.

    There is one pair of tables. If layers with sliding windows are rotated differently, there is a second pair for
    them. Angles and the rotation itself are float32, whatever the model's dtype; the result has the input's dtype.

    With dynamic scaling, the rotation of a token depends on the length of the sequence when the token is added. All
    tokens of a prompt count as added together, later tokens one by one. `begin` sets the length of the prompt. Then
    the rotation at every position is fixed, whatever the number of draft tokens and the size of passes.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self._width, self._kinds, self._device = config.rotated, config.ropes, device
        windows = [config.sliding_window(layer) for layer in range(config.num_layers)]
        self._kind_of = [int(len(self._kinds) > 1 and window is not None) for window in windows]
        self._prompt_length = 0
        self._tables: list[Angles] = []
        self._forget()

    def begin(self, prompt_length: int) -> bool:
        """Sets the number of tokens of the prompt. Returns whether this changes rotations: then keys that were rotated
        before must not be used again. This only happens with dynamic scaling."""
        changes = self.changes_with(prompt_length)
        self._prompt_length = prompt_length
        if not changes:
            return False
        rows = self._positions
        self._forget()
        self.reserve(rows)
        return True

    def _forget(self) -> None:
        empty = torch.empty(0, self._width, device=self._device)
        self._tables = [(empty, empty)] * len(self._kinds)

    @property
    def _positions(self) -> int:
        """The number of positions in the tables."""
        return self._tables[0][0].shape[0]

    @property
    def depends_on_prompt(self) -> bool:
        """Whether rotations depend on the length of the prompt."""
        return self._kinds[0].type == "dynamic"

    def changes_with(self, prompt_length: int) -> bool:
        """Whether a prompt of this length would be rotated differently from the prompt of the last `begin`."""
        original = self._kinds[0].original_positions
        lengths = (max(length, original) for length in (prompt_length, self._prompt_length))
        return self.depends_on_prompt and len(set(lengths)) > 1

    def reserve(self, positions: int) -> None:
        """Extends the tables to all positions below `positions`. After a call for the whole context, they do not grow
        any more."""
        if positions <= self._positions:
            return
        lengths = torch.arange(1, positions + 1)
        lengths[: self._prompt_length] = self._prompt_length
        for kind, config in enumerate(self._kinds):
            cos, sin = (torch.empty(positions, self._width, device=self._device) for _ in range(2))
            for first in range(0, positions, _PIECE):
                piece = slice(first, first + _PIECE)
                self._fill(config, first, lengths[piece], cos[piece], sin[piece])
            self._tables[kind] = cos, sin

    def _fill(self, config: RopeConfig, first: int, lengths: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Writes rows `[n, rotated dimensions]` of a pair of tables, from position `first` on. `lengths`: see
        `RopeConfig.inverse_frequencies`."""
        frequencies = config.inverse_frequencies(self._width, lengths).to(self._device)
        positions = torch.arange(first, first + len(lengths), device=self._device)
        angles = positions.float().unsqueeze(1) * frequencies  # [n, rotated dimensions / 2]
        half = self._width // 2
        torch.mul(angles.cos(), config.attention_factor, out=cos[:, :half])
        torch.mul(angles.sin(), config.attention_factor, out=sin[:, half:])
        cos[:, half:] = cos[:, :half]
        # The table includes the sign of rotate_half, so that a rotation is a roll and two products.
        torch.neg(sin[:, half:], out=sin[:, :half])

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the tables, each with the name `rope` under which the memory of a run is listed."""
        yield from (("rope", table) for both in self._tables for table in both)

    def rows(self, start: int, n: int) -> RopeRows:
        """The rows of all tables for the `n` positions from `start` on."""
        self._reach(start + n)
        return tuple(table[start : start + n] for both in self._tables for table in both)

    def _reach(self, stop: int) -> None:
        """Extends the tables to at least all positions below `stop`."""
        if stop > self._positions:
            self.reserve(max(stop, 2 * self._positions))

    def rotate(self, layer: int, x: Tensor, start: int | RopeRows, out: Tensor | None = None) -> Tensor:
        """Rotates `x` `[heads, n, head_dim]` of a layer, whose rows have the positions `start`, `start + 1`, ...

        Args:
            layer: the number of the layer.
            start: the first position; or, if the host does not know the positions, the rows of the tables for them.
            out: see `kernels.rotate`.
        """
        return rotate(x, *self.angles(layer, start, x.shape[1]), out)

    def angles(self, layer: int, start: int | RopeRows, n: int) -> Angles:
        """The angles by which `rotate` rotates `n` rows of a layer."""
        kind = self._kind_of[layer]
        if not isinstance(start, int):
            return start[2 * kind], start[2 * kind + 1]
        self._reach(start + n)
        cos, sin = self._tables[kind]
        return cos[start : start + n], sin[start : start + n]

    def rotate_to(self, layer: int, x: Tensor, position: int) -> Tensor:
        """Rotates all rows of `x` `[heads, n, head_dim]` of a layer as if each had the position `position`."""
        self.reserve(position + 1)
        cos, sin = self._tables[self._kind_of[layer]]
        return rotate(x, cos[position], sin[position])
