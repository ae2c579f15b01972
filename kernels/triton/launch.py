"""Starts Triton's kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.runtime import JITFunction

_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
"""By kernel and what it was compiled for: the compiled one, and the constants among its arguments."""


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Starts `grid` programs of a kernel on the GPU of its first argument.

    What Triton compiled is kept by what it was compiled for, as Triton keeps it too: but of a launch its look-up takes
    hosts of an H200 11 to 20 µs, and a streamed verification has a thousand. This one took 6 on an AMD EPYC.

    Args:
        args: all that are no constants, tensors and numbers; the first is a tensor. Triton distinguishes 1, multiples
            of 16 and what needs 64 bits, and tensors that begin at a multiple of 16 bytes.
        constants: the kernel's last parameters, and options of Triton.
    """
    with torch.cuda.device_of(args[0]):
        if not isinstance(kernel, JITFunction):  # Triton's interpreter
            kernel[grid](*args, **constants)
            return
        key = id(kernel), args[0].device.index, *constants.items(), *map(_kind, args)
        found = _compiled.get(key)
        if found is None:
            compiled = kernel[grid](*args, **constants)
            _compiled[key] = compiled, tuple(constants[each.name] for each in kernel.params[len(args) :])
        else:
            compiled, last = found
            compiled[(*grid, 1, 1)[:3]](*args, *last)


def _kind(value: Any) -> Any:
    """What Triton distinguishes of an argument."""
    if isinstance(value, int):
        return 1 if value == 1 else (value % 16 == 0, -(2**31) <= value < 2**31)
    return (value.dtype, value.data_ptr() % 16 == 0) if isinstance(value, Tensor) else type(value)
