"""Starts Triton's kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.runtime import JITFunction

_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
"""The compiled kernel and the constants among its arguments, by kernel and the properties that it was compiled for."""


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Starts `grid` programs of a kernel on the GPU of its first argument.

    Compiled kernels are kept in a table here, although Triton has a table too. Triton's look-up takes 11 to 20 µs for a
    launch on hosts of an H200, and a streamed verification has a thousand launches. This look-up took 6 µs on an AMD
    EPYC.

    Args:
        args: all arguments that are not constants: tensors and numbers, the first of them a tensor. Triton compiles
            separately for the number 1, for multiples of 16, for numbers that need 64 bits, and for tensors that begin
            at a multiple of 16 bytes.
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
    """The properties of an argument for which Triton compiles separately."""
    if isinstance(value, int):
        return 1 if value == 1 else (value % 16 == 0, -(2**31) <= value < 2**31)
    return (value.dtype, value.data_ptr() % 16 == 0) if isinstance(value, Tensor) else type(value)
