"""Triton kernels against the plain functions and PyTorch's own attention in float64.

Without a GPU they run under Triton's interpreter (see `conftest.py`); with one, the same tests run compiled.
"""

import functools
import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from test_kernels import oracle, random_qkv
from triforce.kernels import attention, chunks
from triforce.kernels.attention import FEW_ROWS, attend, choose_backend, merge_partials
from triforce.kernels.chunks import chunk_mass, copy_chunks, gather_chunks
from triforce.kernels.flash import flash_cuda, flash_package

triton = pytest.importorskip("triton", reason="Triton is not installed; pip install triton adds it on Linux")
# Triton may be missing until here.
from triforce.kernels.triton import chunks as triton_chunks  # noqa: E402
from triforce.kernels.triton.attention import attend_triton  # noqa: E402
from triforce.kernels.triton.chunks import (  # noqa: E402
    chunk_mass_triton,
    copy_chunks_triton,
    gather_chunks_triton,
    takes_chunks,
)

_version = tuple(map(int, triton.__version__.split(".")[:2]))
OLD_INTERPRETER = _version < (3, 7) and np.lib.NumpyVersion(np.__version__) >= "2.4.0"
interpreted = pytest.mark.skipif(
    torch.cuda.is_available() or OLD_INTERPRETER,
    reason="Triton's interpreter before 3.7 fails with numpy 2.4"
    if OLD_INTERPRETER
    else "with a GPU, Triton's kernels are compiled",
)
INTERPRETED = pytest.param("cpu", id="interpreted", marks=interpreted)
COMPILED = pytest.param("cuda", id="compiled", marks=pytest.mark.gpu)
both = pytest.mark.parametrize("device", [INTERPRETED, COMPILED])

DTYPES = {
    "float32": (torch.float32, 0.0),
    "bfloat16": (torch.bfloat16, 2**-8),
    "float16": (torch.float16, 2**-11),
}
"""Each with the relative error of rounding to it, which is what kernels do to 16-bit probabilities."""


@pytest.fixture(autouse=True, scope="module")
def exact_products():
    """Matrix products of the interpreter in float64. Its own multiply the bits of bfloat16 numbers in place of the
    numbers, and those of a BLAS round a row by its place among others, which tensor cores do not."""
    if torch.cuda.is_available():
        yield
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def numbers(x):
        if str(x.dtype.scalar) == "bf16":
            return (x.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return x.data.astype(np.float64)

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        return TensorHandle((numbers(a) @ numbers(b)).astype(d.data.dtype) + d.data, d.dtype.scalar)

    before = InterpreterBuilder.create_dot
    InterpreterBuilder.create_dot = create_dot
    yield
    InterpreterBuilder.create_dot = before


def check(attend_there, shape, n, m, *, device, dtype="float32", scale=0.3, diagonal=None, window=None):
    """Compares one call with float64 and with the plain function."""
    kind, rounding = DTYPES[dtype]
    q, k, v = random_qkv(shape, n, m, kind)
    out, lse = attend_there(q.to(device), k.to(device), v.to(device), scale=scale, diagonal=diagonal, window=window)
    assert out.dtype == lse.dtype == torch.float32
    out, lse = out.cpu(), lse.cpu()
    allowed = rounding * oracle(q, k, v.abs(), scale, diagonal, window)[0] + 1e-5
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
@pytest.mark.slow(keep=8)
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
def test_a_window_equals_sdpa_in_float64(device, n, diagonal, window):
    check(attend_triton, (2, 1, 32), n, 290, device=device, diagonal=diagonal, window=window)


@both
@pytest.mark.parametrize("window", [None, 30])
def test_many_rows_without_a_split_equal_sdpa_in_float64(device, window):
    attend_there = functools.partial(attend_triton, split=False)
    check(attend_there, (2, 1, 32), FEW_ROWS, 290, device=device, diagonal=255, window=window, dtype="float16")


@both
@pytest.mark.parametrize("m", [1, 15, 256, 257, 1030])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.slow(keep=5)
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
@pytest.mark.slow(keep=1)
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
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("group", "head_dim", "n", "m", "chunk_size"), [(1, 64, 3, 300, 4), (4, 96, 7, 136, 8), (8, 128, 1, 16, 16)]
)
@pytest.mark.parametrize(("diagonal", "window"), [(None, None), (120, None), (-2, None), (200, 90)])
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


@both
@pytest.mark.parametrize("n", [2, FEW_ROWS + 1])
def test_attend_hands_its_arguments_on(device, n, monkeypatch):
    monkeypatch.setattr(attention, "_backend", lambda *_: "triton")
    q, k, v = random_qkv((2, 1, 32), n, 290)
    for diagonal, window in [(None, None), (200, None), (torch.tensor(200), 40)]:
        there = diagonal.to(device) if isinstance(diagonal, torch.Tensor) else diagonal
        out, lse = attend(q.to(device), k.to(device), v.to(device), scale=0.3, diagonal=there, window=window)
        want_out, want_lse = oracle(q, k, v, 0.3, None if diagonal is None else int(diagonal), window)
        assert (out.cpu() - want_out).abs().max() < 1e-5
        assert (lse.cpu() - want_lse).abs().max() < 2e-5


def chunk_functions(q, k, lse, indices):
    """Mass of chunks of eight keys, and some of these chunks, by the functions that everything calls."""
    mass = lse.new_empty(*lse.shape, k.shape[1] // 8)
    chunk_mass(q, k, lse, mass, scale=0.2, diagonal=60)
    return mass, gather_chunks(k.unsqueeze(0), indices, 8)


@interpreted
def test_chunk_functions_take_triton_where_it_is_usable(monkeypatch):
    q, k, v = random_qkv((4, 2, 32), 3, 64)
    lse = attend(q, k, v, scale=0.2, diagonal=60)[1]
    indices = torch.tensor([[0, 5, 7], [1, 2, 3]])
    want = chunk_functions(q, k, lse, indices)
    called = []
    for name in ("chunk_mass_triton", "gather_chunks_triton"):
        kernel = getattr(triton_chunks, name)
        monkeypatch.setattr(
            triton_chunks, name, lambda *a, kernel=kernel, **named: called.append(kernel) or kernel(*a, **named)
        )
    monkeypatch.setattr(chunks, "usable_packages", lambda device: {"triton"})
    got = chunk_functions(q, k, lse, indices)
    assert len(called) == 2
    torch.testing.assert_close(got, want)


@interpreted
def test_attend_gives_mass_beside_a_kernel_that_does_not(monkeypatch):
    q, k, v = random_qkv((4, 2, 32), 3, 64)
    want, got = torch.empty(4, 3, 8), torch.empty(4, 3, 8)
    attend(q, k, v, scale=0.2, diagonal=60, mass=want)
    monkeypatch.setattr(attention, "_backend", lambda *_: "triton")
    attend(q, k, v, scale=0.2, diagonal=60, mass=got)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("n", [1, 5, FEW_ROWS + 1, 150])
@pytest.mark.parametrize("window", [None, 30])
def test_the_plain_path_takes_a_diagonal_in_a_tensor(n, window):
    q, k, v = random_qkv((4, 2, 32), n, 100)
    for value in (-3, 0, 40, 300):
        out, lse = attend(q, k, v, scale=0.3, diagonal=torch.tensor(value), window=window)
        want_out, want_lse = oracle(q, k, v, 0.3, value, window)
        assert (out - want_out).abs().max() < 2e-5
        assert torch.allclose(lse.double(), want_lse, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("want", "changes"),
    [
        ("triton", {}),
        ("triton", {"dtype": torch.float32}),
        ("triton", {"few_rows": False, "flash_mask": False}),
        ("triton", {"few_rows": False, "packages": {"triton"}, "head_dim": 100}),
        ("flash_package", {"few_rows": False}),
        ("flash_cuda", {"few_rows": False, "packages": {"triton"}}),
        ("flash_cuda", {"few_rows": False, "packages": set()}),
        ("plain", {"packages": set()}),
        ("plain", {"few_rows": False, "dtype": torch.float32}),
        ("plain", {"dtype": torch.float64}),
        ("plain", {"head_dim": 512}),
        ("plain", {"capability": (7, 5)}),
        ("plain", {"capability": None}),
        ("plain", {"capability": None, "few_rows": False, "flash_mask": False}),
        ("flash_cpu", {"capability": None, "few_rows": False}),
    ],
)
def test_the_backend_follows_from_device_packages_and_call(want, changes):
    usual = {
        "capability": (8, 9),
        "packages": {"triton", "flash_attn"},
        "dtype": torch.bfloat16,
        "head_dim": 128,
        "few_rows": True,
        "flash_mask": True,
    }
    assert choose_backend(**(usual | changes)) == want


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_run_on_the_cpu_does_not_import_triton():
    done = run_python(
        "import sys, torch; from triforce.kernels.attention import attend; import triforce.offload\n"
        "x = torch.randn(2, 40, 16); attend(x, x, x, scale=1.0); attend(x[:, :1], x, x, scale=1.0)\n"
        "print('triton' in sys.modules)"
    )
    assert done.stdout.split() == ["False"], done.stderr


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.slow
def test_the_compiler_accepts_the_kernels_without_a_gpu(capability, tmp_path):
    """Triton brings its own assembler, so what the interpreter lets pass (types, shared memory) shows here."""
    script = Path(__file__).parents[1] / "support" / "compile_triton.py"
    done = subprocess.run(
        [sys.executable, "-P", str(script), str(capability)],
        env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "attend" in done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("flash", [flash_cuda, flash_package])
@pytest.mark.parametrize("causal", [False, True])
def test_flash_kernels_equal_sdpa_in_float64(flash, causal):
    if flash is flash_package:
        pytest.importorskip("flash_attn", reason="flash-attn is not installed")
    n = 130
    q, k, v = random_qkv((8, 2, 64), n, n if causal else 300, torch.bfloat16)
    out, lse = flash(q.cuda(), k.cuda(), v.cuda(), 0.125, causal)
    diagonal = 0 if causal else None
    want_out, want_lse = oracle(q, k, v, 0.125, diagonal)
    assert out.shape == q.shape
    assert ((out.cpu() - want_out).abs() < 2**-7 * oracle(q, k, v.abs(), 0.125, diagonal)[0] + 1e-5).all()
    assert (lse.cpu() - want_lse).abs().max() < 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("n", [1, 13, 200])
@pytest.mark.parametrize("diagonal", [None, 0, 150, -5])
@pytest.mark.parametrize("window", [None, 64])
def test_attend_on_a_gpu_equals_sdpa_in_float64(dtype, n, diagonal, window):
    if diagonal is None and window is not None:
        pytest.skip("a window needs a diagonal")
    kind, rounding = DTYPES[dtype]
    q, k, v = random_qkv((8, 2, 64), n, 300, kind)
    out, lse = attend(q.cuda(), k.cuda(), v.cuda(), scale=0.125, diagonal=diagonal, window=window)
    want_out, want_lse = oracle(q, k, v, 0.125, diagonal, window)
    allowed = 2 * rounding * oracle(q, k, v.abs(), 0.125, diagonal, window)[0] + 1e-5  # flash kernels round twice
    assert ((out.cpu() - want_out).abs() < allowed).all()
    assert torch.allclose(lse.cpu().double(), want_lse, rtol=0, atol=1e-4)


@pytest.mark.gpu
def test_chunk_functions_on_a_gpu_equal_those_on_a_cpu():
    q, k, v = random_qkv((8, 2, 64), 5, 320, torch.float32)
    lse = attend(q, k, v, scale=0.2, diagonal=60)[1]
    indices = torch.tensor([[0, 3, 39], [1, 2, 20]])
    mass, gathered = chunk_functions(q.cuda(), k.cuda(), lse.cuda(), indices.cuda())
    want_mass, want_gathered = chunk_functions(q, k, lse, indices)
    assert torch.allclose(mass.cpu(), want_mass, rtol=1e-4, atol=1e-7)
    assert torch.equal(gathered.cpu(), want_gathered)


@pytest.mark.gpu
def test_a_captured_graph_follows_its_diagonal():
    q, k, v = (x.cuda() for x in random_qkv((8, 2, 64), 4, 1000, torch.bfloat16))
    diagonal = torch.tensor(0, device="cuda")
    attend(q, k, v, scale=0.125, diagonal=diagonal)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend(q, k, v, scale=0.125, diagonal=diagonal)
    for value in (0, 500, 996):
        diagonal.fill_(value)
        graph.replay()
        want_out, want_lse = attend(q, k, v, scale=0.125, diagonal=diagonal)
        assert torch.equal(out, want_out)
        assert torch.equal(lse, want_lse)
