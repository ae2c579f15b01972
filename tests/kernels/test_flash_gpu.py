"""The flash kernels of a GPU, which a prefill's attention may be computed by, against float64."""

import pytest
import torch
from oracles import oracle, random_qkv
from triforce.kernels.flash import flash_cuda, flash_package

pytestmark = pytest.mark.gpu


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
