"""Predicts the time of a pass from measured passes on the same machine, instead of from a data sheet.

The time of a pass is the sum of an overhead, a time for each byte that it reads, and a time for each operation. These
three terms are fitted to measured passes over different numbers of rows and tokens. `cost_model` takes the maximum of
its terms instead. Here the terms add up, as the measurements already contain what runs in parallel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch

from .cards import DISK_BANDWIDTH


@dataclass(frozen=True)
class MeasuredPass:
    """The mean of many passes of one kind."""

    read: float
    """Bytes of weights, keys and values that a pass reads."""
    multiplied: float
    """Operations of a pass."""
    seconds: float
    """Mean time of a pass."""


@dataclass(frozen=True)
class PassLine:
    """Seconds of a pass as a linear function of its bytes and operations. No term is below 0."""

    overhead_s: float
    """Seconds of every pass."""
    byte_s: float
    """Seconds per byte read."""
    operation_s: float
    """Seconds per operation."""

    def seconds(self, read: float, multiplied: float) -> float:
        """Predicted seconds of a pass that reads `read` bytes and computes `multiplied` operations."""
        return self.overhead_s + read * self.byte_s + multiplied * self.operation_s

    def worst(self, passes: Sequence[MeasuredPass]) -> float:
        """The maximum error over all passes, as a share of the measured time."""
        return max(abs(self.seconds(p.read, p.multiplied) / p.seconds - 1) for p in passes)


@dataclass(frozen=True)
class MeasuredMachine:
    """A machine whose passes were measured. See `cost_model.Hardware`."""

    line: PassLine
    """The times of the target's passes."""
    link_bandwidth: float
    """Bytes per second."""
    draft_s: float | None
    """Seconds of a step of the draft model; `None` if none was measured."""
    round_seconds: float
    """Seconds of a round of speculation besides its passes: the refresh, agreement between ranks."""
    disk_bandwidth: float = DISK_BANDWIDTH
    """Bytes per second."""

    def pass_seconds(self, read: float, multiplied: float, layers: int, gpus: int) -> float:
        """See `cost_model.Hardware`. `layers` and `gpus` are not used: the measurements include them."""
        return self.line.seconds(read, multiplied)

    def draft_step_seconds(self, read: float, layers: int) -> float:
        """See `cost_model.Hardware`: the measured time, for any arguments."""
        assert self.draft_s is not None
        return self.draft_s


def fit(passes: Sequence[MeasuredPass]) -> PassLine:
    """Fits a line to `passes`: the one with the minimum sum of squared relative errors, with no term below 0.

    Raises:
        ValueError: `passes` is empty.
    """
    if not passes:
        raise ValueError("no pass to fit a line to")
    seconds = torch.tensor([p.seconds for p in passes], dtype=torch.float64)
    terms = torch.tensor([[1.0, p.read, p.multiplied] for p in passes], dtype=torch.float64)
    scale = terms.mean(dim=0)  # bytes and operations are many orders of magnitude larger than 1
    shares = terms / scale / seconds[:, None]
    best, least = torch.zeros(3, dtype=torch.float64), float("inf")
    # The optimum with no term below 0 is the free optimum over some of the terms: three terms have seven such choices.
    for count in (1, 2, 3):
        for chosen in combinations(range(3), min(count, len(passes))):
            found = torch.linalg.lstsq(shares[:, chosen], torch.ones_like(seconds)[:, None], driver="gelsd").solution
            missed = float((shares[:, chosen] @ found - 1).square().sum())
            if bool((found >= 0).all()) and missed < least * (1 - 1e-9):
                best, least = torch.zeros(3, dtype=torch.float64), missed
                best[list(chosen)] = found[:, 0]
    overhead, byte, operation = (best / scale).tolist()
    return PassLine(overhead, byte, operation)
