"""A segment: the keys and values of up to `SEGMENT` consecutive tokens in a file, as safetensors, written once.

The file holds a tensor a layer, `[num_kv_heads, 2, tokens, head_dim]` (keys, then values, rotated by their positions),
the token ids, and checksums: one for each layer, KV head and run of `RUN` positions. Every tensor begins at a multiple
of 4,096 bytes and the tokens are padded up to that, so that files can be read past the page cache. A file may hold some
of the model's KV heads, those of one rank. Its header follows from `Contents` alone: a reader that knows what a file
must hold compares the header byte by byte.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
import xxhash

from .disk import Disk, write_all

if TYPE_CHECKING:
    from torch import Tensor

SEGMENT = 16_384
"""Tokens of a segment, but for the last one of a context, which may have fewer."""

RUN = 1024
"""Consecutive positions with a checksum for each layer and KV head: a multiple of 64."""

_ALIGNMENT = 4096
DTYPES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2)}
"""What safetensors calls a number format, and the bytes of a number."""


class DamagedError(Exception):
    """A file that does not hold what it must. The message says what is wrong, without its name."""


@dataclass(frozen=True)
class Shape:
    """What the keys and values of a token are, of a whole model."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    """PyTorch's name for it, such as `bfloat16`."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a key, or of a value."""
        return self.head_dim * DTYPES[self.dtype][1]

    @property
    def token_bytes(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.row_bytes


@dataclass(frozen=True)
class Contents:
    """What a segment's file holds."""

    shape: Shape
    fingerprint: str
    """Of the model, see `fingerprint`."""
    first: int
    """Position of the first token."""
    tokens: int
    chain: str
    """See `chained`: of all token ids from the first of the context to the last of the segment."""
    kv_heads: tuple[int, int]
    """The model's KV heads that are in the file: the first, and the one behind the last."""

    @property
    def heads(self) -> int:
        return self.kv_heads[1] - self.kv_heads[0]

    @property
    def runs(self) -> int:
        return -(-self.tokens // RUN)

    @property
    def padded(self) -> int:
        """Tokens that the file has room for."""
        row = self.shape.row_bytes
        granule = 64 * (_ALIGNMENT // gcd(_ALIGNMENT, 64 * row))
        return -(-self.tokens // granule) * granule

    @property
    def data_start(self) -> int:
        return len(self.header)

    @property
    def half_bytes(self) -> int:
        """Of the keys, or the values, of one head in one layer."""
        return self.padded * self.shape.row_bytes

    def half_start(self, layer: int, head: int, half: int) -> int:
        """Where in the file the keys (`half` 0) or values (1) of a head begin; heads count from the file's first."""
        return self.data_start + ((layer * self.heads + head) * 2 + half) * self.half_bytes

    @property
    def ids_start(self) -> int:
        return self.half_start(self.shape.num_layers, 0, 0)

    @property
    def sums_start(self) -> int:
        return self.ids_start + _aligned(4 * self.tokens)

    @property
    def sums_bytes(self) -> int:
        return 8 * self.shape.num_layers * self.heads * self.runs

    @property
    def file_bytes(self) -> int:
        return self.sums_start + _aligned(self.sums_bytes)

    @cached_property
    def header(self) -> bytes:
        """The header of a safetensors file: its length (8 bytes), JSON, and spaces up to a multiple of 4,096 bytes."""
        layers, heads = self.shape.num_layers, self.heads
        layer_bytes = 2 * heads * self.half_bytes
        size = [heads, 2, self.padded, self.shape.head_dim]
        kind, _ = DTYPES[self.shape.dtype]
        described: dict[str, object] = {
            "__metadata__": {
                "format": "triforce-kv-1",
                "fingerprint": self.fingerprint,
                "first": str(self.first),
                "tokens": str(self.tokens),
                "chain": self.chain,
                "kv_heads": f"{self.kv_heads[0]}:{self.kv_heads[1]} of {self.shape.num_kv_heads}",
            }
        }
        for layer in range(layers):
            offsets = [layer * layer_bytes, (layer + 1) * layer_bytes]
            described[f"layer.{layer}"] = {"dtype": kind, "shape": size, "data_offsets": offsets}
        at = layers * layer_bytes
        for name, dtype, width, used in (
            ("token_ids", "I32", 4, 4 * self.tokens),
            ("checksums", "U64", 8, self.sums_bytes),
        ):
            room = _aligned(used)
            described[name] = {"dtype": dtype, "shape": [room // width], "data_offsets": [at, at + room]}
            at += room
        text = json.dumps(described, separators=(",", ":")).encode()
        text += b" " * (_aligned(8 + len(text)) - 8 - len(text))
        return len(text).to_bytes(8, "little") + text


def chained(chain: str, token_ids: Sequence[int]) -> str:
    """The hash of `chain` and the token ids after it; the first chain of a context is its model's fingerprint."""
    return xxhash.xxh3_128_hexdigest(chain.encode() + np.asarray(token_ids, dtype="<i4").tobytes())


def write_segment(
    disk: Disk, path: Path, contents: Contents, token_ids: Sequence[int], layers: Iterable[Sequence[Tensor]]
) -> str:
    """Writes a segment's file durably; until it is whole its name is another one.

    Args:
        token_ids: those of the segment.
        layers: of each layer the keys and values in pieces `[2, heads, any, head_dim]` in host memory, in the order of
            positions, `contents.tokens` in all.

    Returns:
        The checksum of the file's checksums, for the manifest.

    Raises:
        OSError: the disk is full, or cannot be written.
    """
    sums = np.zeros((contents.shape.num_layers, contents.heads, contents.runs), dtype="<u8")
    padding = bytes(contents.half_bytes - contents.tokens * contents.shape.row_bytes)
    with disk.replacing(path) as file:
        write_all(file, contents.header)
        for layer, pieces in enumerate(layers):
            for head in range(contents.heads):
                hashes = [xxhash.xxh3_64() for _ in range(contents.runs)]
                for half in (0, 1):
                    rows = Rows.of(pieces, half, head, contents.shape.row_bytes)
                    for run, (start, stop) in enumerate(_runs(contents.tokens)):
                        for part in rows.cut(start, stop):
                            write_all(file, part)
                            hashes[run].update(part)
                    write_all(file, padding)
                sums[layer, head] = [one.intdigest() for one in hashes]
        ids = np.asarray(token_ids, dtype="<i4").tobytes()
        write_all(file, ids.ljust(_aligned(len(ids)), b"\0"))
        write_all(file, sums.tobytes().ljust(_aligned(sums.nbytes), b"\0"))
    return xxhash.xxh3_128_hexdigest(sums.tobytes())


class SegmentFile:
    """A segment's file, open for reading; whoever removes it in the meantime takes nothing away."""

    def __init__(self, path: Path, contents: Contents, checksum: str | None = None) -> None:
        """Args:
            checksum: what `write_segment` returned; `None` to find it out.

        Raises:
            DamagedError: it is not there, or holds something else.
        """
        self.contents = contents
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise DamagedError(f"it cannot be opened: {error.strerror or error}") from error
        try:
            size = os.fstat(self._descriptor).st_size
            if size != contents.file_bytes:
                raise DamagedError(f"it has {size:,} bytes instead of {contents.file_bytes:,}")
            header = contents.header
            if self._read(0, len(header)) != header:
                raise DamagedError("its header is not that of the segment")
            sums = self._read(contents.sums_start, contents.sums_bytes)
            self.checksum = xxhash.xxh3_128_hexdigest(sums)
            if checksum not in (None, self.checksum):
                raise DamagedError("its checksums are not those in the manifest")
            shape = contents.shape.num_layers, contents.heads, contents.runs
            self._sums = np.frombuffer(sums, dtype="<u8").reshape(shape)
        except BaseException:
            self.close()
            raise

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

        Args: `chain` is that of the tokens before it.

        Raises:
            DamagedError: they are not those that the manifest's chain is of.
        """
        raw = self._read(self.contents.ids_start, 4 * self.contents.tokens)
        ids = np.frombuffer(raw, dtype="<i4")
        if chained(chain, ids) != self.contents.chain:  # pyright: ignore[reportArgumentType]
            raise DamagedError("its token ids are not those in the manifest")
        return ids.tolist()

    def read(self, layer: int, kv_head: int, keys: Sequence[memoryview], values: Sequence[memoryview]) -> None:
        """Reads the first tokens of a KV head in a layer into memory, as many as that holds, and checks them.

        Args:
            kv_head: counted in the model.
            keys, values: bytes, in the order of positions; both of the same, whole number of tokens.

        Raises:
            DamagedError: they are not what was written.
        """
        contents = self.contents
        head, row = kv_head - contents.kv_heads[0], contents.shape.row_bytes
        wanted = sum(map(len, keys)) // row
        checked = min(-(-wanted // RUN) * RUN, contents.tokens)  # a checksum is of a whole run
        halves = []
        for half, parts in enumerate((keys, values)):
            whole = [*parts, memoryview(bytearray((checked - wanted) * row))]
            self._scatter(contents.half_start(layer, head, half), whole)
            halves.append(Rows(whole, row))
        for run, (start, stop) in enumerate(_runs(checked)):
            found = xxhash.xxh3_64()
            for rows in halves:
                for part in rows.cut(start, stop):
                    found.update(part)
            if found.intdigest() != int(self._sums[layer, head, run]):
                first = contents.first + start
                raise DamagedError(f"layer {layer}, KV head {kv_head} is damaged from position {first:,} on")

    def _read(self, offset: int, size: int) -> bytes:
        found = bytearray(size)
        self._scatter(offset, [memoryview(found)])
        return bytes(found)

    def _scatter(self, offset: int, parts: Sequence[memoryview]) -> None:
        """Reads consecutive bytes into several places."""
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


def byte_views(pieces: Sequence[Tensor], half: int, head: int) -> list[memoryview]:
    """The memory of a head's keys (`half` 0) or values (1) in pieces `[2, heads, any, head_dim]` in host memory."""
    import torch  # not above: listing contexts needs none

    return [piece[half, head].view(torch.uint8).numpy().reshape(-1).data for piece in pieces]


class Rows:
    """Consecutive rows of bytes that lie in several places."""

    def __init__(self, parts: Sequence[memoryview], row_bytes: int) -> None:
        self._parts, self._row_bytes = parts, row_bytes

    @classmethod
    def of(cls, pieces: Sequence[Tensor], half: int, head: int, row_bytes: int) -> Self:
        """A head's keys (`half` 0) or values (1) in pieces `[2, heads, any, head_dim]` in host memory."""
        return cls(byte_views(pieces, half, head), row_bytes)

    def cut(self, start: int, stop: int) -> Iterator[memoryview]:
        """The memory of rows `start` to `stop`."""
        first, last, at = start * self._row_bytes, stop * self._row_bytes, 0
        for part in self._parts:
            if at < last and at + len(part) > first:
                yield part[max(first - at, 0) : last - at]
            at += len(part)


def _runs(tokens: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + RUN, tokens)) for start in range(0, tokens, RUN))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
