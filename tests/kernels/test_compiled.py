"""The compiled CPU kernels against float64 attention, the plain path, and themselves with other numbers of rows."""

import itertools
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from oracles import at_the_end, error_of, oracle, random_qkv
from tiny import save_llama
from triforce.kernels import STEP_ROWS, attend, attend_blocks, linear, takes_blocks
from triforce.kernels.attention import Piece, attend_pieces, new_running
from triforce.kernels.cpu.attention import attend_compiled
from triforce.kernels.cpu.library import Level, cpu_level, load_library, loaded
from triforce.kernels.flash import attend_flash, flash_cpu
from triforce.kernels.selection import use_kernels
from triforce.offload.caches.full import FullCache
from triforce.tp.model.config import ModelConfig
from triforce.tp.rope import Rope

compiled = pytest.mark.skipif(
    cpu_level() == 0, reason="the compiled kernels were not built, or this processor cannot run them"
)
DTYPES = [torch.bfloat16, torch.float32]
LEVELS = ["AVX2", "AVX-512", "AVX-512 bfloat16 dot products", "AMX"]
SHAPES = [(4, 4, 64), (8, 2, 32), (6, 1, 128), (8, 1, 256), (3, 3, 96)]  # num_heads, num_kv_heads, head_dim
every_level = pytest.mark.parametrize("level", [pytest.param(i, id=name) for i, name in enumerate(LEVELS, 1)])


def need(level):
    if level > cpu_level():
        pytest.skip(f"this processor has no {LEVELS[level - 1]}")


def excess(got, q, k, v, scale, diagonal, window, level):
    """By how much a result differs from float64 more than it may: with products of bfloat16, the share of each key is
    rounded to that, by up to 2^-8 of it, and the result is divided by the sum of what was rounded."""
    out, lse = oracle(q, k, v, scale, diagonal, window)
    rounding = 1.01 * 2**-8 if level >= Level.AVX512_BF16 and q.dtype == torch.bfloat16 else 0.0
    allowed = rounding * (oracle(q, k, v.abs(), scale, diagonal, window)[0] + out.abs()) if rounding else 0.0
    beyond = ((got[0] - out).abs() - allowed).max().item()
    return max(beyond, error_of((out.float(), got[1]), (out, lse)))


@compiled
@every_level
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n", [1, 5, 13, 130])
@pytest.mark.slow(
    keep=("1-shape1-dtype1-AVX2", "13-shape0-dtype0-AVX2", "130-shape1-dtype0-AVX-512", "130-shape0-dtype0-AMX")
)
def test_attention_equals_sdpa_in_float64(dtype, shape, n, level):
    need(level)
    for m in (1, 63, 64, 200, 2300):
        check_attention(dtype, shape, n, m, level)


def check_attention(dtype, shape, n, m, level):
    q, k, v = random_qkv(shape, n, m, dtype)
    scale = shape[2] ** -0.5
    for diagonal, window in [(None, None), (m - n, None), (-3, None), (m // 2, None), (m + 9, 50), (m // 2, 90)]:
        got = attend_compiled(q, k, v, scale=scale, diagonal=diagonal, window=window, level=level)
        error = excess(got, q, k, v, scale, diagonal, window, level)
        assert error < 1e-5, f"{m} keys, diagonal {diagonal}, window {window}: off by {error}"


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_errs_no_more_than_twice_as_much_as_the_plain_path(dtype):
    q, k, v = random_qkv((4, 4, 64), 13, 8192, dtype)
    want = oracle(q, k, v, 0.125, 8192 - 13)
    level = min(cpu_level(), Level.AVX512)  # above, shares are rounded to bfloat16
    error = error_of(attend_compiled(q, k, v, scale=0.125, diagonal=8192 - 13, level=level), want)
    with use_kernels(attention="plain"):
        plain = error_of(attend(q, k, v, scale=0.125, diagonal=8192 - 13), want)
    assert error < max(2 * plain, 2e-6), f"{error} where the plain path, which differs by machine, has {plain}"


@compiled
@pytest.mark.parametrize("scale", [0.01, 0.125, 0.5, 2.0])
def test_with_products_of_bfloat16_it_errs_no_more_than_the_flash_kernel_of_pytorch(scale):
    need(Level.AVX512_BF16)
    q, k, v = random_qkv((4, 4, 64), 130, 2048, torch.bfloat16)
    want = oracle(q, k, v, scale, 2048 - 130)
    out, _ = attend_compiled(q, k, v, scale=scale, diagonal=2048 - 130)
    flash, _ = attend_flash(flash_cpu, q, k, v, scale, 2048 - 130)
    error, other = ((x - want[0]).square().mean().sqrt() for x in (out, flash))
    assert error < other, f"{error} where PyTorch's flash kernel has {other}"


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_of_any_size_are_summed_safely(dtype):
    q, k, v = random_qkv((2, 2, 32), 5, 300, dtype)
    for scale in (1e-6, 30.0, 1000.0):
        got = attend_compiled(q, k, v, scale=scale, diagonal=295)
        error = excess(got, q, k, v, scale, 295, None, cpu_level())
        assert error < 1e-5 * max(1.0, scale), f"scale {scale}: off by {error}"


@compiled
@pytest.mark.parametrize("threads", [1, 2])
def test_small_numbers_are_zero_in_attention_and_nowhere_else(threads):
    """Keys 87 to 103 below the best have denormal shares, which would take a processor a hundred times as long."""
    torch.set_num_threads(threads)
    q, k = torch.ones(2, 8, 64), torch.zeros(2, 600, 64)
    k[:, 5] = 95 / 64
    v = torch.randn(2, 600, 64)
    out, _ = attend_compiled(q, k, v, scale=1.0)
    assert torch.equal(out, v[:, 5:6].expand_as(out))
    assert (torch.full((64,), 1e-38) * 0.1 > 0).all(), "the mode is left as it was"


@compiled
@every_level
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.slow(keep=3)
def test_a_row_is_the_same_bit_by_bit_however_many_come_with_it(dtype, window, level):
    """Decoding, verification and prefill agree: with one thread and with several, with more keys behind or not."""
    need(level)
    n, m = 150, 3000
    q, k, v = random_qkv((8, 2, 64), n, m, dtype)
    mass = torch.empty(8, n, m // 8)
    out, lse = attend_compiled(q, k, v, scale=0.3, diagonal=m - n, window=window, mass=mass, level=level)
    threads = torch.get_num_threads()
    try:
        for rows, num_threads in [(1, 1), (1, 4), (2, 2), (4, 1), (5, 2), (13, 3), (32, 2), (149, 1)]:
            torch.set_num_threads(num_threads)
            for first in {0, 60, n - rows}:
                part, last = slice(first, first + rows), m - n + min(first + rows, n)
                for stop in (-(-last // 8) * 8, m):
                    own = torch.empty(8, len(q[0, part]), stop // 8)
                    got = attend_compiled(
                        q[:, part],
                        k[:, :stop],
                        v[:, :stop],
                        scale=0.3,
                        diagonal=m - n + first,
                        window=window,
                        mass=own,
                        level=level,
                    )
                    assert torch.equal(got[0], out[:, part]), f"{rows} rows from {first} on differ from {n} rows"
                    assert torch.equal(got[1], lse[:, part])
                    assert torch.equal(own, mass[:, part, : stop // 8])
    finally:
        torch.set_num_threads(threads)


@compiled
@every_level
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_threads_share_the_work_of_one(dtype, level):
    """More than there are processors and blocks of rows, so that they arrive late, and help one another with the last
    keys of a block: with few blocks, with one, and with more than have memory for helpers."""
    need(level)
    shapes = [((4, 4, 64), 3, 5000), ((8, 1, 128), 5, 3000), ((1, 1, 64), 1, 9000), ((3, 3, 32), 700, 2600)]
    before = torch.get_num_threads()
    try:
        for shape, n, m in shapes:
            q, k, v = random_qkv(shape, n, m, dtype)
            for window in (None, 1500):
                attended = partial(attend_compiled, q, k, v, scale=0.2, diagonal=m - n, window=window, level=level)
                torch.set_num_threads(1)
                want = attended()
                for num_threads in (2, 3, 9, 16):
                    torch.set_num_threads(num_threads)
                    for _ in range(3):
                        assert all(torch.equal(x, y) for x, y in zip(attended(), want, strict=True))
    finally:
        torch.set_num_threads(before)


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 13, 100])
def test_hidden_keys_and_values_may_hold_anything(dtype, n):
    q, k, v = random_qkv((4, 2, 32), n, 1500, dtype)
    want = attend_compiled(q, k, v, scale=1.0, diagonal=1100 - n)
    k[:, 1100:] = v[:, 1100:] = float("nan")
    got = attend_compiled(q, k, v, scale=1.0, diagonal=1100 - n)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    want = attend_compiled(q, k, v, scale=1.0, diagonal=1100 - n, window=50)
    k[:, : 1051 - n] = v[:, : 1051 - n] = float("nan")
    got = attend_compiled(q, k, v, scale=1.0, diagonal=1100 - n, window=50)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


@compiled
@every_level
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_whose_scores_are_minus_infinity_gives_nothing(dtype, level):
    need(level)
    q, k = torch.ones(1, 3, 64, dtype=dtype), torch.full((1, 64, 64), float("-inf"), dtype=dtype)
    mass = torch.full((1, 3, 8), 5.0)
    out, lse = attend_compiled(q, k, torch.ones_like(k), scale=0.125, mass=mass, level=level)
    assert (out == 0).all() and (lse == float("-inf")).all() and (mass == 0).all()


@compiled
@every_level
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_far_beyond_any_model_are_summed_or_are_nan(dtype, level):
    need(level)
    q = k = torch.full((1, 3, 64), 30080.0, dtype=dtype)
    v = torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    out, lse = attend_compiled(q, k, v, scale=0.125, level=level)
    assert (out - v.float().mean(1)).abs().max() < 0.01
    assert (lse / (30080.0**2 * 8) - 1).abs().max() < 1e-4
    out, _ = attend_compiled(q * 1e17, k * 1e17, v, scale=0.125, level=level)  # infinite products
    assert out.isnan().all()


@compiled
@every_level
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 16, 17])
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are locked away by mprotect")
def test_nothing_behind_the_last_key_is_read(dtype, n, level):
    need(level)
    q, k, v = random_qkv((1, 1, 64), n, 77, dtype)
    want = attend_compiled(q, k, v, scale=0.125, level=level)
    got = attend_compiled(q, at_the_end(k), at_the_end(v), scale=0.125, level=level)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strided", [False, True])
def test_blocks_give_what_their_tokens_give(dtype, strided):
    num_blocks, num_kv_heads, block_size, head_dim = 5, 2, 192, 64
    g = torch.Generator().manual_seed(3)
    blocks = torch.randn(num_blocks, 2, num_kv_heads, block_size, head_dim, generator=g).to(dtype)
    q = torch.randn(13, 6, head_dim, generator=g).to(dtype).transpose(0, 1)  # token-major, as a projection gives it
    k, v = (blocks[:, i].transpose(0, 1).flatten(1, 2) for i in range(2))
    if strided:
        blocks = torch.stack((blocks, blocks), dim=4)[..., 0, :]
    assert takes_blocks(q, blocks)
    for m, chunk_size in ((800, 8), (960, 8), (720, 24)):
        want_mass, mass = torch.empty(6, 13, m // chunk_size), torch.empty(6, 13, m // chunk_size)
        want = attend_compiled(q, k[:, :m], v[:, :m], scale=0.2, diagonal=m - 15, mass=None)
        attend(q, k[:, :m], v[:, :m], scale=0.2, diagonal=m - 15, mass=want_mass)
        got = attend_blocks(q, blocks, m, scale=0.2, diagonal=m - 15, mass=mass)
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
        assert torch.allclose(mass, want_mass, rtol=0, atol=1e-3 if dtype == torch.bfloat16 else 1e-6)


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk_size", [None, 8, 24])
def test_pieces_give_what_their_rows_give_alone(dtype, chunk_size):
    """Rows 0 to 12 on a text that they share, then each sequence's rows on its own keys, in one call."""
    g = torch.Generator().manual_seed(5)
    size = 192
    shared, *own = (torch.randn(count, 2, 2, size, 64, generator=g).to(dtype) for count in (8, 1, 3, 2, 60))
    q = torch.randn(13, 6, 64, generator=g).to(dtype).transpose(0, 1)
    rows = [slice(0, 1), slice(1, 5), slice(5, 10), slice(10, 13)]
    pieces = [Piece(slice(0, 13), shared, 768, 768, 768)]
    for one, blocks, (first, m, window) in zip(
        rows, own, [(24, 48, None), (0, 528, 200), (192, 96, None), (0, 11520, None)], strict=True
    ):
        pieces.append(Piece(one, blocks, first, m, m - (one.stop - one.start), window))
    if chunk_size:
        for piece in pieces:
            piece.mass = torch.empty(6, piece.rows.stop - piece.rows.start, piece.m // chunk_size)
    running, out = new_running(q), torch.empty_like(q)
    lses = [
        lse for some in (pieces[:1], pieces[1:]) for lse in attend_pieces(q, some, scale=0.2, running=running, out=out)
    ]
    alone = new_running(q)
    for piece, lse in zip(pieces, lses, strict=True):
        flat = piece.blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, piece.first : piece.first + piece.m]
        mass, so_far = None if piece.mass is None else torch.empty_like(piece.mass), alone[:, piece.rows].contiguous()
        shown = {"scale": 0.2, "diagonal": piece.diagonal, "window": piece.window, "mass": mass, "rounded": True}
        want, want_lse = attend(q[:, piece.rows], flat[0], flat[1], running=so_far, **shown)
        alone[:, piece.rows] = so_far
        assert torch.equal(lse, want_lse)
        assert mass is None or piece.mass is None or torch.equal(mass, piece.mass)
        if piece.blocks is not shared:
            assert torch.equal(out[:, piece.rows], want)
    assert torch.equal(alone[..., :67], running[..., :67])


@compiled
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_sums_of_pieces_are_float32_whatever_pytorch_makes_by_default(default):
    q, blocks = torch.randn(6, 3, 64), torch.randn(2, 2, 2, 64, 64)
    piece, out, before = Piece(slice(0, 3), blocks, 0, 100, 97), torch.empty_like(q), torch.get_default_dtype()
    want = attend_pieces(q, [piece], scale=0.2, running=new_running(q), out=out)
    torch.set_default_dtype(default)
    try:
        got = attend_pieces(q, [piece], scale=0.2, running=new_running(q), out=out)
    finally:
        torch.set_default_dtype(before)
    assert got[0].dtype == torch.float32
    assert torch.equal(got[0], want[0])


@compiled
def test_several_python_threads_can_attend_at_once():
    cases = [random_qkv((8, 2, 64), n, 2000 + 100 * n, torch.bfloat16, seed=n) for n in (1, 5, 13, 40)]
    wanted = [attend_compiled(*case, scale=0.1, diagonal=1000) for case in cases]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            done = pool.map(lambda case: attend_compiled(*case, scale=0.1, diagonal=1000), cases)
            for want, got in zip(wanted, done, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


@compiled
def test_there_is_one_openmp_library():
    """With two, each would have threads of its own, which wait for work by spinning."""
    q, k, v = random_qkv((4, 4, 64), 13, 4000, torch.bfloat16)
    attend(q, k, v, scale=0.1)
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("the loaded libraries of a process are listed in /proc on Linux only")
    loaded = {line.split()[-1] for line in maps.read_text().splitlines() if "libgomp" in line}
    assert len(loaded) == 1, loaded


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_verification_reads_the_full_cache_as_decoding_does(dtype, tmp_path):
    save_llama(tmp_path, num_key_value_heads=2, head_dim=32)
    config = ModelConfig.load(tmp_path)
    device = torch.device("cpu")
    g = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(heads, 700, 32, generator=g).to(dtype) for heads in (4, 2, 2))
    outs = []
    for cuts in ([640, 660, 661, 674], [640, *range(641, 674), 674]):
        rope = Rope(config, device)
        cache = FullCache.on_device(config, rope, dtype=dtype, device=device, capacity=700, chunk_size=8)
        edges = [0, *cuts]
        parts = [cache.attend(0, *(x[:, a:b] for x in (q, k, v))) for a, b in itertools.pairwise(edges)]
        outs.append(torch.cat(parts, dim=1))
    assert torch.equal(*outs)


@compiled
def test_running_out_of_memory_is_an_error():
    """No system gives memory for the peaks of so many keys, which are one key again and again."""
    q, k, v = random_qkv((2, 2, 32), 3, 1)
    many = 2**52
    mass = torch.zeros(2, 3, 1).expand(2, 3, many // 64)
    with pytest.raises(MemoryError, match=f"3 rows to {many} keys"):
        attend_compiled(q, k.expand(2, many, 32), v.expand(2, many, 32), scale=1.0, mass=mass)


@every_level
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_what_is_no_number_shows_in_every_row_that_sees_it_and_in_no_other(dtype, level, broken):
    need(level)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 64, generator=generator).to(dtype) for n in (5, 300, 300))
    shown = {"scale": 0.125, "diagonal": 295, "window": None, "mass": None, "level": level}
    fine, _ = attend_compiled(q, k, v, **shown)
    of_a_query = q.clone()
    of_a_query[0, 2, 7] = broken
    out, lse = attend_compiled(of_a_query, k, v, **shown)
    assert out[0, 2].isnan().all()
    assert lse[0, 2].isnan()
    assert torch.equal(out[0, [0, 1, 3, 4]], fine[0, [0, 1, 3, 4]])
    of_a_key = k.clone()
    of_a_key[1, 297, 7] = broken  # rows from the third on see it
    out, _ = attend_compiled(q, of_a_key, v, **shown)
    met = [2, 3, 4] if broken != broken else (q[1, 2:, 7] > 0).nonzero().flatten().add(2).tolist()  # -inf is no weight
    assert out[1, met].isnan().all()
    assert torch.equal(out[1, :2], fine[1, :2])


@compiled
def test_a_library_of_other_sources_is_not_used(tmp_path):
    kernels = loaded()
    assert kernels is not None
    built = Path(kernels._name)
    assert load_library(built) is not None
    assert load_library(built, abi=-1) is None
    assert load_library(built, call_size=8) is None
    (tmp_path / "no.so").write_bytes(b"no library")
    assert load_library(tmp_path / "no.so") is None


@pytest.mark.skipif(
    cpu_level() < Level.AVX512_BF16, reason="these kernels are not installed, or not for this processor"
)
def test_products_of_few_rows_are_computed_by_compiled_kernels(monkeypatch):
    monkeypatch.setattr(F, "linear", None)  # whoever called it would fail
    x, weight = torch.zeros(STEP_ROWS, 64, dtype=torch.bfloat16), torch.zeros(64, 64, dtype=torch.bfloat16)
    linear(x, weight)
    with pytest.raises(TypeError):
        linear(torch.zeros(STEP_ROWS + 1, 64, dtype=torch.bfloat16), weight)
