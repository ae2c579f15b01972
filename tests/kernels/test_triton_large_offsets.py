"""Offsets of more than 2^31 elements in Triton's kernels, interpreted."""

import sys

import pytest
import torch
from far_memory import FAR, STRIDES, spread
from oracles import random_qkv
from triforce.kernels import copy_chunks, gather_chunks
from triforce.kernels.packing import pack_plain, unpack_plain
from triforce.kernels.slots import Layout
from triton_runs import interpreted, launches

from triforce.kernels.triton import attention as triton_attention  # isort: skip (Triton may be missing until here)
from triforce.kernels.triton import chunks as triton_chunks
from triforce.kernels.triton.packing import pack_triton, unpack_triton

pytestmark = [interpreted, pytest.mark.skipif(sys.platform != "linux", reason="memory is reserved as Linux does")]


@pytest.mark.parametrize("strides", STRIDES.values(), ids=STRIDES)
def test_triton_attention_reads_far_keys(strides):
    q, k, v = random_qkv((4, 2, 64), 3, 200)
    far_q = spread(q, FAR, FAR // 4, 1)
    want = triton_attention.attend_triton(q, k, v, scale=0.2, diagonal=190)
    far = triton_attention.attend_triton(far_q, spread(k, *strides), spread(v, *strides), scale=0.2, diagonal=190)
    assert all(map(torch.equal, far, want))
    mass, far_mass = (torch.zeros(4, 3, 25) for _ in range(2))
    triton_chunks.chunk_mass_triton(q, k, want[1], mass, scale=0.2, diagonal=190)
    triton_chunks.chunk_mass_triton(far_q, spread(k, *strides), want[1], far_mass, scale=0.2, diagonal=190)
    assert torch.equal(far_mass, mass) and mass.sum() > 11


def test_no_launch_has_more_programs_in_a_dimension_than_cuda_takes():
    """65,535 in all but the first: of two million keys of the largest heads, and of a hundred million."""
    with launches(run=False) as grids:
        for dtype, dim, keys in (
            (torch.float32, 128, 2**20),
            (torch.bfloat16, 256, 2**21),
            (torch.bfloat16, 64, 2**27),
        ):
            q, k = torch.zeros(1, 2, dim, dtype=dtype), torch.zeros(1, 1, dim, dtype=dtype).expand(1, keys, dim)
            mass = torch.zeros(1, 1, 1).expand(1, 2, keys // 8)
            triton_chunks.chunk_mass_triton(q, k, torch.zeros(1, 2), mass, scale=1.0)
            triton_attention.attend_triton(q[:, :1], k, k, scale=1.0)
    assert len(grids) > 6
    assert all(size < 2**31 for size, *_ in grids) and all(size < 2**16 for _, *rest in grids for size in rest)


def test_chunks_are_copied_from_far_blocks_to_far_places():
    layer = torch.randn(5, 2, 3, 64, 32)
    indices = torch.tensor([[0, 9, 39], [8, 17, 33], [2, 30, 38]])
    for strides in ((FAR, 2**30, 2**28, 32, 1), (2**29 - 32, 32, 2**31 - 64, 2**23, 1)):
        far = spread(layer, *strides)
        for part in (0, 1):
            want = gather_chunks(layer[:, part], indices, 8)
            assert torch.equal(triton_chunks.gather_chunks_triton(far[:, part], indices, 8), want)
    block, chunks = layer[0], indices % 10
    k, v = torch.zeros(2, 3, 24, 32)
    copy_chunks(block, 1, chunks, k, v, 8)
    far_k, far_v = (spread(torch.zeros(3, 24, 32), 2**31 - 64, 2**27, 1) for _ in range(2))
    triton_chunks.copy_chunks_triton(spread(block, FAR, 2**30, 2**24, 1), 1, chunks, far_k, far_v, 8)
    assert torch.equal(far_k, k) and torch.equal(far_v, v) and k.any() and v.any()


def test_far_blocks_are_packed_into_far_slots():
    blocks = torch.randn(3, 2, 128, 32).bfloat16()
    layout = Layout(2, 128, 32)
    want = torch.zeros(3, layout.slot_bytes, dtype=torch.uint8)
    pack_plain(blocks, want, layout)
    far_blocks, slots = spread(blocks, FAR, 2**31 - 64, 2**24, 1), spread(torch.zeros_like(want), 2**32 + 64, 1)
    pack_triton(far_blocks, slots, layout)
    assert torch.equal(slots, want)
    far_blocks.zero_()
    unpack_triton(slots, far_blocks, layout)
    plain = torch.zeros_like(blocks)
    unpack_plain(want, plain, layout)
    assert torch.equal(far_blocks, plain) and torch.equal(plain, blocks)
