"""How Triton's kernels are tested: interpreted where there is no GPU, compiled where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed; pip install triton adds it on Linux")

_version = tuple(map(int, triton.__version__.split(".")[:2]))
OLD_INTERPRETER = _version < (3, 7) and np.lib.NumpyVersion(np.__version__) >= "2.4.0"
interpreted = pytest.mark.skipif(
    torch.cuda.is_available() or OLD_INTERPRETER,
    reason="Triton's interpreter before 3.7 fails with numpy 2.4"
    if OLD_INTERPRETER
    else "with a GPU, Triton's kernels are compiled",
)
both = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", id="interpreted", marks=interpreted),
        pytest.param("cuda", id="compiled", marks=pytest.mark.gpu),
    ],
)
"""Runs a test with the argument `device`, interpreted and compiled."""

DTYPES = {
    "float32": (torch.float32, 0.0),
    "bfloat16": (torch.bfloat16, 2**-8),
    "float16": (torch.float16, 2**-11),
}
"""Each with the relative error of rounding to it, which is what kernels do to 16-bit probabilities."""


def _spare_the_interpreter() -> None:
    """Triton's interpreter without two kinds of work that have no effect. For each call within a kernel, it replaces
    the names of Triton's language, also where they are replaced already. And it computes whether integers overflow, but
    says so only if its option `debug` is set."""
    from triton.runtime import interpreter

    builder, language, patch_language = interpreter.interpreter_builder, interpreter.tl, interpreter._patch_lang
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)

    def patch_once(function: Any) -> Any:
        used = [value for value in function.__globals__.values() if value is language or value is language.core]
        patched = used and not any(language.core.is_builtin(one.load) for one in used)
        return None if patched else patch_language(function)

    interpreter._patch_lang = patch_once


if not torch.cuda.is_available():
    _spare_the_interpreter()


@contextmanager
def launches(*, run: bool = True) -> Iterator[list[tuple[int, ...]]]:
    """The grids of what Triton's interpreter is asked to run within; without `run` nothing is computed."""
    from triton.runtime.interpreter import GridExecutor

    compute = GridExecutor.__call__
    grids: list[tuple[int, ...]] = []

    def launched(executor, *arguments, **named):
        grids.append(tuple(executor.grid))
        return compute(executor, *arguments, **named) if run else None

    with patch.object(GridExecutor, "__call__", launched):
        yield grids
