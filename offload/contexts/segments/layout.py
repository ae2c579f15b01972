"""The layout of a segment's file and its header. The file is a safetensors file that is written once.

There are two layouts.

*Raw*, format 1. Each layer is a tensor `[num_kv_heads, 2, tokens, head_dim]`: first keys, which are rotated by their
positions, then values. The token dimension is padded up to a multiple of 4,096 bytes. After the layers come the token
ids, then the checksums: one for each layer, KV head and run of `RUN` positions.

*Packed*, format 2, for keys and values in bfloat16. Each layer is a tensor of bytes. It has the KV heads one after
another, and each head begins at a multiple of 4,096 bytes. A head consists of runs of `PACKED_RUN` positions. A run has
its keys first, then its values. Each of these two is a *half* of the run, and begins at a multiple of 64 bytes. A half
is stored as a slot (see `kernels.packing`), or raw, `[tokens, head_dim]`: raw if it does not fit into a slot, or if the
slot would not be smaller. In a slot of the last run, the last token is repeated until the number of tokens is a
multiple of 64. After the layers come `packed` (one byte for each layer, KV head, run and half: whether it is a slot),
the token ids, and the checksums of the runs as they are in the file.

If only a segment's last tokens are saved in a layer (`Shape.last_tokens`), the runs before the first of these tokens
are left out. Their checksums are 0.

*States* of layers with linear attention are in separate files in the raw layout. The values of a key head
(`caches.states.States.export`), followed by zeros, are stored like keys and values with `STATE_ROW` values per row.
These files have no token ids.

In all files, every tensor begins at a multiple of 4,096 bytes, so that files can be read without the page cache. A
layer is read in one piece. A file may hold only some of the model's heads: those of one rank. Its header depends only
on `Contents` and on what is packed. So a reader, who knows what a file must hold, compares the header byte by byte.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from itertools import accumulate
from math import gcd
from typing import Any, Self

import numpy as np

from ....kernels.slots import GROUP, Layout
from .contents import DTYPES, PACKABLE, Contents

_ALIGNMENT = 4096

_HALF_ALIGNMENT = 64
"""A half of a packed run begins at a multiple of this number of bytes, like a slot."""


class SegmentLayout(ABC):
    """The places of the data in a file, in bytes from its start. Heads are counted from the first in the file, runs
    from the first of the segment."""

    header: bytes
    """The header of a safetensors file: its length (8 bytes), JSON, and spaces up to `data_start`."""

    def __init__(self, contents: Contents) -> None:
        self.contents = contents

    @property
    def data_start(self) -> int:
        """Where the first layer begins."""
        return len(self.header)

    @property
    @abstractmethod
    def ids_start(self) -> int: ...

    @property
    def sums_start(self) -> int:
        """Where the checksums begin."""
        return self.ids_start + aligned(self.contents.ids_bytes)

    @property
    def file_bytes(self) -> int:
        """The size of the file."""
        return self.sums_start + aligned(self.contents.sums_bytes)

    def _described(self, kind: str, sizes: list[list[int]], layer_bytes: list[int], flags: int | None) -> bytes:
        """The JSON of a header.

        Args:
            kind, sizes, layer_bytes: number format, shapes and sizes in bytes of the layers' tensors.
            flags: bytes of the tensor `packed`; `None` without this tensor.
        """
        contents = self.contents
        heads = f"{contents.kv_heads[0]}:{contents.kv_heads[1]} of {contents.shape.num_kv_heads}"
        raw = "triforce-states-1" if contents.state_rows else "triforce-kv-1"
        described: dict[str, object] = {
            "__metadata__": {
                "format": raw if flags is None else "triforce-kv-2",
                "fingerprint": contents.fingerprint,
                "first": str(contents.first),
                "tokens": str(contents.tokens),
                "chain": contents.chain,
                "key_heads" if contents.state_rows else "kv_heads": heads,
            }
        }
        at = 0
        for layer, (size, num_bytes) in enumerate(zip(sizes, layer_bytes, strict=True)):
            described[f"layer.{layer}"] = {"dtype": kind, "shape": size, "data_offsets": [at, at + num_bytes]}
            at += num_bytes
        for name, dtype, width, used in (
            ("packed", "U8", 1, flags),
            ("token_ids", "I32", 4, contents.ids_bytes or None),
            ("checksums", "U64", 8, contents.sums_bytes),
        ):
            if used is not None:
                room = aligned(used)
                described[name] = {"dtype": dtype, "shape": [room // width], "data_offsets": [at, at + room]}
                at += room
        return json.dumps(described, separators=(",", ":")).encode()


class RawLayout(SegmentLayout):
    """The layout of a file with keys and values that are not packed, or with states."""

    def __init__(self, contents: Contents) -> None:
        super().__init__(contents)
        layers, heads, shape = contents.shape.num_layers, contents.heads, contents.shape
        padded = [self.padded(layer) for layer in range(layers)]
        self._half_bytes = [rows * shape.row_bytes for rows in padded]
        sizes = [2 * heads * size for size in self._half_bytes]
        self._layer_start = [0, *accumulate(sizes)]
        kind, _ = DTYPES[shape.dtype]
        described = self._described(kind, [[heads, 2, rows, shape.head_dim] for rows in padded], sizes, None)
        self.header = framed(described, aligned(8 + len(described)))

    def padded(self, layer: int) -> int:
        """Rows of a layer, including the padding."""
        row = self.contents.shape.row_bytes
        granule = 64 * (_ALIGNMENT // gcd(_ALIGNMENT, 64 * row))
        return -(-(self.contents.rows - self.contents.first_token(layer)) // granule) * granule

    def half_bytes(self, layer: int) -> int:
        """Bytes of the keys, or of the values, of one head in a layer."""
        return self._half_bytes[layer]

    def half_start(self, layer: int, head: int, half: int) -> int:
        """Where in the file the keys (`half` 0) or values (1) of a head begin."""
        return self.data_start + self._layer_start[layer] + (head * 2 + half) * self._half_bytes[layer]

    @property
    def ids_start(self) -> int:
        return self.data_start + self._layer_start[-1]


class PackedLayout(SegmentLayout):
    """The layout of a file with packed keys and values. Some halves of runs may be raw."""

    def __init__(self, contents: Contents, packed: np.ndarray) -> None:
        """Args: `packed` says which halves of runs are packed: `flags_shape(contents)` bool."""
        super().__init__(contents)
        self.packed = packed
        sizes = np.where(packed, slot_sizes(contents), raw_sizes(contents))
        for layer in range(contents.shape.num_layers):
            sizes[layer, :, : contents.first_run(layer)] = 0
        self._size = sizes
        ends = sizes.reshape(*sizes.shape[:2], -1).cumsum(2)
        self._within = (ends - sizes.reshape(ends.shape)).reshape(sizes.shape)
        """Where a half begins, counted from the start of its head."""
        self._head_bytes = aligned(ends[:, :, -1])
        self._head_start = (self._head_bytes.cumsum() - self._head_bytes.ravel()).reshape(self._head_bytes.shape)
        # The header is written last, when it is known which halves fit into slots. Room is left for the longest
        # header: that of a file in which nothing is packed.
        all_raw = [contents.heads * aligned(2 * int(raw_sizes(contents).sum()))] * contents.shape.num_layers
        room = aligned(8 + len(self._json(all_raw)))
        self.header = framed(self._json([int(size) for size in self._head_bytes.sum(1)]), room)

    @classmethod
    def of(cls, contents: Contents, flags: bytes) -> Self:
        """The layout for the bytes of the tensor `packed` in the file.

        Raises:
            ValueError: there are too few or too many bytes.
        """
        return cls(contents, np.frombuffer(flags, dtype=bool).reshape(flags_shape(contents)))

    @property
    def ids_start(self) -> int:
        return self.flags_start + aligned(self.packed.size)

    @property
    def flags_start(self) -> int:
        """Where the tensor `packed` begins."""
        return self.data_start + int(self._head_bytes.sum())

    def half_start(self, layer: int, head: int, run: int, half: int) -> int:
        """Where in the file the keys (`half` 0) or values (1) of a run begin."""
        return self.data_start + int(self._head_start[layer, head] + self._within[layer, head, run, half])

    def half_bytes(self, layer: int, head: int, run: int, half: int) -> int:
        """Bytes of the keys (`half` 0) or values (1) of a run."""
        return int(self._size[layer, head, run, half])

    def run_stop(self, layer: int, head: int, run: int) -> int:
        """Where in the file a run ends."""
        return self.half_start(layer, head, run, 1) + self.half_bytes(layer, head, run, 1)

    def _json(self, layer_bytes: list[int]) -> bytes:
        return self._described("U8", [[size] for size in layer_bytes], layer_bytes, self.packed.size)

    @classmethod
    def tail_bytes(cls, contents: Contents) -> int:
        """Bytes from the start of the tensor `packed` to the end of the file. The same for all files with these
        contents."""
        flags = int(np.prod(flags_shape(contents)))
        return aligned(flags) + aligned(contents.ids_bytes) + aligned(contents.sums_bytes)


def flags_shape(contents: Contents) -> tuple[int, int, int, int]:
    """The shape of the tensor `packed`: layers, KV heads, runs, halves."""
    return contents.shape.num_layers, contents.heads, contents.runs, 2


def slot_layout(contents: Contents, run: int) -> Layout:
    """The layout of the slot for a half of a run."""
    start, stop = contents.bounds(run)
    return Layout(1, -(-(stop - start) // GROUP) * GROUP, contents.shape.head_dim)


def slot_sizes(contents: Contents) -> np.ndarray:
    """For each run, bytes of the slot of one of its halves: `[runs, 1]`."""
    return _by_run(contents, [slot_layout(contents, run).slot_bytes for run in _unlike(contents)])


def raw_sizes(contents: Contents) -> np.ndarray:
    """For each run, bytes of one of its halves if it is not packed: `[runs, 1]`."""
    tokens = (stop - start for start, stop in map(contents.bounds, _unlike(contents)))
    return _by_run(contents, [aligned(each * contents.shape.row_bytes, _HALF_ALIGNMENT) for each in tokens])


def pays(contents: Contents) -> np.ndarray:
    """For each run, whether a slot is smaller than the raw half: `[runs]` bool. All false in other dtypes than
    bfloat16."""
    packable = contents.shape.dtype == PACKABLE
    return (slot_sizes(contents) < raw_sizes(contents))[:, 0] & packable


def _unlike(contents: Contents) -> tuple[int, int]:
    """The first run, and the last one, which may be shorter. All other runs have the size of the first."""
    return 0, contents.runs - 1


def _by_run(contents: Contents, sizes: list[int]) -> np.ndarray:
    found = np.full((contents.runs, 1), sizes[0], dtype=np.int64)
    found[-1] = sizes[1]
    return found


def framed(described: bytes, size: int) -> bytes:
    """The header of a safetensors file with this JSON, padded to `size` bytes."""
    return (size - 8).to_bytes(8, "little") + described.ljust(size - 8)


def aligned(size: Any, alignment: int = _ALIGNMENT) -> Any:
    """`size`, a number or an array of numbers, rounded up to a multiple of `alignment`."""
    return -(-size // alignment) * alignment
