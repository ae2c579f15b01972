"""The numbers of matrices in ggml's formats of blocks in Triton: gguf-py's, bit for bit.

Without a GPU it runs under Triton's interpreter (see `conftest.py`); with one, the same tests run compiled.
"""

import pytest
import torch
from gguf_blocks import numbers_of, random_blocks
from quantised_matrices import blocks_of, moved
from triforce.kernels.quantised import BLOCK_FORMS, BlockMatrix, quantised_linear
from triforce.kernels.selection import use_kernels
from triton_runs import DTYPES, both, compiled_table

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
@pytest.mark.parametrize("n", [1, 40])
@pytest.mark.parametrize("form", ["Q4_1", "Q5_K"])
def test_products_are_those_with_the_numbers(device, form, n):
    matrix, numbers = blocks_of(form, 24, 256)
    g = torch.Generator().manual_seed(1)
    x, bias = (torch.randn(*shape, generator=g).to(device) for shape in ((n, 256), (24,)))
    want = x.double() @ numbers.double().T.to(device) + bias.double()
    with use_kernels(as_gpu={"triton"}):
        found = quantised_linear(x, moved(matrix, device), bias)
    torch.testing.assert_close(found.double(), want, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("capability", ["80", "86", "89", "90", "120"])
@pytest.mark.slow(keep=1)
def test_the_kernel_compiles_without_spills(tmp_path, capability):
    assert "| numbers of blocks |" in compiled_table(
        tmp_path, "--only", "numbers of blocks", "--capabilities", capability
    )
