"""Copies rows of a matrix in host memory to a GPU that needs few of the rows."""

from __future__ import annotations

import torch
from torch import Tensor

from .packages import usable_packages


def reads_host_memory(device: torch.device) -> bool:
    """Whether `rows_from_host` can be called with ids on `device`."""
    return "triton" in usable_packages(device)


def rows_from_host(matrix: Tensor, ids: Tensor) -> Tensor:
    """A copy of some rows, on the device. A kernel reads the rows over the link, without the host and without copy
    operations. So passes that call this function can be captured.

    Args:
        matrix: `[outputs, width]` in page-locked host memory, contiguous, locked in one piece.
        ids: the numbers of the rows, int64 `[n]`, on the device.

    Returns:
        `[n, width]` in the matrix's dtype.
    """
    from .triton.rows import rows_triton  # not imported where it is not used

    return rows_triton(matrix, ids)
