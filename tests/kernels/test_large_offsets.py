"""Offsets of more than 2^31 elements, which a cache of a million tokens has: each function reads and writes there."""

import sys

import pytest
import torch
from far_memory import FAR, STRIDES, spread
from oracles import random_qkv
from triforce.kernels import (
    Layout,
    attend,
    attend_blocks,
    chunk_mass,
    copy_chunks,
    gather_chunks,
    gather_packed,
    pack,
    takes_blocks,
    unpack,
    use_kernels,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is reserved as Linux does")


@pytest.mark.parametrize("wanted", [None, "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strides", STRIDES.values(), ids=STRIDES)
def test_attention_reads_far_keys(strides, dtype, wanted):
    q, k, v = random_qkv((4, 2, 64), 3, 200, dtype)
    mass, far_mass = (torch.zeros(4, 2, 25) for _ in range(2))
    with use_kernels(attention=wanted):
        want = attend(q, k, v, scale=0.2, diagonal=190, mass=mass)
        far = attend(q, spread(k, *strides), spread(v, *strides), scale=0.2, diagonal=190, mass=far_mass)
    torch.testing.assert_close((*far, far_mass), (*want, mass), rtol=0, atol=1e-6)


def test_attention_reads_far_blocks():
    q, k, v = random_qkv((4, 2, 64), 3, 256)
    blocks = torch.stack((k.unflatten(1, (4, 64)), v.unflatten(1, (4, 64)))).permute(2, 0, 1, 3, 4).contiguous()
    if not takes_blocks(q, blocks):
        pytest.skip("blocks are attended in one call by the compiled kernels alone, which are not in use here")
    far = spread(blocks, FAR // 4, FAR, 64 * 64, 64, 1)
    want = attend_blocks(q, blocks, 250, scale=0.2, diagonal=247)
    assert all(map(torch.equal, attend_blocks(q, far, 250, scale=0.2, diagonal=247), want))


def test_chunks_are_copied_from_far_blocks_to_far_places():
    layer = torch.randn(5, 2, 3, 64, 32)
    indices = torch.tensor([[0, 9, 39], [8, 17, 33], [2, 30, 38]])
    for strides in ((FAR, 2**30, 2**28, 32, 1), (2**29 - 32, 32, 2**31 - 64, 2**23, 1)):
        far = spread(layer, *strides)
        for part in (0, 1):
            assert torch.equal(gather_chunks(far[:, part], indices, 8), gather_chunks(layer[:, part], indices, 8))
    block = layer[0]
    chunks = indices % 10
    k, v = torch.zeros(2, 3, 24, 32)
    copy_chunks(block, 1, chunks, k, v, 8)
    far_k, far_v = (spread(torch.zeros(3, 24, 32), 2**31 - 64, 2**27, 1) for _ in range(2))
    copy_chunks(spread(block, FAR, 2**30, 2**24, 1), 1, chunks, far_k, far_v, 8)
    assert torch.equal(far_k, k) and torch.equal(far_v, v) and k.any() and v.any()


def test_far_blocks_are_packed_into_far_slots():
    blocks = torch.randn(3, 2, 128, 32).bfloat16()
    want, fits = pack(blocks)
    assert fits.all()
    far_blocks, slots = spread(blocks, FAR, 2**31 - 64, 2**24, 1), spread(torch.zeros_like(want), 2**32 + 64, 1)
    pack(far_blocks, slots)
    assert torch.equal(slots, want)
    far_blocks.zero_()
    unpack(slots, far_blocks)
    assert torch.equal(far_blocks, blocks)
    tokens, layout = torch.tensor([[5, 200, 383], [0, 130, 300]]), Layout(2, 128, 32)
    assert torch.equal(gather_packed(slots, layout, 0, tokens), gather_packed(want, layout, 0, tokens))


def test_the_mass_of_chunks_is_that_of_far_keys():
    q, k, _ = random_qkv((4, 2, 64), 3, 200)
    lse, mass, far_mass = torch.zeros(4, 3), *torch.zeros(2, 4, 3, 25)
    chunk_mass(q, k, lse, mass, scale=0.2)
    chunk_mass(q, spread(k, 2**31 - 64, 2**24, 1), lse, far_mass, scale=0.2)
    torch.testing.assert_close(far_mass, mass, rtol=1e-6, atol=0)
