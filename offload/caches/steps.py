"""Steps, that is passes over few rows, of which the compiled kernels take a layer's rows to its caches and attend to
them in one call (`kernels.attention.PreparedStep`)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ...kernels.attention import PreparedStep, StepRows
from ...kernels.layers import copy_rows
from ...tp.rope import Rope, RopeRows


class StepOfPass:
    """The step of the pass under way, if it is one that kernels take. It is made when its first layer comes, from that
    of the pass before where only positions differ."""

    def __init__(self) -> None:
        self._step: PreparedStep | None = None
        self._is_one = self._is_made = False

    def begin(self, *, may_be: bool) -> None:
        """Begins a pass. Args: `may_be` says whether it may be such a step."""
        self._is_one, self._is_made = may_be, False

    def get(self, make: Callable[[PreparedStep | None], PreparedStep | None]) -> PreparedStep | None:
        """The step; `None` where the pass is none.

        Args: `make` is given the one before, see `kernels.attention.prepared_step`.
        """
        if self._is_one and not self._is_made:
            found = make(self._step)
            self._step, self._is_one, self._is_made = found or self._step, found is not None, True
        return self._step if self._is_one else None

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
