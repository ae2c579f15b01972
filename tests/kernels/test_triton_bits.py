"""The bits of a row of Triton's attention depend on that row and on the keys it sees alone.

Without a GPU it runs under Triton's interpreter (see `conftest.py`); with one, the same tests run compiled.
"""

import itertools

import pytest
import torch
from oracles import oracle, random_qkv
from triton_runs import DTYPES, both

from triforce.kernels.triton.attention import KEYS_PER_SPLIT, attend_triton  # isort: skip (Triton may be missing)

pytestmark = pytest.mark.usefixtures("exact_products")

SCALE = 0.2


def no_keys(q):
    """A running result of no keys, as `partials.new_running` makes it."""
    running = torch.zeros(*q.shape[:2], q.shape[2] + 16, device=q.device)
    running[..., q.shape[2]] = -1e30
    return running


def in_calls(q, k, v, edges, *, diagonal, window=None, **options):
    """Attention to keys that come in several calls: the last call's results, and the running result."""
    running, got = no_keys(q), ()
    for first, stop in itertools.pairwise(edges):
        got = attend_triton(
            q,
            k[:, first:stop],
            v[:, first:stop],
            scale=SCALE,
            diagonal=diagonal - first,
            window=window,
            running=running,
            **options,
        )
    return *got, running


def assert_same(got, want):
    for ours, theirs in zip(got, want, strict=True):
        assert torch.equal(ours, theirs), f"bits differ, by up to {(ours - theirs).abs().max():.1e}"


def inputs(device, shape, n, m, dtype="bfloat16"):
    return tuple(x.to(device) for x in random_qkv(shape, n, m, DTYPES[dtype][0]))


@both
@pytest.mark.parametrize(
    ("dtype", "group", "window"),
    [("bfloat16", 4, None), ("bfloat16", 1, 300), ("float16", 8, None), ("float32", 2, 70)],
)
@pytest.mark.slow(keep=("bfloat16-1-300-interpreted", "bfloat16-1-300-compiled"))
def test_up_to_forty_rows_give_the_same_bits_alone_and_together(device, dtype, group, window):
    n, m = 40, KEYS_PER_SPLIT + 70
    q, k, v = inputs(device, (group, 1, 32), n, m, dtype)
    together = attend_triton(q, k, v, scale=SCALE, diagonal=m - n, window=window)
    alone = (0, 1, 7, 15, 16, 17, 23, 31, 32, 33, 38, 39)
    for rows in [*(slice(i, i + 1) for i in alone), slice(0, 7), slice(7, 40), slice(3, 36)]:
        part = attend_triton(q[:, rows], k, v, scale=SCALE, diagonal=m - n + rows.start, window=window)
        assert_same(part, (together[0][:, rows], together[1][:, rows]))


@both
@pytest.mark.parametrize("window", [None, 2500, 300])
@pytest.mark.parametrize("n", [1, 6])
@pytest.mark.slow(keep=1)
def test_the_number_of_calls_and_of_hidden_keys_changes_no_bit(device, n, window):
    visible, m = 4096, 6144
    q, k, v = inputs(device, (2, 1, 16), n, m)
    k[:, visible:] = float("nan")
    diagonal = visible - n
    once = attend_triton(q, k[:, :visible], v[:, :visible], scale=SCALE, diagonal=diagonal, window=window)
    assert_same(attend_triton(q, k, v, scale=SCALE, diagonal=diagonal, window=window), once)
    there = torch.tensor(diagonal, device=device)
    assert_same(attend_triton(q, k, v, scale=SCALE, diagonal=there, window=window), once)
    *one, running = in_calls(q, k, v, [0, visible], diagonal=diagonal, window=window)
    assert_same(one, once)
    for edges in ([0, 2048, visible], [0, 512, 3 * 512, 4096, m]):
        assert_same(in_calls(q, k, v, edges, diagonal=diagonal, window=window), (*once, running))


@both
@pytest.mark.slow
def test_little_memory_for_partial_results_changes_no_bit(device):
    n, m = 3, 3 * KEYS_PER_SPLIT + 100
    q, k, v = inputs(device, (4, 2, 16), n, m)
    once = attend_triton(q, k, v, scale=SCALE, diagonal=m - n)
    running = in_calls(q, k, v, [0, m], diagonal=m - n)[2]
    two_splits = 2 * 4 * 4 * n * (16 + 2)
    assert_same(attend_triton(q, k, v, scale=SCALE, diagonal=m - n, most_parts=two_splits), once)
    assert_same(in_calls(q, k, v, [0, m], diagonal=m - n, most_parts=two_splits), (*once, running))


@both
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 600])
@pytest.mark.slow(keep=1)
def test_keys_in_several_calls_equal_sdpa_in_float64(device, dtype, window):
    """Peaks far apart too: keys grow, so that later splits outweigh earlier ones."""
    n, m = 5, 3 * KEYS_PER_SPLIT + 17
    q, k, v = random_qkv((4, 2, 32), n, m, DTYPES[dtype][0])
    k = (k.float() * torch.linspace(0.1, 6, m).unsqueeze(-1)).to(k.dtype)
    out, lse, running = in_calls(
        *(x.to(device) for x in (q, k, v)), [0, 512, 1536, m], diagonal=m - n - 2, window=window
    )
    want, want_lse = oracle(q, k, v, SCALE, m - n - 2, window)
    rounding = DTYPES[dtype][1] * (2 if device == "cpu" else 1)  # the interpreter cuts bits off where a GPU rounds
    allowed = rounding * oracle(q, k, v.abs(), SCALE, m - n - 2, window)[0] + 1e-5
    excess = ((out.cpu() - want).abs() - allowed).max()
    assert excess < 0, f"out misses by {excess:.1e} more than allowed"
    assert (lse.cpu() - want_lse).abs().max() < 1e-4
    sums, peak, total = running[..., :32], running[..., 32], running[..., 33]
    torch.testing.assert_close(sums / total.unsqueeze(-1), out)
    torch.testing.assert_close((peak + total.log2()) * torch.log(torch.tensor(2.0)).item(), lse)


@both
@pytest.mark.parametrize("split", [True, False])
def test_rows_that_see_no_key_yet_go_on_from_nothing(device, split):
    q, k, v = inputs(device, (2, 1, 32), 4, 600, "float32")
    running = no_keys(q)
    out, lse = attend_triton(q, k, v, scale=SCALE, diagonal=-10, split=split, running=running)
    assert (out == 0).all()
    assert (lse == float("-inf")).all()
    assert torch.equal(running[..., :34], no_keys(q)[..., :34])
    got = attend_triton(q, k, v, scale=SCALE, diagonal=598, split=split, running=running)
    assert_same(got, attend_triton(q, k, v, scale=SCALE, diagonal=598, split=split, running=no_keys(q)))
    want, _ = oracle(q.cpu(), k.cpu(), v.cpu(), SCALE, 598)
    assert (got[0].cpu() - want).abs().max() < 1e-5
