"""Attention, merging and chunk selection against PyTorch's own attention in float64."""

import itertools

import pytest
import torch
from oracles import oracle, random_qkv
from triforce.kernels.attention import FEW_ROWS, attend, merge_partials
from triforce.kernels.chunks import chunk_scores, gather_chunks, select_chunks

SHAPES = [(4, 4, 32), (8, 2, 64), (6, 1, 24), (2, 2, 128)]  # num_heads, num_kv_heads, head_dim


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n", [1, 3, FEW_ROWS, FEW_ROWS + 1, 75])
@pytest.mark.parametrize("diagonal", [None, 0, 5, 60, -2, 1000])
@pytest.mark.slow(keep=24)
def test_attend_equals_sdpa_in_float64(shape, n, diagonal):
    q, k, v = random_qkv(shape, n, 100)
    out, lse = attend(q, k, v, scale=0.3, diagonal=diagonal)
    want_out, want_lse = oracle(q, k, v, 0.3, diagonal)
    assert (out - want_out).abs().max() < 2e-5
    seen = want_lse > float("-inf")
    assert torch.equal(seen, lse > float("-inf"))
    assert torch.allclose(lse[seen].double(), want_lse[seen], rtol=0, atol=2e-5)


@pytest.mark.parametrize("n", [1, 5, 150])
@pytest.mark.parametrize("diagonal", [0, 40, 300])
def test_attend_in_a_window_equals_sdpa_in_float64(n, diagonal):
    q, k, v = random_qkv((4, 2, 32), n, 100)
    out, lse = attend(q, k, v, scale=0.3, diagonal=diagonal, window=30)
    want_out, want_lse = oracle(q, k, v, 0.3, diagonal, 30)
    assert (out - want_out).abs().max() < 2e-5
    assert torch.allclose(lse.double(), want_lse, rtol=0, atol=2e-5)


@pytest.mark.parametrize("n", [1, 13, 40])
def test_attend_in_bfloat16_errs_no_more_than_its_inputs(n):
    q, k, v = random_qkv((4, 4, 64), n, 300, torch.bfloat16)
    out, lse = attend(q, k, v, scale=0.125, diagonal=300 - n)
    want_out, want_lse = oracle(q, k, v, 0.125, 300 - n)
    assert (out - want_out).abs().max() < 2**-8
    assert (lse - want_lse).abs().max() < 1e-3


@pytest.mark.parametrize("n", [2, 40])
def test_hidden_keys_may_hold_anything(n):
    q, k, v = random_qkv((4, 2, 32), n, 64)
    diagonal = 10 - n
    want = attend(q, k, v, scale=1.0, diagonal=diagonal)
    k[:, 10:] = float("nan")
    v[:, 10:] = 0.0
    got = attend(q, k, v, scale=1.0, diagonal=diagonal)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize("n", [1, 7, 33])
@pytest.mark.parametrize("cuts", [(20,), (1, 2, 50), (33, 64, 90)])
def test_merged_parts_equal_the_whole(n, cuts):
    q, k, v = random_qkv((8, 4, 32), n, 100)
    offset = 100 - n
    edges = [0, *cuts, 100]
    parts = [attend(q, k[:, a:b], v[:, a:b], scale=0.2, diagonal=offset - a) for a, b in itertools.pairwise(edges)]
    out, lse = merge_partials([p[0] for p in parts], [p[1] for p in parts])
    want_out, want_lse = oracle(q, k, v, 0.2, offset)
    assert (out - want_out).abs().max() < 2e-5
    assert (lse - want_lse).abs().max() < 2e-5


def test_heads_that_do_not_divide_are_refused():
    q, k, v = random_qkv((6, 4, 8), 1, 4)
    with pytest.raises(ValueError, match="6 query heads cannot share 4"):
        attend(q, k, v, scale=1.0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n", [1, 9, FEW_ROWS, FEW_ROWS + 1, 140])
@pytest.mark.parametrize(("diagonal", "window"), [(None, None), (60, None), (-3, None), (40, 30)])
@pytest.mark.slow(keep=12)
def test_mass_is_what_the_last_rows_give_each_chunk(shape, n, diagonal, window):
    q, k, v = random_qkv(shape, n, 96)
    for rows in {n, min(n, 8)}:
        mass = torch.full((shape[0], rows, 12), float("nan"))
        attend(q, k, v, scale=0.3, diagonal=diagonal, window=window, mass=mass)
        # Attention to values that say which chunk they belong to.
        of_chunk = torch.eye(12).repeat_interleave(8, 0).expand(shape[1], -1, -1)
        want, _ = oracle(q, k, of_chunk, 0.3, diagonal, window)
        error = (mass - want[:, n - rows :]).abs().max()
        assert error < 1e-5, f"shares of {rows} rows differ by {error}"


@pytest.mark.parametrize("n", [2, 40])
def test_mass_ignores_what_hidden_keys_hold(n):
    q, k, v = random_qkv((4, 2, 32), n, 64)
    want, got = torch.empty(4, 2, 8), torch.empty(4, 2, 8)
    attend(q, k, v, scale=1.0, diagonal=10 - n, mass=want)
    k[:, 10:] = float("nan")
    attend(q, k, v, scale=1.0, diagonal=10 - n, mass=got)
    assert torch.equal(got, want)


def test_asking_for_mass_changes_nothing_else():
    q, k, v = random_qkv((4, 2, 32), 9, 64)
    plain, asked = (attend(q, k, v, scale=0.2, diagonal=55, mass=mass) for mass in (None, torch.empty(4, 9, 8)))
    assert all(torch.equal(a, b) for a, b in zip(plain, asked, strict=True))


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


@pytest.mark.parametrize("n", [1, 5, FEW_ROWS + 1, 150])
@pytest.mark.parametrize("window", [None, 30])
def test_the_plain_path_takes_a_diagonal_in_a_tensor(n, window):
    q, k, v = random_qkv((4, 2, 32), n, 100)
    for value in (-3, 0, 40, 300):
        out, lse = attend(q, k, v, scale=0.3, diagonal=torch.tensor(value), window=window)
        want_out, want_lse = oracle(q, k, v, 0.3, value, window)
        assert (out - want_out).abs().max() < 2e-5
        assert torch.allclose(lse.double(), want_lse, rtol=0, atol=2e-5)
