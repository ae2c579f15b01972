"""Writes a segment's file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import xxhash

from ..disk import Disk, write_all
from .contents import PACKED_RUN, Contents
from .layout import PackedLayout, RawLayout, aligned, flags_shape, pays, raw_sizes, slot_layout
from .rows import SegmentRows

if TYPE_CHECKING:
    from torch import Tensor


def write_segment(
    disk: Disk, path: Path, contents: Contents, token_ids: Sequence[int], layers: Iterable[Sequence[Tensor]]
) -> str:
    """Writes a segment's file durably. The file has a temporary name until it is complete.

    Args:
        token_ids: the token ids of the segment; empty for a file with states.
        layers: the keys and values of each layer, in pieces `[2, heads, any, head_dim]` in host memory, in the order of
            positions. They have `contents.rows` rows in total. Rows that are not saved may have any values.

    Returns:
        A checksum of the tensor `packed` (if there is one) and of the file's checksums, for the manifest.

    Raises:
        OSError: the disk is full, or cannot be written.
    """
    with disk.replacing(path) as file:
        if contents.packed:
            flags, sums = _write_packed(file, contents, layers)
        else:
            flags, sums = b"", _write_raw(file, contents, layers)
        ids = np.asarray(token_ids, dtype="<i4").tobytes()
        for content in (flags, ids, sums):
            write_all(file, content.ljust(aligned(len(content)), b"\0"))
        if contents.packed:
            file.seek(0)
            write_all(file, PackedLayout.of(contents, flags).header)
    return xxhash.xxh3_128_hexdigest(flags + sums)


def _write_raw(file: BinaryIO, contents: Contents, layers: Iterable[Sequence[Tensor]]) -> bytes:
    """Writes the header and all layers. Returns the checksums."""
    layout, row = RawLayout(contents), contents.shape.row_bytes
    sums = np.zeros((contents.shape.num_layers, contents.heads, contents.runs), dtype="<u8")
    write_all(file, layout.header)
    for layer, pieces in enumerate(layers):
        runs = range(contents.first_run(layer), contents.runs)
        padding = bytes(layout.half_bytes(layer) - (contents.rows - contents.first_token(layer)) * row)
        for head in range(contents.heads):
            hashes = {run: xxhash.xxh3_64() for run in runs}
            for half in (0, 1):
                rows = SegmentRows.of(pieces, half, head, row)
                for run in runs:
                    for part in rows.cut(*contents.bounds(run)):
                        write_all(file, part)
                        hashes[run].update(part)
                write_all(file, padding)
            sums[layer, head, runs.start :] = [one.intdigest() for one in hashes.values()]
    return sums.tobytes()


def _write_packed(file: BinaryIO, contents: Contents, layers: Iterable[Sequence[Tensor]]) -> tuple[bytes, bytes]:
    """Writes all layers, and leaves room for the header. Returns the bytes of the tensor `packed`, and the
    checksums."""
    sums = np.zeros((contents.shape.num_layers, contents.heads, contents.runs), dtype="<u8")
    flags = np.zeros(flags_shape(contents), dtype=bool)
    file.seek(PackedLayout(contents, flags).data_start)
    for layer, pieces in enumerate(layers):
        first = contents.first_run(layer)
        for head in range(contents.heads):
            written = 0
            for run, (packed, halves) in enumerate(_packed_runs(contents, pieces, head, first), first):
                flags[layer, head, run] = packed
                found = xxhash.xxh3_64()
                for half in halves:
                    write_all(file, half)
                    found.update(half)
                    written += len(half)
                sums[layer, head, run] = found.intdigest()
            write_all(file, bytes(aligned(written) - written))
    return flags.tobytes(), sums.tobytes()


def _packed_runs(
    contents: Contents, pieces: Sequence[Tensor], head: int, first: int
) -> Iterator[tuple[list[bool], list[memoryview]]]:
    """For each run of a head, from run `first` on: which of its halves are packed, and the bytes of both."""
    import torch

    values = torch.cat([piece[:, head] for piece in pieces], dim=1)  # [2, tokens, head_dim]
    slots, raw_bytes = [_slots(contents, half, first) for half in values], raw_sizes(contents)[:, 0]
    for run in range(first, contents.runs):
        start, stop = contents.bounds(run)
        halves = []
        for half in (0, 1):
            slot = slots[half][run - first]
            if slot is None:
                raw = values[half, start:stop].reshape(-1).view(torch.uint8).numpy()
                halves.append(np.pad(raw, (0, int(raw_bytes[run]) - len(raw))).data)
            else:
                halves.append(slot.numpy().data)
        yield [slots[half][run - first] is not None for half in (0, 1)], halves


def _slots(contents: Contents, values: Tensor, first: int) -> list[Tensor | None]:
    """The slots of a head's keys, or of its values, `[tokens, head_dim]`: one for each run from run `first` on. `None`
    for a run that does not fit into a slot, or whose slot is not smaller than the raw half."""
    import torch

    from ....kernels.packing import pack

    whole = contents.tokens // PACKED_RUN
    found: list[Tensor | None] = []
    if whole > first:
        slots, fits = pack(values[first * PACKED_RUN : whole * PACKED_RUN].view(whole - first, 1, PACKED_RUN, -1))
        found += [slot if fit else None for slot, fit in zip(slots, fits.tolist(), strict=True)]
    rest = values[whole * PACKED_RUN :]
    if len(rest):
        padding = rest[-1:].expand(slot_layout(contents, whole).tokens - len(rest), -1)
        slot, fit = pack(torch.cat((rest, padding)).unsqueeze(0))
        found.append(slot if fit else None)
    return [slot if worth else None for slot, worth in zip(found, pays(contents)[first:].tolist(), strict=True)]
