"""Rows of a matrix in host memory, for a GPU that needs few of them."""

from __future__ import annotations

import torch
from torch import Tensor

from .packages import usable_packages


def reads_host_memory(device: torch.device) -> bool:
    """Whether `rows_from_host` can be called with ids on `device`."""
    return "triton" in usable_packages(device)


def rows_from_host(matrix: Tensor, ids: Tensor) -> Tensor:
    """A copy of some rows, on the device. Neither the host nor the link's copies have a part in it: a kernel reads them
    over the link, so that passes that call it can be captured.

    Args:
        matrix: `[outputs, width]` in page-locked host memory, contiguous, locked in one piece.
        ids: of the rows, int64 `[n]`, on the device.

    Returns:
        `[n, width]` in the matrix's dtype.
    """
    from .triton.rows import rows_triton  # not imported where it is not used

    return rows_triton(matrix, ids)
