"""Offsets of more than 2^31 elements, which a cache of a million tokens has, in all implementations of the kernels.

Memory is reserved and hardly touched, so that this takes a few megabytes.
"""

import mmap
import sys

import pytest
import torch
from oracles import random_qkv
from torch import Tensor
from triforce.kernels.attention import attend, attend_blocks
from triforce.kernels.chunks import chunk_mass, copy_chunks, gather_chunks
from triforce.kernels.cpu.attention import attend_compiled, compiled_attention
from triforce.kernels.cpu.library import loaded
from triforce.kernels.packing import gather_packed, gather_plain, pack_plain, unpack_plain
from triforce.kernels.slots import Layout
from triton_runs import interpreted

from triforce.kernels.triton import attention as triton_attention  # isort: skip (Triton may be missing until here)
from triforce.kernels.triton import chunks as triton_chunks
from triforce.kernels.triton.packing import pack_triton, unpack_triton

FAR = 2**31 + 2**12
"""Elements."""

NO_RESERVE = 0x4000
"""`MAP_NORESERVE` of Linux, which Python has a name for from 3.13 on."""

needs_compiled = pytest.mark.skipif(not compiled_attention(torch.float32, 64), reason="no compiled kernels here")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is reserved as Linux does")


def spread(x: Tensor, *strides: int) -> Tensor:
    """A copy of `x` with these strides, in memory of which only the pages that it touches are taken."""
    last = sum((size - 1) * step for size, step in zip(x.shape, strides, strict=True))
    size = (last + 1) * x.element_size()
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    there = torch.frombuffer(memory, dtype=x.dtype).as_strided(x.shape, strides)
    return there.copy_(x)


STRIDES = {
    "heads": (FAR, 64, 1),
    "rows": (64, 2**24, 1),  # each product fits into 32 bits, and most of them do not
    "both": (2**31 - 64, 2**24 - 64, 1),
}


@needs_compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strides", STRIDES.values(), ids=STRIDES)
def test_compiled_attention_reads_far_keys(strides, dtype):
    q, k, v = random_qkv((4, 2, 64), 3, 200, dtype)
    mass, far_mass = (torch.zeros(4, 2, 25) for _ in range(2))
    want = attend_compiled(q, k, v, scale=0.2, diagonal=190, mass=mass)
    far = attend_compiled(q, spread(k, *strides), spread(v, *strides), scale=0.2, diagonal=190, mass=far_mass)
    assert all(torch.equal(one, other) for one, other in zip((*far, far_mass), (*want, mass), strict=True))


@needs_compiled
def test_compiled_attention_reads_far_blocks():
    q, k, v = random_qkv((4, 2, 64), 3, 256)
    blocks = torch.stack((k.unflatten(1, (4, 64)), v.unflatten(1, (4, 64)))).permute(2, 0, 1, 3, 4).contiguous()
    far = spread(blocks, FAR // 4, FAR, 64 * 64, 64, 1)
    want = attend_blocks(q, blocks, 250, scale=0.2, diagonal=247)
    assert all(map(torch.equal, attend_blocks(q, far, 250, scale=0.2, diagonal=247), want))


@pytest.mark.parametrize("strides", STRIDES.values(), ids=STRIDES)
def test_pytorch_reads_far_keys(strides):
    q, k, v = (x.double() for x in random_qkv((4, 2, 64), 3, 200))
    want = attend(q, k, v, scale=0.2, diagonal=190)
    far = attend(q, spread(k, *strides), spread(v, *strides), scale=0.2, diagonal=190)
    torch.testing.assert_close(far, want, rtol=0, atol=1e-12)


@interpreted
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


@pytest.mark.parametrize(
    "functions",
    [
        pytest.param((gather_chunks, copy_chunks), id="pytorch"),
        pytest.param(
            (triton_chunks.gather_chunks_triton, triton_chunks.copy_chunks_triton), marks=interpreted, id="triton"
        ),
    ],
)
def test_chunks_are_copied_from_far_blocks_to_far_places(functions):
    gather, copy = functions
    layer = torch.randn(5, 2, 3, 64, 32)
    indices = torch.tensor([[0, 9, 39], [8, 17, 33], [2, 30, 38]])
    for strides in ((FAR, 2**30, 2**28, 32, 1), (2**29 - 32, 32, 2**31 - 64, 2**23, 1)):
        far = spread(layer, *strides)
        for part in (0, 1):
            want = gather_chunks(layer[:, part], indices, 8)
            assert torch.equal(gather(far[:, part], indices, 8), want)
    block = layer[0]
    chunks = indices % 10
    k, v = torch.zeros(2, 3, 24, 32)
    copy_chunks(block, 1, chunks, k, v, 8)
    far_k, far_v = (spread(torch.zeros(3, 24, 32), 2**31 - 64, 2**27, 1) for _ in range(2))
    copy(spread(block, FAR, 2**30, 2**24, 1), 1, chunks, far_k, far_v, 8)
    assert torch.equal(far_k, k) and torch.equal(far_v, v) and k.any() and v.any()


@pytest.mark.parametrize("kernels", ["compiled", pytest.param("triton", marks=interpreted)])
def test_far_blocks_are_packed_into_far_slots(kernels):
    if kernels == "compiled" and loaded() is None:
        pytest.skip("no compiled kernels here")
    from triforce.kernels.cpu.packing import pack_compiled, unpack_compiled

    pack, unpack = (pack_compiled, unpack_compiled) if kernels == "compiled" else (pack_triton, unpack_triton)
    blocks = torch.randn(3, 2, 128, 32).bfloat16()
    layout = Layout(2, 128, 32)
    want = torch.zeros(3, layout.slot_bytes, dtype=torch.uint8)
    pack_plain(blocks, want, layout)
    far_blocks, slots = spread(blocks, FAR, 2**31 - 64, 2**24, 1), spread(torch.zeros_like(want), 2**32 + 64, 1)
    pack(far_blocks, slots, layout)
    assert torch.equal(slots, want)
    far_blocks.zero_()
    unpack(slots, far_blocks, layout)
    plain = torch.zeros_like(blocks)
    unpack_plain(want, plain, layout)
    assert torch.equal(far_blocks, plain) and torch.equal(plain, blocks)
    tokens = torch.tensor([[5, 200, 383], [0, 130, 300]])
    assert torch.equal(gather_packed(slots, layout, 0, tokens), gather_plain(want, layout, 0, tokens))


def test_the_mass_of_chunks_is_that_of_far_keys():
    q, k, _ = random_qkv((4, 2, 64), 3, 200)
    lse, mass, far_mass = torch.zeros(4, 3), *torch.zeros(2, 4, 3, 25)
    chunk_mass(q, k, lse, mass, scale=0.2)
    chunk_mass(q, spread(k, 2**31 - 64, 2**24, 1), lse, far_mass, scale=0.2)
    torch.testing.assert_close(far_mass, mass, rtol=1e-6, atol=0)


@interpreted
def test_no_launch_has_more_programs_in_a_dimension_than_cuda_takes(monkeypatch):
    """65,535 in all but the first: of two million keys of the largest heads, and of a hundred million."""
    grids: list[tuple[int, ...]] = []

    class Recorded:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *arguments, **named: None

    monkeypatch.setattr(triton_chunks, "_mass_kernel", Recorded())
    monkeypatch.setattr(triton_attention, "_attend_kernel", Recorded())
    monkeypatch.setattr(triton_attention, "_merge_kernel", Recorded())
    for dtype, dim, keys in ((torch.float32, 128, 2**20), (torch.bfloat16, 256, 2**21), (torch.bfloat16, 64, 2**27)):
        q, k = torch.zeros(1, 2, dim, dtype=dtype), torch.zeros(1, 1, dim, dtype=dtype).expand(1, keys, dim)
        mass = torch.zeros(1, 1, 1).expand(1, 2, keys // 8)
        triton_chunks.chunk_mass_triton(q, k, torch.zeros(1, 2), mass, scale=1.0)
        triton_attention.attend_triton(q[:, :1], k, k, scale=1.0)
    assert len(grids) > 6
    assert all(size < 2**31 for size, *_ in grids) and all(size < 2**16 for _, *rest in grids for size in rest)
