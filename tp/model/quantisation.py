"""Weights in four to eight bits as checkpoints store them: GPTQ, AWQ, compressed-tensors, FP8 and GGUF.

The `config.json` of a model says which matrices are stored in few bits, and how. So their size in memory is known
before the weights are downloaded. A matrix is read as one of the classes of `kernels.quantised`. Activations are never
quantised, even if a checkpoint asks for it.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ...kernels.quantised import (
    BLOCK_FORMS,
    BLOCK_SIZES,
    BlockMatrix,
    GroupedMatrix,
    QuantisedMatrix,
    grouped_of_blocks,
)
from ...kernels.selection import on_cpu
from ..errors import ModelError
from ..pages import lasting, weight_memory

SUPPORTED = (
    "weights in float32, bfloat16 and float16; GPTQ with 4 or 8 bits; AWQ (gemm); FP8 (e4m3); compressed-tensors "
    "(pack-quantized, int-quantized, float-quantized, naive-quantized); GGUF files"
)
"""The supported formats, for messages."""

_SCALES = (torch.float16, torch.bfloat16, torch.float32)
_INT32, _INT8, _FP8 = (torch.int32,), (torch.int8,), (torch.float8_e4m3fn,)

_AWQ_FIELDS = (0, 4, 1, 5, 2, 6, 3, 7)
"""For each of eight neighbouring outputs, its field in a word."""


class StoredTensors(Protocol):
    """The methods of `checkpoint.Checkpoint` that are needed here. Tensors are copied to the device first, so that a
    GPU rearranges them."""

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        ...

    def stored(self, name: str, *shape: int, dtypes: tuple[torch.dtype, ...]) -> Tensor:
        """A copy of the tensor as it is stored, on the device.

        Raises:
            ModelError: the tensor is missing, or has another shape or dtype.
        """
        ...


class Quantisation(ABC):
    """How the quantised matrices of a model are stored."""

    activations: bool
    """Whether the checkpoint asks for quantised activations, which are not supported: they are not quantised."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name for messages."""

    @abstractmethod
    def covers(self, name: str) -> bool:
        """Whether the matrix of the projection `name` is quantised."""

    @abstractmethod
    def num_bytes(self, name: str, outputs: int, inputs: int, columns: slice | None = None) -> int:
        """The size of the matrix of the projection `name` in memory, in bytes, if scales have the usual number of bits.

        Args:
            outputs, inputs: the shape of the matrix; the outputs are those that a rank holds.
            columns: the inputs that a rank holds; `None`: all.
        """

    @abstractmethod
    def read(self, source: StoredTensors, name: str, outputs: int, inputs: int) -> QuantisedMatrix:
        """Reads the matrix of the projection `name`, `[outputs, inputs]`.

        Raises:
            ModelError: its tensors are missing, or do not agree with the configuration.
        """


@dataclass(frozen=True)
class Gguf(Quantisation):
    """Blocks of neighbouring inputs; each matrix has its own format. Tensor: `weight` `[outputs, bytes]`."""

    forms: tuple[tuple[str, str], ...]
    """The format of each projection."""
    activations: bool = False

    @property
    def name(self) -> str:
        return f"GGUF ({', '.join(sorted(set(self._form_of.values())))})"

    def covers(self, name: str) -> bool:
        return name in self._form_of

    def num_bytes(self, name: str, outputs: int, inputs: int, columns: slice | None = None) -> int:
        in_block, num_bytes = BLOCK_SIZES[self._form_of[name]]
        first, stop, _ = (columns or slice(None)).indices(inputs)
        if first % in_block or stop % in_block:
            raise ModelError(
                f"{name} is in {self._form_of[name]}, in blocks of {in_block} inputs, but a rank would hold the inputs "
                f"{first:,} to {stop:,}; give another number of --gpus"
            )
        return outputs * ((stop - first) // in_block) * num_bytes

    def read(self, source: StoredTensors, name: str, outputs: int, inputs: int) -> QuantisedMatrix:
        form = self._form_of[name]
        in_block, num_bytes = BLOCK_SIZES[form]
        if inputs % in_block:
            raise ModelError(f"{name} has {inputs:,} inputs, but in {form} they are multiples of {in_block}")
        row_bytes = inputs // in_block * num_bytes
        blocks = source.stored(f"{name}.weight", outputs, row_bytes, dtypes=(torch.uint8,))
        if form in BLOCK_FORMS:
            return BlockMatrix(blocks, form)
        found = grouped_of_blocks(blocks, form)
        return replace(found, values=lasting(found.values)) if on_cpu(blocks.device) else found

    @cached_property
    def _form_of(self) -> dict[str, str]:
        return dict(self.forms)


@dataclass(frozen=True)
class GroupedQuantisation(Quantisation):
    """Quantised matrices of a model's layers, in groups of inputs."""

    bits: int
    """4 or 8."""
    group_size: int
    """How many inputs share a scale; 0: all inputs of an output share one."""
    symmetric: bool
    """Whether the zero point is the same everywhere."""
    left_out: tuple[str, ...]
    """Matrices that are not quantised. An entry is a name, the beginning of names up to a dot, a part of names between
    two dots, or the end of names; or `re:` and a regular expression that matches the beginning of names."""
    ordered: bool
    """Whether the file says which group each input belongs to (`desc_act`)."""
    activations: bool
    """Whether the checkpoint asks for quantised activations, which are not supported: they are not quantised."""

    scale_bytes: ClassVar[int] = 2

    def read(self, source: StoredTensors, name: str, outputs: int, inputs: int) -> GroupedMatrix:
        of_outputs, of_inputs = self.multiples
        if outputs % of_outputs or inputs % of_inputs:
            raise ModelError(
                f"{name} has {outputs:,} outputs and {inputs:,} inputs, but in {self.name} they are multiples of "
                f"{of_outputs} and {of_inputs}"
            )
        return self._read(source, name, outputs, inputs)

    @property
    def multiples(self) -> tuple[int, int]:
        """The numbers of which the number of outputs and the number of inputs must be multiples."""
        return 1, 1

    @abstractmethod
    def _read(self, source: StoredTensors, name: str, outputs: int, inputs: int) -> GroupedMatrix:
        """See `read`."""

    def covers(self, name: str) -> bool:
        return name.startswith("model.layers.") and not any(_matches(part, name) for part in self.left_out)

    def groups(self, inputs: int) -> int:
        """The number of scales of an output."""
        return -(-inputs // self.group_size) if self.group_size else 1

    def num_bytes(self, name: str, outputs: int, inputs: int, columns: slice | None = None) -> int:
        first, stop, _ = (columns or slice(None)).indices(inputs)
        size, width = self.group_size or inputs, stop - first
        groups = -(-stop // size) - first // size
        if self.ordered and width < inputs:
            groups = min(self.groups(inputs), width)
        uneven = inputs % size != 0 or first % size != 0 or stop % size != 0
        order = 8 * width if self.ordered or uneven else 0  # see `GroupedMatrix.group_of`
        return outputs * (width * self.bits // 8 + groups * (self.scale_bytes + (not self.symmetric))) + order

    def _matrix(
        self, values: Tensor, scales: Tensor, zeros: Tensor | int = 0, group_of: Tensor | None = None
    ) -> GroupedMatrix:
        """Makes the matrix from its tensors.

        Args:
            values: the first dimension is the outputs; the others, one or several, are the inputs.
            scales: `[outputs, groups]`.
            zeros: zero points `[outputs, groups]`, or the same one everywhere.
            group_of: the group of each input if that is stored.
        """
        inputs, groups = values[0].numel() * 8 // self.bits, scales.shape[1]
        if scales.dtype == torch.float32 and self.scale_bytes == 2 and torch.equal(scales.half().float(), scales):
            scales = scales.half()
        neighbours = torch.arange(inputs, device=values.device) // (self.group_size or inputs)
        if group_of is None or torch.equal(group_of, neighbours):
            group_of = neighbours if inputs % groups or inputs // groups != (self.group_size or inputs) else None
        if isinstance(zeros, Tensor):
            first = int(zeros.flatten()[0])
            zeros = first if bool((zeros == first).all()) else zeros.contiguous()
        values = values if values.is_contiguous() else lasting(values)
        if values.dtype == torch.uint8 and self.symmetric and self.bits == 8 and zeros == 128:
            room = weight_memory(values.shape, torch.uint8, values.device)
            values, zeros = torch.bitwise_xor(values, 128, out=room).view(torch.int8), 0  # nothing to subtract
        return GroupedMatrix(values.flatten(1), scales.contiguous(), zeros, self.bits, group_of)

    def _group_of(self, source: StoredTensors, name: str, inputs: int) -> Tensor | None:
        """The group of each input, from the tensor `name`; `None` if there is no such tensor."""
        if not source.has(name):
            return None
        found = source.stored(name, inputs, dtypes=(torch.int32, torch.int64)).long()
        least, most, groups = int(found.min()), int(found.max()), self.groups(inputs)
        if not 0 <= least <= most < groups:
            raise ModelError(f"{name} has groups from {least} to {most}; the configuration says {groups} groups")
        return found


@dataclass(frozen=True)
class Gptq(GroupedQuantisation):
    """GPTQ. Tensors: `qweight` `[inputs / fields, outputs]`, `qzeros` `[groups, outputs / fields]`, `scales` `[groups,
    outputs]`, and perhaps `g_idx` `[inputs]`. A word of 32 bits has `fields` numbers, the first in its lowest bits."""

    zeros_less_one: bool
    """Whether zero points are stored minus one, as in the first version of the format. Then 1 is added to each."""

    @property
    def name(self) -> str:
        return f"GPTQ, {self.bits} bits"

    @property
    def multiples(self) -> tuple[int, int]:
        return 32 // self.bits, 32 // self.bits

    def _read(self, source: StoredTensors, name: str, outputs: int, inputs: int) -> GroupedMatrix:
        groups, fields = self.groups(inputs), 32 // self.bits
        words = source.stored(f"{name}.qweight", inputs // fields, outputs, dtypes=_INT32)
        zeros = source.stored(f"{name}.qzeros", groups, outputs // fields, dtypes=_INT32)
        scales = source.stored(f"{name}.scales", groups, outputs, dtypes=_SCALES)
        values = words.view(torch.uint8).view(-1, outputs, 4).transpose(0, 1)
        zeros = _fields(zeros, self.bits).T.to(torch.int16) + self.zeros_less_one
        zeros = zeros if self.bits == 8 and zeros.max() > 255 else zeros.to(torch.uint8)
        return self._matrix(values, scales.T, zeros, self._group_of(source, f"{name}.g_idx", inputs))


@dataclass(frozen=True)
class Awq(GroupedQuantisation):
    """AWQ. Tensors: `qweight` `[inputs, outputs / 8]`, `qzeros` `[groups, outputs / 8]`, `scales` `[groups, outputs]`.
    A word of 32 bits has the numbers of eight outputs, in the order of `_AWQ_FIELDS`."""

    @property
    def name(self) -> str:
        return "AWQ, 4 bits"

    @property
    def multiples(self) -> tuple[int, int]:
        return 8, 2

    def _read(self, source: StoredTensors, name: str, outputs: int, inputs: int) -> GroupedMatrix:
        groups = self.groups(inputs)
        words = source.stored(f"{name}.qweight", inputs, outputs // 8, dtypes=_INT32)
        zeros = source.stored(f"{name}.qzeros", groups, outputs // 8, dtypes=_INT32)
        scales = source.stored(f"{name}.scales", groups, outputs, dtypes=_SCALES)
        found = words.view(torch.uint8).view(inputs, -1, 4)
        even, odd = found[0::2], found[1::2]  # an even input and the next one share bytes in `GroupedMatrix.values`
        fields = torch.stack((even & 15 | odd << 4, even >> 4 | odd & 240), dim=-1).flatten(2)
        values = fields[:, :, _AWQ_FIELDS].flatten(1).T
        return self._matrix(values, scales.T, _fields(zeros, 4).unflatten(1, (-1, 8))[:, :, _AWQ_FIELDS].flatten(1).T)


@dataclass(frozen=True)
class CompressedTensors(GroupedQuantisation):
    """compressed-tensors. Tensors: `weight_packed` `[outputs, inputs / fields]`, words of 32 bits whose numbers have
    zero in the middle of their range, or `weight` `[outputs, inputs]`, int8 or FP8; `weight_scale` `[outputs, groups]`,
    or one scale; perhaps `weight_zero_point` and `weight_g_idx`."""

    kind: str
    """`packed`, `int8` or `fp8`."""
    one_scale: bool
    """Whether the whole matrix has one scale."""

    @property
    def name(self) -> str:
        return f"compressed-tensors, {'FP8' if self.kind == 'fp8' else f'{self.bits} bits'}"

    @property
    def multiples(self) -> tuple[int, int]:
        fields = 32 // self.bits if self.kind == "packed" else 1
        return 1 if self.symmetric else fields, fields

    def _read(self, source: StoredTensors, name: str, outputs: int, inputs: int) -> GroupedMatrix:
        groups, fields = self.groups(inputs), 32 // self.bits
        zeros: Tensor | int = 0
        if self.kind == "packed":
            words = source.stored(f"{name}.weight_packed", outputs, inputs // fields, dtypes=_INT32)
            values, zeros = words.contiguous().view(torch.uint8), 1 << self.bits - 1
            if source.has(f"{name}.weight_shape"):  # not needed: the shape follows from the configuration
                source.stored(f"{name}.weight_shape", 2, dtypes=(torch.int32, torch.int64))
            if not self.symmetric:
                stored = source.stored(f"{name}.weight_zero_point", outputs // fields, groups, dtypes=_INT32)
                zeros = _fields(stored.T.contiguous(), self.bits).T
        else:
            values = source.stored(f"{name}.weight", outputs, inputs, dtypes=_FP8 if self.kind == "fp8" else _INT8)
            if not self.symmetric:
                zeros = source.stored(f"{name}.weight_zero_point", outputs, groups, dtypes=_INT8)
        shape = (1,) if self.one_scale else (outputs, groups)
        scales = source.stored(f"{name}.weight_scale", *shape, dtypes=_SCALES).expand(outputs, groups)
        return self._matrix(values, scales, zeros, self._group_of(source, f"{name}.weight_g_idx", inputs))


@dataclass(frozen=True)
class Fp8(GroupedQuantisation):
    """FP8. Tensors: `weight` `[outputs, inputs]` in e4m3, and `weight_scale_inv`, a factor for each block of outputs
    and inputs; or one factor for all, `weight_scale` or `weight_scale_inv`."""

    block_rows: int
    """The number of outputs of a block; 0 if there is one scale for all."""

    @property
    def name(self) -> str:
        return "FP8"

    scale_bytes = 4

    def _read(self, source: StoredTensors, name: str, outputs: int, inputs: int) -> GroupedMatrix:
        values = source.stored(f"{name}.weight", outputs, inputs, dtypes=_FP8)
        if self.block_rows:
            shape = -(-outputs // self.block_rows), self.groups(inputs)
            blocks = source.stored(f"{name}.weight_scale_inv", *shape, dtypes=_SCALES)
            return self._matrix(values, blocks[torch.arange(outputs, device=values.device) // self.block_rows])
        one = "weight_scale" if source.has(f"{name}.weight_scale") else "weight_scale_inv"
        return self._matrix(values, source.stored(f"{name}.{one}", dtypes=_SCALES).expand(outputs, 1))


def part_of(matrix: QuantisedMatrix, rows: slice | None, columns: slice | None) -> QuantisedMatrix:
    """A rank's part of a matrix: some outputs, and some inputs.

    Raises:
        ModelError: the inputs begin or end inside a byte or a block.
    """
    rows, columns = rows or slice(None), columns or slice(None)
    first, stop, _ = columns.indices(matrix.shape[1])
    if isinstance(matrix, BlockMatrix):
        in_block, num_bytes = BLOCK_SIZES[matrix.form]
        if first % in_block or stop % in_block:
            raise ModelError(f"inputs {first:,} to {stop:,} of a matrix in {matrix.form} are no whole blocks of "
                             f"{in_block}; give another number of --gpus")  # fmt: skip
        part = slice(first // in_block * num_bytes, stop // in_block * num_bytes)
        return BlockMatrix(_copied(matrix.blocks[rows, part], matrix.blocks), matrix.form)
    assert isinstance(matrix, GroupedMatrix)
    inputs, per_byte = matrix.shape[1], 8 // matrix.bits
    some = matrix.outputs(rows)
    values, scales, zeros, group_of, groups = some.values, some.scales, some.zeros, some.group_of, slice(None)
    if (first, stop) != (0, inputs):
        if first % per_byte or stop % per_byte:
            raise ModelError(f"inputs {first:,} to {stop:,} of a matrix in {matrix.bits} bits do not fill whole bytes; "
                             "give another number of --gpus")  # fmt: skip
        values = values[:, first // per_byte : stop // per_byte]
        size = inputs // scales.shape[1]
        if group_of is None and first % size == 0 and stop % size == 0:
            groups = slice(first // size, stop // size)
        else:
            neighbours = torch.arange(inputs, device=values.device) // size
            group_of = (neighbours if group_of is None else group_of)[first:stop]
            kept, group_of = group_of.unique(return_inverse=True)
            scales = scales[:, kept]
            zeros = zeros if isinstance(zeros, int) else zeros[:, kept]
    if isinstance(zeros, Tensor) and isinstance(matrix.zeros, Tensor):
        zeros = _copied(zeros[:, groups], matrix.zeros)
    scales = _copied(scales[:, groups], matrix.scales)
    return GroupedMatrix(_copied(values, matrix.values), scales, zeros, matrix.bits, group_of)


def _copied(part: Tensor, whole: Tensor) -> Tensor:
    """Copies a part of a tensor to memory of its own, so that the rest can be freed."""
    return whole if part.shape == whole.shape else lasting(part)


def joined_inputs(parts: Sequence[QuantisedMatrix]) -> QuantisedMatrix:
    """Joins parts of a matrix that have the same outputs. Their inputs follow one another.

    Raises:
        ModelError: there are several parts, and a part has inputs whose groups are not neighbours of equal size.
    """
    if len(parts) == 1:
        return parts[0]
    blocks = [part for part in parts if isinstance(part, BlockMatrix)]
    if len(blocks) == len(parts):
        return BlockMatrix(torch.cat([part.blocks for part in blocks], dim=1), blocks[0].form)
    grouped = [part for part in parts if isinstance(part, GroupedMatrix)]
    if any(part.group_of is not None for part in grouped):
        raise ModelError(
            "this rank holds inputs from several places of a matrix, in groups that are not whole; give another number "
            "of --gpus"
        )
    values, scales = (torch.cat([getattr(part, name) for part in grouped], dim=1) for name in ("values", "scales"))
    zeros = [part.zeros for part in grouped]
    joined = zeros[0] if isinstance(zeros[0], int) else torch.cat([x for x in zeros if isinstance(x, Tensor)], dim=1)
    return GroupedMatrix(values, scales, joined, grouped[0].bits)


def quantisation_of(raw: dict[str, Any], path: Any) -> Quantisation | None:
    """Reads from a `config.json` how weights are quantised; `None` if they are not quantised.

    Args:
        raw: the content of `config.json`.
        path: the file that messages name.

    Raises:
        ModelError: the format is not supported, or cannot be read.
    """
    given = raw.get("quantization_config") or raw.get("compression_config")
    if not given:
        return None
    if not isinstance(given, dict):
        raise ModelError(f"{path} gives a quantization_config that is not an object")
    method = str(given.get("quant_method") or "unknown")
    readers = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed_tensors, "fp8": _fp8, "gguf": _gguf}
    try:
        if method not in readers:
            raise _Unsupported(f"quantised weights of the kind {method!r}")
        return readers[method](given)
    except _Unsupported as error:
        raise ModelError(f"{path} asks for {error}, which is not supported; supported: {SUPPORTED}") from None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, re.error) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else repr(error)
        raise ModelError(f"{path} has a quantization_config that cannot be read: {reason}") from error


class _Unsupported(Exception):
    """A property of a `quantization_config` that is not supported."""


def _gguf(given: dict[str, Any]) -> Quantisation:
    forms = given["forms"]
    for name, form in forms.items():
        _refuse(f"{name} in {form}", form not in BLOCK_SIZES)
    return Gguf(tuple(sorted(forms.items())))


def _gptq(given: dict[str, Any]) -> Quantisation:
    bits = _whole(given["bits"])
    _refuse(f"GPTQ with {bits} bits", bits not in (4, 8))
    form = str(given.get("checkpoint_format") or given.get("format") or "gptq")
    _refuse(f"GPTQ's checkpoint_format {form!r}", form not in ("gptq", "gptq_v2"))
    by_module = given.get("dynamic") or {}
    changed = {key: value for key, value in by_module.items() if not key.startswith("-:") and value}
    _refuse("GPTQ with settings by module (dynamic)", bool(changed))
    _refuse("a quantised output head", bool(given.get("lm_head")))
    only = given.get("modules_in_block_to_quantize")
    left_out = _listed({"dynamic": [f"re:{key[2:]}" for key in by_module if key.startswith("-:")]}, "dynamic")
    if only:  # lists of names within a layer
        names = [str(name) for names in only for name in (names if isinstance(names, list) else [names])]
        left_out += (rf"re:(?!.*\.({'|'.join(map(re.escape, names))})$)",)
    size, symmetric, ordered = (
        _group_size(given["group_size"]),
        _yes(given, "sym", True),
        _yes(given, "desc_act", False),
    )
    return Gptq(bits, size, symmetric, left_out, ordered, False, zeros_less_one=form == "gptq")


def _awq(given: dict[str, Any]) -> Quantisation:
    bits, version = _whole(given.get("bits", given.get("w_bit", 4))), str(given.get("version", "gemm")).lower()
    _refuse(f"AWQ with {bits} bits", bits != 4)
    _refuse(f"AWQ's version {version!r}", version != "gemm")
    _refuse("AWQ without zero points", not _yes(given, "zero_point", True))
    size = _group_size(given.get("group_size", given.get("q_group_size", 128)))
    return Awq(bits, size, False, _listed(given, "modules_to_not_convert"), False, False)


def _fp8(given: dict[str, Any]) -> Quantisation:
    form, block = str(given.get("fmt", "e4m3")), given.get("weight_block_size")
    _refuse(f"FP8 in the format {form!r}", form != "e4m3")
    rows, columns = (0, 0) if block is None else (_size(size, "weight_block_size") for size in block)
    left_out = _listed(given, "modules_to_not_convert") + _listed(given, "ignored_layers")
    return Fp8(8, columns, True, left_out, False, True, block_rows=rows)


_KINDS = {
    "pack-quantized": {"int": "packed"},
    "int-quantized": {"int": "int8"},
    "float-quantized": {"float": "fp8"},
    "naive-quantized": {"int": "int8", "float": "fp8"},
}
"""`CompressedTensors.kind` by the format and the type of numbers of compressed-tensors."""


def _compressed_tensors(given: dict[str, Any]) -> Quantisation:
    groups = list(given["config_groups"].values())
    _refuse("compressed-tensors with several config_groups", len(groups) != 1)
    _refuse("compressed-tensors with a quantised KV cache (kv_cache_scheme)", bool(given.get("kv_cache_scheme")))
    _refuse("compressed-tensors with transforms (transform_config)", bool(given.get("transform_config")))
    sparse = (given.get("sparsity_config") or {}).get("format", "dense")
    _refuse(f"compressed-tensors with sparse weights ({sparse})", sparse != "dense")
    scheme, weights = groups[0], groups[0]["weights"]
    form = str(scheme.get("format") or given.get("format"))
    bits, numbers = _whole(weights["num_bits"]), str(weights.get("type", "int"))
    kind = _KINDS.get(form, {}).get(numbers)
    _refuse(f"compressed-tensors in the format {form!r} with {numbers}{bits}", kind is None or bits not in (4, 8))
    _refuse(f"compressed-tensors in the format {form!r} with {bits} bits", kind != "packed" and bits != 8)
    inputs, outputs = scheme.get("input_activations"), scheme.get("output_activations")
    _refuse("4-bit activations", bool(inputs) and _whole(inputs.get("num_bits", 8)) < 8)
    strategy = str(weights.get("strategy") or ("group" if weights.get("group_size") else "tensor"))
    _refuse(f"compressed-tensors with the strategy {strategy!r}", strategy not in ("tensor", "channel", "group"))
    targets = [str(target) for target in scheme.get("targets", ["Linear"])]
    _refuse(f"compressed-tensors for {', '.join(targets)} alone", targets != ["Linear"])
    size = _group_size(weights["group_size"]) if strategy == "group" else 0
    assert kind
    symmetric, ordered = _yes(weights, "symmetric", True), bool(weights.get("actorder"))
    ignored, one_scale = _listed(given, "ignore"), strategy == "tensor"
    _refuse("compressed-tensors with one zero point for a whole matrix", one_scale and not symmetric)
    activations = bool(inputs or outputs)
    return CompressedTensors(bits, size, symmetric, ignored, ordered, activations, kind=kind, one_scale=one_scale)


def _refuse(what: str, refused: bool) -> None:
    if refused:
        raise _Unsupported(what)


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r} is not a whole number")
    return value


def _size(value: Any, name: str) -> int:
    size = _whole(value)
    if not 0 < size < 2**31:
        raise ValueError(f"{name} {size} is not from 1 to 2^31 - 1")
    return size


def _group_size(value: Any) -> int:
    return 0 if value == -1 else _size(value, "group_size")


def _yes(given: dict[str, Any], key: str, default: bool) -> bool:
    value = given.get(key, default)
    if not isinstance(value, bool):
        raise ValueError(f"{key} {value!r}, which is neither true nor false")
    return value


def _listed(given: dict[str, Any], key: str) -> tuple[str, ...]:
    """Reads a list of names, or of patterns that are quick to match.

    Raises:
        ValueError: the value is something else, or a pattern may take long to match.
    """
    names = given.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"{key}, which is no list of names")
    for name in names:
        if name.startswith("re:"):
            re.compile(name)
            if len(name) > 400 or len(re.findall(r"[*+{]", name)) > 4 or re.search(r"\)[*+{?]", name):
                raise ValueError(f"{key} with the pattern {name[:60]!r}, which may take long to match")
    return tuple(names)


def _matches(part: str, name: str) -> bool:
    """Whether `part`, an entry of `GroupedQuantisation.left_out`, matches the matrix `name`."""
    if part.startswith("re:"):
        return re.match(part[3:], name) is not None
    return name == part or name.startswith(f"{part}.") or name.endswith(part) or f".{part}." in name


def _fields(words: Tensor, bits: int) -> Tensor:
    """The numbers in the 32-bit words `[n, m]`, from the lowest bits of each word on: uint8 `[n, m * 32 / bits]`."""
    found = words.contiguous().view(torch.uint8)
    return torch.stack((found & 15, found >> 4), dim=-1).flatten(1) if bits == 4 else found
