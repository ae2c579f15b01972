"""A model's weights, as one rank holds them: which tensors of a checkpoint they come from, what they take, and products
of rows with them.

What a plan counts and a decoder reads is the same list (`ModelMatrices`), so a weight that is held is planned. Numbers
are in the dtype that is computed in, or those of a matrix are in four to eight bits
(`model.quantisation`).
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
"""Of the names of what is stored beside a matrix, or in its place, in few bits."""


@dataclass(frozen=True)
class Projection:
    """One tensor `[outputs, inputs]` of a checkpoint, and what a rank holds of it."""

    name: str
    outputs: int
    inputs: int
    rows: slice | None = None
    """Of the outputs; `None`: all."""
    columns: tuple[slice, ...] | None = None
    """Of the inputs, which then follow one another; `None`: all."""

    @property
    def held(self) -> tuple[int, int]:
        """Outputs and inputs that the rank holds."""
        columns = self.columns or (slice(None),)
        return len(range(self.outputs)[self.rows or slice(None)]), sum(len(range(self.inputs)[x]) for x in columns)

    def read(self, source: WeightSource, prefix: str, quantisation: Quantisation | None) -> Tensor | QuantisedMatrix:
        """See `Matrix.read`; without a bias."""
        name = prefix + self.name
        if quantisation is None or not quantisation.covers(name):
            if quantisation is not None and any(source.has(f"{name}.{end}") for end in _ENDS):
                if name.startswith("mtp.layers."):  # of a head no configuration says whether it is stored so
                    return self._in_few_bits(source, name, quantisation)
                raise ModelError(f"{name} is stored in few bits, which is not supported outside a model's layers")
            shape, columns = (self.outputs, self.inputs), self.columns or (None,)
            parts = [source.read(f"{name}.weight", *shape, rows=self.rows, columns=some) for some in columns]
            return _joined(parts, dim=1)
        return self._in_few_bits(source, name, quantisation)

    def _in_few_bits(self, source: WeightSource, name: str, quantisation: Quantisation) -> QuantisedMatrix:
        whole = quantisation.read(source, name, self.outputs, self.inputs)
        return joined_inputs([part_of(whole, self.rows, some) for some in self.columns or (None,)])


@dataclass(frozen=True)
class Matrix:
    """A rank's part of projections of the same input: one matrix, whose outputs follow one another."""

    projections: tuple[Projection, ...]
    bias: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """`[outputs, inputs]`."""
        return sum(part.held[0] for part in self.projections), self.projections[0].held[1]

    @property
    def numbers(self) -> int:
        """Numbers that the rank holds, those of the bias included."""
        return prod(self.shape) + self.bias * self.shape[0]

    def of_expert(self, number: int) -> Matrix:
        """Of one of the experts that its names are of; itself, of an MLP."""
        return replace(self, projections=tuple(replace(one, name=one.name.format(number)) for one in self.projections))

    def num_bytes(self, dtype: torch.dtype, quantisation: Quantisation | None, prefix: str) -> int:
        """What it takes in a layer whose names begin with `prefix`."""
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
        """Reads it.

        Args:
            prefix: of the names, those of a layer.
            quantisation: how matrices are stored that are not stored as usual.

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
        # A host takes longer for the memory of a copy than for all that one product for several projections saves.
        if len(few_bits) == len(parts) and not on_cpu(next(few_bits[0].tensors()).device):
            return QuantisedWeight(tuple(joined(few_bits)), bias)
        return QuantisedWeight(tuple(parts), bias)


class WeightSource(StoredTensors, Protocol):
    """The part of `checkpoint.Checkpoint` that is needed here; see there."""

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
        """The product of `rows` `[n, inputs]` with it, `[n, outputs]`; see `kernels.linear`."""
        ...

    def looked_up(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Its numbers for some outputs, by their indices `[n]`: `[n, inputs]` in `dtype`, as an embedding is used."""
        ...

    def outputs(self, part: slice) -> Weight:
        """Some of its outputs, in the same memory; of one without a bias."""
        ...

    def rows_are_independent(self, dtype: torch.dtype) -> bool:
        """Whether a row of a step in `dtype` has the same product, bit by bit, whatever rows come with it."""
        ...

    def tensors(self) -> Iterator[Tensor]:
        """What is held."""
        ...


@dataclass(frozen=True)
class DenseWeight:
    """One of numbers in the dtype that is computed in, contiguous."""

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
    """One of projections of which some are in four to eight bits: their outputs follow one another."""

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
        """The one part of an embedding or an output head."""
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
"""Makes page-locked host memory of a shape, whose first dimension is of what is locked in one piece each.

Raises `CapacityError` where the system refuses it.
"""


@dataclass(frozen=True)
class HostEmbedding:
    """An embedding in page-locked host memory, of which a GPU reads the rows that a pass needs."""

    held: Tensor | QuantisedMatrix

    @classmethod
    def of(cls, weight: DenseWeight | QuantisedWeight, host_memory: LockedMemory) -> HostEmbedding:
        """A copy of what is on the device.

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
        """What it gives for `rows` `[n, hidden]`, with the norm before it, if one is given; see `kernels.gated_mlp`."""
        if norm is not None and norm.dtype != rows.dtype and len(rows) <= STEP_ROWS:  # more would take much memory
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
    """The expert of a layer that all rows have, or a rank's part of it."""

    mlp: GatedMlp
    gate: Weight
    """`[1, hidden]`: what it gives for a row is multiplied by the sigmoid of the product."""

    @property
    def weights(self) -> tuple[Weight, ...]:
        """All matrices."""
        return *self.mlp.weights, self.gate

    def of(self, rows: Tensor) -> Tensor:
        """What it gives for `rows` `[n, hidden]`, which are normed."""
        return by_sigmoid(self.mlp.of(rows), self.gate.times(rows))


@dataclass(frozen=True)
class ExpertMlps:
    """A mixture of experts in the place of a layer's MLP, or a rank's part of each expert.

    Probabilities, weights and the sum over a row's experts, in the order of their numbers, are float32, so that a row's
    result does not depend on which experts others have.
    """

    router: Tensor
    """float32 `[experts, hidden]`."""
    experts: tuple[GatedMlp, ...]
    used: int
    """Of a row: those of the highest probability; of equal ones the first."""
    normalised: bool
    """Whether the weights of a row's experts sum to 1."""
    stacked: tuple[QuantisedMatrix, QuantisedMatrix] | None = None
    """Those of all experts in one, gate and up, and down, where products are with what is chosen of it."""
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
        """With what experts hold in one piece, where that can be used."""
        gate_up, down = (_stacked([one.weights[i] for one in experts]) for i in range(2))
        if gate_up is None or down is None:
            return cls(router, tuple(experts), used, normalised, shared=shared)

        def part(matrix: QuantisedMatrix, expert: int) -> Weight:
            size = matrix.shape[0] // len(experts)
            return QuantisedWeight((matrix.outputs(slice(expert * size, (expert + 1) * size)),))

        parts = tuple(GatedMlp(part(gate_up, i), part(down, i)) for i in range(len(experts)))
        return cls(router, parts, used, normalised, (gate_up, down), shared)

    def waits(self, dtype: torch.dtype) -> bool:
        """Whether the host waits in a step in `dtype` for which experts rows have."""
        return not self._takes_chosen and not self._is_one_call(dtype)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """All matrices, those of every expert included."""
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
        """The sums of the rows' experts, `[n, hidden]`, which are float32 until they are rounded."""
        is_step = len(rows) <= STEP_ROWS
        if is_step and self._is_one_call(rows.dtype) and self._described:
            found = quantised_experts(rows, self._described, of_experts, shares, onto=onto)
            if found is not None:
                return found
        by_chosen = is_step and self._takes_chosen
        total = (self._together if by_chosen else self._one_by_one)(rows, shares, of_experts).to(rows.dtype)
        return total if onto is None else onto.add_(total)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy takes over: no addresses."""
        return {name: value for name, value in vars(self).items() if name != "_described"}

    @cached_property
    def _described(self) -> ctypes.Array[QuantisedCall] | None:
        """What compiled kernels are told of the experts, where all of them are in few bits."""
        matrices = [one for expert in self.experts for one in expert.in_few_bits if expert.activation == "silu"]
        return described_experts(matrices) if len(matrices) == 3 * len(self.experts) else None

    def _is_one_call(self, dtype: torch.dtype) -> bool:
        """Whether one compiled kernel computes the experts of a step's rows."""
        device = self.router.device
        return on_cpu(device) and steps_make_numbers(device, dtype) and self._described is not None

    @property
    def _takes_chosen(self) -> bool:
        """Whether products are with what is chosen of all experts in one."""
        return self.stacked is not None and takes_chosen(self.router.device)

    def _together(self, rows: Tensor, shares: Tensor, of_experts: Tensor) -> Tensor:
        """See `_sums`; of a step's rows, for which the host does not wait."""
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
        """See `_sums`; of any number of rows, an expert after the other."""
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
    """All that a rank holds of a model."""

    qkv: Matrix
    """Of each layer with attention to keys and values, as is the next; the names are those within a layer."""
    o: Matrix
    linear: tuple[Matrix, Matrix] | None
    """Of layers with linear attention: what goes in, and what comes out."""
    linear_layers: frozenset[int]
    mlp: tuple[Matrix, Matrix]
    """Of each layer, as are the next three: gate and up, and down; of each expert, whose number is in the place of `{}`
    in names."""
    shared: tuple[Matrix, Matrix, Matrix] | None
    """Of the expert that all rows have, the same, and its gate."""
    router: Matrix | None
    """What experts are chosen by, in float32."""
    embedding: Matrix
    head: Matrix | None
    """`None` where it is the embedding."""
    head_rows: int
    """Of the largest part of the output head; the last ranks' parts may be smaller."""
    fusion: Matrix | None
    """Of a multi-token-prediction head, whose embedding and output head are the model's: what goes into its layer is
    projected by it."""
    experts: Experts | None
    num_layers: int
    norms: int
    """Numbers of a layer's norms, without those of attention."""
    attention_norms: int
    float32_norms: bool
    vectors: int
    """Other numbers of a layer with attention to keys and values: those that are added behind its sums over ranks."""
    linear_vectors: tuple[int, int]
    """Of one with linear attention: in the dtype that is computed in, and in float32."""
    quantisation: Quantisation | None
    """How matrices of layers are stored that are not in the dtype that is computed in."""

    @classmethod
    def of(cls, config: ModelConfig, split: Split | None = None) -> ModelMatrices:
        """Those of a rank's part of the model; of all of it where no part is given."""
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
        """The MLP's, or each expert's."""
        gate_up, down = self.mlp
        return tuple((gate_up.of_expert(i), down.of_expert(i)) for i in range(self._num_mlps))

    @property
    def _num_mlps(self) -> int:
        return self.experts.count if self.experts else 1

    @property
    def numbers(self) -> int:
        """All of them; of the output head as many rows as the rank with the most has."""
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
        """Those that a pass multiplies each row by: all but the embedding, of which rows are looked up, and the experts
        that are not the row's."""
        whole = self.numbers - (0 if self.fusion else self.embedding.numbers)
        if self.experts:
            of_expert = sum(matrix.numbers for matrix in self.mlp)
            whole -= self.num_layers * (self.experts.count - self.experts.used) * of_expert
        return whole if self.head and not self.fusion else whole + self.head_rows * self.embedding.shape[1]

    def num_bytes(self, dtype: torch.dtype) -> int:
        """What they take in memory."""
        if self.fusion:
            return self._layer_bytes(dtype) + self._fusion_bytes(self.fusion, dtype)
        embedding = self._bytes_of(self.embedding, self.embedding.shape[0], dtype)
        head = self._bytes_of(self.head, self.head_rows, dtype) if self.head else 0
        return self._layer_bytes(dtype) + embedding + head

    def embedding_bytes(self, dtype: torch.dtype) -> int:
        """Of them, what is an embedding and nothing else, which a GPU needs some rows of; 0 where that is the output
        head too, or another model's."""
        if self.head is None or self.fusion:
            return 0
        return self._bytes_of(self.embedding, self.embedding.shape[0], dtype)

    def bytes_of_a_pass(self, dtype: torch.dtype, rows: float = 1) -> int:
        """What a pass over so many rows reads of them. Which experts they have is not known: as many are counted as
        there are on average if each row's are any."""
        share = 1.0
        if self.experts:
            share = 1 - (1 - self.experts.used / self.experts.count) ** rows
        of_layers = self._layer_bytes(dtype, share)
        if self.fusion:
            of_layers += self._fusion_bytes(self.fusion, dtype)
        return of_layers + self._bytes_of(self.head or self.embedding, self.head_rows, dtype)

    def prefix(self, layer: int) -> str:
        """What the names of a layer's tensors begin with."""
        return f"mtp.layers.{layer}." if self.fusion else layer_prefix(layer)

    def of_layer(self, layer: int) -> tuple[Matrix, ...]:
        """Its matrices, but for the router."""
        return *self.mixer(layer), *(matrix for mlp in self.mlps for matrix in mlp), *self._shared

    @property
    def _shared(self) -> tuple[Matrix, ...]:
        return self.shared or ()

    def mixer(self, layer: int) -> tuple[Matrix, Matrix]:
        """What goes into a layer's attention, and what comes out of it."""
        return self.linear if self.linear and layer in self.linear_layers else (self.qkv, self.o)

    def _layer_bytes(self, dtype: torch.dtype, share: float = 1.0) -> int:
        """Of all layers, of whose MLPs a `share` counts, and of the norm behind them."""
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
        """What `_count_matrix_bytes` has found so far."""
        return {}

    def _count_matrix_bytes(self, dtype: torch.dtype) -> Iterator[tuple[int, int, int]]:
        """Of layers that have as many: how many layers, bytes of a layer's matrices without its MLPs', and of one of
        these."""
        for layer, count in self._alike():
            prefix = self.prefix(layer)
            # All experts of a layer are stored alike.
            first = (matrix.of_expert(0) for matrix in self.mlp)
            of_mlp = sum(matrix.num_bytes(dtype, self.quantisation, prefix) for matrix in first)
            others = (*self.mixer(layer), *self._shared)
            yield count, sum(matrix.num_bytes(dtype, self.quantisation, prefix) for matrix in others), of_mlp

    def _fusion_bytes(self, fusion: Matrix, dtype: torch.dtype) -> int:
        """Of the projection, and the two norms before it."""
        norms = 2 * self.embedding.shape[1] * (4 if self.float32_norms else dtype.itemsize)
        return fusion.num_bytes(dtype, self.quantisation, "") + norms

    def _alike(self) -> list[tuple[int, int]]:
        """Layers, and how many there are with as many bytes as each, itself included."""
        if self.quantisation:
            return [(layer, 1) for layer in range(self.num_layers)]
        linear = len(self.linear_layers)
        whole = next(layer for layer in range(self.num_layers) if layer not in self.linear_layers)
        found = [(whole, self.num_layers - linear)]
        return [*found, (min(self.linear_layers), linear)] if linear else found

    def _bytes_of(self, matrix: Matrix, outputs: int, dtype: torch.dtype) -> int:
        """Of so many outputs of the embedding or the output head."""
        (one,) = matrix.projections
        if self.quantisation is not None and self.quantisation.covers(one.name):
            return self.quantisation.num_bytes(one.name, outputs, one.inputs)
        return outputs * one.inputs * dtype.itemsize

    def expansion_bytes(self, dtype: torch.dtype, *, is_step: bool) -> int:
        """What the products of a pass take for numbers of a matrix that is stored in fewer bits."""
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
    """See `ModelMatrices.linear`. Outputs of a rank's heads follow one another, whichever projection they are of."""
    heads, names = split.key_heads, linear.names.inputs
    together, values = linear.value_heads // linear.key_heads, linear.value_heads_of(heads)

    def part(name: str, outputs: int, width: int, heads: slice, first: int = 0) -> Projection:
        """Of a projection, what some heads have, each of them `width` wide and the first one at `first`."""
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
    """See `ModelMatrices.linear_vectors`; of a rank's part."""
    if linear is None:
        return 0, 0
    return linear.value_dim, 2 * linear.value_heads + linear.kernel * linear.channels


def layer_prefix(index: int) -> str:
    """What the names of a layer's tensors begin with, but for a multi-token-prediction head's."""
    return f"model.layers.{index}."


def num_parameters(config: ModelConfig) -> int:
    """Number of a model's weights; a tied output head is not counted again."""
    return ModelMatrices.of(config).numbers


def _stacked(weights: list[Weight]) -> QuantisedMatrix | None:
    """All of them in one matrix, if they are stored alike; not where a CPU computes, whose products have no use for it
    and which takes longer for the memory of a copy than for these."""
    matrices = [weight.parts[0] for weight in weights if isinstance(weight, QuantisedWeight) and len(weight.parts) == 1]
    few_bits = [matrix for matrix in matrices if isinstance(matrix, QuantisedMatrix)]
    if len(few_bits) < len(weights) or on_cpu(next(few_bits[0].tensors()).device):
        return None
    found = joined(few_bits)
    return found[0] if len(found) == 1 else None


def _joined(tensors: list[Tensor], dim: int = 0) -> Tensor:
    """All of them in memory that lasts."""
    first = tensors[0]
    if len(tensors) == 1:
        return first
    shape = list(first.shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return torch.cat(tensors, dim, out=weight_memory(shape, first.dtype, first.device))
