"""Captures passes as CUDA graphs. See `capture.Capture` for the interface.

With several ranks, NCCL's collectives are captured, too. This has three requirements. Every rank captures and replays
the same passes (`passes.Graphs.agree`). The communicator exists before (a prefill has used it). And the capture is
limited to its own thread, because PyTorch's watchdog for NCCL queries events in another thread.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...tp.decoder import Decoder


class CudaCapture:
    """Captures on its own stream. Functions are warmed up on it, too, because cuBLAS has a workspace for each
    stream."""

    _broken: ClassVar[list[torch.cuda.CUDAGraph]] = []
    """The objects of broken captures. They are kept, because PyTorch's allocators may still ask them which streams were
    captured. After `clear` they have no graph."""

    runs = False
    joins = True
    passes_before = 1
    most_tokens = 32
    pieces_rows = pieces_tokens = 32

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._stream = torch.cuda.Stream(device)

    def takes(self, decoder: Decoder) -> bool:
        return not decoder.waits_in_steps

    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def warm_up(self, run: Callable[[], Tensor]) -> Tensor:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = run()
        current.wait_stream(self._stream)
        result.record_stream(current)
        return result

    def capture(
        self, run: Callable[[Callable[[], None]], Tensor], pool: Any
    ) -> tuple[list[Callable[[], None]], Tensor]:
        graphs: list[torch.cuda.CUDAGraph] = []

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            graphs[-1].capture_begin(pool, capture_error_mode="thread_local")

        def cut() -> None:
            graphs[-1].capture_end()
            begin()

        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # cached memory cannot be freed during a capture
        try:
            with torch.cuda.stream(self._stream):
                begin()
                try:
                    result = run(cut)
                finally:  # even after an error, although it then fails too: otherwise the stream stays in capture mode
                    graphs[-1].capture_end()
        except BaseException:
            self._give_up(graphs[-1], pool)
            raise
        self._graphs.update(graphs)
        return [graph.replay for graph in graphs], result

    def clear(self) -> None:
        with suppress(RuntimeError):  # the run has already seen errors of the device
            torch.cuda.synchronize(self._device)  # a replay may be in progress
        for graph in (*self._graphs, *self._broken):
            with suppress(RuntimeError):  # the memory of a broken capture was freed when it broke
                graph.reset()

    def _give_up(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        """Cleans up PyTorch's allocator after CUDA broke off a capture. As long as the allocator assumes a capture in
        progress, it does not free memory that two streams have used, and does not empty its cache."""
        self._broken.append(graph)
        with suppress(
            RuntimeError, AttributeError
        ):  # without this, PyTorch 2.11 would assume from now on that the generator is being captured
            generator = torch.cuda.default_generators[self._stream.device_index]
            generator.graphsafe_set_state(generator.clone_state())
        with suppress(RuntimeError):  # raised if the capture ended normally, and something else failed
            torch._C._cuda_endAllocateToPool(self._stream.device_index, pool)
            torch._C._cuda_releasePool(self._stream.device_index, pool)
