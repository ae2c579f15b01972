"""Triton's kernels for chunks of keys against the plain functions and PyTorch's own attention in float64.

Without a GPU they run under Triton's interpreter (see `conftest.py`); with one, the same tests run compiled.
"""

import pytest
import torch
from oracles import oracle, random_qkv
from triforce.kernels import attend, chunk_mass, copy_chunks, gather_chunks, use_kernels
from triton_runs import DTYPES, both, interpreted, launches

from triforce.kernels.triton.chunks import (  # isort: skip (Triton may be missing until here)
    chunk_mass_triton,
    copy_chunks_triton,
    gather_chunks_triton,
    takes_chunks,
)

pytestmark = pytest.mark.usefixtures("exact_products")


@both
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("group", "head_dim", "n", "m", "chunk_size"), [(1, 64, 3, 300, 4), (4, 96, 7, 136, 8), (8, 128, 1, 16, 16)]
)
@pytest.mark.parametrize(("diagonal", "window"), [(None, None), (120, None), (-2, None), (200, 90)])
@pytest.mark.slow(keep=4)
def test_chunk_mass_is_the_attention_a_chunk_gets(device, dtype, group, head_dim, n, m, chunk_size, diagonal, window):
    q, k, v = random_qkv((2 * group, 2, head_dim), n, m, DTYPES[dtype][0])
    _, lse = oracle(q, k, v, 0.1, diagonal, window)
    assert takes_chunks(chunk_size, group, head_dim, q.dtype)
    mass = torch.full((2 * group, n, m // chunk_size), float("nan"), device=device)
    there = diagonal if diagonal is None else torch.tensor(diagonal, device=device)
    chunk_mass_triton(
        q.to(device), k.to(device), lse.float().to(device), mass, scale=0.1, diagonal=there, window=window
    )
    # Attention to values that say which chunk they belong to.
    member = torch.eye(m // chunk_size).repeat_interleave(chunk_size, 0).expand(2, -1, -1)
    want, _ = oracle(q, k, member, 0.1, diagonal, window)
    assert (mass.cpu() - want).abs().max() < 1e-5


def test_chunks_that_do_not_fill_a_tile_are_not_taken():
    assert not takes_chunks(12, 4, 128, torch.bfloat16)
    assert not takes_chunks(256, 4, 128, torch.bfloat16)


@both
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("chunk_size", "head_dim"), [(8, 80), (4, 128), (12, 32)])
@pytest.mark.slow(keep=2)
def test_gathered_chunks_equal_the_plain_function(device, dtype, chunk_size, head_dim):
    g = torch.Generator().manual_seed(3)
    layer = torch.randn(3, 2, 4, 5 * chunk_size, head_dim, generator=g).to(DTYPES[dtype][0])
    indices = torch.rand(4, 15, generator=g).argsort(dim=1)[:, :7].sort(dim=1).values
    for part in (0, 1):  # keys and values, strided as in the full cache
        got = gather_chunks_triton(layer.to(device)[:, part], indices.to(device), chunk_size)
        assert torch.equal(got.cpu(), gather_chunks(layer[:, part], indices, chunk_size))


@both
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("chunk_size", "head_dim", "first"), [(8, 80, 0), (4, 128, 6), (12, 32, 10)])
@pytest.mark.slow(keep=2)
def test_copied_chunks_are_those_of_the_block_in_their_places(device, dtype, chunk_size, head_dim, first):
    g = torch.Generator().manual_seed(3)
    block = torch.randn(2, 4, 5 * chunk_size, head_dim, generator=g).to(DTYPES[dtype][0])
    indices = torch.rand(4, 15, generator=g).argsort(dim=1)[:, :7].sort(dim=1).values
    room = torch.zeros(2, 4, 9 * chunk_size, head_dim, dtype=block.dtype)  # longer than the chunks, as a cache's is
    got = room.to(device)
    k, v = got[:, :, : 7 * chunk_size]
    copy_chunks_triton(block.to(device), first, indices.to(device), k, v, chunk_size)
    k, v = room[:, :, : 7 * chunk_size]
    copy_chunks(block, first, indices, k, v, chunk_size)
    assert torch.equal(got.cpu(), room)
    for head, places in enumerate(indices.tolist()):
        for place, chunk in enumerate(places):
            want = torch.zeros(2, chunk_size, head_dim, dtype=block.dtype)
            if first <= chunk < first + 5:
                want = block[:, head].unflatten(1, (5, chunk_size))[:, chunk - first]
            assert torch.equal(room[:, head, place * chunk_size : (place + 1) * chunk_size], want)


def chunk_functions(q, k, lse, indices):
    """Mass of chunks of eight keys, and some of these chunks, by the functions that everything calls."""
    mass = lse.new_empty(*lse.shape, k.shape[1] // 8)
    chunk_mass(q, k, lse, mass, scale=0.2, diagonal=60)
    return mass, gather_chunks(k.unsqueeze(0), indices, 8)


@interpreted
def test_chunk_functions_take_triton_where_it_is_usable():
    q, k, v = random_qkv((4, 2, 32), 3, 64)
    lse = attend(q, k, v, scale=0.2, diagonal=60)[1]
    indices = torch.tensor([[0, 5, 7], [1, 2, 3]])
    want = chunk_functions(q, k, lse, indices)
    with launches() as grids:
        assert chunk_functions(q, k, lse, indices) and not grids
        with use_kernels(as_gpu={"triton"}):
            got = chunk_functions(q, k, lse, indices)
    assert len(grids) == 2
    torch.testing.assert_close(got, want)
