"""What captured passes need of the compiled attention: rounded results, and a diagonal that is read from memory."""

import pytest
import torch
from oracles import random_qkv
from triforce.kernels.cpu.attention import attend_compiled
from triforce.kernels.cpu.calls import noting
from triforce.kernels.cpu.library import Level, cpu_level

every_level = pytest.mark.parametrize(
    "level",
    [
        pytest.param(
            level,
            id=level.name,
            marks=pytest.mark.skipif(level > cpu_level(), reason=f"not built, or this processor has no {level.name}"),
        )
        for level in Level
        if level > Level.NONE
    ],
)


@every_level
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 13, 100])
def test_rounded_results_are_those_of_pytorchs_rounding(dtype, n, level):
    q, k, v = random_qkv((4, 2, 64), n, 600, dtype)
    v[1, 590:] = float("nan")  # which rows of one group of heads see
    shown = {"scale": 0.125, "diagonal": 595 - n, "level": level}
    want, want_lse = attend_compiled(q, k, v, **shown)
    out, lse = attend_compiled(q, k, v, **shown, rounded=True)
    assert out.dtype == dtype and out.transpose(0, 1).is_contiguous()
    assert torch.equal(out.nan_to_num(nan=7.0), want.to(dtype).nan_to_num(nan=7.0))
    assert torch.equal(lse, want_lse)


@every_level
def test_a_diagonal_in_memory_is_read_when_the_kernel_runs(level):
    q, k, v = random_qkv((4, 2, 64), 3, 600, torch.bfloat16)
    calls = []
    diagonal = torch.tensor([0, 5])[1]
    with noting(calls.append):
        out, lse = attend_compiled(q, k, v, scale=0.125, diagonal=diagonal, window=100, level=level)
    for value in (5, 300, 597, 0):
        diagonal.fill_(value)
        assert calls[0]() == 0
        want = attend_compiled(q, k, v, scale=0.125, diagonal=value, window=100, level=level)
        assert torch.equal(out, want[0]) and torch.equal(lse, want[1])
