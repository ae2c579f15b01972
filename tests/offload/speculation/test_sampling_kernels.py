"""Sampling by the compiled kernels gives what PyTorch's operations give: the same draws, and distributions but for
rounding."""

import pytest
import torch
from triforce.kernels.cpu.library import Level, cpu_level
from triforce.kernels.selection import use_kernels
from triforce.offload.speculation.distribution import distribution, rounded_certainties
from triforce.offload.speculation.noise import CommonNoise, FreshNoise
from triforce.offload.speculation.sampling import Sampling

pytestmark = pytest.mark.skipif(cpu_level() == Level.NONE, reason="there are no compiled kernels for sampling")

FILTERS = [(0.0,), (1.0, 1.0), (0.6, 0.9), (1e-30, 0.9), (0.05, 1.0), (1.7, 0.97, 40), (1.0, 1.0, 1), (0.8, 1e-9)]
FILTERS += [(2.0, 0.9, 2**64 + 1)]


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("vocab", [7, 16, 49, 4096, 20_001])
def test_compiled_kernels_compute_what_pytorch_does(filters, vocab):
    logits = torch.randn(9, vocab, generator=torch.Generator().manual_seed(vocab)) * 4
    logits[1, : vocab // 2] = 6.0  # ties
    logits[2, ::2] = float("-inf")
    logits[3, vocab // 2] = 90.0
    logits[4, -1] = float("nan")

    def sampled(weights):
        fresh = FreshNoise(torch.Generator().manual_seed(5))
        found = distribution(logits, Sampling(*filters))
        noises = fresh, CommonNoise(5), CommonNoise(None)
        draws = [noise.draw(found if weights is None else weights, 3) for noise in noises]
        return found, draws, [rounded_certainties(logits, tokens) for tokens in draws]

    with use_kernels(layers="plain"):
        wanted, draws, sure = sampled(None)
    found, ours, ours_sure = sampled(wanted)
    assert found[4].isnan().any() and wanted[4].isnan().any()
    found[4] = wanted[4] = 0.0
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=1e-7)
    assert torch.equal(found > 1e-30, wanted > 1e-30)  # smaller ones may be 0
    for tokens, of_kernels in zip(draws, ours, strict=True):
        assert torch.equal(tokens, of_kernels)
    for certain, of_kernels in zip(sure, ours_sure, strict=True):
        assert (certain - of_kernels).abs().max() <= 2
