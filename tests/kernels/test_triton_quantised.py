"""Products with quantised matrices in Triton: those with the numbers, and a row's bits its own.

Without a GPU it runs under Triton's interpreter (see `conftest.py`); with one, the same tests run compiled.
"""

from dataclasses import replace

import pytest
import torch
from quantised import FORMATS
from quantised_matrices import matrix_of, moved
from triforce.kernels.quantised import quantised_linear
from triforce.kernels.selection import use_kernels
from triton_runs import DTYPES, both

pytestmark = pytest.mark.usefixtures("exact_products")


def product(x, matrix, **more):
    with use_kernels(as_gpu={"triton"}):
        return quantised_linear(x, matrix, **more)


def rows(n, inputs, dtype, device, seed=1):
    return torch.randn(n, inputs, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@both
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_products_are_those_with_the_numbers(device, name, dtype):
    """Of fewer outputs and inputs than a tile, and of more."""
    (dtype, _), outputs, inputs = DTYPES[dtype], 40, 192
    matrix, numbers = matrix_of(name, outputs, inputs)
    x, bias = rows(5, inputs, dtype, device), rows(1, outputs, dtype, device, 2)[0]
    want = x.double() @ numbers.to(dtype).double().T.to(device) + bias.double()
    size = x.double().abs() @ numbers.abs().double().T.to(device)
    got = product(x, moved(matrix, device), bias=bias).double()
    error = torch.finfo(dtype).eps * want.abs() + 2e-6 * size + 1e-6
    assert ((got - want).abs() <= error).all()


@both
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["awq", "gptq-act-order", "int8", "fp8"])
def test_a_product_of_several_parts_of_the_inputs(device, name, dtype):
    """In tiles that are full, where groups leave them; with a bias, added to rows with a stride."""
    (dtype, _), outputs, inputs = DTYPES[dtype], 128, 1152
    matrix, numbers = matrix_of(name, outputs, inputs)
    x, bias = rows(35, inputs, dtype, device), rows(1, outputs, dtype, device, 2)[0]
    onto = rows(35, 2 * outputs, dtype, device, 3)[:, :outputs]
    before = onto.double()
    product_of = x.double() @ numbers.to(dtype).double().T.to(device) + bias.double()
    want = product_of.to(dtype).double() + before
    got = product(x, moved(matrix, device), bias=bias, onto=onto)
    assert got.data_ptr() == onto.data_ptr()
    size = x.double().abs() @ numbers.abs().double().T.to(device)
    error = torch.finfo(dtype).eps * (product_of.abs() + want.abs()) + 2e-6 * size
    assert ((got.double() - want).abs() <= error).all()


@both
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_numbers_have_the_bits_of_the_formula(device, name, dtype):
    (dtype, _), (matrix, want) = DTYPES[dtype], matrix_of(name, 40, 96)
    with use_kernels(as_gpu={"triton"}):
        whole = moved(matrix, device).expand(dtype)
        part = moved(matrix, device).outputs(slice(5, 38)).expand(dtype)
    assert torch.equal(whole.cpu(), want.to(dtype)) and torch.equal(part, whole[5:38])


@both
@pytest.mark.parametrize("name", ["gptq-act-order", "awq", "fp8"])
def test_a_row_has_the_same_bits_alone_and_in_company(device, name):
    matrix, _ = matrix_of(name, 48, 192)
    matrix, x = moved(matrix, device), rows(70, 192, torch.bfloat16, device)
    together = product(x, matrix)
    for n in (1, 2, 13, 33):
        assert torch.equal(product(x[:n], matrix), together[:n])
    assert torch.equal(product(x[50:51], matrix), together[50:51])


@both
def test_every_byte_of_float8_is_read(device):
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    matrix, _ = matrix_of("float8", 256, 32)
    values = every.view(torch.uint8).view(256, 1).expand(256, 32).contiguous().view(torch.float8_e4m3fn)
    matrix = moved(replace(matrix, values=values, scales=torch.ones(256, 1, dtype=torch.float16)), device)
    one = torch.zeros(1, 32, device=device)
    one[0, 3] = 1.0
    want = every.float().to(device)
    numbers = want.isfinite()
    found = product(one, replace(matrix, values=matrix.values.float().nan_to_num(0.0).to(torch.float8_e4m3fn)))[0]
    assert torch.equal(found[numbers], want[numbers])
    assert product(one, matrix)[0][~numbers].isnan().all()


@both
@pytest.mark.parametrize("name", ["gptq", "fp8"])
def test_what_lies_behind_a_matrix_counts_for_nothing(device, name):
    """Scales that are no numbers, behind the outputs that there are."""
    matrix, numbers = matrix_of(name, 40, 64)
    matrix.scales[24:] = float("nan")
    zeros = matrix.zeros if isinstance(matrix.zeros, int) else matrix.zeros[:24]
    first = replace(matrix, values=matrix.values[:24], scales=matrix.scales[:24], zeros=zeros)
    x = rows(3, 64, torch.float32, device)
    want = x.double() @ numbers[:24].double().T.to(device)
    torch.testing.assert_close(product(x, moved(first, device)).double(), want, atol=1e-5, rtol=1e-5)


@both
def test_a_scale_that_is_no_number_gives_none(device):
    """Whatever its bits are."""
    matrix, _ = matrix_of("fp8", 32, 64)
    matrix.scales.view(torch.int32)[3] = 0x7FFFFFFF
    found = product(rows(3, 64, torch.bfloat16, device), moved(matrix, device))
    assert found[:, 3].isnan().all() and found.isfinite().sum() == 3 * 31
