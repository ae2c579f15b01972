"""Choosing implementations by hand. Without it the functions of this package take the fastest that the device has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

Backend = Literal["plain", "compiled", "flash_cpu", "flash_cuda", "flash_package", "triton"]
"""Implementations of attention: PyTorch operations, the compiled CPU kernels, PyTorch's flash kernels for CPUs and for
GPUs, the flash-attn package, and the Triton kernels of this package."""


@dataclass(frozen=True)
class Selection:
    """Implementations that were chosen by hand; `None` leaves the choice to the device and the call.

    A choice is ignored for calls that the implementation cannot compute: the compiled kernels support some dtypes and
    head sizes, the flash kernels no window.
    """

    attention: Backend | None = None
    """For passes of at most `FEW_ROWS` rows, and for prefill unless `prefill` says otherwise."""
    prefill: Backend | None = None
    """For passes of more rows."""
    layers: Literal["plain"] | None = None
    """For projections, MLP and rotation: `plain` does without the compiled kernels."""

    def backend(self, few_rows: bool) -> Backend | None:
        """The chosen implementation of attention."""
        return self.attention if few_rows else self.prefill or self.attention


_BY_DEVICE = Selection()

_selection: ContextVar[Selection] = ContextVar("selection", default=_BY_DEVICE)

selected = _selection.get
"""The selection in force, in this thread."""


@contextmanager
def use_kernels(
    *, attention: Backend | None = None, prefill: Backend | None = None, layers: Literal["plain"] | None = None
) -> Iterator[None]:
    """Within, in this thread, attention and layers are computed by these implementations; see `Selection`.

    For measuring one against another, and for tests:

        with use_kernels(attention="plain", layers="plain"):  # PyTorch alone
            engine.generate(...)
    """
    token = _selection.set(Selection(attention, prefill, layers))
    try:
        yield
    finally:
        _selection.reset(token)
