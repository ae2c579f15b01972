"""Triton's kernels compile for GPUs that need not be there, without spilling registers and within their shared memory.

Triton brings its own assembler, so what its interpreter lets pass (types, shared memory, registers) shows here. A
process compiles many of them: importing PyTorch and Triton takes as long as a dozen."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton_runs  # skips where Triton is not installed

SCRIPT = Path(triton_runs.__file__).with_name("compile_triton.py")
KERNELS = {
    *("attention", "copies of chunks", "delta rule", "mass of chunks", "merge", "numbers of blocks", "packing"),
    *("packing: exceptions", "packing: unpacking", "products of blocks", "products of experts"),
    *("products of quantised matrices", "products of quantised matrices: sums", "rows in host memory"),
}


def compiled(cache: Path, *arguments: str) -> list[str]:
    """The first words of each line that `compile_triton.py` prints: the kernels. It fails where one takes too much.

    Args: `cache` is an empty directory for what is compiled.
    """
    done = subprocess.run(
        [sys.executable, "-P", str(SCRIPT), *arguments],
        env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return [line.removeprefix("| ").split(" | ")[0] for line in done.stdout.splitlines()]


def test_each_value_of_each_constant_compiles_without_spills(tmp_path):
    assert {*compiled(tmp_path, "--some", "--groups", "4")} - {"kernel", "|---" * 7 + "|"} == KERNELS


@pytest.mark.parametrize("capabilities", ["80 86 89", "90", "120"])
@pytest.mark.slow
def test_every_variant_compiles_without_spills(tmp_path, capabilities):
    """Attention with four query heads for each KV head."""
    assert {*compiled(tmp_path, "--groups", "4", "--capabilities", *capabilities.split())} >= KERNELS


@pytest.mark.parametrize("capability", ["80", "90"])
@pytest.mark.slow
def test_unusual_variants_compile_without_spills(tmp_path, capability):
    assert any(line.startswith("attention") for line in compiled(tmp_path, "--unusual", capability))
