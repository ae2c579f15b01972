"""Levels of the compiled kernels: which one this processor has; and the kernels keep their word on every lower one, and
where none were built."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from triforce.kernels import Level, arithmetic, cpu_level, instructions

ROOT = Path(__file__).parents[2]
CONTRACTS = [str(Path(__file__).with_name(f"test_{name}.py")) for name in ("attention", "chunks", "layers", "packing")]


def test_the_level_is_what_the_system_says_of_the_processor():
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    flags = next((set(line.split(":")[1].split()) for line in lines if line.startswith("flags")), None)
    if flags is None or cpu_level() == Level.NONE or "TRIFORCE_CPU_LEVEL" in os.environ:
        pytest.skip("Linux alone lists a processor's features, and the kernels' highest level is needed")
    assert {"avx2", "fma"} <= flags
    avx512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= flags
    assert (cpu_level() >= Level.AVX512) == avx512
    assert (cpu_level() >= Level.AVX512_BF16) == (avx512 and "avx512_bf16" in flags)
    if cpu_level() == Level.AMX:  # the system may refuse it
        assert {"amx_tile", "amx_bf16"} <= flags
    assert instructions()


def run_pytest(*arguments: str, **environment: str) -> None:
    """Runs tests in a process of its own, which must all pass or be skipped."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-5000:]


@pytest.mark.slow
@pytest.mark.parametrize("level", [level for level in Level if level < cpu_level()], ids=lambda level: level.name)
def test_kernels_keep_their_word_on_every_lower_level(level):
    run_pytest(*CONTRACTS, TRIFORCE_CPU_LEVEL=level.name.lower())


def test_each_level_has_a_number_of_its_own():
    """It is in contexts that are saved, so it stays."""
    numbers = {Level.NONE: 0, Level.AVX2: 1, Level.AVX512: 2, Level.AVX512_BF16: 10, Level.AMX: 11}
    assert list(numbers) == list(Level) and arithmetic() == numbers[cpu_level()]
    assert arithmetic("cuda") is None


@pytest.mark.slow
def test_kernels_keep_their_word_where_none_were_built(tmp_path):
    """With a copy of the package that has no built library."""
    shutil.copytree(ROOT / "kernels", tmp_path / "triforce" / "kernels", ignore=shutil.ignore_patterns("*.so", "build"))
    check = tmp_path / "test_nothing_was_built.py"
    check.write_text(
        "from triforce import kernels\n\n\ndef test_nothing_was_built():\n"
        f"    assert kernels.__file__.startswith({str(tmp_path)!r}) and kernels.instructions() is None\n"
    )
    run_pytest(*CONTRACTS, str(check), PYTHONPATH=str(tmp_path), TRIFORCE_CPU_LEVEL="")


def test_a_computation_on_the_cpu_does_not_import_triton():
    code = (
        "import sys, torch; from triforce.kernels import attend; import triforce.offload\n"
        "x = torch.randn(2, 40, 16); attend(x, x, x, scale=1.0); attend(x[:, :1], x, x, scale=1.0)\n"
        "print('triton' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["False"], done.stderr
