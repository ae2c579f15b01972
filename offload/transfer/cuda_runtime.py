"""What the link asks of CUDA: streams, events and page-locking. A class of its own, so that a simulator can replace it.

Nothing here decides anything; what is ordered after what is the business of `cuda_link`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from typing import Any

import torch


class CudaRuntime:
    """CUDA on one device."""

    def __init__(self, device: torch.device) -> None:
        # With its number: PyTorch takes ten microseconds to find it out, at each of the calls below.
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)

    def new_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def use(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        """Within, operations on the device go to `stream`."""
        return torch.cuda.stream(stream)

    def record_event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """An event with a time, behind what `stream` was given so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def synchronize(self) -> None:
        """Returns when the device has done all that it was given."""
        torch.cuda.synchronize(self.device)

    def lock_pages(self, address: int, size: int) -> int:
        """Page-locks `size` bytes from `address` on; CUDA's error code, 0 if that succeeded."""
        runtime: Any = torch.cuda.cudart()
        with torch.cuda.device(self.device):  # which is a thread's own
            return int(runtime.cudaHostRegister(address, size, 0))

    def unlock_pages(self, address: int) -> None:
        """Undoes `lock_pages`."""
        runtime: Any = torch.cuda.cudart()
        with torch.cuda.device(self.device):
            runtime.cudaHostUnregister(address)

    def clear_error(self) -> None:
        """Forgets the error of a call that was refused: CUDA keeps it, and PyTorch would raise it after the next kernel
        it launches. That is what is done here, as PyTorch does not offer `cudaGetLastError`."""
        with suppress(RuntimeError):
            torch.zeros(1, device=self.device)
