"""The functions of CUDA that the link needs: streams, events and page-locking. In tests, a simulator replaces the
class.

Nothing is decided here. `cuda_link` decides the order of operations.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from typing import Any

import torch


class CudaRuntime:
    """CUDA on one device."""

    def __init__(self, device: torch.device) -> None:
        # With the device's number. Without it, PyTorch takes ten microseconds to find it, in each of the calls below.
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)

    def new_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def use(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        """A context in which operations on the device go to `stream`."""
        return torch.cuda.stream(stream)

    def record_event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """An event with a time, after all operations in `stream` so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def synchronize(self) -> None:
        """Returns when the device has finished all operations."""
        torch.cuda.synchronize(self.device)

    def lock_pages(self, address: int, size: int) -> int:
        """Page-locks `size` bytes from `address` on. Returns CUDA's error code; 0 is success."""
        runtime: Any = torch.cuda.cudart()
        with torch.cuda.device(self.device):  # the current device is set for each thread separately
            return int(runtime.cudaHostRegister(address, size, 0))

    def unlock_pages(self, address: int) -> None:
        """Undoes `lock_pages`."""
        runtime: Any = torch.cuda.cudart()
        with torch.cuda.device(self.device):
            runtime.cudaHostUnregister(address)

    def clear_error(self) -> None:
        """Clears the error of a refused call. CUDA keeps it, and PyTorch would raise it after the next kernel launch.
        So this launches a kernel, because PyTorch does not offer `cudaGetLastError`."""
        with suppress(RuntimeError):
            torch.zeros(1, device=self.device)
