"""What a pass takes on a machine where some were measured: a line through them, in place of a data sheet.

A pass takes an overhead, time for each byte it reads, and time for each operation it multiplies. The three are fitted
to measured passes over different numbers of rows and tokens. Unlike in `cost_model` they add up: what is hidden behind
what is in the measurements already.
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
    """Bytes of weights, keys and values."""
    multiplied: float
    """Operations."""
    seconds: float


@dataclass(frozen=True)
class PassLine:
    """Seconds of a pass: `overhead_s` and so much for each byte and operation; none is below 0."""

    overhead_s: float
    byte_s: float
    operation_s: float

    def seconds(self, read: float, multiplied: float) -> float:
        return self.overhead_s + read * self.byte_s + multiplied * self.operation_s

    def worst(self, passes: Sequence[MeasuredPass]) -> float:
        """By how much it misses the pass that it fits worst, as a share of what was measured."""
        return max(abs(self.seconds(p.read, p.multiplied) / p.seconds - 1) for p in passes)


@dataclass(frozen=True)
class MeasuredMachine:
    """A machine whose passes were measured. See `cost_model.Hardware`."""

    line: PassLine
    link_bandwidth: float
    """Bytes a second."""
    draft_s: float | None
    """Of a step of the draft model; `None` if none was measured."""
    round_seconds: float
    """What a round of speculation takes besides its passes: the refresh, agreement between ranks."""
    disk_bandwidth: float = DISK_BANDWIDTH
    """Bytes a second."""

    def pass_seconds(self, read: float, multiplied: float, layers: int, gpus: int) -> float:
        return self.line.seconds(read, multiplied)

    def draft_step_seconds(self, read: float, layers: int) -> float:
        assert self.draft_s is not None
        return self.draft_s


def fit(passes: Sequence[MeasuredPass]) -> PassLine:
    """The line that misses `passes` least, in the sum of squares of relative errors, with no term below 0.

    Raises:
        ValueError: there is none to fit.
    """
    if not passes:
        raise ValueError("no pass to fit a line to")
    seconds = torch.tensor([p.seconds for p in passes], dtype=torch.float64)
    terms = torch.tensor([[1.0, p.read, p.multiplied] for p in passes], dtype=torch.float64)
    scale = terms.mean(dim=0)  # bytes and operations are many orders of magnitude from 1
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
