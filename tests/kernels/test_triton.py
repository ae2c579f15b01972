"""Triton's attention against the plain functions and PyTorch's own attention in float64.

Without a GPU it runs under Triton's interpreter (see `conftest.py`); with one, the same tests run compiled.
"""

import functools
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import oracle, random_qkv
from profiles import examples
from triforce.kernels.attention import STEP_ROWS, attend, merge_partials
from triforce.kernels.selection import use_kernels
from triton_runs import DTYPES, both, interpreted

from triforce.kernels.triton.attention import attend_triton  # isort: skip (Triton may be missing until here)

pytestmark = pytest.mark.usefixtures("exact_products")


def check(attend_there, shape, n, m, *, device, dtype="float32", scale=0.3, diagonal=None, window=None):
    """Compares one call with float64 and with the plain function."""
    kind, rounding = DTYPES[dtype]
    q, k, v = random_qkv(shape, n, m, kind)
    out, lse = attend_there(q.to(device), k.to(device), v.to(device), scale=scale, diagonal=diagonal, window=window)
    assert out.dtype == lse.dtype == torch.float32
    out, lse = out.cpu(), lse.cpu()
    allowed = rounding * oracle(q, k, v.abs(), scale, diagonal, window)[0] + 1e-5
    with use_kernels(attention="plain"):
        plain = attend(q, k, v, scale=scale, diagonal=diagonal, window=window)
    for want_out, want_lse in (oracle(q, k, v, scale, diagonal, window), plain):
        excess = ((out - want_out).abs() - allowed).max()
        assert excess < 0, f"out misses by {excess:.1e} more than allowed"
        seen = want_lse > float("-inf")
        assert torch.equal(seen, lse > float("-inf"))
        error = (lse - want_lse)[seen].abs().amax() if seen.any() else 0.0
        assert error < (2e-5 if device == "cpu" else 1e-4), f"lse misses by {error:.1e}"


@both
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128])
@pytest.mark.slow(keep=4)
def test_every_head_shape_equals_sdpa_in_float64(device, head_dim, group, dtype):
    check(
        attend_triton,
        (group, 1, head_dim),
        3,
        301,
        device=device,
        diagonal=298,
        scale=head_dim**-0.5,
        dtype=dtype,
    )


@both
@pytest.mark.parametrize("n", [1, 17])
@pytest.mark.parametrize("diagonal", [None, 0, 255, 256, 10**6, -3, -40])
@pytest.mark.slow(keep=4)
def test_every_diagonal_equals_sdpa_in_float64(device, n, diagonal):
    check(attend_triton, (4, 2, 32), n, 277, device=device, diagonal=diagonal)


@both
@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("diagonal", [0, 100, 300, 900])
@pytest.mark.parametrize("window", [1, 200])
@pytest.mark.slow(keep=4)
def test_a_window_equals_sdpa_in_float64(device, n, diagonal, window):
    check(attend_triton, (2, 1, 32), n, 290, device=device, diagonal=diagonal, window=window)


@both
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.slow(keep=1)
def test_many_rows_without_a_split_equal_sdpa_in_float64(device, window):
    attend_there = functools.partial(attend_triton, split=False)
    check(attend_there, (2, 1, 32), STEP_ROWS, 290, device=device, diagonal=255, window=window, dtype="float16")


@both
@pytest.mark.parametrize("m", [1, 15, 256, 257, 1030])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.slow(keep=3)
def test_every_ragged_end_equals_sdpa_in_float64(device, m, dtype):
    check(attend_triton, (2, 2, 64), 2, m, device=device, dtype=dtype, scale=0.125)


@both
@pytest.mark.parametrize("head_dim", [8, 24, 256])
def test_unusual_heads_equal_sdpa_in_float64(device, head_dim):
    check(attend_triton, (6, 3, head_dim), 4, 70, device=device, diagonal=66, scale=head_dim**-0.5)


@both
@examples(12, derandomize=True)
@given(data=st.data())
def test_any_call_equals_sdpa_in_float64(device, data):
    draw = data.draw
    group, kv_heads = draw(st.sampled_from([1, 2, 4, 8])), draw(st.integers(1, 2))
    diagonal = draw(st.none() | st.integers(-30, 400))
    check(
        attend_triton,
        (group * kv_heads, kv_heads, draw(st.sampled_from([16, 32, 48]))),
        draw(st.integers(1, 20)),
        draw(st.integers(1, 330)),
        device=device,
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        diagonal=diagonal,
        window=draw(st.none() | st.integers(1, 200)) if diagonal is not None else None,
        scale=0.2,
    )


@both
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.slow
def test_a_row_gives_the_same_bits_alone_and_with_others(device, group, dtype):
    """Verification and decoding must agree wherever the matmuls do."""
    n, m = 19, 400
    q, k, v = (x.to(device) for x in random_qkv((2 * group, 2, 64), n, m, DTYPES[dtype][0]))
    out, lse = attend_triton(q, k, v, scale=0.125, diagonal=m - n)
    for i in (0, 7, n - 1):
        alone, alone_lse = attend_triton(q[:, i : i + 1], k, v, scale=0.125, diagonal=m - n + i)
        assert torch.equal(out[:, i : i + 1], alone)
        assert torch.equal(lse[:, i : i + 1], alone_lse)


@both
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.slow(keep=1)
def test_a_diagonal_on_the_device_is_read_at_the_call(device, dtype):
    q, k, v = (x.to(device) for x in random_qkv((4, 2, 32), 3, 300))
    diagonal = torch.zeros((), dtype=dtype, device=device)
    for value in (-2, 0, 17, 290, 5000):
        diagonal.fill_(value)
        got = attend_triton(q, k, v, scale=0.3, diagonal=diagonal, window=50)
        want = attend_triton(q, k, v, scale=0.3, diagonal=value, window=50)
        torch.testing.assert_close(got, want, rtol=0, atol=0 if device == "cpu" else 1e-6)


@both
def test_keys_may_lie_in_strided_blocks_and_hidden_ones_hold_anything(device):
    """The layout of the full cache: keys and values of a block side by side, queries transposed."""
    n, m = 5, 290
    q, k, v = random_qkv((4, 2, 32), n, m)
    block = torch.stack([k, v]).to(device)
    block[0, :, 200:] = float("nan")
    queries = q.transpose(0, 1).contiguous().transpose(0, 1).to(device)
    out, _ = attend_triton(queries, block[0], block[1], scale=0.3, diagonal=200 - n)
    want, _ = oracle(q, k, v, 0.3, 200 - n)
    assert (out.cpu() - want).abs().max() < 1e-5


@both
def test_merged_blocks_equal_the_whole(device):
    n, m = 7, 900
    q, k, v = (x.to(device) for x in random_qkv((4, 2, 32), n, m))
    parts = [
        attend_triton(q, k[:, a:b], v[:, a:b], scale=0.3, diagonal=m - n - a)
        for a, b in itertools.pairwise([0, 64, 400, 894, m])
    ]
    out, lse = merge_partials([out for out, _ in parts], [lse for _, lse in parts])
    want_out, want_lse = oracle(q.cpu(), k.cpu(), v.cpu(), 0.3, m - n)
    assert (out.cpu() - want_out).abs().max() < 1e-5
    assert (lse.cpu() - want_lse).abs().max() < 2e-5


@both
@pytest.mark.parametrize("n", [2, pytest.param(STEP_ROWS + 1, marks=pytest.mark.slow)])
def test_attend_passes_its_arguments_on(device, n):
    q, k, v = random_qkv((2, 1, 32), n, 560)
    for diagonal, window in [(None, None), (200, None), (torch.tensor(200), 40)]:
        there = diagonal.to(device) if isinstance(diagonal, torch.Tensor) else diagonal
        with use_kernels(attention="triton"):
            out, lse = attend(q.to(device), k.to(device), v.to(device), scale=0.3, diagonal=there, window=window)
        want_out, want_lse = oracle(q, k, v, 0.3, None if diagonal is None else int(diagonal), window)
        assert (out.cpu() - want_out).abs().max() < 1e-5
        assert (lse.cpu() - want_lse).abs().max() < 2e-5


@interpreted
def test_attend_gives_mass_beside_a_kernel_that_does_not():
    q, k, v = random_qkv((4, 2, 32), 3, 64)
    want, got = torch.empty(4, 3, 8), torch.empty(4, 3, 8)
    attend(q, k, v, scale=0.2, diagonal=60, mass=want)
    with use_kernels(attention="triton"):
        attend(q, k, v, scale=0.2, diagonal=60, mass=got)
    torch.testing.assert_close(got, want)
