"""Products of rows with a matrix that is held in four to eight bits.

Its numbers are what the format's formula gives in float32, scales widened and never narrowed, rounded once to the dtype
that is computed in. Passes over few rows and over many multiply by the same numbers.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from .cpu.calls import call, threads
from .cpu.library import Level, QuantisedCall, cpu_level, loaded
from .layers import held_expert_mlps, held_gated_mlp, held_linear, linear, rms_norm
from .packages import usable_packages
from .selection import STEP_ROWS, on_cpu, selected

STEP_NUMBERS, PREFILL_NUMBERS = 2**22, 2**26
"""Numbers of a matrix that a step, and a prefill, expands at a time, in whole outputs."""

FLOAT32_NUMBERS = 2**20
"""Numbers that are float32 at a time while they are expanded, in whole outputs."""

_KINDS = {torch.uint8: 1, torch.int8: 2, torch.float8_e4m3fn: 3}
"""See `GroupedMatrix.kind`."""

_BLOCKS = 16
"""`BLOCKS` of cpu.h."""

_NUMBERS = {
    dtype: i
    for i, dtype in enumerate((torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16))
}
"""`NUMBERS_FLOAT32` and those after it of cpu.h."""


@dataclass(frozen=True)
class Choice:
    """Which of the matrices whose outputs follow one another in a larger one each row is multiplied by."""

    ids: Tensor
    """Int64 `[n * each]`: the numbers of the first row's, of the second's, ..."""
    each: int
    """How many a row is multiplied by."""
    outputs: int
    """Of one of them; there are as many as the larger matrix has times these."""


class QuantisedMatrix(ABC):
    """`[outputs, inputs]` whose numbers are the formula of a format."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""

    @abstractmethod
    def tensors(self) -> Iterator[Tensor]:
        """What is held."""

    def outputs(self, part: slice) -> Self:
        """Some of its outputs, in the same memory."""
        return self.with_rows(lambda held: held[part])

    def rows(self, ids: Tensor) -> Self:
        """A copy of the outputs `ids`, int64 `[n]`, in their order."""
        return self.with_rows(lambda held: held[ids])

    def expand(self, dtype: torch.dtype) -> Tensor:
        """Its numbers: `[outputs, inputs]` in `dtype`, contiguous."""
        return self.expand_to(torch.empty(self.shape, dtype=dtype, device=next(self.tensors()).device))

    def expand_to(self, out: Tensor) -> Tensor:
        """Writes its numbers to `out` `[outputs, inputs]`, contiguous."""
        if "triton" in usable_packages(out.device):
            self._expand_triton(out)
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
        """Writes its numbers to `out` `[outputs, inputs]`, bfloat16 or float32, by the compiled kernels.

        Args: `level` is that of the instructions to use, at most `cpu_level()`, which is the default.
        """
        kernels, level = loaded(), cpu_level() if level is None else level
        assert kernels is not None
        is_bf16 = out.dtype == torch.bfloat16
        if call(kernels.triforce_expand, self.described, out.data_ptr(), is_bf16, level, threads()):
            raise ValueError(f"this processor has not the instructions of level {level}")

    def product_compiled(self, x: Tensor) -> Tensor:
        """`x` `[n, inputs]`, bfloat16 or float32, times its numbers in that dtype, by the compiled kernels
        (`cpu/source/products.c`), which need AVX2 and inputs in eights: `[n, outputs]`, float32."""
        kernels = loaded()
        assert kernels is not None
        out = x.new_empty(len(x), self.shape[0], dtype=torch.float32)
        rows, is_bf16 = x.float().contiguous(), x.dtype == torch.bfloat16
        failed = call(
            kernels.triforce_product, self.described, rows.data_ptr(), len(x), out.data_ptr(), is_bf16, threads()
        )
        if failed:
            raise MemoryError if failed == 1 else ValueError("this processor has not the instructions of AVX2")
        return out

    @abstractmethod
    def sums_triton(self, x: Tensor, choice: Choice | None = None) -> Tensor:
        """Sums of `x` `[n, inputs]`, contiguous, times it over parts of the inputs: `[parts, n, outputs]`, float32; or
        times what is chosen of it: `[parts, n * each, outputs]`."""

    @abstractmethod
    def with_rows(self, change: Callable[[Tensor], Tensor]) -> Self:
        """One that holds other rows: what `change` makes of each tensor of which an output has a row."""

    @abstractmethod
    def _numbers(self) -> Tensor:
        """Those of it, in float32."""

    @cached_property
    def described(self) -> ctypes.Array[QuantisedCall]:
        """What the compiled kernels are told of it: addresses, good as long as it lives."""
        return (QuantisedCall * 1)(self._describe())

    def __getstate__(self) -> dict[str, Any]:
        """What a copy takes over: no addresses."""
        return {name: value for name, value in vars(self).items() if name != "described"}

    @abstractmethod
    def _describe(self) -> QuantisedCall:
        """See `described`."""

    @abstractmethod
    def _expand_triton(self, out: Tensor) -> None:
        """Expands to `out`."""


@dataclass(frozen=True)
class GroupedMatrix(QuantisedMatrix):
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
        return self.values.shape[0], self.values.shape[1] * 8 // self.bits

    @property
    def kind(self) -> int:
        """What kernels call the way values are held: 0 for two in a byte, 1 for uint8, 2 for int8, 3 for e4m3."""
        return 0 if self.bits == 4 else _KINDS[self.values.dtype]

    def tensors(self) -> Iterator[Tensor]:
        for held in (self.values, self.scales, self.zeros, self.group_of):
            if isinstance(held, Tensor):
                yield held

    def with_rows(self, change: Callable[[Tensor], Tensor]) -> Self:
        zeros = self.zeros if isinstance(self.zeros, int) else change(self.zeros)
        return replace(self, values=change(self.values), scales=change(self.scales), zeros=zeros)

    def _numbers(self) -> Tensor:
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

    def _describe(self) -> QuantisedCall:
        zeros, group_of, groups = self.zeros, self.group_of, self.scales.shape[1]
        assert self.values.stride(1) == 1 and self.scales.is_contiguous()
        assert isinstance(zeros, int) or zeros.is_contiguous()
        return QuantisedCall(
            *(self.values.data_ptr(), self.kind, self.values.stride(0), *self.shape, groups, self.shape[1] // groups),
            0 if group_of is None else group_of.data_ptr(),
            *(self.scales.data_ptr(), _NUMBERS[self.scales.dtype]),
            *((0, 0, zeros) if isinstance(zeros, int) else (zeros.data_ptr(), _NUMBERS[zeros.dtype], 0)),
        )

    def sums_triton(self, x: Tensor, choice: Choice | None = None) -> Tensor:
        from .triton.groups import group_sums  # not imported where it is not used

        return group_sums(x, self, choice)

    def _expand_triton(self, out: Tensor) -> None:
        from .triton.groups import expand_groups_triton  # not imported where it is not used

        expand_groups_triton(self, out)


@dataclass(frozen=True)
class Field:
    """Where a block holds some bits of each of its inputs.

    The first `run` inputs are in the lowest bits of as many bytes, the next ones in the bits above them. Once all bits
    of these bytes are taken, the next bytes follow.
    """

    start: int
    """The first byte."""
    bits: int
    run: int

    def of(self, blocks: Tensor, inputs: int) -> Tensor:
        """Those bits in blocks `[..., bytes]`: uint8 `[..., inputs]`."""
        held = blocks[..., self.start : self.start + inputs * self.bits // 8].unflatten(-1, (-1, 1, self.run))
        shifts = torch.arange(0, 8, self.bits, dtype=torch.uint8, device=blocks.device).unsqueeze(-1)
        return (held >> shifts & (1 << self.bits) - 1).flatten(-3)


@dataclass(frozen=True)
class BlockForm:
    """One of ggml's formats of blocks; `block_*` in ggml-common.h are their bytes."""

    number: int
    """What the compiled kernels call it."""
    inputs: int
    """Of a block."""
    bytes: int
    """Of a block."""
    run: int
    """Neighbouring inputs with one scale."""
    low: Field
    """The lower bits of values."""
    high: Field | None = None
    """Those above the four lower ones."""
    zero: int = 0
    """What is subtracted from values."""


BLOCK_FORMS = {
    "Q4_1": BlockForm(0, inputs=32, bytes=20, run=32, low=Field(4, 4, 16)),
    "Q5_0": BlockForm(1, inputs=32, bytes=22, run=32, low=Field(6, 4, 16), high=Field(2, 1, 1), zero=16),
    "Q5_1": BlockForm(2, inputs=32, bytes=24, run=32, low=Field(8, 4, 16), high=Field(4, 1, 1)),
    "Q4_K": BlockForm(3, inputs=256, bytes=144, run=32, low=Field(16, 4, 32)),
    "Q5_K": BlockForm(4, inputs=256, bytes=176, run=32, low=Field(48, 4, 32), high=Field(16, 1, 32)),
    "Q6_K": BlockForm(5, inputs=256, bytes=210, run=16, low=Field(0, 4, 64), high=Field(128, 2, 32), zero=32),
}
"""By ggml's names."""

BLOCK_SIZES = {"Q8_0": (32, 34), "Q4_0": (32, 18)}
BLOCK_SIZES |= {name: (form.inputs, form.bytes) for name, form in BLOCK_FORMS.items()}
"""Inputs and bytes of a block, of these and those of `grouped_of_blocks`, by ggml's names."""


@dataclass(frozen=True)
class BlockMatrix(QuantisedMatrix):
    """`[outputs, inputs]` in one of ggml's formats of blocks of neighbouring inputs, as a GGUF file holds it.

    Its numbers are `scale * (value - zero) - least`, each step rounded to float32. Neighbours share a scale and a least
    number, which are products of what the block holds.
    """

    blocks: Tensor
    """uint8 `[outputs, bytes of a row]`."""
    form: str
    """One of `BLOCK_FORMS`."""

    @property
    def layout(self) -> BlockForm:
        """Of its form."""
        return BLOCK_FORMS[self.form]

    @property
    def shape(self) -> tuple[int, int]:
        return self.blocks.shape[0], self.blocks.shape[1] // self.layout.bytes * self.layout.inputs

    def tensors(self) -> Iterator[Tensor]:
        yield self.blocks

    def with_rows(self, change: Callable[[Tensor], Tensor]) -> Self:
        return replace(self, blocks=change(self.blocks))

    def _numbers(self) -> Tensor:
        form = self.layout
        blocks = self.blocks.unflatten(1, (-1, form.bytes))
        values = form.low.of(blocks, form.inputs)
        if form.high is not None:
            values = values | form.high.of(blocks, form.inputs) << 4
        scales, least = self._scales(blocks)
        centred = values.float().unflatten(-1, (-1, form.run)) - form.zero
        numbers = centred * scales.unsqueeze(-1)
        return (numbers if least is None else numbers - least.unsqueeze(-1)).flatten(1)

    def _scales(self, blocks: Tensor) -> tuple[Tensor, Tensor | None]:
        """The scales and, of forms that have them, the least numbers of blocks `[..., bytes]`: float32
        `[..., inputs / run]`."""
        if self.form == "Q6_K":
            return _float16(blocks[..., 208:210]) * blocks[..., 192:208].view(torch.int8).float(), None
        if self.form == "Q5_0":
            return _float16(blocks[..., :2]), None
        scale, least = _float16(blocks[..., :2]), _float16(blocks[..., 2:4])
        if self.form in ("Q4_1", "Q5_1"):
            return scale, -least
        of_scales, of_least, both = blocks[..., 4:16].split(4, dim=-1)
        last_scales, last_least = both & 15 | of_scales >> 2 & 48, both >> 4 | of_least >> 2 & 48
        return (
            scale * torch.cat((of_scales & 63, last_scales), dim=-1).float(),
            least * torch.cat((of_least & 63, last_least), dim=-1).float(),
        )

    def _describe(self) -> QuantisedCall:
        held = self.blocks
        assert held.stride(1) == 1
        return QuantisedCall(held.data_ptr(), _BLOCKS + self.layout.number, held.stride(0), *self.shape)

    def sums_triton(self, x: Tensor, choice: Choice | None = None) -> Tensor:
        from .triton.blocks import block_sums  # not imported where it is not used

        return block_sums(x, self, choice)

    def _expand_triton(self, out: Tensor) -> None:
        from .triton.blocks import expand_blocks_triton  # not imported where it is not used

        expand_blocks_triton(self, out)


def _float16(pairs: Tensor) -> Tensor:
    """What pairs of bytes `[..., 2]` stand for, float32 `[..., 1]`."""
    return pairs.view(torch.float16).float()


def grouped_of_blocks(blocks: Tensor, form: str) -> GroupedMatrix:
    """A matrix in ggml's Q8_0 or Q4_0, whose blocks are groups with one scale; `blocks` is uint8
    `[outputs, bytes of a row]`.

    Raises:
        ValueError: `form` is another.
    """
    if form not in ("Q8_0", "Q4_0"):
        raise ValueError(f"blocks of {form} are no groups with one scale")
    apart = blocks.unflatten(1, (-1, BLOCK_SIZES[form][1]))
    scales, held = apart[..., :2].view(torch.float16)[..., 0].contiguous(), apart[..., 2:]
    if form == "Q8_0":
        return GroupedMatrix(held.view(torch.int8).flatten(1), scales, 0, 8)
    values = torch.cat((held & 15, held >> 4), dim=-1).flatten(1)
    return GroupedMatrix(values[:, ::2] | values[:, 1::2] << 4, scales, 8, 4)


def joined(matrices: Sequence[QuantisedMatrix]) -> list[QuantisedMatrix]:
    """Those of the same inputs whose outputs follow one another: one, where all are held alike and groups are
    neighbours; or as they are given."""
    grouped = [one for one in matrices if isinstance(one, GroupedMatrix) and one.group_of is None]
    blocks = [one for one in matrices if isinstance(one, BlockMatrix)]
    if len(matrices) == 1:
        return list(matrices)
    if len(blocks) == len(matrices) and len({one.form for one in blocks}) == 1:
        return [BlockMatrix(torch.cat([one.blocks for one in blocks]), blocks[0].form)]
    ways = {(one.kind, one.scales.shape[1], one.scales.dtype) for one in grouped}
    of_zeros = {one.zeros.dtype for one in grouped if isinstance(one.zeros, Tensor)}
    if len(grouped) < len(matrices) or len(ways) > 1 or len(of_zeros) > 1:
        return list(matrices)
    zeros = grouped[0].zeros
    if not isinstance(zeros, int) or any(one.zeros != zeros for one in grouped):
        zeros = torch.cat([
            torch.full(one.scales.shape, one.zeros, dtype=torch.uint8, device=one.scales.device)
            if isinstance(one.zeros, int) else one.zeros
            for one in grouped
        ])  # fmt: skip
    values, scales = torch.cat([one.values for one in grouped]), torch.cat([one.scales for one in grouped])
    return [replace(grouped[0], values=values, scales=scales, zeros=zeros)]


def quantised_linear(
    x: Tensor,
    matrix: QuantisedMatrix,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    onto: Tensor | None = None,
) -> Tensor:
    """`layers.linear` with a matrix whose numbers are expanded in `x`'s dtype."""
    is_step, by_triton = x.shape[0] <= STEP_ROWS, "triton" in usable_packages(x.device)
    is_fused = is_step and _is_fused(x, matrix)
    if norm is not None and (is_fused or norm.dtype != x.dtype or not on_cpu(x.device)):  # once for all parts of it
        x, norm = rms_norm(x, norm, eps), None
    if by_triton and is_step:
        from .triton.quantised import product_triton  # not imported where it is not used

        return product_triton(x.contiguous(), matrix, bias, onto)
    if is_step and x.dtype == torch.bfloat16 and on_cpu(x.device):
        product = held_linear(x, matrix.described, bias, norm=norm, eps=eps, onto=onto)
        if product is not None:
            return product
    if is_fused:
        product = matrix.product_compiled(x)
        product = (product if bias is None else product.add_(bias)).to(x.dtype)
        return product if onto is None else onto.add_(product)
    outputs, inputs = matrix.shape
    numbers = STEP_NUMBERS if is_step else PREFILL_NUMBERS
    at_once = max(1, numbers // inputs)
    if outputs <= at_once:
        return linear(x, matrix.expand(x.dtype), bias, norm=norm, eps=eps, onto=onto)
    product = x.new_empty(x.shape[0], outputs)
    room = x.new_empty(at_once, inputs)  # one for all: the system takes longer to give memory than numbers take
    for first in range(0, outputs, at_once):
        some = slice(first, first + at_once)
        part, of_part = matrix.outputs(some), None if bias is None else bias[some]
        product[:, some] = linear(x, part.expand_to(room[: part.shape[0]]), of_part, norm=norm, eps=eps)
    return product if onto is None else onto.add_(product)


def quantised_mlp(
    x: Tensor, matrices: Sequence[QuantisedMatrix], norm: Tensor | None, eps: float, *, onto: Tensor | None = None
) -> Tensor | None:
    """`layers.gated_mlp` with gate, up and down in few bits, where one compiled kernel computes it for the rows of a
    step; else `None`."""
    if x.dtype != torch.bfloat16 or not on_cpu(x.device):
        return None
    return held_gated_mlp(x, norm, eps, _described(matrices), onto=onto)


def joint_linear(
    x: Tensor,
    matrices: Sequence[QuantisedMatrix],
    bias: Tensor | None,
    *,
    norm: Tensor | None,
    eps: float,
    onto: Tensor | None,
) -> Tensor | None:
    """`quantised_linear` with matrices whose outputs follow one another, where one compiled kernel computes it for the
    rows of a step; else `None`."""
    if x.dtype != torch.bfloat16 or len(x) > STEP_ROWS or not on_cpu(x.device):
        return None
    return held_linear(x, _described(matrices), bias, norm=norm, eps=eps, onto=onto)


def described_experts(matrices: Sequence[QuantisedMatrix]) -> ctypes.Array[QuantisedCall] | None:
    """What the compiled kernels are told of a mixture's gate, up and down, of one expert after another; addresses, good
    as long as these live. `None` where experts are not all of the same sizes."""
    gate, _, down = (one.shape for one in matrices[:3])
    if down[::-1] != gate or any(one.shape != (gate, gate, down)[i % 3] for i, one in enumerate(matrices)):
        return None
    return _described(matrices)


def _described(matrices: Sequence[QuantisedMatrix]) -> ctypes.Array[QuantisedCall]:
    return (QuantisedCall * len(matrices))(*(one.described[0] for one in matrices))


def quantised_experts(
    x: Tensor, experts: ctypes.Array[QuantisedCall], ids: Tensor, shares: Tensor, *, onto: Tensor | None = None
) -> Tensor | None:
    """What a mixture of experts in few bits gives for the rows of a step, where one compiled kernel computes it; else
    `None`. See `layers.held_expert_mlps`."""
    return held_expert_mlps(x, experts, ids.contiguous(), shares.contiguous(), onto=onto)


def takes_chosen(device: torch.device) -> bool:
    """Whether `chosen_products` can be called with matrices on `device`."""
    return "triton" in usable_packages(device)


def chosen_products(x: Tensor, matrix: QuantisedMatrix, choice: Choice) -> Tensor:
    """Products of each row of `x` `[n, inputs]` with the matrices that are chosen for it, in `x`'s dtype:
    `[n * each, outputs]`. The host does not wait to know which these are, and a row's bits are its own."""
    from .triton.quantised import chosen_triton  # not imported where it is not used

    return chosen_triton(x.contiguous(), matrix, choice)


def expansion_bytes(numbers: int, dtype: torch.dtype, *, is_step: bool) -> int:
    """What `quantised_linear` takes for numbers of a matrix that has so many."""
    expanded = min(numbers, STEP_NUMBERS if is_step else PREFILL_NUMBERS)
    return expanded * dtype.itemsize + 4 * 4 * min(numbers, FLOAT32_NUMBERS)


def _is_fused(x: Tensor, matrix: QuantisedMatrix) -> bool:
    """Whether `product_compiled` multiplies few rows: on processors whose products PyTorch computes otherwise
    (`layers.linear`; for others there is `held_linear`), and where that is faster, which in float32 it is not for
    groups."""
    dtypes = (torch.bfloat16, torch.float32) if isinstance(matrix, BlockMatrix) else (torch.bfloat16,)
    is_such = x.dtype in dtypes and x.shape[1] % 8 == 0 and on_cpu(x.device)
    return is_such and selected().layers != "plain" and cpu_level() in (Level.AVX2, Level.AVX512)
