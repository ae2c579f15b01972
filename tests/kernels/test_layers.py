"""A decoder's products, its MLP and rotation against PyTorch in float64, and each row against itself alone."""

import sys

import pytest
import torch
import torch.nn.functional as F
from oracles import at_the_end
from torch import Tensor
from triforce.kernels import (
    STEP_ROWS,
    attend,
    gated_mlp,
    linear,
    padded_rows,
    put,
    rms_norm,
    rotate,
    rows_are_independent,
    use_kernels,
)

CPU = torch.device("cpu")
SHAPES = [
    (96, 32),
    (13, 77),
    (256, 160),
    (1, 8),
    (1027, 515),
    (1027, 514),
    (48, 40),
    (33, 8),
    (34, 2),
]  # outputs, inputs
FORMATS = [(torch.float32, 2e-6), (torch.bfloat16, 8e-3)]
NORMS = [
    (torch.float32, torch.float32, 2e-6),
    (torch.bfloat16, torch.bfloat16, 8e-3),
    (torch.bfloat16, torch.float32, 4e-3),
]
ROWS = [1, 2, 3, 5, 13, 32, 33]


def random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def norm_of(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.double(), weight.shape, weight.double(), eps)


def assert_near(got: Tensor, want: Tensor, tolerance: float) -> None:
    missed = ((got.double() - want).abs().max() / want.abs().max()).item()
    assert missed <= tolerance, f"off by {missed:.1e} of the largest value, more than {tolerance:.0e}"


@pytest.mark.parametrize(("dtype", "tolerance"), FORMATS)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("n", ROWS)
@pytest.mark.slow(keep=28)
def test_linear_is_the_product_of_the_normalised_rows(n, outputs, inputs, dtype, tolerance):
    x = random(n, 2 * inputs, dtype=dtype, seed=1)[:, inputs:]  # rows that do not follow each other
    weight, bias = random(outputs, inputs, dtype=dtype, seed=2), random(outputs, dtype=dtype, seed=3)
    norm = random(inputs, dtype=dtype, seed=4)
    plain = x.double() @ weight.double().T
    assert_near(linear(x, weight), plain, tolerance)
    assert_near(linear(x, weight, bias), plain + bias.double(), tolerance)
    wanted = norm_of(x, norm, 1e-5) @ weight.double().T + bias.double()
    assert_near(linear(x, weight, bias, norm=norm, eps=1e-5), wanted, 2 * tolerance)


@pytest.mark.parametrize(("dtype", "of_norm", "tolerance"), NORMS)
@pytest.mark.parametrize(("heads", "width"), [(None, 77), (None, 4096), (1, 8), (5, 128)])
@pytest.mark.parametrize("n", [1, 3, 13, 70])
def test_a_norm_is_one_by_the_root_of_the_mean_square(n, heads, width, dtype, of_norm, tolerance):
    """Of rows, also where heads' rows lie side by side; a row has the same bits alone."""
    x = random(n, (heads or 1) * width + 3, dtype=dtype, seed=1)[:, 3:]
    x = x if heads is None else x.view(n, heads, width).transpose(0, 1)
    norm = random(width, dtype=of_norm, seed=2)
    found = rms_norm(x, norm, 1e-5)
    assert found.shape == x.shape and found.dtype == dtype
    assert_near(found, norm_of(x, norm, 1e-5), tolerance)
    if rows_are_independent(CPU, dtype, 64):
        for i in range(n):
            assert torch.equal(rms_norm(x[..., i : i + 1, :], norm, 1e-5), found[..., i : i + 1, :])


def test_a_norm_of_another_width_is_an_error():
    with pytest.raises(RuntimeError, match="shape"):
        rms_norm(torch.ones(1, 16), torch.ones(3), 1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), FORMATS)
@pytest.mark.parametrize(("hidden", "width"), [(32, 96), (77, 13), (78, 46), (256, 688)])
@pytest.mark.parametrize("n", ROWS)
@pytest.mark.slow(keep=20)
def test_gated_mlp_is_the_one_of_llama(n, hidden, width, dtype, tolerance):
    x, norm = random(n, hidden, dtype=dtype, seed=1), random(hidden, dtype=dtype, seed=2)
    gate_up = random(2 * width, hidden, dtype=dtype, seed=3)  # gates far beyond where e^x overflows among them
    down = random(hidden, width, dtype=dtype, seed=4)
    gate, up = (norm_of(x, norm, 1e-5) @ gate_up.double().T).chunk(2, dim=-1)
    assert_near(gated_mlp(x, norm, 1e-5, gate_up, down), (F.silu(gate) * up) @ down.double().T, 4 * tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), FORMATS)
@pytest.mark.parametrize("head_dim", [8, 32, 40, 64, 128])
@pytest.mark.parametrize("n", ROWS)
@pytest.mark.slow(keep=14)
def test_rotate_turns_pairs_and_writes_where_it_is_told(n, head_dim, dtype, tolerance):
    x = random(n, 7, head_dim, dtype=dtype, seed=1).transpose(0, 1)[2:5]
    angles = random(n, head_dim // 2, dtype=torch.float32, seed=2)
    cos, sin = torch.cat((angles.cos(),) * 2, -1), torch.cat((-angles.sin(), angles.sin()), -1)
    turned = torch.polar(torch.ones_like(angles), angles).to(torch.complex128)
    halves = torch.complex(*x.double().chunk(2, dim=-1)) * turned
    want = torch.cat((halves.real, halves.imag), dim=-1)
    assert_near(rotate(x, cos, sin), want, tolerance)
    cache = random(3, n + 9, head_dim, dtype=dtype, seed=3)
    untouched = cache.clone()
    rotate(x, cos, sin, out=cache[:, 4 : 4 + n])
    assert_near(cache[:, 4 : 4 + n], want, tolerance)
    assert torch.equal(cache[:, :4], untouched[:, :4])
    assert torch.equal(cache[:, 4 + n :], untouched[:, 4 + n :])
    alike = torch.stack([rotate(x[:, i : i + 1], cos[0], sin[0])[:, 0] for i in range(n)], dim=1)
    assert torch.equal(rotate(x, cos[0], sin[0]), alike)


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are locked away by mprotect")
def test_nothing_behind_a_matrix_is_read(outputs, inputs):
    x, weight = random(13, inputs, dtype=torch.bfloat16, seed=1), random(outputs, inputs, dtype=torch.bfloat16, seed=2)
    assert_near(linear(x, at_the_end(weight)), x.double() @ weight.double().T, 8e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("padded", [False, True])
def test_a_row_is_the_same_to_the_last_bit_however_many_come_with_it(padded, threads, dtype):
    """Where that is promised: by the compiled kernels of some processors, and everywhere where rows are padded."""
    with padded_rows(padded):
        if not rows_are_independent(torch.device("cpu"), dtype, 32):
            assert not padded
            pytest.skip("this processor's products depend on how many rows there are, unless rows are padded")
        torch.set_num_threads(threads)
        x, norm = random(STEP_ROWS, 256, dtype=dtype, seed=1), random(256, dtype=dtype, seed=2)
        weight = random(2 * 1100, 256, dtype=dtype, seed=3)
        down = random(256, 1100, dtype=dtype, seed=4)
        k, v = random(2, 500, 32, dtype=dtype, seed=5), random(2, 500, 32, dtype=dtype, seed=6)
        for n in (2, 5, 13, STEP_ROWS):
            for function in (
                lambda rows: linear(rows, weight, norm=norm, eps=1e-6),
                lambda rows: gated_mlp(rows, norm, 1e-6, weight, down),
                lambda rows: attend(rows.unflatten(1, (8, 32)).transpose(0, 1), k, v, scale=0.2)[0].transpose(0, 1),
            ):
                alone = torch.cat([function(x[i : i + 1]) for i in range(n)])
                assert torch.equal(function(x[:n]), alone), f"{n} rows together differ from each alone"


def test_plain_pytorch_computes_the_same_where_that_is_chosen():
    x, weight = random(5, 64, dtype=torch.float32, seed=1), random(96, 64, dtype=torch.float32, seed=2)
    norm, down = random(64, dtype=torch.float32, seed=3), random(64, 48, dtype=torch.float32, seed=4)
    with use_kernels(layers="plain"):
        product, mlp = linear(x, weight, norm=norm, eps=1e-5), gated_mlp(x, norm, 1e-5, weight, down)
    assert_near(product, norm_of(x, norm, 1e-5) @ weight.double().T, 2e-6)
    gate, up = (norm_of(x, norm, 1e-5) @ weight.double().T).chunk(2, dim=-1)
    assert_near(mlp, (F.silu(gate) * up) @ down.double().T, 5e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_formats_go_through_pytorch(dtype):
    x, weight = random(3, 64, dtype=dtype, seed=1), random(8, 64, dtype=dtype, seed=2)
    assert torch.equal(linear(x, weight), F.linear(x, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_are_the_same_to_the_last_bit_whatever_others_a_matrix_has(dtype):
    """Few rows take more outputs at a time, and a matrix's last ones come by themselves. No rows give nothing."""
    weight, bias = random(29, 330, dtype=dtype, seed=2), random(29, dtype=dtype, seed=3)
    for n in range(6):
        x = random(n, 330, dtype=dtype, seed=1)
        whole = linear(x, weight, bias)
        assert whole.shape == (n, 29)
        for outputs in range(1, 29 if rows_are_independent(CPU, dtype, 32) else 1):
            assert torch.equal(linear(x, weight[:outputs], bias[:outputs]), whole[:, :outputs])


@pytest.mark.parametrize(("dtype", "tolerance"), FORMATS)
@pytest.mark.parametrize("n", [1, 5, 33])
def test_products_are_added_to_what_is_there(n, dtype, tolerance):
    """The bits of a product and a sum."""
    outputs, inputs, width = 160, 96, 77
    x, weight = random(n, inputs, dtype=dtype, seed=1), random(outputs, inputs, dtype=dtype, seed=2)
    before = random(n, outputs, dtype=dtype, seed=3)
    onto = before.clone()
    assert linear(x, weight, onto=onto) is onto
    assert torch.equal(onto, before + linear(x, weight))
    with use_kernels(layers="plain"):
        plain = linear(x, weight, onto=before.clone())
    assert_near(onto, plain.double(), 2 * tolerance)

    norm = random(inputs, dtype=dtype, seed=4)
    gate_up, down = random(2 * width, inputs, dtype=dtype, seed=5), random(inputs, width, dtype=dtype, seed=6)
    alone = gated_mlp(x, norm, 1e-5, gate_up, down)
    rows = x.clone()
    assert gated_mlp(rows, norm, 1e-5, gate_up, down, onto=rows) is rows
    assert torch.equal(rows, x + alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rows_are_put_where_slots_say(dtype):
    heads, n, dim = 3, 4, 48
    x = random(n, heads, dim, dtype=dtype, seed=1).transpose(0, 1)
    angles = random(n, dim, dtype=torch.float32, seed=2), random(n, dim, dtype=torch.float32, seed=3)
    slots = torch.tensor([7, 2, 3, 0])
    for rotation in (None, angles):
        buffer = torch.zeros(heads, 9, dim, dtype=dtype)
        put(x, buffer, slots, rotation)
        want = torch.zeros(heads, 9, dim, dtype=dtype)
        want[:, slots] = x if rotation is None else rotate(x, *angles)
        assert torch.equal(buffer, want)
