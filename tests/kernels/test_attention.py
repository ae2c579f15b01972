"""Attention, and joining parts of it, against PyTorch's own attention in float64."""

import itertools
from typing import get_args

import pytest
import torch
from oracles import error_of, oracle, random_qkv
from triforce.kernels import (
    STEP_ROWS,
    Backend,
    Scratch,
    attend,
    attend_blocks,
    merge_partials,
    new_running,
    takes_blocks,
    use_kernels,
)

SHAPES = [(4, 4, 32), (8, 2, 64), (6, 1, 24), (2, 2, 128)]  # num_heads, num_kv_heads, head_dim


def assert_within(got, q, k, v, scale, diagonal):
    """That a result errs by no more than rounding the share of each key to `q`'s format does, or float32 sums."""
    (out, lse), (want, want_lse) = got, oracle(q, k, v, scale, diagonal)
    rounding = 2**-7 if q.dtype == torch.bfloat16 else 0.0
    excess = ((out - want).abs() - rounding * oracle(q, k, v.abs(), scale, diagonal)[0]).max()
    assert excess < 2e-5, f"off by {excess:.1e} more than rounding allows"
    assert (lse - want_lse).abs().max() < 1e-3


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n", [1, 3, STEP_ROWS, STEP_ROWS + 1, 75])
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
@pytest.mark.parametrize("n", [1, 9, STEP_ROWS, STEP_ROWS + 1, 140])
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


@pytest.mark.parametrize("n", [1, 5, STEP_ROWS + 1, 150])
@pytest.mark.parametrize("window", [None, 30])
def test_the_plain_path_takes_a_diagonal_in_a_tensor(n, window):
    q, k, v = random_qkv((4, 2, 32), n, 100)
    for value in (-3, 0, 40, 300):
        out, lse = attend(q, k, v, scale=0.3, diagonal=torch.tensor(value), window=window)
        want_out, want_lse = oracle(q, k, v, 0.3, value, window)
        assert (out - want_out).abs().max() < 2e-5
        assert torch.allclose(lse.double(), want_lse, rtol=0, atol=2e-5)


@pytest.mark.parametrize("wanted", [one for one in get_args(Backend) if one in ("plain", "compiled", "flash_cpu")])
@pytest.mark.parametrize("n", [3, 70])
@pytest.mark.parametrize(("diagonal", "window"), [(230, None), (230, 50), (-20, None), (None, None)])
def test_every_choice_computes_every_call(wanted, n, diagonal, window):
    """Also those that the implementation is not for, which another computes."""
    for dtype, head_dim in [(torch.float32, 64), (torch.float32, 24), (torch.float64, 64)]:
        q, k, v = random_qkv((4, 2, head_dim), n, 300, dtype)
        with use_kernels(attention=wanted):
            got = attend(q, k, v, scale=0.2, diagonal=diagonal, window=window)
        assert error_of(got, oracle(q, k, v, 0.2, diagonal, window)) < 2e-5


def test_what_one_implementation_does_not_take_another_computes():
    q, k, v = random_qkv((2, 2, 64), 3, 100)
    want = oracle(q, k, v, 0.2, 97)
    odd_rows = torch.stack((k, k), dim=-1)[..., 0]
    for other in (
        attend(q, odd_rows, v, scale=0.2, diagonal=97),  # rows that are not contiguous
        attend(q.double(), k.double(), v.double(), scale=0.2, diagonal=97),
    ):
        assert error_of(other, want) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 13])
@pytest.mark.parametrize("wanted", [None, "plain"])
def test_keys_that_come_in_several_calls_equal_the_whole(wanted, n, dtype):
    """Also where peaks are far apart: keys grow, so that later ones outweigh earlier ones."""
    m = 1000
    q, k, v = random_qkv((4, 2, 64), n, m, dtype)
    k = (k.float() * torch.linspace(0.1, 6, m).unsqueeze(-1)).to(dtype)
    running, got, mass = new_running(q), None, torch.empty(4, n, (m - 768) // 8)
    with use_kernels(attention=wanted):
        for first, stop in itertools.pairwise([0, 256, 768, m]):
            seen = {"scale": 0.2, "diagonal": m - n - first, "running": running}
            shares = mass if stop == m else None
            got = attend(q, k[:, first:stop], v[:, first:stop], **seen, mass=shares)
    assert got is not None
    tolerance = 2e-5 if dtype == torch.float32 else 2**-7
    assert_within(got, q, k, v, 0.2, m - n)
    of_chunk = torch.eye(m // 8).repeat_interleave(8, 0).expand(2, -1, -1)
    want, _ = oracle(q, k, of_chunk, 0.2, m - n)
    assert (mass - want[:, :, 768 // 8 :]).abs().max() < tolerance, "shares of the last keys are of all keys so far"


def test_rows_that_see_no_key_yet_go_on_from_nothing():
    q, k, v = random_qkv((2, 1, 32), 4, 600)
    running = new_running(q)
    out, lse = attend(q, k, v, scale=0.2, diagonal=-10, running=running)
    assert (out == 0).all() and (lse == float("-inf")).all()
    got = attend(q, k, v, scale=0.2, diagonal=598, running=running)
    assert error_of(got, oracle(q, k, v, 0.2, 598)) < 2e-5


def test_buffers_may_be_used_again_by_calls_of_any_size():
    scratch = Scratch()
    for n, m in ((3, 100), (70, 300), (1, 40), (300, 500)):
        q, k, v = random_qkv((4, 2, 32), n, m)
        with use_kernels(attention="plain"):
            got = attend(q, k, v, scale=0.2, diagonal=m - n, scratch=scratch)
        assert error_of(got, oracle(q, k, v, 0.2, m - n)) < 2e-5


def test_rounded_results_have_the_dtype_of_the_queries():
    q, k, v = random_qkv((4, 2, 64), 5, 200, torch.bfloat16)
    exact, lse = attend(q, k, v, scale=0.2, diagonal=195)
    rounded, same = attend(q, k, v, scale=0.2, diagonal=195, rounded=True)
    assert (exact.dtype, rounded.dtype, same.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    assert torch.equal(rounded, exact.bfloat16()) and torch.equal(same, lse)


def test_results_are_float32_whatever_pytorch_makes_by_default():
    q, k, v = (torch.randn(2, n, 64) for n in (3, 90, 90))
    want, _ = attend(q, k, v, scale=0.125)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        got, lse = attend(q, k, v, scale=0.125)
    finally:
        torch.set_default_dtype(before)
    assert (got.dtype, lse.dtype) == (torch.float32, torch.float32)
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strided", [False, True])
def test_blocks_give_what_their_tokens_give(dtype, strided):
    num_blocks, num_kv_heads, block_size, head_dim = 5, 2, 192, 64
    g = torch.Generator().manual_seed(3)
    blocks = torch.randn(num_blocks, 2, num_kv_heads, block_size, head_dim, generator=g).to(dtype)
    q = torch.randn(13, 6, head_dim, generator=g).to(dtype).transpose(0, 1)  # token-major, as a projection gives it
    k, v = (blocks[:, i].transpose(0, 1).flatten(1, 2) for i in range(2))
    if strided:
        blocks = torch.stack((blocks, blocks), dim=4)[..., 0, :]
    with use_kernels(attention="plain"):
        assert not takes_blocks(q, blocks)
    if not takes_blocks(q, blocks):
        pytest.skip("blocks are attended in one call by the compiled kernels alone, which are not in use here")
    for m, chunk_size in ((800, 8), (960, 8), (720, 24)):
        mass, want_mass = torch.empty(6, 13, m // chunk_size), torch.empty(6, 13, m // chunk_size)
        got = attend_blocks(q, blocks, m, scale=0.2, diagonal=m - 15, mass=mass)
        attend(q, k[:, :m], v[:, :m], scale=0.2, diagonal=m - 15, mass=want_mass)
        assert_within(got, q, k[:, :m], v[:, :m], 0.2, m - 15)
        assert torch.allclose(mass, want_mass, rtol=0, atol=1e-3 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("n", [STEP_ROWS + 1, 70])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("block_size", [64, 2048])
@pytest.mark.slow(keep=1)
def test_a_prefill_by_the_flash_kernel_reads_blocks_too(dtype, n, block_size):
    """What is done where the compiled kernels were not built, here by choice; beyond what it copies together."""
    g = torch.Generator().manual_seed(1)
    blocks = torch.randn(20480 // block_size, 2, 2, block_size, 64, generator=g).to(dtype)
    q = torch.randn(n, 6, 64, generator=g).to(dtype).transpose(0, 1)
    if not takes_blocks(q, blocks):
        pytest.skip("blocks are attended in one call by the compiled kernels alone, which are not in use here")
    rounding = 2**-6 if dtype == torch.bfloat16 else 1e-5  # of values up to 4, rounded once or twice
    for start, window in [(0, None), (500, None), (16384 - n, None), (17001, None), (17001, 19000), (700, 100)]:
        m = -(-(start + n) // 8) * 8
        hidden = blocks.clone()
        flat = hidden.permute(1, 2, 0, 3, 4).flatten(2, 3)
        hidden[(start + n) // block_size, :, :, (start + n) % block_size :] = 9e9  # what no row sees
        want_mass, mass = torch.empty(6, 8, m // 8), torch.empty(6, 8, m // 8)
        call = {"scale": 0.125, "diagonal": start, "window": window}
        want = attend_blocks(q, hidden, m, **call, mass=want_mass)
        with use_kernels(prefill="flash_cpu"):
            got = attend_blocks(q, hidden, m, **call, mass=mass)
        exact = oracle(q, flat[0, :, :m], flat[1, :, :m], 0.125, start, window)
        assert error_of(want, exact) < rounding
        assert error_of(got, exact) < rounding, f"from {start}, window {window}"
        assert torch.allclose(mass, want_mass, rtol=0.03 if dtype == torch.bfloat16 else 1e-4, atol=1e-5)


@pytest.mark.parametrize("n", [1, 9, 40, 140])
@pytest.mark.parametrize("chunk_size", [1, 4, 64, 24])
@pytest.mark.parametrize(("diagonal", "window"), [(None, None), (500, None), (-3, None), (560, 300)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.slow(keep=24)
def test_chunks_may_have_any_size(n, chunk_size, diagonal, window, dtype):
    m = 576
    q, k, v = random_qkv((4, 2, 32), n, m, dtype)
    of_chunk = torch.eye(m // chunk_size).repeat_interleave(chunk_size, 0).expand(2, -1, -1)
    want, _ = oracle(q, k, of_chunk, 0.3, diagonal, window)
    for rows in {n, min(n, 8)}:
        mass = torch.full((4, rows, m // chunk_size), float("nan"))
        attend(q, k, v, scale=0.3, diagonal=diagonal, window=window, mass=mass)
        error = (mass - want[:, n - rows :]).abs().max()
        # What is not summed with attention is computed from scores in the keys' format.
        assert error < (0.02 if dtype == torch.bfloat16 else 1e-5), f"shares of {rows} rows differ by {error}"
