"""Products of rows with a matrix that is held in four or eight bits.

Its numbers are what the format's formula gives in float32, scales widened and never narrowed, rounded once to the dtype
that is computed in. Passes over few rows and over many multiply by the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .cpu.calls import call, threads
from .cpu.library import cpu_level, loaded
from .layers import linear
from .packages import usable_packages
from .selection import STEP_ROWS, on_cpu, selected

STEP_NUMBERS = 2**22
"""Of a matrix that a pass over few rows expands at a time, in whole outputs; one over many expands all of it."""

FLOAT32_NUMBERS = 2**20
"""That are float32 at a time while they are expanded, in whole outputs."""


_KINDS = {torch.uint8: 1, torch.int8: 2, torch.float8_e4m3fn: 3}
"""How the compiled kernels call values of eight bits."""


@dataclass(frozen=True)
class GroupedMatrix:
    """`[outputs, inputs]` of `scale * (value - zero)`, where a group of inputs of an output has one scale and zero."""

    values: Tensor
    """`[outputs, inputs]` uint8, int8 or float8, or `[outputs, inputs / 2]` uint8 with the number of an even input in
    bits 0 to 3 and that of the input after it in bits 4 to 7."""
    scales: Tensor
    """As they are stored, `[outputs, groups]`."""
    zeros: Tensor | int
    """Whole numbers `[outputs, groups]`, or one for all."""
    bits: int
    """4 or 8."""
    group_of: Tensor | None = None
    """The group of each input, int64 `[inputs]`; `None` where groups are neighbours, as many in each."""

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.values.shape[0], self.values.shape[1] * 8 // self.bits

    @property
    def in_bytes(self) -> tuple[Tensor, int]:
        """The values, float8 as uint8, and how Triton's kernels call what they hold: 0 two in a byte, 1 one in a byte,
        2 one in e4m3."""
        if self.values.dtype == torch.float8_e4m3fn:
            return self.values.view(torch.uint8), 2
        return self.values, 0 if self.bits == 4 else 1

    def tensors(self) -> Iterator[Tensor]:
        """What is held."""
        for held in (self.values, self.scales, self.zeros, self.group_of):
            if isinstance(held, Tensor):
                yield held

    def expand(self, first: int, stop: int, dtype: torch.dtype) -> Tensor:
        """The numbers of outputs `first` to `stop`: `[stop - first, inputs]` in `dtype`, contiguous."""
        inputs = self.shape[1]
        out = torch.empty(stop - first, inputs, dtype=dtype, device=self.values.device)
        if "triton" in usable_packages(out.device):
            from .triton.quantised import expand_triton  # not imported where it is not used

            zeros = self.zeros if isinstance(self.zeros, int) else self.zeros[first:stop]
            values, kind = self.in_bytes
            expand_triton(values[first:stop], kind, self.scales[first:stop], zeros, self.group_of, out)
            return out
        compiled = on_cpu(out.device) and dtype in (torch.bfloat16, torch.float32) and loaded() is not None
        if compiled and selected().layers != "plain":
            self.expand_compiled(first, stop, out)
            return out
        step = max(1, FLOAT32_NUMBERS // inputs)
        for begin in range(first, stop, step):
            end = min(stop, begin + step)
            out[begin - first : end - first] = self._numbers(slice(begin, end))
        return out

    def expand_compiled(self, first: int, stop: int, out: Tensor, level: int | None = None) -> None:
        """`expand` by the compiled kernels (`cpu/source/quantised.c`), in bfloat16 or float32.

        Args: `level` is that of the instructions to use, at most `cpu_level()`, which is the default.
        """
        kernels, values, scales = loaded(), self.values[first:stop], self.scales[first:stop].float()
        zeros = torch.full_like(scales, self.zeros) if isinstance(self.zeros, int) else self.zeros[first:stop].float()
        kind = 0 if self.bits == 4 else _KINDS[values.dtype]
        group_of = None if self.group_of is None else self.group_of.data_ptr()
        assert kernels is not None
        call(
            kernels.triforce_expand,
            *(values.data_ptr(), kind, scales.data_ptr(), zeros.data_ptr(), group_of, out.data_ptr()),
            *(*out.shape, scales.shape[1], out.dtype == torch.bfloat16),
            cpu_level() if level is None else level,
            threads(),
        )

    def _numbers(self, outputs: slice) -> Tensor:
        """Of some outputs, in float32."""
        values = self.values[outputs]
        if self.bits == 4:
            values = torch.stack((values & 15, values >> 4), dim=-1).flatten(1)
        scales = self.scales[outputs].float()
        zeros = self.zeros if isinstance(self.zeros, int) else self.zeros[outputs].float()
        if self.group_of is not None:
            zeros = zeros if isinstance(zeros, int) else zeros[:, self.group_of]
            return (values.float() - zeros) * scales[:, self.group_of]
        zeros = zeros if isinstance(zeros, int) else zeros.unsqueeze(-1)
        grouped = values.float().unflatten(1, (scales.shape[1], -1))
        return ((grouped - zeros) * scales.unsqueeze(-1)).flatten(1)


def quantised_linear(
    x: Tensor,
    matrix: GroupedMatrix,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    onto: Tensor | None = None,
) -> Tensor:
    """`layers.linear` with a matrix whose numbers are expanded in `x`'s dtype."""
    outputs, inputs = matrix.shape
    if x.shape[0] <= STEP_ROWS and "triton" in usable_packages(x.device):
        product = _fused(x if norm is None else F.rms_norm(x, norm.shape, norm, eps), matrix)
        product = (product if bias is None else product.add_(bias)).to(x.dtype)
        return product if onto is None else onto.add_(product)
    if x.shape[0] > STEP_ROWS:
        return linear(x, matrix.expand(0, outputs, x.dtype), bias, norm=norm, eps=eps, onto=onto)
    step = max(1, STEP_NUMBERS // inputs)
    parts = []
    for first in range(0, outputs, step):
        stop = min(outputs, first + step)
        of_part = None if bias is None else bias[first:stop]
        parts.append(linear(x, matrix.expand(first, stop, x.dtype), of_part, norm=norm, eps=eps))
    product = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return product if onto is None else onto.add_(product)


def _fused(x: Tensor, matrix: GroupedMatrix) -> Tensor:
    """The product of few rows by Triton's kernel, float32."""
    from .triton.quantised import product_triton  # not imported where it is not used

    return product_triton(x.contiguous(), *matrix.in_bytes, matrix.scales, matrix.zeros, matrix.group_of)
