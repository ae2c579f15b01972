"""How Triton's kernels are started: what was compiled is found again where Triton would compile nothing else."""

import pytest
import torch
from triton_runs import triton  # skips without Triton

launcher = pytest.importorskip("triforce.kernels.triton.launch")


class Kernel(triton.runtime.JITFunction):
    """Stands for a kernel that a GPU would run: notes what is compiled, and what is launched."""

    def __init__(self) -> None:
        self.params = [type("Param", (), {"name": name})() for name in ("x", "n", "SIZE", "KIND")]
        self.compiled: list[tuple] = []
        self.launched: list[tuple] = []

    def __getitem__(self, grid):
        def compile_and_run(*args, **constants):
            self.compiled.append((grid, args, constants))
            return Compiled(self)

        return compile_and_run


class Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args: self.kernel.launched.append((grid, args))


def test_a_kernel_is_compiled_once_and_launched_with_all_arguments(monkeypatch):
    monkeypatch.setattr(launcher, "_compiled", {})
    kernel, x = Kernel(), torch.zeros(64)
    for n in (32, 48, 160):
        launcher.launch(kernel, (n, 2), x, n, KIND=3, num_warps=4, SIZE=8)
    assert len(kernel.compiled) == 1
    assert kernel.launched == [((n, 2, 1), (x, n, 8, 3)) for n in (48, 160)]


@pytest.mark.parametrize("first", range(10))
def test_what_triton_compiles_for_is_told_apart(monkeypatch, first):
    """Numbers that are 1, multiples of 16, or need 64 bits; tensors by their number format and where they begin;
    constants and options."""
    monkeypatch.setattr(launcher, "_compiled", {})
    kernel, x = Kernel(), torch.zeros(64)
    ways = [
        (x, 32, 8, 4), (x, 1, 8, 4), (x, 17, 8, 4), (x, 2**32, 8, 4), (x, 2**32 + 1, 8, 4), (x[1:], 32, 8, 4),
        (x.half(), 32, 8, 4), (x, 32, 16, 4), (x, 32, 8, 8), (x, 1.5, 8, 4),
    ]  # fmt: skip
    for given, n, size, warps in ways[first:] + ways[:first]:
        launcher.launch(kernel, (1,), given, n, SIZE=size, KIND=3, num_warps=warps)
    assert len(kernel.compiled) == len(ways) and not kernel.launched
    launcher.launch(kernel, (1,), x[4:], 64, SIZE=8, KIND=3, num_warps=4)  # sixteen bytes on
    assert len(kernel.compiled) == len(ways)
