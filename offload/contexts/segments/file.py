"""Reads a segment's file and checks everything that it reads, so that no damaged data are returned."""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import xxhash

from .contents import Contents, DamagedError, chained
from .layout import PackedLayout, RawLayout, flags_shape
from .rows import SegmentRows

_RUNS_AT_ONCE = 8
"""Packed runs that are read at once. Large reads are faster, but the data should stay in the processor's caches until
they are unpacked."""


class SegmentFile:
    """A segment's file, open for reading. It stays readable if it is removed in the meantime."""

    def __init__(self, path: Path, contents: Contents, checksum: str | None = None) -> None:
        """Args:
            path: the file.
            contents: what the file must hold.
            checksum: what `write_segment` returned; `None`: not compared. The attribute `checksum` has the file's own.

        Raises:
            DamagedError: the file is missing, or holds something else.
        """
        self.contents = contents
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise DamagedError(f"it cannot be opened: {error.strerror or error}") from error
        try:
            size = os.fstat(self._descriptor).st_size
            self.layout, flags = self._packed_layout(size) if contents.packed else (RawLayout(contents), b"")
            if size != self.layout.file_bytes:
                raise DamagedError(f"it has {size:,} bytes instead of {self.layout.file_bytes:,}")
            header = self.layout.header
            if self._read(0, len(header)) != header:
                raise DamagedError("its header is not that of the segment")
            sums = self._read(self.layout.sums_start, contents.sums_bytes)
            self.checksum = xxhash.xxh3_128_hexdigest(flags + sums)
            if checksum not in (None, self.checksum):
                raise DamagedError("its checksums are not those in the manifest")
            shape = contents.shape.num_layers, contents.heads, contents.runs
            self._sums = np.frombuffer(sums, dtype="<u8").reshape(shape)
        except BaseException:
            self.close()
            raise

    def _packed_layout(self, size: int) -> tuple[PackedLayout, bytes]:
        """Reads which halves of runs are packed. Their place is counted from the end of the file, because the size of
        the layers depends on them."""
        flags_start = size - PackedLayout.tail_bytes(self.contents)
        if flags_start < 0:
            raise DamagedError(f"it has {size:,} bytes, which is too few")
        flags = self._read(flags_start, prod(flags_shape(self.contents)))
        if not flags or max(flags) > 1:
            raise DamagedError("it does not say which parts of it are packed")
        try:
            return PackedLayout.of(self.contents, flags), flags
        except ValueError as error:
            raise DamagedError(f"its layout of packed parts is impossible: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._descriptor)

    def token_ids(self, chain: str) -> list[int]:
        """The token ids of the segment.

        Args: `chain` is the chain before the segment, see `chained`.

        Raises:
            DamagedError: the token ids do not match the segment's chain in the manifest.
        """
        raw = self._read(self.layout.ids_start, self.contents.ids_bytes)
        ids = np.frombuffer(raw, dtype="<i4")
        if chained(chain, ids) != self.contents.chain:  # pyright: ignore[reportArgumentType]
            raise DamagedError("its token ids are not those in the manifest")
        return ids.tolist()

    def check(self, layer: int, kv_head: int) -> None:
        """Checks all keys and values, or states, of a head in a layer.

        Args: `kv_head` is the head's number in the model.

        Raises:
            DamagedError: they are not what was written.
        """
        if isinstance(self.layout, PackedLayout):
            for first in range(self.contents.first_run(layer), self.contents.runs, _RUNS_AT_ONCE):
                self._read_runs(self.layout, layer, kv_head, first, min(first + _RUNS_AT_ONCE, self.contents.runs))
        else:
            size = (self.contents.rows - self.contents.first_token(layer)) * self.contents.shape.row_bytes
            self.read(layer, kv_head, [memoryview(bytearray(size))], [memoryview(bytearray(size))])

    def read(self, layer: int, kv_head: int, keys: Sequence[memoryview], values: Sequence[memoryview]) -> None:
        """Reads the keys and values of a head in a layer into the given memory, and checks them. It reads from the
        first saved token on, as many tokens as the memory has room for.

        Args:
            kv_head: the head's number in the model.
            keys, values: the memory, in the order of positions. Both have room for the same whole number of tokens.

        Raises:
            DamagedError: they are not what was written.
        """
        halves = [SegmentRows(parts, self.contents.shape.row_bytes) for parts in (keys, values)]
        if isinstance(self.layout, PackedLayout):
            self._read_packed(self.layout, layer, kv_head, halves)
        else:
            self._read_raw(self.layout, layer, kv_head, halves)

    def _read_raw(self, layout: RawLayout, layer: int, kv_head: int, halves: Sequence[SegmentRows]) -> None:
        contents = self.contents
        head, row, wanted = kv_head - contents.kv_heads[0], contents.shape.row_bytes, len(halves[0])
        before = contents.first_token(layer)
        runs = contents.runs_of(before + wanted)
        rest = contents.bounds(runs - 1)[1] - before - wanted if wanted else 0  # a checksum covers a whole run
        whole = [SegmentRows([*rows.parts, memoryview(bytearray(rest * row))], row) for rows in halves]
        for half, rows in enumerate(whole):
            self._scatter(layout.half_start(layer, head, half), rows.parts)
        for run in range(contents.first_run(layer), runs):
            found, (start, stop) = xxhash.xxh3_64(), contents.bounds(run)
            for rows in whole:
                for part in rows.cut(start - before, stop - before):
                    found.update(part)
            self._compare(layer, kv_head, run, found.intdigest())

    def _read_packed(self, layout: PackedLayout, layer: int, kv_head: int, halves: Sequence[SegmentRows]) -> None:
        from .unpacking import PackedRuns  # it imports PyTorch, which is not needed to check raw files

        contents, head = self.contents, kv_head - self.contents.kv_heads[0]
        before = contents.first_token(layer)
        wanted = contents.runs_of(before + len(halves[0]))
        for first in range(contents.first_run(layer), wanted, _RUNS_AT_ONCE):
            stop = min(first + _RUNS_AT_ONCE, wanted)
            runs = PackedRuns(layout, layer, head, first, self._read_runs(layout, layer, kv_head, first, stop))
            for half, rows in enumerate(halves):
                here = rows.cut(contents.bounds(first)[0] - before, contents.bounds(stop - 1)[1] - before)
                runs.unpack(half, SegmentRows(list(here), rows.row_bytes))

    def _read_runs(self, layout: PackedLayout, layer: int, kv_head: int, first: int, stop: int) -> np.ndarray:
        """The bytes of packed runs `first` to `stop` of a head, as they are in the file; checked."""
        head = kv_head - self.contents.kv_heads[0]
        start = layout.half_start(layer, head, first, 0)
        found = np.empty(layout.run_stop(layer, head, stop - 1) - start, dtype=np.uint8)
        self._scatter(start, [found.data])
        for run in range(first, stop):
            part = found[layout.half_start(layer, head, run, 0) - start : layout.run_stop(layer, head, run) - start]
            self._compare(layer, kv_head, run, xxhash.xxh3_64_intdigest(part.data))
        return found

    def _compare(self, layer: int, kv_head: int, run: int, checksum: int) -> None:
        if checksum != int(self._sums[layer, kv_head - self.contents.kv_heads[0], run]):
            if self.contents.state_rows:
                raise DamagedError(f"the state of layer {layer}, key head {kv_head} is damaged")
            first = self.contents.first + self.contents.bounds(run)[0]
            raise DamagedError(f"layer {layer}, KV head {kv_head} is damaged from position {first:,} on")

    def _read(self, offset: int, size: int) -> bytes:
        found = bytearray(size)
        self._scatter(offset, [memoryview(found)])
        return bytes(found)

    def _scatter(self, offset: int, parts: Sequence[memoryview]) -> None:
        """Reads consecutive bytes, from `offset` on, into several places."""
        rest = [part for part in parts if len(part)]
        while rest:
            try:
                got = os.preadv(self._descriptor, rest[:512], offset)
            except OSError as error:
                raise DamagedError(f"it cannot be read: {error.strerror or error}") from error
            if not got:
                raise DamagedError("it ends too early")
            offset += got
            while rest and got >= len(rest[0]):
                got -= len(rest.pop(0))
            if got:
                rest[0] = rest[0][got:]
