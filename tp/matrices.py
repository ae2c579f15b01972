"""A model's weights, as one rank holds them: the tensors of a checkpoint that they come from, their size in memory, and
products of rows with them.

A plan counts, and a decoder reads, the same list of weights (`ModelMatrices`), so every weight that is loaded is
planned. Weights are in the dtype of the run; matrices may be in four to eight bits (`model.quantisation`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from ..kernels.cpu.library import QuantisedCall
from ..kernels.host_rows import rows_from_host
from ..kernels.layers import (
    by_sigmoid,
    choose_experts,
    gated,
    gated_mlp,
    linear,
    products_are_independent,
    rms_norm,
    steps_make_numbers,
)
from ..kernels.packages import usable_packages
from ..kernels.quantised import (
    Choice,
    QuantisedMatrix,
    chosen_products,
    described_experts,
    expansion_bytes,
    joined,
    joint_linear,
    quantised_experts,
    quantised_linear,
    quantised_mlp,
    takes_chosen,
)
from ..kernels.selection import STEP_ROWS, on_cpu
from .errors import ModelError
from .model.config import ModelConfig
from .model.families import Experts
from .model.linear_attention import LinearAttention
from .model.quantisation import Quantisation, StoredTensors, joined_inputs, part_of
from .pages import weight_memory
from .parallel.ranks import ALONE
from .parallel.split import Split

_ENDS = "qweight", "weight_packed", "weight_scale", "weight_scale_inv"
"""Endings of the names of tensors that are stored beside a matrix or in its place, if it is in few bits."""


@dataclass(frozen=True)
class Projection:
    """One tensor `[outputs, inputs]` of a checkpoint, and the part of it that a rank holds."""

    name: str
    outputs: int
    inputs: int
    rows: slice | None = None
    """The outputs that the rank holds; `None`: all."""
    columns: tuple[slice, ...] | None = None
    """The inputs that the rank holds, joined in this order; `None`: all."""

    @property
    def held(self) -> tuple[int, int]:
        """The numbers of outputs and inputs that the rank holds."""
        columns = self.columns or (slice(None),)
        return len(range(self.outputs)[self.rows or slice(None)]), sum(len(range(self.inputs)[x]) for x in columns)

    def read(self, source: WeightSource, prefix: str, quantisation: Quantisation | None) -> Tensor | QuantisedMatrix:
        """Reads the rank's part; see `Matrix.read`. There is no bias."""
        name = prefix + self.name
        if quantisation is None or not quantisation.covers(name):
            if quantisation is not None and any(source.has(f"{name}.{end}") for end in _ENDS):
                if name.startswith("mtp.layers."):  # no configuration says how a head is stored
                    return self._in_few_bits(source, name, quantisation)
                raise ModelError(
                    f"{name} is stored in few bits, but it is outside the model's layers, or the quantization_config "
                    "leaves it out, which is not supported"
                )
            shape, columns = (self.outputs, self.inputs), self.columns or (None,)
            parts = [source.read(f"{name}.weight", *shape, rows=self.rows, columns=some) for some in columns]
            return _joined(parts, dim=1)
        return self._in_few_bits(source, name, quantisation)

    def _in_few_bits(self, source: WeightSource, name: str, quantisation: Quantisation) -> QuantisedMatrix:
        whole = quantisation.read(source, name, self.outputs, self.inputs)
        return joined_inputs([part_of(whole, self.rows, some) for some in self.columns or (None,)])


@dataclass(frozen=True)
class Matrix:
    """A rank's part of several projections of the same input, as one matrix: their outputs follow one another."""

    projections: tuple[Projection, ...]
    bias: bool = False

    @cached_property  # a run plan needs it several times, and is made for each sequence
    def shape(self) -> tuple[int, int]:
        """`[outputs, inputs]`."""
        return sum(part.held[0] for part in self.projections), self.projections[0].held[1]

    @property
    def numbers(self) -> int:
        """How many numbers the rank holds, including the bias."""
        return prod(self.shape) + self.bias * self.shape[0]

    def of_expert(self, number: int) -> Matrix:
        """The matrix of one expert: its number replaces `{}` in the names. If there is no `{}`, the same matrix."""
        return replace(self, projections=tuple(replace(one, name=one.name.format(number)) for one in self.projections))

    def num_bytes(self, dtype: torch.dtype, quantisation: Quantisation | None, prefix: str) -> int:
        """The size of the matrix in memory, in bytes.

        Args:
            dtype: that of the numbers that are not in few bits.
            quantisation: how matrices in few bits are stored.
            prefix: the beginning of the names: that of the layer.
        """
        found = self.bias * self.shape[0] * dtype.itemsize
        for one in self.projections:
            if quantisation is not None and quantisation.covers(prefix + one.name):
                shape = one.held[0], one.inputs
                columns = one.columns or (None,)
                found += sum(quantisation.num_bytes(prefix + one.name, *shape, some) for some in columns)
            else:
                found += prod(one.held) * dtype.itemsize
        return found

    def read(
        self, source: WeightSource, prefix: str = "", quantisation: Quantisation | None = None
    ) -> DenseWeight | QuantisedWeight:
        """Reads the matrix and its bias.

        Args:
            source: the checkpoint.
            prefix: the beginning of the names: that of the layer.
            quantisation: how matrices in few bits are stored.

        Raises:
            ModelError: see `Checkpoint`.
        """
        bias, all_of = None, self.projections
        if self.bias:
            bias = _joined([source.read(f"{prefix}{one.name}.bias", one.outputs, rows=one.rows) for one in all_of])
        parts = [one.read(source, prefix, quantisation) for one in all_of]
        dense = [part for part in parts if isinstance(part, Tensor)]
        if len(dense) == len(parts):
            return DenseWeight(_joined(dense), bias)
        few_bits = [part for part in parts if isinstance(part, QuantisedMatrix)]
        # On a CPU, memory for a joined copy takes more time than one product for several projections saves.
        if len(few_bits) == len(parts) and not on_cpu(next(few_bits[0].tensors()).device):
            return QuantisedWeight(tuple(joined(few_bits)), bias)
        return QuantisedWeight(tuple(parts), bias)


class WeightSource(StoredTensors, Protocol):
    """The methods of `checkpoint.Checkpoint` that are needed here, where they are documented."""

    def read(
        self,
        name: str,
        *shape: int,
        rows: slice | None = None,
        columns: slice | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor: ...


class Weight(Protocol):
    """A matrix `[outputs, inputs]` and perhaps a bias `[outputs]`."""

    def times(
        self, rows: Tensor, *, norm: Tensor | None = None, eps: float = 0.0, onto: Tensor | None = None
    ) -> Tensor:
        """The product of `rows` `[n, inputs]` with this matrix, `[n, outputs]`; see `kernels.linear`."""
        ...

    def looked_up(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Embeddings: the rows of the matrix for the outputs `ids` `[n]`, as `[n, inputs]` in `dtype`."""
        ...

    def outputs(self, part: slice) -> Weight:
        """Some outputs of a matrix without a bias, in the same memory."""
        ...

    def rows_are_independent(self, dtype: torch.dtype) -> bool:
        """Whether the product of a row of a step in `dtype` is the same, bit by bit, whatever other rows are in the
        step."""
        ...

    def tensors(self) -> Iterator[Tensor]:
        """All tensors."""
        ...


@dataclass(frozen=True)
class DenseWeight:
    """A `Weight` whose numbers are in the dtype of the run, contiguous."""

    matrix: Tensor
    bias: Tensor | None = None

    def times(
        self, rows: Tensor, *, norm: Tensor | None = None, eps: float = 0.0, onto: Tensor | None = None
    ) -> Tensor:
        return linear(rows, self.matrix, self.bias, norm=norm, eps=eps, onto=onto)

    def looked_up(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return self.matrix.index_select(0, ids).to(dtype)

    def outputs(self, part: slice) -> DenseWeight:
        return DenseWeight(self.matrix[part])

    def rows_are_independent(self, dtype: torch.dtype) -> bool:
        return products_are_independent(self.matrix.device, dtype)

    def tensors(self) -> Iterator[Tensor]:
        yield self.matrix
        if self.bias is not None:
            yield self.bias


@dataclass(frozen=True)
class QuantisedWeight:
    """A `Weight` of several projections, some of them in four to eight bits. Their outputs follow one another."""

    parts: tuple[QuantisedMatrix | Tensor, ...]
    bias: Tensor | None = None

    def times(
        self, rows: Tensor, *, norm: Tensor | None = None, eps: float = 0.0, onto: Tensor | None = None
    ) -> Tensor:
        if len(self.parts) == 1:
            return _product(rows, self.parts[0], self.bias, norm, eps, onto)
        in_few_bits = [part for part in self.parts if isinstance(part, QuantisedMatrix)]
        if len(in_few_bits) == len(self.parts):
            joint = joint_linear(rows, in_few_bits, self.bias, norm=norm, eps=eps, onto=onto)
            if joint is not None:
                return joint
        sizes = [part.shape[0] for part in self.parts]
        biases = [None] * len(sizes) if self.bias is None else self.bias.split(sizes)
        both = zip(self.parts, biases, strict=True)
        product = torch.cat([_product(rows, part, bias, norm, eps) for part, bias in both], dim=1)
        return product if onto is None else onto.add_(product)

    def looked_up(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return self.only.rows(ids).expand(dtype)

    def outputs(self, part: slice) -> QuantisedWeight:
        return QuantisedWeight((self.only.outputs(part),))

    @property
    def only(self) -> QuantisedMatrix:
        """The only part of an embedding or an output head."""
        (part,) = self.parts
        assert not isinstance(part, Tensor)
        return part

    def rows_are_independent(self, dtype: torch.dtype) -> bool:
        device = next(self.tensors()).device
        fused = "triton" in usable_packages(device) and all(isinstance(part, QuantisedMatrix) for part in self.parts)
        return fused or products_are_independent(device, dtype)

    def tensors(self) -> Iterator[Tensor]:
        for part in self.parts:
            yield from (part,) if isinstance(part, Tensor) else part.tensors()
        if self.bias is not None:
            yield self.bias


LockedMemory = Callable[[Sequence[int], torch.dtype], Tensor]
"""Allocates page-locked host memory of a shape and dtype. Each item of the first dimension is locked in one piece.

Raises `CapacityError` if the system refuses the memory.
"""


@dataclass(frozen=True)
class HostEmbedding:
    """An embedding in page-locked host memory, from which a GPU reads the rows that a pass needs."""

    held: Tensor | QuantisedMatrix

    @classmethod
    def of(cls, weight: DenseWeight | QuantisedWeight, host_memory: LockedMemory) -> HostEmbedding:
        """Copies an embedding that is on the device.

        Raises:
            CapacityError: see `LockedMemory`.
        """

        def there(held: Tensor) -> Tensor:
            return host_memory((1, *held.shape), held.dtype)[0].copy_(held)

        if isinstance(weight, DenseWeight):
            return cls(there(weight.matrix))
        return cls(weight.only.with_rows(there))

    def looked_up(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """See `Weight.looked_up`."""
        if isinstance(self.held, Tensor):
            return rows_from_host(self.held, ids).to(dtype)
        return self.held.with_rows(lambda held: rows_from_host(held, ids)).expand(dtype)


def _product(
    rows: Tensor,
    part: QuantisedMatrix | Tensor,
    bias: Tensor | None,
    norm: Tensor | None,
    eps: float,
    onto: Tensor | None = None,
) -> Tensor:
    multiply = linear if isinstance(part, Tensor) else quantised_linear
    return multiply(rows, part, bias, norm=norm, eps=eps, onto=onto)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class GatedMlp:
    """The MLP of a layer, or a rank's part of it."""

    gate_up: Weight
    down: Weight
    activation: str = "silu"
    """See `ModelConfig`."""

    @property
    def weights(self) -> tuple[Weight, ...]:
        """All matrices."""
        return self.gate_up, self.down

    def of(self, rows: Tensor, *, norm: Tensor | None = None, eps: float = 0.0, onto: Tensor | None = None) -> Tensor:
        """The result for `rows` `[n, hidden]`, with the norm before the MLP if it is given; see `kernels.gated_mlp`."""
        # Not for more rows, because their norm would take much memory.
        if norm is not None and norm.dtype != rows.dtype and len(rows) <= STEP_ROWS:
            rows, norm = rms_norm(rows, norm, eps), None
        if self.activation == "silu" and (norm is None or norm.dtype == rows.dtype):
            if isinstance(self.gate_up, DenseWeight) and isinstance(self.down, DenseWeight):
                return gated_mlp(rows, norm, eps, self.gate_up.matrix, self.down.matrix, onto=onto)
            found = quantised_mlp(rows, self.in_few_bits, norm, eps, onto=onto) if self.in_few_bits else None
            if found is not None:
                return found
        gate, up = self.gate_up.times(rows, norm=norm, eps=eps).chunk(2, dim=-1)
        return self.down.times(gated(gate, up, self.activation), onto=onto)

    @cached_property
    def in_few_bits(self) -> tuple[QuantisedMatrix, ...]:
        """Gate, up and down, if each is one matrix in few bits without a bias; else none."""
        if not isinstance(self.gate_up, QuantisedWeight) or not isinstance(self.down, QuantisedWeight):
            return ()
        parts = *self.gate_up.parts, *self.down.parts
        if self.gate_up.bias is not None or self.down.bias is not None:
            return ()
        if len(self.gate_up.parts) == len(self.down.parts) == 1 and isinstance(parts[0], QuantisedMatrix):
            width = parts[0].shape[0] // 2
            parts = parts[0].outputs(slice(width)), parts[0].outputs(slice(width, None)), parts[1]
        found = tuple(part for part in parts if isinstance(part, QuantisedMatrix))
        return found if len(found) == len(parts) == 3 else ()


@dataclass(frozen=True)
class SharedExpert:
    """The expert of a layer that is used for all rows, or a rank's part of it."""

    mlp: GatedMlp
    gate: Weight
    """`[1, hidden]`. The result of the MLP for a row is multiplied by the sigmoid of the row's product with `gate`."""

    @property
    def weights(self) -> tuple[Weight, ...]:
        """All matrices."""
        return *self.mlp.weights, self.gate

    def of(self, rows: Tensor) -> Tensor:
        """The result for `rows` `[n, hidden]`, which are normed already."""
        return by_sigmoid(self.mlp.of(rows), self.gate.times(rows))


@dataclass(frozen=True)
class ExpertMlps:
    """A mixture of experts in the place of a layer's MLP, or a rank's part of each expert.

    Probabilities, shares and sums over a row's experts are float32. Sums are in the order of the experts' numbers. So
    the result of a row does not depend on the experts of other rows.
    """

    router: Tensor
    """float32 `[experts, hidden]`."""
    experts: tuple[GatedMlp, ...]
    used: int
    """How many experts a row uses: those with the highest probabilities; of equal ones, the first."""
    normalised: bool
    """Whether the shares of a row's experts sum to 1."""
    stacked: tuple[QuantisedMatrix, QuantisedMatrix] | None = None
    """The matrices of all experts joined into two: gate and up, and down. Kernels multiply a row by its experts in
    them. `None` if they cannot be joined, or on a CPU."""
    shared: SharedExpert | None = None

    @classmethod
    def of_experts(
        cls,
        router: Tensor,
        experts: Sequence[GatedMlp],
        used: int,
        *,
        normalised: bool,
        shared: SharedExpert | None = None,
    ) -> ExpertMlps:
        """A mixture of these experts, whose matrices are joined (see `stacked`) if possible."""
        gate_up, down = (_stacked([one.weights[i] for one in experts]) for i in range(2))
        if gate_up is None or down is None:
            return cls(router, tuple(experts), used, normalised, shared=shared)

        def part(matrix: QuantisedMatrix, expert: int) -> Weight:
            size = matrix.shape[0] // len(experts)
            return QuantisedWeight((matrix.outputs(slice(expert * size, (expert + 1) * size)),))

        parts = tuple(GatedMlp(part(gate_up, i), part(down, i)) for i in range(len(experts)))
        return cls(router, parts, used, normalised, (gate_up, down), shared)

    def waits(self, dtype: torch.dtype) -> bool:
        """Whether the host must wait in a step in `dtype` until it knows the experts of the rows."""
        return not self._takes_chosen and not self._is_one_call(dtype)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """All matrices, including those of every expert."""
        shared = self.shared.weights if self.shared else ()
        if self.stacked:
            return DenseWeight(self.router), *(QuantisedWeight((matrix,)) for matrix in self.stacked), *shared
        return DenseWeight(self.router), *(weight for one in self.experts for weight in one.weights), *shared

    def of(self, rows: Tensor, *, norm: Tensor, eps: float, onto: Tensor | None = None) -> Tensor:
        """See `GatedMlp.of`."""
        rows = rms_norm(rows, norm, eps)
        shares, ids = choose_experts(rows, self.router, self.used, normalised=self.normalised)
        if self.shared is None:
            return self._sums(rows, shares, ids, onto)
        total = self._sums(rows, shares, ids)
        total += self.shared.of(rows)
        return total if onto is None else onto.add_(total)

    def _sums(self, rows: Tensor, shares: Tensor, of_experts: Tensor, onto: Tensor | None = None) -> Tensor:
        """The sum over each row's experts, `[n, hidden]`: computed in float32, then rounded to the dtype of `rows`."""
        is_step = len(rows) <= STEP_ROWS
        if is_step and self._is_one_call(rows.dtype) and self._described:
            found = quantised_experts(rows, self._described, of_experts, shares, onto=onto)
            if found is not None:
                return found
        by_chosen = is_step and self._takes_chosen
        total = (self._together if by_chosen else self._one_by_one)(rows, shares, of_experts).to(rows.dtype)
        return total if onto is None else onto.add_(total)

    def __getstate__(self) -> dict[str, Any]:
        """The attributes for copying: all except addresses."""
        return {name: value for name, value in vars(self).items() if name != "_described"}

    @cached_property
    def _described(self) -> ctypes.Array[QuantisedCall] | None:
        """The experts for compiled kernels. `None` if not all of their matrices are in few bits, their sizes differ, or
        the activation is not `silu`."""
        matrices = [one for expert in self.experts for one in expert.in_few_bits if expert.activation == "silu"]
        return described_experts(matrices) if len(matrices) == 3 * len(self.experts) else None

    def _is_one_call(self, dtype: torch.dtype) -> bool:
        """Whether one call of a compiled kernel computes the experts of a step's rows."""
        device = self.router.device
        return on_cpu(device) and steps_make_numbers(device, dtype) and self._described is not None

    @property
    def _takes_chosen(self) -> bool:
        """Whether kernels multiply rows by their experts in `stacked`."""
        return self.stacked is not None and takes_chosen(self.router.device)

    def _together(self, rows: Tensor, shares: Tensor, of_experts: Tensor) -> Tensor:
        """See `_sums`; for the rows of a step. The host does not wait."""
        assert self.stacked is not None
        (gate_up, down), count = self.stacked, len(self.experts)
        of_experts, order = of_experts.sort(dim=1)
        shares, ids = shares.gather(1, order), of_experts.flatten()
        gate, up = chosen_products(rows, gate_up, Choice(ids, self.used, gate_up.shape[0] // count)).chunk(2, dim=-1)
        results = chosen_products(gated(gate, up, "silu"), down, Choice(ids, 1, down.shape[0] // count))
        results = results.float().view(len(rows), self.used, -1).mul_(shares.unsqueeze(-1))
        total = results[:, 0].clone()
        for i in range(1, self.used):
            total += results[:, i]
        return total

    def _one_by_one(self, rows: Tensor, shares: Tensor, of_experts: Tensor) -> Tensor:
        """See `_sums`; for any number of rows, one expert after the other."""
        order = of_experts.flatten().argsort(stable=True)  # by expert, then by row
        counts = of_experts.flatten().bincount(minlength=len(self.experts)).tolist()
        of_rows, shares = order // self.used, shares.flatten()[order].unsqueeze(1)
        total = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
        stop = 0
        for expert, count in enumerate(counts):
            if count:
                start, stop = stop, stop + count
                its_rows, its_shares = of_rows[start:stop], shares[start:stop]
                total.index_add_(0, its_rows, self.experts[expert].of(rows[its_rows]).float().mul_(its_shares))
        return total


Mlp = GatedMlp | ExpertMlps


@dataclass(frozen=True)
class ModelMatrices:
    """All weights of a model that a rank holds. Names of matrices of a layer are without the layer's prefix."""

    qkv: Matrix
    """Queries, keys and values of a layer with attention to keys and values."""
    o: Matrix
    """The output projection of a layer with attention to keys and values."""
    linear: tuple[Matrix, Matrix] | None
    """The input and the output projections of a layer with linear attention."""
    linear_layers: frozenset[int]
    """The layers with linear attention."""
    mlp: tuple[Matrix, Matrix]
    """Gate and up, and down, of a layer's MLP or of each of its experts. `{}` in the names stands for the number of the
    expert."""
    shared: tuple[Matrix, Matrix, Matrix] | None
    """Gate and up, down, and the gate of the expert that all rows of a layer use."""
    router: Matrix | None
    """The matrix by which a layer chooses experts, in float32."""
    embedding: Matrix
    head: Matrix | None
    """The output head; `None` if it is the embedding."""
    head_rows: int
    """Rows of the largest part of the output head; the last ranks' parts may be smaller."""
    fusion: Matrix | None
    """The projection before the layer of a multi-token-prediction head. The embedding and the output head of this head
    are those of the model."""
    experts: Experts | None
    num_layers: int
    norms: int
    """How many numbers the norms of a layer have, without those of attention."""
    attention_norms: int
    """How many numbers the norms of queries and keys have, in a layer with attention to keys and values."""
    float32_norms: bool
    """Whether the numbers of norms are float32."""
    vectors: int
    """How many other numbers a layer with attention to keys and values has: those added behind its sums over ranks."""
    linear_vectors: tuple[int, int]
    """How many other numbers a layer with linear attention has: in the dtype of the run, and in float32."""
    quantisation: Quantisation | None
    """How matrices of layers are stored that are not in the dtype of the run."""

    @classmethod
    def of(cls, config: ModelConfig, split: Split | None = None) -> ModelMatrices:
        """The weights of a rank's part of the model; without `split`, those of the whole model."""
        split = split or Split.of(config, ALONE)
        hidden, intermediate, size = config.hidden_size, config.intermediate_size, config.head_dim
        num_queries, num_keys = config.num_heads * size, config.num_kv_heads * size
        queries, keys = (slice(part.start * size, part.stop * size) for part in (split.heads, split.kv_heads))
        of_keys = (Projection(f"self_attn.{name}_proj", num_keys, hidden, keys) for name in "kv")
        gate, up, down, experts = "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", config.experts
        if experts:
            gate, up, down = experts.names.gate, experts.names.up, experts.names.down
        gate_up = Matrix(tuple(Projection(name, intermediate, hidden, split.mlp) for name in (gate, up)))
        head = Projection("lm_head", config.vocab_size, hidden, split.vocabulary)
        asked = Projection("self_attn.q_proj", num_queries, hidden, queries)
        if config.output_gate:
            asked = replace(asked, outputs=2 * num_queries, rows=slice(2 * queries.start, 2 * queries.stop))
        shared, linear = None, config.linear
        if experts and experts.shared_width:
            name, width = experts.names.shared, experts.shared_width
            both = tuple(Projection(f"{name}.{one}_proj", width, hidden, split.shared) for one in ("gate", "up"))
            down_shared = Projection(f"{name}.down_proj", hidden, width, columns=(split.shared,))
            shared = Matrix(both), Matrix((down_shared,)), Matrix((Projection(f"{name}_gate", 1, hidden),))
        return cls(
            qkv=Matrix((asked, *of_keys), bias=config.qkv_bias),
            o=Matrix((Projection("self_attn.o_proj", hidden, num_queries, columns=(queries,)),)),
            linear=_linear_matrices(linear, hidden, split) if linear else None,
            linear_layers=frozenset(linear.layers if linear else ()),
            shared=shared,
            mlp=(gate_up, Matrix((Projection(down, hidden, intermediate, columns=(split.mlp,)),))),
            router=Matrix((Projection(experts.names.router, experts.count, hidden),)) if experts else None,
            experts=experts,
            embedding=Matrix((Projection("model.embed_tokens", config.vocab_size, hidden),)),
            head=None if config.tie_word_embeddings else Matrix((head,)),
            head_rows=split.vocabulary_room,
            fusion=Matrix((Projection("mtp.fc", hidden, 2 * hidden),)) if config.is_head else None,
            num_layers=config.num_layers,
            norms=hidden * (4 if config.norms_behind else 2),
            attention_norms=2 * size * config.qk_norm,
            float32_norms=config.float32_norms,
            vectors=hidden * config.o_bias,
            linear_vectors=_linear_vectors(split.config(config).linear),
            quantisation=config.quantisation,
        )

    @property
    def mlps(self) -> tuple[tuple[Matrix, Matrix], ...]:
        """The matrices of the MLP, or of each expert of a layer."""
        gate_up, down = self.mlp
        return tuple((gate_up.of_expert(i), down.of_expert(i)) for i in range(self._num_mlps))

    @property
    def _num_mlps(self) -> int:
        return self.experts.count if self.experts else 1

    @property
    def numbers(self) -> int:
        """How many numbers all weights have. The output head counts with the rows of its largest part."""
        hidden, router = self.embedding.shape[1], self.router.numbers if self.router else 0
        of_mlps = self._num_mlps * sum(matrix.numbers for matrix in self.mlp)
        of_mlps += sum(matrix.numbers for matrix in self._shared)
        attention = self.qkv.numbers + self.o.numbers + self.attention_norms + self.vectors
        linear = sum(matrix.numbers for matrix in self.linear or ()) + sum(self.linear_vectors)
        layers = self.num_layers * (of_mlps + router + self.norms)
        layers += (self.num_layers - len(self.linear_layers)) * attention + len(self.linear_layers) * linear
        if self.fusion:
            return layers + self.fusion.numbers + 3 * hidden
        return layers + self.embedding.numbers + (self.head is not None) * self.head_rows * hidden + hidden

    @property
    def numbers_of_a_row(self) -> int:
        """By how many numbers a pass multiplies each row. These are all except the embedding, whose rows are looked up,
        and the experts that the row does not use."""
        whole = self.numbers - (0 if self.fusion else self.embedding.numbers)
        if self.experts:
            of_expert = sum(matrix.numbers for matrix in self.mlp)
            whole -= self.num_layers * (self.experts.count - self.experts.used) * of_expert
        return whole if self.head and not self.fusion else whole + self.head_rows * self.embedding.shape[1]

    def num_bytes(self, dtype: torch.dtype) -> int:
        """The size of all weights in memory, in bytes."""
        if self.fusion:
            return self._layer_bytes(dtype) + self._fusion_bytes(self.fusion, dtype)
        embedding = self._bytes_of(self.embedding, self.embedding.shape[0], dtype)
        head = self._bytes_of(self.head, self.head_rows, dtype) if self.head else 0
        return self._layer_bytes(dtype) + embedding + head

    def embedding_bytes(self, dtype: torch.dtype) -> int:
        """The size in bytes of an embedding that is not used as output head, so that a GPU needs only some of its rows.
        0 if it is also the output head, or belongs to another model."""
        if self.head is None or self.fusion:
            return 0
        return self._bytes_of(self.embedding, self.embedding.shape[0], dtype)

    def bytes_of_a_pass(self, dtype: torch.dtype, rows: float = 1) -> int:
        """How many bytes of the weights a pass over `rows` rows reads. The experts of the rows are not known: the
        average number of different experts is counted, as if each row chose its experts at random."""
        share = 1.0
        if self.experts:
            share = 1 - (1 - self.experts.used / self.experts.count) ** rows
        of_layers = self._layer_bytes(dtype, share)
        if self.fusion:
            of_layers += self._fusion_bytes(self.fusion, dtype)
        return of_layers + self._bytes_of(self.head or self.embedding, self.head_rows, dtype)

    def prefix(self, layer: int) -> str:
        """The beginning of the names of a layer's tensors."""
        return f"mtp.layers.{layer}." if self.fusion else layer_prefix(layer)

    def of_layer(self, layer: int) -> tuple[Matrix, ...]:
        """The matrices of a layer, except the router."""
        return *self.mixer(layer), *(matrix for mlp in self.mlps for matrix in mlp), *self._shared

    @property
    def _shared(self) -> tuple[Matrix, ...]:
        return self.shared or ()

    def mixer(self, layer: int) -> tuple[Matrix, Matrix]:
        """The input and the output projection of a layer's attention."""
        return self.linear if self.linear and layer in self.linear_layers else (self.qkv, self.o)

    def _layer_bytes(self, dtype: torch.dtype, share: float = 1.0) -> int:
        """The bytes of all layers and of the norm behind them; only a `share` of the MLPs is counted."""
        router = 4 * self.router.numbers if self.router else 0
        of_norm = 4 if self.float32_norms else dtype.itemsize
        attention = self.attention_norms * of_norm + self.vectors * dtype.itemsize
        linear = self.linear_vectors[0] * dtype.itemsize + self.linear_vectors[1] * 4
        found = self.num_layers * (self.norms * of_norm + router) + self.embedding.shape[1] * of_norm
        found += (self.num_layers - len(self.linear_layers)) * attention + len(self.linear_layers) * linear
        if dtype not in self._matrix_bytes:  # counted once: a run is planned for each of its sequences
            self._matrix_bytes[dtype] = list(self._count_matrix_bytes(dtype))
        return found + sum(
            count * (whole + int(share * self._num_mlps * of_mlp)) for count, whole, of_mlp in self._matrix_bytes[dtype]
        )

    @cached_property
    def _matrix_bytes(self) -> dict[torch.dtype, list[tuple[int, int, int]]]:
        """The results of `_count_matrix_bytes` so far."""
        return {}

    def _count_matrix_bytes(self, dtype: torch.dtype) -> Iterator[tuple[int, int, int]]:
        """For each kind of layer (see `_alike`): how many layers there are, and the bytes of a layer's matrices without
        MLPs and of one of its MLPs."""
        for layer, count in self._alike():
            prefix = self.prefix(layer)
            # All experts of a layer are stored alike.
            first = (matrix.of_expert(0) for matrix in self.mlp)
            of_mlp = sum(matrix.num_bytes(dtype, self.quantisation, prefix) for matrix in first)
            others = (*self.mixer(layer), *self._shared)
            yield count, sum(matrix.num_bytes(dtype, self.quantisation, prefix) for matrix in others), of_mlp

    def _fusion_bytes(self, fusion: Matrix, dtype: torch.dtype) -> int:
        """The bytes of the projection and of the two norms before it."""
        norms = 2 * self.embedding.shape[1] * (4 if self.float32_norms else dtype.itemsize)
        return fusion.num_bytes(dtype, self.quantisation, "") + norms

    def _alike(self) -> list[tuple[int, int]]:
        """One layer of each kind, and the number of layers of this kind. Layers of a kind have the same size in
        bytes."""
        if self.quantisation:
            return [(layer, 1) for layer in range(self.num_layers)]
        linear = len(self.linear_layers)
        whole = next(layer for layer in range(self.num_layers) if layer not in self.linear_layers)
        found = [(whole, self.num_layers - linear)]
        return [*found, (min(self.linear_layers), linear)] if linear else found

    def _bytes_of(self, matrix: Matrix, outputs: int, dtype: torch.dtype) -> int:
        """The bytes of `outputs` outputs of the embedding or the output head."""
        (one,) = matrix.projections
        if self.quantisation is not None and self.quantisation.covers(one.name):
            return self.quantisation.num_bytes(one.name, outputs, one.inputs)
        return outputs * one.inputs * dtype.itemsize

    def expansion_bytes(self, dtype: torch.dtype, *, is_step: bool) -> int:
        """The bytes that the products of a pass take for expanded numbers of matrices in few bits."""
        if self.quantisation is None:
            return 0
        head = self.head or self.embedding
        of_head = [head] if self.quantisation.covers(head.projections[0].name) else []
        of_layers = (
            self.qkv,
            self.o,
            *(self.linear or ()),
            *self.mlp,
            *self._shared,
            *([self.fusion] if self.fusion else []),
        )
        largest = max(prod(matrix.shape) for matrix in (*of_layers, *of_head))
        return expansion_bytes(largest, dtype, is_step=is_step)


def _linear_matrices(linear: LinearAttention, hidden: int, split: Split) -> tuple[Matrix, Matrix]:
    """See `ModelMatrices.linear`. The outputs of a rank's heads follow one another, even if they are in several
    places of a projection."""
    heads, names = split.key_heads, linear.names.inputs
    together, values = linear.value_heads // linear.key_heads, linear.value_heads_of(heads)

    def part(name: str, outputs: int, width: int, heads: slice, first: int = 0) -> Projection:
        """The part of a projection for some heads. Each head has `width` outputs; head 0 begins at `first`."""
        return Projection(name, outputs, hidden, slice(first + heads.start * width, first + heads.stop * width))

    def by_key_head(name: str, width: int) -> Projection:
        return part(name, linear.key_heads * width, width, heads)

    if linear.names.joint_gate:
        inputs = [by_key_head(names[0], 2 * linear.key_dim + 2 * together * linear.value_dim)]
    else:
        qkv, z, *_ = names
        keys = [part(qkv, linear.channels, linear.key_dim, heads, first) for first in (0, linear.keys)]
        of_values = [part(qkv, linear.channels, linear.value_dim, some, 2 * linear.keys) for some in values]
        whole = heads == slice(0, linear.key_heads)
        inputs = [Projection(qkv, linear.channels, hidden)] if whole else [*keys, *of_values]
        inputs += [part(z, linear.values, linear.value_dim, some) for some in values]
    if linear.names.joint_decay:
        inputs.append(by_key_head(names[-1], 2 * together))
    else:
        inputs += [part(name, linear.value_heads, 1, some) for name in names[-2:] for some in values]
    columns = tuple(slice(some.start * linear.value_dim, some.stop * linear.value_dim) for some in values)
    return Matrix(tuple(inputs)), Matrix((Projection("linear_attn.out_proj", hidden, linear.values, columns=columns),))


def _linear_vectors(linear: LinearAttention | None) -> tuple[int, int]:
    """See `ModelMatrices.linear_vectors`; for a rank's part."""
    if linear is None:
        return 0, 0
    return linear.value_dim, 2 * linear.value_heads + linear.kernel * linear.channels


def layer_prefix(index: int) -> str:
    """The beginning of the names of a layer's tensors, except in a multi-token-prediction head."""
    return f"model.layers.{index}."


def num_parameters(config: ModelConfig) -> int:
    """The number of a model's weights; a tied output head is not counted again."""
    return ModelMatrices.of(config).numbers


def _stacked(weights: list[Weight]) -> QuantisedMatrix | None:
    """Joins matrices that are stored in the same way into one; `None` if that is not possible. Not done on a CPU: its
    products do not need it, and memory for a copy takes more time than the products."""
    matrices = [weight.parts[0] for weight in weights if isinstance(weight, QuantisedWeight) and len(weight.parts) == 1]
    few_bits = [matrix for matrix in matrices if isinstance(matrix, QuantisedMatrix)]
    if len(few_bits) < len(weights) or on_cpu(next(few_bits[0].tensors()).device):
        return None
    found = joined(few_bits)
    return found[0] if len(found) == 1 else None


def _joined(tensors: list[Tensor], dim: int = 0) -> Tensor:
    """Joins tensors along `dim`, in memory from `weight_memory`. A single tensor is returned as it is."""
    first = tensors[0]
    if len(tensors) == 1:
        return first
    shape = list(first.shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return torch.cat(tensors, dim, out=weight_memory(shape, first.dtype, first.device))
