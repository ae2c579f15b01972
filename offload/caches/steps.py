"""Passes over few rows for which the compiled kernels write a layer's rows into its caches and attend to them in one
call (`kernels.attention.PreparedStep`)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ...kernels.attention import PreparedStep, StepRows
from ...kernels.layers import copy_rows
from ...tp.rope import Rope, RopeRows


class StepOfPass:
    """The prepared step of the pass under way, where there is one. It is made when the first layer asks for it, from
    that of an earlier pass where only positions differ. The earlier one is kept until then, and the rows of a new one
    may be where its rows were."""

    def __init__(self) -> None:
        self._step: PreparedStep | None = None
        self.possible = False
        """Whether the pass under way may be computed by one."""
        self._is_made = False

    def begin(self, *, possible: bool) -> None:
        """Begins a pass."""
        self.possible, self._is_made = possible, False

    def get(self, make: Callable[[PreparedStep | None], PreparedStep | None]) -> PreparedStep | None:
        """The step; `None` where there is none.

        Args: `make` is given an earlier one, see `kernels.attention.prepared_step`.
        """
        if self.possible and not self._is_made:
            found = make(self._step)
            self._step, self.possible, self._is_made = found or self._step, found is not None, True
        return self._step if self.possible else None

    def tensors(self) -> tuple[Tensor, ...]:
        """What it keeps."""
        return self._step.tensors() if self._step else ()


def put_rows(
    rows: StepRows, layer: int, given: tuple[Tensor, Tensor, Tensor], rope: Rope, rotation: RopeRows
) -> StepRows:
    """`rows` with a layer's queries, keys and values, which are not yet rotated."""
    q, k, v = given
    rope.rotate(layer, q, rotation, out=rows.q)
    rope.rotate(layer, k, rotation, out=rows.k)
    copy_rows(v, rows.v)
    return rows
