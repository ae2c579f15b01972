"""What captures passes: CUDA's graphs on a GPU, lists of operations on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from ...tp.decoder import Decoder
from ...tp.parallel.ranks import ALONE, Ranks
from .cpu import CpuCapture


class Capture(Protocol):
    """Turns a function that starts kernels into one that starts them again, at once."""

    runs: bool
    """Whether capturing a function also runs it."""
    joins: bool
    """Whether passes over several sequences are captured whole: those with fewer tokens get further ones, which cost
    next to nothing on a GPU."""
    passes_before: int
    """Passes over so many tokens that run before one of them is captured: the first may compile, and few are not worth
    a capture."""
    most_tokens: int
    """Tokens of a pass that is captured at most: longer ones are rare, and starting their kernels takes a smaller
    share."""
    pieces_rows: int
    """Tokens of a pass at most of which all but its attention is captured, in pieces."""
    pieces_tokens: int
    """Tokens of one sequence at most in such a pass."""

    def takes(self, decoder: Decoder) -> bool:
        """Whether passes of `decoder`, with the kernels that are selected, can be captured."""
        ...

    def pool(self) -> Any:
        """New room that captured functions share for what they compute on the way."""
        ...

    def warm_up(self, run: Callable[[], Tensor]) -> Tensor:
        """Runs a function as it will be captured, which compiles and loads what it needs; its result."""
        ...

    def capture(
        self, run: Callable[[Callable[[], None]], Tensor], pool: Any
    ) -> tuple[list[Callable[[], None]], Tensor]:
        """Captures a function without relying on what it computes meanwhile.

        Args: `run` may call what it is given, to end a piece and begin the next.

        Returns:
            What replays each piece, and the tensor that holds the result after each replay of all, until the next one
            of this pool.

        Raises:
            RuntimeError: it does something that cannot be captured, such as waiting for the device.
        """
        ...

    def clear(self) -> None:
        """Frees what all captures so far have left on the device, whoever holds what replays them; none is replayed any
        more."""
        ...


def capture_for(device: torch.device, ranks: Ranks = ALONE) -> Capture | None:
    """What captures passes on `device`; `None` where they run as they come."""
    if device.type == "cuda":
        from .cuda import CudaCapture  # only where it is used: a CPU has no streams to capture

        return CudaCapture(device)
    return CpuCapture() if ranks.size == 1 else None  # Gloo's sums are not captured


def first_reason(error: BaseException) -> str:
    """The first line of what went wrong first: a capture that is broken fails again when it ends."""
    while error.__context__ is not None:
        error = error.__context__
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
