"""Packing by the compiled CPU kernels (`source/packing.c`), which `packing.pack` and `packing.unpack` call."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..slots import Layout
from .library import PackingCall, cpu_level, loaded


def pack_compiled(
    blocks: Tensor, slots: Tensor, layout: Layout, level: int | None = None, threads: int | None = None
) -> None:
    """`packing.pack_plain` with the compiled kernels. The channels of `blocks` are contiguous.

    Args:
        level: the level to use, at most `cpu_level()`, which is the default; `Level.NONE` is plain C.
        threads: default: as many as PyTorch uses.
    """
    _call("triforce_pack", blocks, slots, layout, level, threads)


def unpack_compiled(
    slots: Tensor, blocks: Tensor, layout: Layout, level: int | None = None, threads: int | None = None
) -> None:
    """`packing.unpack_plain` with the compiled kernels; see `pack_compiled`."""
    _call("triforce_unpack", blocks, slots, layout, level, threads)


def gather_compiled(slots: Tensor, layout: Layout, first_head: int, tokens: Tensor) -> Tensor:
    """`packing.gather_plain` with the compiled kernels. The bytes of a slot are contiguous."""
    kernels = loaded()
    assert kernels is not None and slots.stride(-1) == 1
    found = torch.empty(*tokens.shape, layout.head_dim, dtype=torch.bfloat16)
    call = _described(slots, layout, None)
    call.blocks, call.num_blocks = found.data_ptr(), len(slots)
    tokens = tokens.contiguous()
    kernels.triforce_gather(ctypes.byref(call), tokens.data_ptr(), first_head, *tokens.shape)
    return found


def _call(name: str, blocks: Tensor, slots: Tensor, layout: Layout, level: int | None, threads: int | None) -> None:
    kernels = loaded()
    assert kernels is not None and blocks.stride(-1) == slots.stride(-1) == 1
    call = _described(slots, layout, threads)
    call.blocks, call.num_blocks = blocks.data_ptr(), len(blocks)
    call.block_stride, call.head_stride, call.token_stride, _ = blocks.stride()
    call.level = cpu_level() if level is None else level
    if getattr(kernels, name)(ctypes.byref(call)):
        raise ValueError(f"this processor does not have the instructions of level {call.level}")


def _described(slots: Tensor, layout: Layout, threads: int | None) -> PackingCall:
    """The arguments of a call, except those for its blocks."""
    call = PackingCall()
    call.slots, call.slot_stride = slots.data_ptr(), slots.stride(0)
    call.num_kv_heads, call.tokens, call.head_dim = layout.num_kv_heads, layout.tokens, layout.head_dim
    call.below, call.starts, call.exceptions = layout.below, layout.starts, layout.exceptions
    call.largest, call.slot_bytes, call.capacity = layout.largest, layout.slot_bytes, layout.capacity
    call.threads = threads or torch.get_num_threads()
    return call
