"""The gated delta rule: what transformers computes, row after row and in chunks; compiled, in PyTorch and in Triton."""

from dataclasses import replace

import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as theirs
from triforce.kernels import Level, cpu_level, use_kernels
from triforce.kernels.delta_rule import DeltaWeights, delta_chunks, delta_steps
from triforce.kernels.layers import gated_norm, products_are_independent
from triton_runs import both, interpreted

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, KERNEL = 2, 6, 16, 24, 4
KEYS = KEY_HEADS * KEY_DIM
CHANNELS = 2 * KEYS + VALUE_HEADS * VALUE_DIM

implementations = pytest.mark.parametrize(
    "layers",
    [
        pytest.param(
            None, marks=pytest.mark.skipif(cpu_level() < Level.AVX2, reason="no compiled kernels for this CPU")
        ),
        "plain",
    ],
    ids=["compiled", "plain"],
)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def given(n: int, dtype: torch.dtype, seed: int = 0):
    """Inputs, gates, weights and a state."""
    torch.manual_seed(seed)
    taps, decay = (torch.randn(KERNEL, CHANNELS) / 2).to(dtype).float(), -8 * torch.rand(VALUE_HEADS) - 0.01
    weights = DeltaWeights(taps, decay, torch.randn(VALUE_HEADS), KEY_HEADS, KEY_DIM)
    inputs, gates = (torch.randn(rows, width).to(dtype) for rows, width in ((n + 3, CHANNELS), (n, 2 * VALUE_HEADS)))
    return inputs, gates, weights, torch.randn(VALUE_HEADS, KEY_DIM, VALUE_DIM)


def by_transformers(inputs, gates, weights, state):
    """What transformers' recurrence gives, and the state behind it."""
    dtype = inputs.dtype
    conv = weights.conv.t().to(dtype)
    mixed = theirs.causal_conv1d_fn(inputs.t()[None], conv, activation="silu")
    q, k, v = mixed[0].t()[3:].split((KEYS, KEYS, VALUE_HEADS * VALUE_DIM), dim=1)
    b, a = gates.chunk(2, dim=1)
    g = weights.decay * torch.nn.functional.softplus(a.float() + weights.decay_bias)
    heads = (x.reshape(1, len(gates), -1, size) for x, size in ((q, KEY_DIM), (k, KEY_DIM), (v, VALUE_DIM)))
    rest = {"g": g[None], "beta": b.sigmoid()[None], "initial_state": state[None], "output_final_state": True}
    out, behind = theirs.torch_recurrent_gated_delta_rule(*heads, **rest, use_qk_l2norm_in_kernel=True)
    return out[0], behind[0]


@both
@dtypes
def test_steps_in_triton_are_those_of_pytorch(device, dtype):
    """And a row's bits do not depend on how many pass with it."""
    inputs, gates, weights, state = given(6, dtype)
    middle, end = (torch.empty_like(state) for _ in range(2))
    with use_kernels(layers="plain"):
        want = delta_steps(inputs, gates, weights, state, wanted=4, saved=[(2, middle), (6, end)])
    moved = replace(weights, **{name: getattr(weights, name).to(device) for name in ("conv", "decay", "decay_bias")})
    inputs, gates, kept, alone = (x.to(device) for x in (inputs, gates, state.clone(), state.clone()))
    with use_kernels(as_gpu={"triton"}):
        at = torch.empty_like(kept)
        got = delta_steps(inputs, gates, moved, kept, wanted=4, saved=[(2, at), (6, kept)])
        rows = [
            delta_steps(inputs[i : i + 4], gates[i : i + 1], moved, alone, wanted=1, saved=[(1, alone)])
            for i in range(6)
        ]
    assert torch.equal(torch.cat(rows)[2:], got) and torch.equal(alone, kept)
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2  # the interpreter cuts numbers off where a GPU rounds them
    assert (got.cpu() - want).abs().max() < tolerance
    assert (at.cpu() - middle).abs().max() < tolerance and (kept.cpu() - end).abs().max() < tolerance


@implementations
@dtypes
def test_steps_are_those_of_transformers(layers, dtype):
    inputs, gates, weights, state = given(13, dtype)
    want, behind = by_transformers(inputs, gates, weights, state)
    kept, before = torch.empty_like(state), state.clone()
    with use_kernels(layers=layers):
        got = delta_steps(inputs, gates, weights, state, wanted=13, saved=[(13, kept)])
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert torch.equal(state, before)
    assert (got - want).abs().max() < tolerance and (kept - behind).abs().max() < tolerance


@implementations
@dtypes
def test_numbers_as_large_as_those_of_outliers(layers, dtype):
    """Of which the activation leaves 0, or all."""
    inputs, gates, weights, state = given(13, dtype)
    inputs = inputs * 300
    want, behind = by_transformers(inputs, gates, weights, state)
    with use_kernels(layers=layers):
        got = delta_steps(inputs, gates, weights, state, wanted=13, saved=[(13, state)])
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert (got - want).abs().max() < tolerance * want.abs().max()
    assert (state - behind).abs().max() < tolerance * behind.abs().max()


@implementations
@dtypes
def test_bits_do_not_depend_on_how_many_rows_pass_together(layers, dtype):
    inputs, gates, weights, state = given(13, dtype)
    middle, end, alone = torch.empty_like(state), torch.empty_like(state), state.clone()
    with use_kernels(layers=layers):
        got = delta_steps(inputs, gates, weights, state, wanted=9, saved=[(5, middle), (13, end)])
        rows = []
        for i in range(13):
            rows.append(delta_steps(inputs[i : i + 4], gates[i : i + 1], weights, alone, wanted=1, saved=[(1, alone)]))
            assert i != 4 or torch.equal(alone, middle)
    assert torch.equal(torch.cat(rows)[-9:], got) and torch.equal(alone, end)


def tiled(x: torch.Tensor, dim: int, width: int = 1) -> torch.Tensor:
    """Value heads, each `width` wide, so that the first ones of all key heads are neighbours, then the second ones."""
    apart = x.unflatten(dim, (KEY_HEADS, VALUE_HEADS // KEY_HEADS, width))
    return apart.transpose(dim, dim + 1).flatten(dim, dim + 2)


@pytest.mark.parametrize("kind", ["compiled", "plain", pytest.param("triton", marks=interpreted), "chunks"])
@dtypes
def test_tiled_value_heads_compute_what_neighbours_do(kind, dtype):
    """The same bits, in another order."""
    inputs, gates, weights, state = given(70, dtype)
    conv, moved = (
        torch.cat((x[:, : 2 * KEYS], tiled(x[:, 2 * KEYS :], 1, VALUE_DIM)), 1) for x in (weights.conv, inputs)
    )
    decay, bias, of_tiled = (tiled(x, 0) for x in (weights.decay, weights.decay_bias, state))
    of_gates = torch.cat([tiled(x, 1) for x in gates.chunk(2, dim=1)], dim=1)
    both = (
        (inputs, gates, weights, state),
        (moved, of_gates, replace(weights, conv=conv, decay=decay, decay_bias=bias, tiled=True), of_tiled),
    )
    found = []
    with use_kernels(layers="plain" if kind == "plain" else None, as_gpu={"triton"} if kind == "triton" else None):
        for x, g, w, s in both:
            if kind == "chunks":
                found.append((delta_chunks(x, g, w, s, 0), s))
            else:
                found.append((delta_steps(x[:8], g[:5], w, s, wanted=5, saved=[(5, s)]), s))
    (want, behind), (got, after) = found
    assert torch.equal(got, tiled(want, 1)) and torch.equal(after, tiled(behind, 0))


@dtypes
@pytest.mark.parametrize(("start", "n"), [(0, 64), (0, 200), (37, 300), (10, 20), (128, 65)])
def test_chunks_give_what_steps_do(dtype, start, n):
    """From any position on."""
    inputs, gates, weights, state = given(n, dtype, seed=n)
    stepped = torch.empty_like(state)
    want = delta_steps(inputs, gates, weights, state, wanted=n, saved=[(n, stepped)])
    compiled = state.clone()
    assert (delta_chunks(inputs, gates, weights, compiled, start) - want).abs().max() < 2e-2
    with use_kernels(layers="plain"):
        got = delta_chunks(inputs, gates, weights, state, start)
    assert (got - want).abs().max() < (1e-5 if dtype == torch.float32 else 2e-2)
    assert (state - stepped).abs().max() < (1e-5 if dtype == torch.float32 else 1e-3)


def test_chunks_are_at_absolute_positions():
    """A text that is read in two parts, which end where a chunk does, has the bits that it has in one."""
    inputs, gates, weights, state = given(256, torch.float32)
    parts, whole = state.clone(), state.clone()
    with use_kernels(layers="plain"):
        got = [delta_chunks(inputs[:131], gates[:128], weights, parts, 64)]
        got.append(delta_chunks(inputs[128:], gates[128:], weights, parts, 192))
        want = delta_chunks(inputs, gates, weights, whole, 64)
    assert torch.allclose(torch.cat(got), want, atol=1e-6) and torch.allclose(parts, whole, atol=1e-6)


@dtypes
def test_the_gated_norm_is_that_of_transformers(dtype):
    norm = theirs.Qwen3NextRMSNormGated(VALUE_DIM, eps=1e-6).to(dtype)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    x, inputs = torch.randn(5, VALUE_HEADS, VALUE_DIM).to(dtype), torch.randn(5, 3 * VALUE_HEADS * VALUE_DIM).to(dtype)
    gate = inputs.chunk(3, dim=1)[1].view(x.shape)  # as it lies in what a projection gives
    want, found = norm(x, gate), gated_norm(x, gate, norm.weight, 1e-6)
    assert (found - want).abs().max() <= (1e-6 if dtype == torch.float32 else 2e-2)
    if products_are_independent(x.device, dtype):
        for i in range(5):
            assert torch.equal(gated_norm(x[i : i + 1], gate[i : i + 1], norm.weight, 1e-6)[0], found[i])
