"""Products of rows with a matrix that is stored in four to eight bits.

The numbers of the matrix are computed with the formula of its format in float32, and rounded once to the dtype of the
run. Scales are widened and never narrowed. Passes over few rows and over many rows multiply by the same numbers.
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
"""How many numbers of a matrix a step and a prefill expand at a time, rounded down to whole outputs, at least one."""

FLOAT32_NUMBERS = 2**20
"""How many numbers are float32 at a time while they are expanded, rounded down to whole outputs, at least one."""

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
    """For each row, the matrices that it is multiplied by. The matrices are joined into a larger one, in which their
    outputs follow one another."""

    ids: Tensor
    """Int64 `[n * each]`: the numbers of the matrices for the first row, for the second row, ..."""
    each: int
    """By how many matrices a row is multiplied."""
    outputs: int
    """The number of outputs of one matrix. The number of outputs of the larger matrix is a multiple."""


class QuantisedMatrix(ABC):
    """A matrix `[outputs, inputs]` whose numbers are computed with the formula of its format."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""

    @abstractmethod
    def tensors(self) -> Iterator[Tensor]:
        """All tensors."""

    def outputs(self, part: slice) -> Self:
        """A part of the outputs, in the same memory."""
        return self.with_rows(lambda held: held[part])

    def rows(self, ids: Tensor) -> Self:
        """A copy of the outputs `ids`, int64 `[n]`, in the order of `ids`."""
        return self.with_rows(lambda held: held[ids])

    def expand(self, dtype: torch.dtype) -> Tensor:
        """The numbers of the matrix: `[outputs, inputs]` in `dtype`, contiguous."""
        return self.expand_to(torch.empty(self.shape, dtype=dtype, device=next(self.tensors()).device))

    def expand_to(self, out: Tensor) -> Tensor:
        """Writes the numbers of the matrix to `out` `[outputs, inputs]`, contiguous."""
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
        """Writes the numbers of the matrix to `out` `[outputs, inputs]`, contiguous, bfloat16 or float32, with compiled
        kernels, which must have been built.

        Args:
            level: the level to use, at most `cpu_level()`, which is the default.

        Raises:
            ValueError: this processor does not have the instructions of `level`.
        """
        kernels, level = loaded(), cpu_level() if level is None else level
        assert kernels is not None
        is_bf16 = out.dtype == torch.bfloat16
        if call(kernels.triforce_expand, self.described, out.data_ptr(), is_bf16, level, threads()):
            raise ValueError(f"this processor does not have the instructions of level {level}")

    def product_compiled(self, x: Tensor) -> Tensor:
        """Multiplies `x` `[n, inputs]`, bfloat16 or float32, by the numbers of the matrix in the dtype of `x`, with the
        compiled kernels (`cpu/source/products.c`). They need AVX2, and a multiple of 8 inputs.

        Returns:
            `[n, outputs]`, float32.

        Raises:
            MemoryError: no memory for the temporaries.
            ValueError: this processor does not have AVX2.
        """
        kernels = loaded()
        assert kernels is not None
        out = x.new_empty(len(x), self.shape[0], dtype=torch.float32)
        rows, is_bf16 = x.float().contiguous(), x.dtype == torch.bfloat16
        failed = call(
            kernels.triforce_product, self.described, rows.data_ptr(), len(x), out.data_ptr(), is_bf16, threads()
        )
        if failed:
            raise MemoryError if failed == 1 else ValueError("this processor does not have the instructions of AVX2")
        return out

    @abstractmethod
    def sums_triton(self, x: Tensor, choice: Choice | None = None) -> Tensor:
        """The product of `x` `[n, inputs]`, contiguous, with the matrix, as sums over parts of the inputs: `[parts, n,
        outputs]`, float32. With `choice`, the products with the chosen matrices: `[parts, n * each, outputs]`."""

    @abstractmethod
    def with_rows(self, change: Callable[[Tensor], Tensor]) -> Self:
        """A matrix with other rows: `change` is applied to each tensor that has a row for each output."""

    @abstractmethod
    def _numbers(self) -> Tensor:
        """The numbers of the matrix, in float32."""

    @cached_property
    def described(self) -> ctypes.Array[QuantisedCall]:
        """The matrix for the compiled kernels: addresses, which are valid as long as this object exists."""
        return (QuantisedCall * 1)(self._describe())

    def __getstate__(self) -> dict[str, Any]:
        """The attributes for copying: all except addresses."""
        return {name: value for name, value in vars(self).items() if name != "described"}

    @abstractmethod
    def _describe(self) -> QuantisedCall:
        """See `described`."""

    @abstractmethod
    def _expand_triton(self, out: Tensor) -> None:
        """Writes the numbers of the matrix to `out`, with Triton."""


@dataclass(frozen=True)
class GroupedMatrix(QuantisedMatrix):
    """A matrix `[outputs, inputs]` with the numbers `scale * (value - zero)`. A group of inputs of an output shares a
    scale and a zero point."""

    values: Tensor
    """`[outputs, inputs]` uint8, int8 or float8, or `[outputs, inputs / 2]` uint8 with the number of an even input in
    bits 0 to 3 and that of the input after it in bits 4 to 7."""
    scales: Tensor
    """`[outputs, groups]`, in the dtype in which they are stored."""
    zeros: Tensor | int
    """Zero points: whole numbers `[outputs, groups]`, or one number for all."""
    bits: int
    """4 or 8."""
    group_of: Tensor | None = None
    """The group of each input, int64 `[inputs]`; `None` if each group is neighbouring inputs, and all groups have the
    same size."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1] * 8 // self.bits

    @property
    def kind(self) -> int:
        """The number by which kernels know the format of the values: 0 for two in a byte, 1 for uint8, 2 for int8, 3
        for e4m3."""
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
    """Where a block stores some of the bits of each input.

    The first `run` inputs are in the lowest bits of `run` bytes. The next `run` inputs are in the bits above. When all
    bits of these bytes are used, the next bytes follow.
    """

    start: int
    """The first byte."""
    bits: int
    """The number of bits of each input."""
    run: int

    def of(self, blocks: Tensor, inputs: int) -> Tensor:
        """Reads these bits from blocks `[..., bytes]`: uint8 `[..., inputs]`."""
        held = blocks[..., self.start : self.start + inputs * self.bits // 8].unflatten(-1, (-1, 1, self.run))
        shifts = torch.arange(0, 8, self.bits, dtype=torch.uint8, device=blocks.device).unsqueeze(-1)
        return (held >> shifts & (1 << self.bits) - 1).flatten(-3)


@dataclass(frozen=True)
class BlockForm:
    """One of ggml's block formats. Their bytes are the structures `block_*` in ggml-common.h."""

    number: int
    """The number by which the compiled kernels know the format."""
    inputs: int
    """The number of inputs of a block."""
    bytes: int
    """The size of a block in bytes."""
    run: int
    """How many neighbouring inputs share a scale."""
    low: Field
    """The four lower bits of values."""
    high: Field | None = None
    """The bits of values above the four lower bits."""
    zero: int = 0
    """The number that is subtracted from values."""


BLOCK_FORMS = {
    "Q4_1": BlockForm(0, inputs=32, bytes=20, run=32, low=Field(4, 4, 16)),
    "Q5_0": BlockForm(1, inputs=32, bytes=22, run=32, low=Field(6, 4, 16), high=Field(2, 1, 1), zero=16),
    "Q5_1": BlockForm(2, inputs=32, bytes=24, run=32, low=Field(8, 4, 16), high=Field(4, 1, 1)),
    "Q4_K": BlockForm(3, inputs=256, bytes=144, run=32, low=Field(16, 4, 32)),
    "Q5_K": BlockForm(4, inputs=256, bytes=176, run=32, low=Field(48, 4, 32), high=Field(16, 1, 32)),
    "Q6_K": BlockForm(5, inputs=256, bytes=210, run=16, low=Field(0, 4, 64), high=Field(128, 2, 32), zero=32),
}
"""The block formats, by ggml's names."""

BLOCK_SIZES = {"Q8_0": (32, 34), "Q4_0": (32, 18)}
BLOCK_SIZES |= {name: (form.inputs, form.bytes) for name, form in BLOCK_FORMS.items()}
"""The numbers of inputs and bytes of a block, for `BLOCK_FORMS` and the formats of `grouped_of_blocks`, by ggml's
names."""


@dataclass(frozen=True)
class BlockMatrix(QuantisedMatrix):
    """A matrix `[outputs, inputs]` in one of ggml's formats, in which a block has neighbouring inputs, as in a GGUF
    file.

    Its numbers are `scale * (value - zero) - least`, each step rounded to float32. Neighbouring inputs share `scale`
    and `least`: numbers in the block, or products of these. Some formats have no `least`.
    """

    blocks: Tensor
    """uint8 `[outputs, bytes of a row]`."""
    form: str
    """One of `BLOCK_FORMS`."""

    @property
    def layout(self) -> BlockForm:
        """The layout of its format."""
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
        """The scales of blocks `[..., bytes]` and, if the format has them, `least`: float32 `[..., inputs / run]`."""
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
    """The float16 numbers in pairs of bytes `[..., 2]`, as float32 `[..., 1]`."""
    return pairs.view(torch.float16).float()


def grouped_of_blocks(blocks: Tensor, form: str) -> GroupedMatrix:
    """Converts a matrix in ggml's Q8_0 or Q4_0, whose blocks are groups with one scale.

    Args:
        blocks: uint8 `[outputs, bytes of a row]`.
        form: `Q8_0` or `Q4_0`.

    Raises:
        ValueError: `form` is another format.
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
    """Joins matrices of the same inputs into one, in which their outputs follow one another. If their formats differ,
    or groups are not neighbouring inputs, the matrices are returned as they are."""
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
    """`layers.linear` with a matrix in few bits, whose numbers are expanded to `x`'s dtype."""
    is_step, by_triton = x.shape[0] <= STEP_ROWS, "triton" in usable_packages(x.device)
    is_fused = is_step and _is_fused(x, matrix)
    if norm is not None and (is_fused or norm.dtype != x.dtype or not on_cpu(x.device)):  # once for all parts
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
    room = x.new_empty(at_once, inputs)  # one for all parts: allocating takes longer than expanding the numbers
    for first in range(0, outputs, at_once):
        some = slice(first, first + at_once)
        part, of_part = matrix.outputs(some), None if bias is None else bias[some]
        product[:, some] = linear(x, part.expand_to(room[: part.shape[0]]), of_part, norm=norm, eps=eps)
    return product if onto is None else onto.add_(product)


def quantised_mlp(
    x: Tensor, matrices: Sequence[QuantisedMatrix], norm: Tensor | None, eps: float, *, onto: Tensor | None = None
) -> Tensor | None:
    """`layers.gated_mlp` with gate, up and down matrices in few bits, if one compiled kernel can compute it for the
    rows of a step; otherwise `None`."""
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
    """`quantised_linear` with several matrices, whose outputs follow one another, if one compiled kernel can compute it
    for the rows of a step; otherwise `None`."""
    if x.dtype != torch.bfloat16 or len(x) > STEP_ROWS or not on_cpu(x.device):
        return None
    return held_linear(x, _described(matrices), bias, norm=norm, eps=eps, onto=onto)


def described_experts(matrices: Sequence[QuantisedMatrix]) -> ctypes.Array[QuantisedCall] | None:
    """The matrices of a mixture of experts for the compiled kernels: gate, up and down of one expert after another.
    These are addresses, which are valid as long as the matrices exist. `None` if the sizes of experts differ."""
    gate, _, down = (one.shape for one in matrices[:3])
    if down[::-1] != gate or any(one.shape != (gate, gate, down)[i % 3] for i, one in enumerate(matrices)):
        return None
    return _described(matrices)


def _described(matrices: Sequence[QuantisedMatrix]) -> ctypes.Array[QuantisedCall]:
    return (QuantisedCall * len(matrices))(*(one.described[0] for one in matrices))


def quantised_experts(
    x: Tensor, experts: ctypes.Array[QuantisedCall], ids: Tensor, shares: Tensor, *, onto: Tensor | None = None
) -> Tensor | None:
    """The results of a mixture of experts in few bits for the rows of a step, if one compiled kernel can compute them;
    otherwise `None`. See `layers.held_expert_mlps`."""
    return held_expert_mlps(x, experts, ids.contiguous(), shares.contiguous(), onto=onto)


def takes_chosen(device: torch.device) -> bool:
    """Whether `chosen_products` can be called with matrices on `device`."""
    return "triton" in usable_packages(device)


def chosen_products(x: Tensor, matrix: QuantisedMatrix, choice: Choice) -> Tensor:
    """The products of each row of `x` `[n, inputs]` with the matrices that are chosen for it, in `x`'s dtype:
    `[n * each, outputs]`. The host does not wait for the choice, and the bits of a row do not depend on other rows."""
    from .triton.quantised import chosen_triton  # not imported where it is not used

    return chosen_triton(x.contiguous(), matrix, choice)


def expansion_bytes(numbers: int, dtype: torch.dtype, *, is_step: bool) -> int:
    """The bytes that `quantised_linear` takes for expanded numbers of a matrix that has `numbers` numbers."""
    expanded = min(numbers, STEP_NUMBERS if is_step else PREFILL_NUMBERS)
    return expanded * dtype.itemsize + 4 * 4 * min(numbers, FLOAT32_NUMBERS)


def _is_fused(x: Tensor, matrix: QuantisedMatrix) -> bool:
    """Whether `product_compiled` computes the product of few rows.

    It is used on processors on which PyTorch would compute products (`layers.linear`); on others, `held_linear` is
    used. It is also only used where it is faster: not in float32 with a `GroupedMatrix`.
    """
    dtypes = (torch.bfloat16, torch.float32) if isinstance(matrix, BlockMatrix) else (torch.bfloat16,)
    is_such = x.dtype in dtypes and x.shape[1] % 8 == 0 and on_cpu(x.device)
    return is_such and selected().layers != "plain" and cpu_level() in (Level.AVX2, Level.AVX512)
