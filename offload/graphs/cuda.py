"""Capturing passes as CUDA graphs. See `capture.Capture` for the interface.

On several ranks NCCL's collectives are captured with everything else. What that asks for: every rank captures and
replays the same passes (`graphs.Graphs.agree`); its communicator exists before (a prefill has used it); and capturing
minds its own thread only, as PyTorch's watchdog of NCCL asks for events in another.
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
    """Captures on a stream of its own, on which functions are warmed up too: cuBLAS has a workspace for each stream."""

    _broken: ClassVar[list[torch.cuda.CUDAGraph]] = []
    """Kept, as PyTorch's allocators may still ask them which streams were captured; without a graph after `clear`."""

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
        torch.cuda.empty_cache()  # what is cached cannot be given back while a graph is captured
        try:
            with torch.cuda.stream(self._stream):
                begin()
                try:
                    result = run(cut)
                finally:  # also of one that broke, whose end fails: without it the stream would be capturing still
                    graphs[-1].capture_end()
        except BaseException:
            self._give_up(graphs[-1], pool)
            raise
        self._graphs.update(graphs)
        return [graph.replay for graph in graphs], result

    def clear(self) -> None:
        with suppress(RuntimeError):  # an error of the device belongs to the run, which has seen it
            torch.cuda.synchronize(self._device)  # a replay may be under way
        for graph in (*self._graphs, *self._broken):
            with suppress(RuntimeError):  # of one whose memory was given back when it broke
                graph.reset()

    def _give_up(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        """Ends what a capture that CUDA broke off leaves open in PyTorch's allocator, which would not free any memory
        that two streams have used, nor empty its cache, as long as it takes a capture to be under way."""
        self._broken.append(graph)
        with suppress(
            RuntimeError, AttributeError
        ):  # PyTorch 2.11 would take the generator to be captured from here on
            generator = torch.cuda.default_generators[self._stream.device_index]
            generator.graphsafe_set_state(generator.clone_state())
        with suppress(RuntimeError):  # the capture ended in order, and something else failed
            torch._C._cuda_endAllocateToPool(self._stream.device_index, pool)
            torch._C._cuda_releasePool(self._stream.device_index, pool)
