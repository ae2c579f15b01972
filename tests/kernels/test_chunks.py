"""Chunks of keys: what attention gives them, which are kept, and copies of those, against indexing done by hand."""

import pytest
import torch
from oracles import oracle, random_qkv
from triforce.kernels import chunk_mass, chunk_scores, copy_chunks, gather_chunks, select_chunks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("diagonal", "window"), [(None, None), (120, None), (-2, None), (200, 90)])
def test_the_mass_of_a_chunk_is_the_attention_it_gets(dtype, diagonal, window):
    """As attention to values that say which chunk they belong to has it; of a row that sees nothing it is 0."""
    n, m = 5, 136
    q, k, v = random_qkv((8, 2, 64), n, m, dtype)
    _, lse = oracle(q, k, v, 0.1, diagonal, window)
    mass = torch.full((8, n, m // 8), float("nan"))
    chunk_mass(q, k, lse.float(), mass, scale=0.1, diagonal=diagonal, window=window)
    member = torch.eye(m // 8).repeat_interleave(8, 0).expand(2, -1, -1)
    want, _ = oracle(q, k, member, 0.1, diagonal, window)
    assert (mass - want).abs().max() < (1e-5 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("diagonal", [None, 8990])
def test_the_mass_of_many_keys_is_that_of_their_parts(diagonal):
    """More keys than scores are computed for at a time: 9,000, the last of them alone."""
    q, k, v = random_qkv((2, 1, 32), 3, 9000, torch.float32)
    _, lse = oracle(q, k, v, 0.1, diagonal, None)
    mass = torch.full((2, 3, 1125), float("nan"))
    chunk_mass(q, k, lse.float(), mass, scale=0.1, diagonal=diagonal)
    member = torch.eye(1125).repeat_interleave(8, 0).expand(1, -1, -1)
    want, _ = oracle(q, k, member, 0.1, diagonal, None)
    assert (mass - want).abs().max() < 1e-5


def test_a_chunk_is_worth_what_it_or_the_one_before_it_got():
    mass = torch.tensor([[0.3, 0.1, 0.0, 0.4]])
    assert torch.allclose(chunk_scores(mass), torch.tensor([[0.3, 0.3, 0.1, 0.4]]))


@pytest.mark.parametrize("count", [1, 2, 5, 12, 40])
def test_selection_keeps_sink_newest_and_best(count):
    scores = torch.rand(3, 12, generator=torch.Generator().manual_seed(1))
    picked = select_chunks(scores, count)
    assert picked.shape == (3, min(count, 12))
    for head in range(3):
        indices = picked[head].tolist()
        assert indices == sorted(set(indices))
        assert 11 in indices
        if count > 1:
            assert 0 in indices
        if 2 < count < 12:
            best = scores[head, 1:-1].topk(count - 2).indices + 1
            assert set(best.tolist()) <= set(indices)


def test_gather_fetches_each_head_its_own_chunks():
    g = torch.Generator().manual_seed(2)
    flat = torch.randn(3, 64, 5, generator=g)  # [heads, tokens, head_dim]
    blocks = flat.reshape(3, 4, 16, 5).transpose(0, 1)  # 4 blocks of 16 tokens
    indices = torch.tensor([[0, 3, 7], [1, 2, 15], [0, 8, 9]])
    got = gather_chunks(blocks, indices, 4)
    for head in range(3):
        want = torch.cat([flat[head, 4 * c : 4 * c + 4] for c in indices[head].tolist()])
        assert torch.equal(got[head], want)


@pytest.mark.parametrize(("chunk_size", "head_dim", "first"), [(8, 80, 0), (4, 128, 6), (12, 32, 10)])
def test_chunks_of_a_block_are_copied_to_their_places_and_others_left(chunk_size, head_dim, first):
    g = torch.Generator().manual_seed(3)
    block = torch.randn(2, 4, 5 * chunk_size, head_dim, generator=g)
    indices = torch.rand(4, 15, generator=g).argsort(dim=1)[:, :7].sort(dim=1).values
    k, v = torch.zeros(2, 4, 7 * chunk_size, head_dim)
    copy_chunks(block, first, indices, k, v, chunk_size)
    for head, places in enumerate(indices.tolist()):
        for place, chunk in enumerate(places):
            want = torch.zeros(2, chunk_size, head_dim)
            if first <= chunk < first + 5:
                want = block[:, head].unflatten(1, (5, chunk_size))[:, chunk - first]
            rows = slice(place * chunk_size, (place + 1) * chunk_size)
            assert torch.equal(torch.stack((k[head, rows], v[head, rows])), want)
