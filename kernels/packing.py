"""Packs keys and values in bfloat16 into three quarters of their bytes, without loss: `pack` and `unpack`.

Over 64 tokens the exponents of one channel (one of the `head_dim` components) span so little that four bits, counted
down from the largest exponent, hold nearly all of them. A value keeps its sign and its seven bits of mantissa as they
are. A value whose exponent is further below the largest is an *exception*; its exponent is in a separate list. Every
bit pattern comes back: infinities, zeros of both signs, subnormal numbers and the payloads of NaNs.

A block `[num_kv_heads, tokens, head_dim]` of `n` values packs into a *slot*, whose size follows from the shape alone. A
*group* is one channel of one head at 64 consecutive tokens, the first of them a multiple of 64; a *tile* is the groups
of all channels of a head at the same tokens. Tiles are numbered in the order of the block, tokens fastest. Numbers of
several bytes are little-endian. A slot has, in this order and without gaps:

* bytes: `n` bytes in the order of the block, each the sign (bit 7) and the mantissa (bits 0 to 6) of a value;
* below: `n / 2` bytes, `[num_kv_heads, tokens / 2, head_dim]`: the distance of a value's exponent from the largest
  exponent of its group, at most 15. The even token is in bits 0 to 3, the token after it in bits 4 to 7;
* starts: `tiles + 1` 32-bit words: the number of exceptions before each tile, and the total;
* exceptions: `capacity = n // VALUES_PER_EXCEPTION` 32-bit words in the order of the block: the position of the value
  in its tile (`token * head_dim + channel`, token and channel counted from the tile's first) in bits 8 to 31, its
  exponent in bits 0 to 7. Words behind the last exception are zero;
* largest: `n / 64` bytes, `[num_kv_heads, tokens / 64, head_dim]`: the largest exponent of each group;
* zeros up to a multiple of 64 bytes.

So unpacking a value takes two loads, a shift, a subtraction and joining bits, and the exceptions of a tile are found
without a search. A block with more exceptions than the capacity does not fit. The exceptions beyond the capacity are
not in the slot, which the last word of `starts` shows. This block must be kept unpacked, somewhere else.

There are three implementations: plain PyTorch (the reference), the compiled kernels for CPUs (`cpu/source/packing.c`)
and Triton (`triton/packing.py`). They agree in every byte. Only bfloat16 is packed: float16 has five bits of exponent,
of which hardly one could be saved.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .cpu.library import loaded
from .packages import usable_packages
from .selection import on_cpu
from .slots import FARTHEST, GROUP, Layout


def pack(blocks: Tensor, slots: Tensor | None = None, *, threads: int | None = None) -> tuple[Tensor, Tensor]:
    """Packs blocks of keys or values, each into a slot of its own.

    Args:
        blocks: `[..., num_kv_heads, tokens, head_dim]` bfloat16, `tokens` a multiple of 64. Keys and values of a block,
            or those of several layers, can be packed as one block if they are joined along the dimension of the heads.
        slots: `[..., slot_bytes]` uint8, written; beginning at a multiple of 4 bytes. Allocated if not given.
        threads: maximum number of threads of the compiled kernels; `None` is as many as PyTorch uses.

    Returns:
        `slots`, and whether each block is in its slot: `[...]` bool, on the same device. A block that is not must be
        kept unpacked. Its slot contains nothing of use, except the number of exceptions.

    Raises:
        ValueError: `blocks` have another dtype or fewer dimensions, or cannot be packed (see `Layout`); or `slots` have
            another dtype, shape, device or alignment.
    """
    layout = _layout_of(blocks)
    if slots is None:
        slots = torch.empty(*blocks.shape[:-3], layout.slot_bytes, dtype=torch.uint8, device=blocks.device)
    rows = _rows(slots, blocks, layout)
    flat = blocks.reshape(len(rows), *blocks.shape[-3:])
    flat = flat if flat.stride(-1) == 1 else flat.contiguous()
    if flat.numel() == 0:
        rows.zero_()
    elif "triton" in usable_packages(blocks.device):
        from .triton.packing import pack_triton

        pack_triton(flat, rows, layout)
    elif on_cpu(blocks.device) and loaded() is not None:
        from .cpu.packing import pack_compiled

        pack_compiled(flat, rows, layout, threads=threads)
    else:
        pack_plain(flat, rows, layout)
    return slots, is_packed(slots, layout)


def unpack(slots: Tensor, blocks: Tensor, *, threads: int | None = None) -> None:
    """Unpacks slots into blocks. If a block is not in its slot, the block stays unchanged.

    Args:
        slots: `[..., slot_bytes]` uint8, as `pack` wrote them, beginning at a multiple of 4 bytes.
        blocks: `[..., num_kv_heads, tokens, head_dim]` bfloat16, written. Channels are contiguous, and all dimensions
            before the last three can be viewed as one.
        threads: see `pack`.

    Slots with other contents give wrong values, but nothing outside the slots is read, and nothing outside the blocks
    is written.

    Raises:
        ValueError: `slots` or `blocks` have another dtype, shape or strides, or are on different devices.
    """
    layout = _layout_of(blocks)
    rows = _rows(slots, blocks, layout)
    flat = _joined(blocks, 3)
    if flat.stride(-1) != 1:
        raise ValueError("the channels of blocks that are written must be contiguous")
    if flat.numel() == 0:
        return
    if "triton" in usable_packages(blocks.device):
        from .triton.packing import unpack_triton

        unpack_triton(rows, flat, layout)
    elif on_cpu(blocks.device) and loaded() is not None:
        from .cpu.packing import unpack_compiled

        unpack_compiled(rows, flat, layout, threads=threads)
    else:
        unpack_plain(rows, flat, layout)


def gather_packed(slots: Tensor, layout: Layout, first_head: int, tokens: Tensor) -> Tensor:
    """Unpacks some tokens of packed blocks, without unpacking the others.

    Args:
        slots: `[num_blocks, slot_bytes]` uint8, of consecutive blocks.
        layout: that of one block.
        first_head: the head of the block to which the first row of `tokens` belongs; the next heads follow.
        tokens: `[heads, count]` int64, for each head the positions of its tokens, counted over all blocks.

    Returns:
        `[heads, count, head_dim]` bfloat16. Values of a block that is not in its slot are of no use.
    """
    if on_cpu(slots.device) and loaded() is not None:
        from .cpu.packing import gather_compiled

        return gather_compiled(slots, layout, first_head, tokens)
    return gather_plain(slots, layout, first_head, tokens)


def gather_plain(slots: Tensor, layout: Layout, first_head: int, tokens: Tensor) -> Tensor:
    """`gather_packed` with PyTorch operations."""
    num_blocks, (heads, dim) = len(slots), (layout.num_kv_heads, layout.head_dim)
    block, at = tokens // layout.tokens, tokens % layout.tokens
    head = torch.arange(first_head, first_head + len(tokens), device=slots.device).unsqueeze(1)

    def rows(start: int, tokens_of_row: int) -> Tensor:  # [heads, count, head_dim]
        count = layout.tokens // tokens_of_row
        part = slots[:, start : start + heads * count * dim].view(num_blocks, heads, count, dim)
        return part[block, head, at // tokens_of_row].to(torch.int32)

    below = rows(layout.below, 2) >> (at % 2 * 4).unsqueeze(2) & FARTHEST
    rest = rows(0, 1)
    values = (rest & 0x80) << 8 | rest & 0x7F | (rows(layout.largest, GROUP) - below & 0xFF) << 7
    words = slots.view(torch.int32)
    starts = words[:, layout.starts // 4 : layout.exceptions // 4]
    tile = head * (layout.tokens // GROUP) + at // GROUP
    first = starts[block, tile].clamp(0, layout.capacity)
    counts = (starts[block, tile + 1].clamp(0, layout.capacity) - first).clamp_min(0)
    row, column = counts.nonzero(as_tuple=True)  # tokens whose tile has exceptions, of these or other tokens
    counts, first = counts[row, column], first[row, column].to(torch.int64)
    row, column = row.repeat_interleave(counts), column.repeat_interleave(counts)
    within = torch.arange(len(row), device=slots.device) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    entries = words[block[row, column], layout.exceptions // 4 + first.repeat_interleave(counts) + within]
    position = entries >> 8
    own = position // dim == at[row, column] % GROUP
    row, column, channel = row[own], column[own], (position % dim)[own]
    values[row, column, channel] = values[row, column, channel] & 0x807F | (entries[own] & 0xFF) << 7
    return values.to(torch.int16).view(torch.bfloat16)


def packs_fast(device: torch.device) -> bool:
    """Whether a kernel packs and unpacks on this device, instead of the reference."""
    return "triton" in usable_packages(device) or (on_cpu(device) and loaded() is not None)


def is_packed(slots: Tensor, layout: Layout) -> Tensor:
    """Whether each of the slots `[..., slot_bytes]` contains its block: `[...]` bool, on the same device.

    False if the block had more exceptions than `layout.capacity`.
    """
    total = slots.view(torch.int32)[..., layout.starts // 4 + layout.tiles]
    return (total >= 0) & (total <= layout.capacity)


def pack_plain(blocks: Tensor, slots: Tensor, layout: Layout) -> None:
    """`pack` with PyTorch operations: `blocks` `[num_blocks, num_kv_heads, tokens, head_dim]`, `slots` `[num_blocks,
    slot_bytes]`."""
    bits = blocks.view(torch.int16).to(torch.int32)
    tiles = bits.unflatten(2, (-1, GROUP)).flatten(1, 2)  # [num_blocks, tiles, GROUP, head_dim]
    exponents = tiles >> 7 & 0xFF
    largest = exponents.amax(2)
    distance = largest.unsqueeze(2) - exponents
    exceptional = distance > FARTHEST
    below = distance.clamp_max(FARTHEST)
    slots.zero_()
    slots[:, : layout.below] = (tiles >> 8 & 0x80 | tiles & 0x7F).flatten(1)
    slots[:, layout.below : layout.starts] = (below[:, :, 0::2] | below[:, :, 1::2] << 4).flatten(1)
    slots[:, layout.largest :][:, : largest[0].numel()] = largest.flatten(1)
    words = slots.view(torch.int32)
    counts = exceptional.flatten(2).sum(2)
    words[:, layout.starts // 4 : layout.exceptions // 4] = F.pad(counts.cumsum(1), (1, 0))
    block, place = exceptional.flatten(1).nonzero(as_tuple=True)
    totals = counts.sum(1)
    rank = torch.arange(len(place), device=place.device) - (totals.cumsum(0) - totals)[block]
    entries = place % (GROUP * layout.head_dim) << 8 | exponents.flatten(1)[block, place]
    kept = rank < layout.capacity
    words[block[kept], layout.exceptions // 4 + rank[kept]] = entries[kept].to(torch.int32)


def unpack_plain(slots: Tensor, blocks: Tensor, layout: Layout) -> None:
    """`unpack` with PyTorch operations; shapes as in `pack_plain`."""
    for slot, block, there in zip(slots, blocks, is_packed(slots, layout), strict=True):
        values = _unpacked(slot, layout).view(layout.num_kv_heads, layout.tokens, layout.head_dim)
        block.copy_(torch.where(there, values.to(torch.int16).view(torch.bfloat16), block))


def _unpacked(slot: Tensor, layout: Layout) -> Tensor:
    """The bits of the values of a slot's block, in the order of the block: `[values]` int32."""
    rows = slot[: layout.below].to(torch.int32).view(layout.tiles, GROUP, layout.head_dim)
    pairs = slot[layout.below : layout.starts].to(torch.int32).view(layout.tiles, GROUP // 2, layout.head_dim)
    below = torch.stack((pairs & FARTHEST, pairs >> 4), dim=2).flatten(1, 2)
    largest = slot[layout.largest :][: layout.values // GROUP].to(torch.int32).view(layout.tiles, 1, layout.head_dim)
    rest = ((rows & 0x80) << 8 | rows & 0x7F).flatten()
    values = rest | ((largest - below & 0xFF) << 7).flatten()
    words = slot.view(torch.int32)
    starts = words[layout.starts // 4 : layout.exceptions // 4].to(torch.int64).clamp(0, layout.capacity)
    counts = (starts[1:] - starts[:-1]).clamp_min(0)
    tile = torch.arange(layout.tiles, device=slot.device).repeat_interleave(counts)
    within = torch.arange(len(tile), device=slot.device) - (counts.cumsum(0) - counts)[tile]
    entries = words[layout.exceptions // 4 : layout.largest // 4][starts[tile] + within]
    position, tile_values = entries >> 8, GROUP * layout.head_dim
    valid = (position >= 0) & (position < tile_values)
    place = (tile * tile_values + position)[valid]
    values[place] = rest[place] | (entries[valid] & 0xFF) << 7
    return values


def _layout_of(blocks: Tensor) -> Layout:
    if blocks.dtype != torch.bfloat16 or blocks.dim() < 3:
        raise ValueError(
            f"only blocks of heads, tokens and channels in bfloat16 are packed, not {list(blocks.shape)} {blocks.dtype}"
        )
    num_kv_heads, tokens, head_dim = blocks.shape[-3:]
    return Layout(num_kv_heads, tokens, head_dim)


def _rows(slots: Tensor, blocks: Tensor, layout: Layout) -> Tensor:
    """The slots as `[num_blocks, slot_bytes]`."""
    wanted = (*blocks.shape[:-3], layout.slot_bytes)
    if slots.dtype != torch.uint8 or slots.shape != wanted or slots.device != blocks.device:
        raise ValueError(
            f"the slots of blocks {list(blocks.shape)} are {list(wanted)} uint8 on {blocks.device}, not "
            f"{list(slots.shape)} {slots.dtype} on {slots.device}"
        )
    aligned = slots.stride(-1) == 1 and slots.data_ptr() % 4 == 0 and all(step % 4 == 0 for step in slots.stride()[:-1])
    if not aligned:
        raise ValueError("slots must be contiguous and begin at multiples of 4 bytes")
    return _joined(slots, 1)


def _joined(x: Tensor, last: int) -> Tensor:
    """A view of `x` in which all dimensions before the last `last` ones are joined into one.

    Raises:
        ValueError: the strides of `x` do not allow that.
    """
    try:
        return x.view(math.prod(x.shape[:-last]), *x.shape[-last:])
    except RuntimeError as error:
        raise ValueError(f"{list(x.shape)} with strides {x.stride()} cannot be written in one go") from error
