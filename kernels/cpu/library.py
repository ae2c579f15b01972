"""The compiled CPU kernels: there where a compiler was at hand at install, used where the processor can run them.

They are an optional part: `library` is `None` without them, and plain PyTorch does the same, in another order of sums.
"""

from __future__ import annotations

import ctypes
import functools
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

_ABI = 1
"""`TRIFORCE_ABI` of cpu.h."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The loaded kernels, or `None` where there are none that this machine can run."""
    kernels = loaded()
    return kernels if kernels is not None and kernels.triforce_cpu_level() > 0 else None


@functools.cache
def loaded() -> ctypes.CDLL | None:
    """The kernels, whatever of them this machine can run, or `None` where they were not built.

    PyTorch must have been imported before: the kernels then share its OpenMP threads.
    """
    folder = Path(__file__).parent
    built = next((path for suffix in EXTENSION_SUFFIXES if (path := folder / f"_compiled{suffix}").exists()), None)
    if built is None:
        return None
    try:
        kernels = ctypes.CDLL(str(built))
        return kernels if kernels.triforce_abi() == _ABI else None  # built from sources of another time
    except (OSError, AttributeError):
        return None


_LEVELS = (None, "AVX2, attention only", "AVX-512, attention only", "AVX-512 with bfloat16 products")


@functools.cache
def attention_level() -> int:
    """The instructions attention can use here: 0 none, 1 AVX2, 2 AVX-512, 3 AVX-512 with bfloat16 dot products."""
    kernels = loaded()
    return 0 if kernels is None else kernels.triforce_attention_level()


def instructions() -> str | None:
    """The instruction set that the kernels take here; `None` where they were not built or have none of their sets."""
    return _LEVELS[attention_level()]
