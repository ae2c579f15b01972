"""Products of rows with a matrix that is held in four or eight bits.

Its numbers are what the format's formula gives in float32, scales widened and never narrowed, rounded once to the dtype
that is computed in. Passes over few rows and over many multiply by the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .cpu.calls import call, threads
from .cpu.library import cpu_level, loaded
from .layers import linear
from .packages import usable_packages
from .selection import STEP_ROWS, on_cpu, selected

STEP_NUMBERS, MANY_NUMBERS = 2**22, 2**26
"""Of a matrix that a pass over few rows, and over many, expands at a time, in whole outputs."""

FLOAT32_NUMBERS = 2**20
"""That are float32 at a time while they are expanded, in whole outputs."""

_KINDS = {torch.uint8: 1, torch.int8: 2, torch.float8_e4m3fn: 3}
"""See `GroupedMatrix.kind`."""


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
    def kind(self) -> int:
        """What kernels call the way values are held: 0 for two in a byte, 1 for uint8, 2 for int8, 3 for e4m3."""
        return 0 if self.bits == 4 else _KINDS[self.values.dtype]

    def tensors(self) -> Iterator[Tensor]:
        """What is held."""
        for held in (self.values, self.scales, self.zeros, self.group_of):
            if isinstance(held, Tensor):
                yield held

    def outputs(self, part: slice) -> GroupedMatrix:
        """Some of its outputs, in the same memory."""
        zeros = self.zeros if isinstance(self.zeros, int) else self.zeros[part]
        return replace(self, values=self.values[part], scales=self.scales[part], zeros=zeros)

    def expand(self, dtype: torch.dtype) -> Tensor:
        """Its numbers: `[outputs, inputs]` in `dtype`, contiguous."""
        return self.expand_to(torch.empty(self.shape, dtype=dtype, device=self.values.device))

    def expand_to(self, out: Tensor) -> Tensor:
        """Writes its numbers to `out` `[outputs, inputs]`, contiguous."""
        if "triton" in usable_packages(out.device):
            from .triton.quantised import expand_triton  # not imported where it is not used

            expand_triton(self, out)
            return out
        compiled = on_cpu(out.device) and out.dtype in (torch.bfloat16, torch.float32) and loaded() is not None
        if compiled and selected().layers != "plain":
            self.expand_compiled(out)
            return out
        step = max(1, FLOAT32_NUMBERS // out.shape[1])
        for first, some in zip(range(0, len(out), step), out.split(step), strict=True):
            some.copy_(self.outputs(slice(first, first + step))._numbers())
        return out

    def expand_compiled(self, out: Tensor, level: int | None = None) -> None:
        """Writes its numbers to `out` `[outputs, inputs]`, bfloat16 or float32, by the compiled kernels
        (`cpu/source/quantised.c`).

        Args: `level` is that of the instructions to use, at most `cpu_level()`, which is the default.
        """
        kernels, scales = loaded(), self.scales.float()
        zeros = torch.full_like(scales, self.zeros) if isinstance(self.zeros, int) else self.zeros.float()
        group_of = None if self.group_of is None else self.group_of.data_ptr()
        level = cpu_level() if level is None else level
        assert kernels is not None
        failed = call(
            kernels.triforce_expand,
            *(self.values.data_ptr(), self.kind, scales.data_ptr(), zeros.data_ptr(), group_of, out.data_ptr()),
            *(*out.shape, scales.shape[1], out.dtype == torch.bfloat16, level, threads()),
        )
        if failed:
            raise ValueError(f"this processor has not the instructions of level {level}")

    def _numbers(self) -> Tensor:
        """Those of it, in float32."""
        values, scales = self.values, self.scales.float()
        if self.bits == 4:
            values = torch.stack((values & 15, values >> 4), dim=-1).flatten(1)
        zeros = self.zeros if isinstance(self.zeros, int) else self.zeros.float()
        if self.group_of is not None:
            zeros = zeros if isinstance(zeros, int) else zeros[:, self.group_of]
            return (values.float() - zeros) * scales[:, self.group_of]
        zeros = zeros if isinstance(zeros, int) else zeros.unsqueeze(-1)
        grouped = values.float().unflatten(1, (scales.shape[1], -1))
        return ((grouped - zeros) * scales.unsqueeze(-1)).flatten(1)


def joined(matrices: Sequence[GroupedMatrix]) -> list[GroupedMatrix]:
    """Those of the same inputs whose outputs follow one another: one, where all are held alike and groups are
    neighbours; or as they are given."""
    first, *others = matrices
    ways = {
        (one.kind, one.scales.shape[1], one.scales.dtype, one.zeros if isinstance(one.zeros, int) else one.zeros.dtype)
        for one in matrices
    }
    if not others or len(ways) > 1 or any(one.group_of is not None for one in matrices):
        return list(matrices)
    zeros = first.zeros
    if isinstance(zeros, Tensor):
        zeros = torch.cat([one.zeros for one in matrices if isinstance(one.zeros, Tensor)])
    values, scales = torch.cat([one.values for one in matrices]), torch.cat([one.scales for one in matrices])
    return [replace(first, values=values, scales=scales, zeros=zeros)]


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
    if x.shape[0] <= STEP_ROWS and "triton" in usable_packages(x.device):
        from .triton.quantised import product_triton  # not imported where it is not used

        y = x if norm is None else F.rms_norm(x, norm.shape, norm, eps)
        return product_triton(y.contiguous(), matrix, bias, onto)
    outputs, inputs = matrix.shape
    at_once = max(1, (STEP_NUMBERS if x.shape[0] <= STEP_ROWS else MANY_NUMBERS) // inputs)
    if outputs <= at_once:
        return linear(x, matrix.expand(x.dtype), bias, norm=norm, eps=eps, onto=onto)
    product = x.new_empty(x.shape[0], outputs)
    room = x.new_empty(at_once, inputs)  # one for all: the system takes longer to give memory than numbers take
    for first in range(0, outputs, at_once):
        some = slice(first, first + at_once)
        part, of_part = matrix.outputs(some), None if bias is None else bias[some]
        product[:, some] = linear(x, part.expand_to(room[: part.shape[0]]), of_part, norm=norm, eps=eps)
    return product if onto is None else onto.add_(product)
