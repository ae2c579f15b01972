"""Products of rows with matrices that are chosen for each on the device, in Triton: mixtures of experts.

Without a GPU it runs under Triton's interpreter (see `conftest.py`); with one, the same tests run compiled.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from quantised import FORMATS, save_quantised
from quantised_matrices import blocks_of, matrix_of, moved
from recorder import NoWaiting
from triforce.kernels.quantised import Choice, chosen_products, joined
from triforce.kernels.selection import padded_rows, use_kernels
from triforce.tp.decoder import Decoder
from triforce.tp.matrices import ExpertMlps
from triton_runs import DTYPES, both

pytestmark = pytest.mark.usefixtures("exact_products")
COUNT = 5


def stack_of(kind, outputs, inputs) -> tuple[Any, torch.Tensor]:
    """Random matrices in one, and the numbers of each."""
    made = [(blocks_of if kind.startswith("Q") else matrix_of)(kind, outputs, inputs, seed) for seed in range(COUNT)]
    (matrix,) = joined([matrix for matrix, _ in made])
    return matrix, torch.stack([numbers for _, numbers in made])


@both
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("outputs", "inputs", "each"), [(64, 768, 2), (40, 256, 3), (128, 256, 1)])
@pytest.mark.parametrize("kind", ["awq", "int8", "float8", "gptq-symmetric", "Q4_K", "Q6_K", "Q5_0"])
@pytest.mark.slow(keep=10)
def test_each_product_is_with_what_was_chosen(device, kind, outputs, inputs, each, dtype):
    """Of full tiles and others, of one part of the inputs and several; and a row's bits are its own."""
    dtype, _ = DTYPES[dtype]
    matrix, numbers = stack_of(kind, outputs, inputs)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(3, inputs, generator=g).to(device, dtype)
    ids = torch.cat([torch.randperm(COUNT, generator=g)[:each] for _ in range(len(x))]).to(device)
    choice, matrix = Choice(ids, each, outputs), moved(matrix, device)
    with use_kernels(as_gpu={"triton"}):
        found = chosen_products(x, matrix, choice)
        one = chosen_products(x[2:3], matrix, replace(choice, ids=ids[2 * each : 3 * each]))
    assert torch.equal(one, found[2 * each : 3 * each])
    chosen = numbers.to(dtype).double().to(device)[ids]
    rows = x.double().repeat_interleave(each, 0).unsqueeze(-1)
    want, size = (chosen @ rows).squeeze(-1), (chosen.abs() @ rows.abs()).squeeze(-1)
    assert ((found.double() - want).abs() <= torch.finfo(dtype).eps * want.abs() + 2e-6 * size + 1e-6).all()


@both
@pytest.mark.parametrize(("name", "family"), [("gptq", "qwen3-moe"), ("int8", "mixtral")])
def test_experts_of_few_rows_have_the_sums_of_one_after_the_other(tmp_path, device, name, family):
    """And the host does not wait for which they are."""
    save_quantised(tmp_path, FORMATS[name], family, seed=1)
    with use_kernels(as_gpu={"triton"}):
        decoder = Decoder.load(tmp_path, dtype=torch.float32, device=torch.device(device))
        layer = decoder._layers[2]
        assert isinstance(layer.mlp, ExpertMlps) and layer.mlp.stacked is not None and not decoder.waits_in_steps
        rows = torch.randn(11, decoder.config.hidden_size, generator=torch.Generator().manual_seed(2)).to(device)
        with NoWaiting(), padded_rows(True):
            found = layer.mlp.of(rows, norm=layer.post_norm, eps=1e-5)
            alone = layer.mlp.of(rows[4:5], norm=layer.post_norm, eps=1e-5)
        assert (alone - found[4:5]).abs().max().item() == 0
        apart = replace(layer.mlp, stacked=None).of(rows, norm=layer.post_norm, eps=1e-5)
        torch.testing.assert_close(found, apart, atol=1e-5, rtol=1e-5)
