"""The numbers of matrices in ggml's formats of blocks in Triton: gguf-py's, bit for bit.

Without a GPU it runs under Triton's interpreter (see `conftest.py`); with one, the same tests run compiled.
"""

import pytest
import torch
from gguf_blocks import numbers_of, random_blocks
from quantised_matrices import blocks_of, moved
from triforce.kernels.quantised import BLOCK_FORMS, BlockMatrix, quantised_linear
from triforce.kernels.selection import use_kernels
from triton_runs import DTYPES, both

pytestmark = pytest.mark.usefixtures("exact_products")


def expanded(matrix, dtype):
    with use_kernels(as_gpu={"triton"}):
        return matrix.expand(dtype)


@both
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", BLOCK_FORMS)
def test_numbers_have_the_bits_of_the_formula(device, form, dtype):
    """Of fewer outputs than a tile has and of more, and of small blocks also where they do not fill a tile."""
    dtype, _ = DTYPES[dtype]
    inputs = 512 if BLOCK_FORMS[form].inputs == 256 else 352
    matrix, want = blocks_of(form, 21, inputs)
    whole = expanded(moved(matrix, device), dtype)
    assert torch.equal(whole.cpu(), want.to(dtype))
    assert torch.equal(expanded(moved(matrix, device).outputs(slice(5, 8)), dtype), whole[5:8])
    ids = torch.tensor([20, 0, 7, 7], device=device)
    assert torch.equal(expanded(moved(matrix, device).rows(ids), dtype), whole[ids])


@both
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("form", BLOCK_FORMS)
def test_odd_scales_give_what_the_formula_does(device, form):
    """NaN, infinite, -0 and subnormal ones."""
    blocks = random_blocks(form, 16, 512, odd=True)
    want = numbers_of(blocks, form)
    for dtype, _ in DTYPES.values():
        found = expanded(moved(BlockMatrix(blocks, form), device), dtype).cpu()
        torch.testing.assert_close(found, want.to(dtype), rtol=0, atol=0, equal_nan=True)


@both
@pytest.mark.parametrize("form", ["Q5_1", "Q4_K", "Q6_K"])
def test_a_part_of_the_inputs_has_its_numbers(device, form):
    """Whole blocks of each row, which lie apart."""
    matrix, want = blocks_of(form, 10, 1024)
    num_bytes = matrix.blocks.shape[1] // 4
    part = BlockMatrix(matrix.blocks.to(device)[:, num_bytes : 3 * num_bytes], form)
    assert torch.equal(expanded(part, torch.float32).cpu(), want[:, 256:768])


@both
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs", "n"), [(24, 256, 1), (64, 768, 5), (70, 512, 35)])
@pytest.mark.parametrize("form", BLOCK_FORMS)
@pytest.mark.slow(keep=12)
def test_products_are_those_with_the_numbers(device, form, outputs, inputs, n, dtype):
    """Of full tiles and others, of one part of the inputs and several; with a bias, added to rows with a stride."""
    (dtype, _), (matrix, numbers) = DTYPES[dtype], blocks_of(form, outputs, inputs)
    g = torch.Generator().manual_seed(1)
    x, bias, onto = (
        torch.randn(*shape, generator=g).to(device, dtype) for shape in ((n, inputs), (outputs,), (n, 2 * outputs))
    )
    numbers, onto = numbers.to(device, dtype).double(), onto[:, :outputs]
    product, before = x.double() @ numbers.T + bias.double(), onto.double()
    want = product.to(dtype).double() + before
    with use_kernels(as_gpu={"triton"}):
        found = quantised_linear(x, moved(matrix, device), bias, onto=onto)
    assert found.data_ptr() == onto.data_ptr()
    size = x.double().abs() @ numbers.abs().T
    error = torch.finfo(dtype).eps * (product.abs() + want.abs()) + 2e-6 * size
    assert ((found.double() - want).abs() <= error).all()


@both
@pytest.mark.parametrize("form", ["Q5_0", "Q4_K", "Q6_K"])
def test_a_row_has_the_same_bits_alone_and_in_company(device, form):
    matrix, _ = blocks_of(form, 40, 768)
    matrix, x = moved(matrix, device), torch.randn(40, 768, generator=torch.Generator().manual_seed(1))
    x = x.to(device, torch.bfloat16)
    with use_kernels(as_gpu={"triton"}):
        together = quantised_linear(x, matrix)
        for rows in (slice(0, 1), slice(3, 16), slice(33, 34)):
            assert torch.equal(quantised_linear(x[rows], matrix), together[rows])
