"""The interface for capturing passes: as CUDA graphs on a GPU, as lists of operations on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from ...tp.decoder import Decoder
from ...tp.parallel.ranks import ALONE, Ranks
from .cpu import CpuCapture


class Capture(Protocol):
    """Records a function that starts kernels, so that all its kernels can be started again in one call."""

    runs: bool
    """Whether capturing a function also runs it."""
    joins: bool
    """Whether passes over several sequences are captured as a whole. Sequences with fewer tokens than others then get
    additional tokens, which cost almost nothing on a GPU."""
    passes_before: int
    """Passes with the same number of tokens that run before such a pass is captured. The first may compile kernels, and
    for a few passes a capture is not worth its time."""
    most_tokens: int
    """Maximum number of tokens (of one sequence) in a captured pass. Longer passes are rare, and starting their kernels
    takes a smaller share of the time."""
    pieces_rows: int
    """Maximum number of tokens in a pass that is captured in pieces, without its attention."""
    pieces_tokens: int
    """Maximum number of tokens of one sequence in a pass that is captured in pieces."""

    def takes(self, decoder: Decoder) -> bool:
        """Whether passes of `decoder` can be captured with the selected kernels."""
        ...

    def pool(self) -> Any:
        """A new memory pool, which captured functions share for intermediate results."""
        ...

    def warm_up(self, run: Callable[[], Tensor]) -> Tensor:
        """Runs a function in the way in which it will be captured, so that everything is compiled and loaded. Returns
        its result."""
        ...

    def capture(
        self, run: Callable[[Callable[[], None]], Tensor], pool: Any
    ) -> tuple[list[Callable[[], None]], Tensor]:
        """Captures a function. What it computes during the capture is not used.

        Args:
            run: the function. Its argument is a function that ends a piece and begins the next one.
            pool: a memory pool, see `pool`.

        Returns:
            Functions that each replay a piece; and the tensor that holds the result after all pieces were replayed,
            until the next replay with this pool.

        Raises:
            RuntimeError: the function does something that cannot be captured, such as waiting for the device.
        """
        ...

    def clear(self) -> None:
        """Frees the memory of all captures so far on the device, even of those that are still referenced. None of them
        can be replayed afterwards."""
        ...


def capture_for(device: torch.device, ranks: Ranks = ALONE) -> Capture | None:
    """The object that captures passes on `device`; `None` if passes are not captured there."""
    if device.type == "cuda":
        from .cuda import CudaCapture  # only for a GPU: a CPU has no streams to capture

        return CudaCapture(device)
    return CpuCapture() if ranks.size == 1 else None  # Gloo's sums cannot be captured


def first_reason(error: BaseException) -> str:
    """The first line of the first error. A broken capture fails again when it ends, so `error` may be a later one."""
    while error.__context__ is not None:
        error = error.__context__
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
