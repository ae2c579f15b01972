"""Rows of bytes in several places of host memory, one row for each token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from torch import Tensor


class SegmentRows:
    """Consecutive rows of bytes in several places of host memory."""

    def __init__(self, parts: Sequence[memoryview], row_bytes: int) -> None:
        self.parts, self.row_bytes = parts, row_bytes

    @classmethod
    def of(cls, pieces: Sequence[Tensor], half: int, head: int, row_bytes: int) -> Self:
        """A head's keys (`half` 0) or values (1) in pieces `[2, heads, any, head_dim]` in host memory."""
        return cls(byte_views(pieces, half, head), row_bytes)

    def __len__(self) -> int:
        return sum(map(len, self.parts)) // self.row_bytes

    def cut(self, start: int, stop: int) -> Iterator[memoryview]:
        """The memory of rows `start` to `stop`."""
        first, last, at = start * self.row_bytes, stop * self.row_bytes, 0
        for part in self.parts:
            if at < last and at + len(part) > first:
                yield part[max(first - at, 0) : last - at]
            at += len(part)

    def whole_runs(self, run: int) -> Iterator[tuple[int, int, memoryview]]:
        """For each place that holds whole runs of `run` rows: the first run, the last plus 1, and their memory. Runs
        are counted from the first row of all places."""
        row, at = self.row_bytes, 0
        for part in self.parts:
            rows = len(part) // row
            first, stop = -(-at // run), (at + rows) // run
            if first < stop:
                yield first, stop, part[(first * run - at) * row : (stop * run - at) * row]
            at += rows


def byte_views(pieces: Sequence[Tensor], half: int, head: int) -> list[memoryview]:
    """The memory of a head's keys (`half` 0) or values (1) in pieces `[2, heads, any, head_dim]` in host memory."""
    import torch  # not at the top, because listing contexts does not need PyTorch

    return [piece[half, head].view(torch.uint8).numpy().reshape(-1).data for piece in pieces]
