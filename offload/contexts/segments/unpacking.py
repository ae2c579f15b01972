"""Unpacks the packed runs of a segment's file into given memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ....kernels.packing import unpack
from .layout import PackedLayout, slot_layout
from .rows import SegmentRows


class PackedRuns:
    """The bytes of consecutive runs of a KV head in a layer, as they are in the file."""

    def __init__(self, layout: PackedLayout, layer: int, head: int, first: int, content: np.ndarray) -> None:
        """Args:
        head: counted from the first head in the file.
        first: the number of the first run.
        content: the bytes of the runs, uint8.
        """
        self._layout, self._contents = layout, layout.contents
        self._place, self._first = (layer, head), first
        self._start = layout.half_start(layer, head, first, 0)
        self._bytes = torch.from_numpy(content)

    def unpack(self, half: int, rows: SegmentRows) -> None:
        """Writes the keys (`half` 0) or values (1) to `rows`, from the first token of the first run on, as many as
        `rows` has room for."""
        size, dim = self._contents.run, self._contents.shape.head_dim
        beside = set(range(self._first, self._first + -(-len(rows) // size)))
        for start, stop, memory in rows.whole_runs(size):
            start, stop = self._first + start, self._first + stop
            beside -= set(range(start, stop))
            blocks = torch.frombuffer(memory, dtype=torch.bfloat16).view(stop - start, 1, size, dim)
            for at, end in self._alike(half, start, stop):
                self._unpack(half, at, blocks[at - start : end - start])
        for run in beside:  # these runs go to several places, or not all of their tokens are wanted
            layout = slot_layout(self._contents, run)
            block = torch.empty(1, 1, layout.tokens, dim, dtype=torch.bfloat16)
            self._unpack(half, run, block)
            at, found = 0, block.view(torch.uint8).numpy().reshape(-1).data
            first = (run - self._first) * size
            for part in rows.cut(first, first + layout.tokens):
                part[:] = found[at : at + len(part)]
                at += len(part)

    def _alike(self, half: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Divides runs `start` to `stop` into parts: packed runs at equal distances in memory, or one raw run."""
        while start < stop:
            end = start + 1
            while end < stop and self._is_packed(half, start) and self._is_packed(half, end):
                if self._offset(half, end) - self._offset(half, end - 1) != self._step(half, start):
                    break
                end += 1
            yield start, end
            start = end

    def _unpack(self, half: int, run: int, blocks: Tensor) -> None:
        """Unpacks runs from `run` on into `blocks` `[any, 1, tokens, head_dim]`. The runs are one part, see
        `_alike`."""
        if self._is_packed(half, run):
            size = slot_layout(self._contents, run).slot_bytes
            strides = self._step(half, run) if len(blocks) > 1 else size, 1
            unpack(self._bytes.as_strided((len(blocks), size), strides, self._offset(half, run)), blocks, threads=1)
        else:
            start, stop = self._contents.bounds(run)
            raw = self._bytes[self._offset(half, run) :][: (stop - start) * self._contents.shape.row_bytes]
            blocks[0, 0, : stop - start].view(torch.uint8).view(-1).copy_(raw)

    def _is_packed(self, half: int, run: int) -> bool:
        return bool(self._layout.packed[(*self._place, run, half)])

    def _offset(self, half: int, run: int) -> int:
        return self._layout.half_start(*self._place, run, half) - self._start

    def _step(self, half: int, run: int) -> int:
        return self._offset(half, run + 1) - self._offset(half, run)
