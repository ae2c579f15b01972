"""Steps in which the compiled kernels write a layer's rows into its caches and compute attention in one call
(`kernels.attention.PreparedStep`)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ...kernels.attention import PreparedStep, StepRows
from ...kernels.layers import copy_rows
from ...tp.rope import Rope, RopeRows


class StepOfPass:
    """The prepared step of the current pass, if there is one.

    It is made when the first layer needs it. If only positions differ from an earlier pass, it is made from that pass's
    step. The earlier step is kept until then, and a new step may use the memory of its rows.
    """

    def __init__(self) -> None:
        self._step: PreparedStep | None = None
        self.possible = False
        """Whether a prepared step can compute the current pass."""
        self._is_made = False

    def begin(self, *, possible: bool) -> None:
        """Begins a pass. `possible` is whether a prepared step may compute it."""
        self.possible, self._is_made = possible, False

    def get(self, make: Callable[[PreparedStep | None], PreparedStep | None]) -> PreparedStep | None:
        """The step of the current pass; `None` if there is none.

        Args: `make` makes the step. Its argument is an earlier step or `None`, see `kernels.attention.prepared_step`.
        """
        if self.possible and not self._is_made:
            found = make(self._step)
            self._step, self.possible, self._is_made = found or self._step, found is not None, True
        return self._step if self.possible else None

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that the kept step holds."""
        return self._step.tensors() if self._step else ()


def put_rows(
    rows: StepRows, layer: int, given: tuple[Tensor, Tensor, Tensor], rope: Rope, rotation: RopeRows
) -> StepRows:
    """Writes a layer's queries, keys and values to `rows`, and returns `rows`.

    Args: `given` are queries, keys and values; queries and keys are not yet rotated. They are rotated here.
    """
    q, k, v = given
    rope.rotate(layer, q, rotation, out=rows.q)
    rope.rotate(layer, k, rotation, out=rows.k)
    copy_rows(v, rows.v)
    return rows
