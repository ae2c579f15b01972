"""The line that measured passes are fitted by."""

import pytest
import torch
from triforce.offload.planning.calibration import MeasuredPass, PassLine, fit


@pytest.mark.parametrize(
    "law",
    [PassLine(3e-3, 1 / 40e9, 1 / 200e9), PassLine(0.0, 1 / 40e9, 1 / 200e9), PassLine(3e-3, 1 / 40e9, 0.0)],
)
def test_the_fit_finds_the_law_that_passes_follow(law):
    passes = [
        MeasuredPass(read, rows * read / 2, law.seconds(read, rows * read / 2))
        for read, rows in ((1e7, 1), (1e8, 1), (4e8, 1), (1e7, 4), (1e8, 9), (4e8, 13))
    ]
    found = fit(passes)
    assert found.overhead_s == pytest.approx(law.overhead_s, abs=1e-9)
    assert found.byte_s == pytest.approx(law.byte_s, rel=1e-6, abs=1e-18)
    assert found.operation_s == pytest.approx(law.operation_s, rel=1e-6, abs=1e-18)
    assert found.worst(passes) < 1e-6


def test_no_term_of_the_fit_is_below_zero_and_none_better_is_there():
    """Against a search over a grid: passes that get faster with their bytes have no line; the nearest is a constant."""
    generator = torch.Generator().manual_seed(3)
    noise = 1 + 0.3 * torch.randn(6, generator=generator)
    passes = [
        MeasuredPass(read, 4 * read, float((5 - 1e-8 * read) * 1e-3 * factor))
        for read, factor in zip((1e7, 2e7, 5e7, 1e8, 2e8, 3e8), noise, strict=True)
    ]
    found = fit(passes)
    assert min(found.overhead_s, found.byte_s, found.operation_s) >= 0

    def missed(line):
        return sum((line.seconds(p.read, p.multiplied) / p.seconds - 1) ** 2 for p in passes)

    for overhead in torch.linspace(0, 1e-2, 101).tolist():
        for byte in (0.0, *torch.logspace(-14, -9, 51).tolist()):
            assert missed(found) <= missed(PassLine(overhead, byte, 0.0)) + 1e-9
    with pytest.raises(ValueError, match="no pass"):
        fit([])
