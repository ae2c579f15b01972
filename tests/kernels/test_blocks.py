"""Matrices in ggml's formats of blocks: their numbers are gguf-py's, bit for bit."""

import pytest
import torch
from gguf_blocks import numbers_of, random_blocks
from quantised_matrices import blocks_of, matrix_of
from triforce.kernels import Level, cpu_level, use_kernels
from triforce.kernels.layers import gated_mlp, linear
from triforce.kernels.quantised import (
    BLOCK_FORMS,
    FLOAT32_NUMBERS,
    STEP_NUMBERS,
    BlockMatrix,
    grouped_of_blocks,
    quantised_linear,
    quantised_mlp,
)

GROUPED = ["Q8_0", "Q4_0"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LEVELS = [level for level in Level if level <= cpu_level()]


def matrix_in(form, blocks):
    return grouped_of_blocks(blocks, form) if form in GROUPED else BlockMatrix(blocks, form)


def assert_same(found, want):
    """To the last bit, signs of zeros too; one NaN is as good as another."""
    torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found.signbit() | found.isnan(), want.signbit() | want.isnan())


@pytest.mark.parametrize("layers", ["plain", None])
@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("form", [*BLOCK_FORMS, *GROUPED])
def test_numbers_are_those_of_gguf_rounded_once(form, odd, layers):
    """Also where scales are none that a model would have."""
    blocks = random_blocks(form, 40, 768, odd=odd)
    matrix, want = matrix_in(form, blocks), numbers_of(blocks, form)
    assert matrix.shape == want.shape == (40, 768)
    with use_kernels(layers=layers):
        for dtype in DTYPES:
            assert_same(matrix.expand(dtype), want.to(dtype))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", [*BLOCK_FORMS, *GROUPED])
def test_compiled_kernels_give_the_same_bits(form, dtype, level):
    for odd in (False, True):
        blocks = random_blocks(form, 40, 768, seed=1, odd=odd)
        out = torch.empty(33, 768, dtype=dtype)
        matrix_in(form, blocks).outputs(slice(5, 38)).expand_compiled(out, level)
        assert_same(out, numbers_of(blocks, form)[5:38].to(dtype))


def test_a_level_that_the_processor_has_not_is_refused():
    matrix, _ = blocks_of("Q4_K", 4, 256)
    with pytest.raises(ValueError, match="instructions of level 99"):
        matrix.expand_compiled(torch.empty(4, 256), 99)


@pytest.mark.parametrize("layers", ["plain", None])
@pytest.mark.parametrize("form", BLOCK_FORMS)
def test_large_matrices_are_expanded_piece_by_piece(form, layers):
    outputs = 2 * FLOAT32_NUMBERS // 1024 + 5
    matrix, want = blocks_of(form, outputs, 1024)
    with use_kernels(layers=layers):
        assert torch.equal(matrix.expand(torch.bfloat16), want.bfloat16())


@pytest.mark.parametrize("form", [*BLOCK_FORMS, *GROUPED])
def test_outputs_are_a_part_in_the_same_memory_and_rows_a_choice(form):
    blocks = random_blocks(form, 20, 512)
    matrix, want = matrix_in(form, blocks), numbers_of(blocks, form)
    part, ids = matrix.outputs(slice(3, 11)), torch.tensor([19, 0, 7, 7])
    assert part.shape == (8, 512) and torch.equal(part.expand(torch.float32), want[3:11])
    for held, of_part in zip(matrix.tensors(), part.tensors(), strict=True):
        assert of_part.untyped_storage().data_ptr() == held.untyped_storage().data_ptr()
    assert torch.equal(matrix.rows(ids).expand(torch.float32), want[ids])
    assert matrix.rows(ids[:0]).expand(torch.bfloat16).shape == (0, 512)


@pytest.mark.parametrize("name", ["gptq", "gptq-act-order", "awq", "fp8", "float8"])
def test_rows_of_groups_are_a_choice_too(name):
    matrix, want = matrix_of(name)
    ids = torch.tensor([47, 0, 7, 7])
    assert torch.equal(matrix.rows(ids).expand(torch.float32), want[ids])


@pytest.mark.parametrize("form", BLOCK_FORMS)
def test_a_part_of_the_inputs_has_its_numbers(form):
    """Whole blocks of each row, which lie apart."""
    matrix, want = blocks_of(form, 20, 1024)
    num_bytes = matrix.blocks.shape[1] // 4
    part = BlockMatrix(matrix.blocks[:, num_bytes : 3 * num_bytes], form)
    for layers in ("plain", None):
        with use_kernels(layers=layers):
            assert torch.equal(part.expand(torch.float32), want[:, 256:768])


def test_what_is_held_is_the_bytes_of_the_file():
    blocks = random_blocks("Q5_K", 8, 512)
    assert [held.data_ptr() for held in BlockMatrix(blocks, "Q5_K").tensors()] == [blocks.data_ptr()]
    for form in GROUPED:
        blocks = random_blocks(form, 8, 512)
        assert sum(held.nbytes for held in grouped_of_blocks(blocks, form).tensors()) == blocks.nbytes


def test_only_blocks_with_one_scale_become_groups():
    with pytest.raises(ValueError, match="Q4_1"):
        grouped_of_blocks(random_blocks("Q4_1", 2, 64), "Q4_1")


@pytest.mark.parametrize("rows", [1, 7, 300])
@pytest.mark.parametrize("form", ["Q4_K", "Q6_K", "Q5_0"])
def test_products_are_those_with_the_numbers(form, rows):
    """Whatever is expanded at a time."""
    outputs, inputs = STEP_NUMBERS // 4096 + 40, 4096
    matrix, numbers = blocks_of(form, outputs, inputs)
    g = torch.Generator().manual_seed(1)
    x, norm, bias = (torch.randn(*shape, generator=g) for shape in ((rows, inputs), (inputs,), (outputs,)))
    for more in ({}, {"norm": norm, "eps": 1e-5}):
        want = linear(x, numbers, bias, **more)
        torch.testing.assert_close(quantised_linear(x, matrix, bias, **more), want, atol=1e-2, rtol=1e-4)
        onto = torch.ones(rows, outputs)
        assert quantised_linear(x, matrix, bias, onto=onto, **more) is onto
        torch.testing.assert_close(onto, want + 1, atol=1e-2, rtol=1e-4)


@pytest.mark.skipif(cpu_level() < Level.AVX2, reason="the compiled products need AVX2")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", BLOCK_FORMS)
def test_compiled_products_are_those_with_the_numbers(form, dtype):
    """Of a number of outputs that is no multiple of what is expanded together; a row's bits are its own."""
    inputs = 1280 if "K" in form else 1312
    matrix, numbers = blocks_of(form, 39, inputs)
    numbers = numbers.to(dtype).double()
    x = torch.randn(5, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = matrix.product_compiled(x)
    want, size = x.double() @ numbers.T, x.double().abs() @ numbers.abs().T
    assert ((found - want).abs() <= 1e-6 * size).all()
    for n in range(5):
        assert torch.equal(matrix.product_compiled(x[:n]), found[:n])
    assert torch.equal(matrix.outputs(slice(4, 30)).product_compiled(x[4:]), found[4:, 4:30])


@pytest.mark.skipif(cpu_level() < Level.AVX2, reason="the compiled products need AVX2")
def test_compiled_products_with_what_is_no_number_are_none():
    blocks = random_blocks("Q6_K", 40, 768, odd=True)
    numbers = numbers_of(blocks, "Q6_K").bfloat16().float()
    found = BlockMatrix(blocks, "Q6_K").product_compiled(torch.ones(2, 768, dtype=torch.bfloat16))
    want = (numbers.double().sum(1)).isfinite()
    assert not want.all()
    assert torch.equal(found.isfinite(), want.expand(2, 40))


in_the_product = pytest.mark.skipif(cpu_level() < Level.AVX512_BF16, reason="other levels multiply otherwise")


def held_in(form, outputs, inputs, seed=0):
    """A matrix in a format of blocks, or in one of a checkpoint's formats."""
    if form in GROUPED or form in BLOCK_FORMS:
        return matrix_in(form, random_blocks(form, outputs, inputs, seed))
    return matrix_of(form, outputs, inputs, seed)[0]


@in_the_product
@pytest.mark.parametrize("rows", [1, 5, 16, 17, 40, 288])
@pytest.mark.parametrize(
    "form", [*BLOCK_FORMS, *GROUPED, "gptq", "gptq-act-order", "awq", "int8-zeros", "fp8", "float8"]
)
def test_a_product_in_bfloat16_is_that_with_the_numbers_to_the_last_bit(form, rows):
    """Of a number of outputs that is no multiple of those that are multiplied together, and of inputs for which numbers
    are made more than once; a row's bits are its own."""
    outputs, inputs = (37, 768) if form in (*BLOCK_FORMS, *GROUPED) else (72, 576)
    matrix = held_in(form, outputs, inputs)
    g = torch.Generator().manual_seed(rows)
    x, norm, bias = (torch.randn(*shape, generator=g).bfloat16() for shape in ((rows, inputs), (inputs,), (outputs,)))
    numbers = matrix.expand(torch.bfloat16)
    for more in ({}, {"norm": norm, "eps": 1e-5}):
        found = quantised_linear(x, matrix, bias, **more)
        assert torch.equal(found, linear(x, numbers, bias, **more))
        assert torch.equal(quantised_linear(x[-1:], matrix, bias, **more), found[-1:])
    onto = torch.ones(rows, outputs, dtype=torch.bfloat16)
    assert torch.equal(quantised_linear(x, matrix, onto=onto.clone()), linear(x, numbers, onto=onto))


@in_the_product
@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("form", ["Q4_K", "Q6_K", "Q8_0", "awq"])
def test_an_mlp_in_few_bits_is_that_with_the_numbers_to_the_last_bit(form, rows):
    hidden, width = 512, 768
    gate, up, down = (
        held_in(form, *shape, seed) for seed, shape in enumerate([(width, hidden)] * 2 + [(hidden, width)])
    )
    g = torch.Generator().manual_seed(rows)
    x, norm = (torch.randn(*shape, generator=g).bfloat16() for shape in ((rows, hidden), (hidden,)))
    gate_up = torch.cat([one.expand(torch.bfloat16) for one in (gate, up)])
    want = gated_mlp(x, norm, 1e-5, gate_up, down.expand(torch.bfloat16))
    found = quantised_mlp(x, (gate, up, down), norm, 1e-5)
    assert found is not None and torch.equal(found, want)
    assert quantised_mlp(x.float(), (gate, up, down), norm.float(), 1e-5) is None
    with pytest.raises(RuntimeError):
        quantised_linear(x, down)  # of other inputs
