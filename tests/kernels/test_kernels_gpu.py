"""Attention and chunk functions on a GPU, through whichever kernels it has, against float64 and the CPU."""

import pytest
import torch
from oracles import oracle, random_qkv
from triforce.kernels import attend, chunk_mass, gather_chunks
from triton_runs import DTYPES

pytestmark = pytest.mark.gpu


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


def chunk_functions(q, k, lse, indices):
    """Mass of chunks of eight keys, and some of these chunks, by the functions that everything calls."""
    mass = lse.new_empty(*lse.shape, k.shape[1] // 8)
    chunk_mass(q, k, lse, mass, scale=0.2, diagonal=60)
    return mass, gather_chunks(k.unsqueeze(0), indices, 8)


def test_chunk_functions_on_a_gpu_equal_those_on_a_cpu():
    q, k, v = random_qkv((8, 2, 64), 5, 320, torch.float32)
    lse = attend(q, k, v, scale=0.2, diagonal=60)[1]
    indices = torch.tensor([[0, 3, 39], [1, 2, 20]])
    mass, gathered = chunk_functions(q.cuda(), k.cuda(), lse.cuda(), indices.cuda())
    want_mass, want_gathered = chunk_functions(q, k, lse, indices)
    assert torch.allclose(mass.cpu(), want_mass, rtol=1e-4, atol=1e-7)
    assert torch.equal(gathered.cpu(), want_gathered)


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
