"""A model's weights, as one rank holds them: which tensors of a checkpoint they come from, what they take, and products
of rows with them.

What a plan counts and a decoder reads is the same list (`ModelMatrices`), so a weight that is held is planned. All are
numbers in the dtype that is computed in: bytes are their count times its size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ..kernels.layers import gated_mlp, linear, products_are_independent
from .model.config import ModelConfig
from .parallel.ranks import ALONE
from .parallel.split import Split


@dataclass(frozen=True)
class Projection:
    """One tensor `[outputs, inputs]` of a checkpoint, and what a rank holds of it."""

    name: str
    outputs: int
    inputs: int
    rows: slice | None = None
    """Of the outputs; `None`: all."""
    columns: slice | None = None
    """Of the inputs; `None`: all."""

    @property
    def held(self) -> tuple[int, int]:
        """Outputs and inputs that the rank holds."""
        return len(range(self.outputs)[self.rows or slice(None)]), len(range(self.inputs)[self.columns or slice(None)])


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
        return prod(self.shape) + self.bias * self.shape[0]

    def read(self, read: Callable[..., Tensor]) -> Weight:
        """Reads it.

        Args: `read` is called as `Checkpoint.read`.

        Raises:
            ModelError: see `Checkpoint.read`.
        """
        parts, biases = self.projections, []
        tensors = [
            read(f"{one.name}.weight", one.outputs, one.inputs, rows=one.rows, columns=one.columns) for one in parts
        ]
        if self.bias:
            biases = [read(f"{one.name}.bias", one.outputs, rows=one.rows) for one in parts]
        return Weight(_joined(tensors), _joined(biases) if biases else None)


@dataclass(frozen=True)
class Weight:
    """A matrix `[outputs, inputs]`, contiguous, of numbers in the dtype that is computed in; and a bias `[outputs]`."""

    matrix: Tensor
    bias: Tensor | None = None

    def times(
        self, rows: Tensor, *, norm: Tensor | None = None, eps: float = 0.0, onto: Tensor | None = None
    ) -> Tensor:
        """The product of `rows` `[n, inputs]` with it, `[n, outputs]`; see `kernels.linear`."""
        return linear(rows, self.matrix, self.bias, norm=norm, eps=eps, onto=onto)

    @property
    def rows_are_independent(self) -> bool:
        """Whether a row of a step has the same product, bit by bit, whatever rows come with it."""
        return products_are_independent(self.matrix.device, self.matrix.dtype)

    def tensors(self) -> Iterator[Tensor]:
        """What is held."""
        yield self.matrix
        if self.bias is not None:
            yield self.bias


@dataclass(frozen=True)
class GatedMlp:
    """The MLP of a layer, or a rank's part of it."""

    gate_up: Weight
    down: Weight

    @property
    def weights(self) -> tuple[Weight, ...]:
        return self.gate_up, self.down

    def of(self, rows: Tensor, *, norm: Tensor, eps: float, onto: Tensor | None = None) -> Tensor:
        """What it gives for `rows` `[n, hidden]`, with the norm before it; see `kernels.gated_mlp`."""
        return gated_mlp(rows, norm, eps, self.gate_up.matrix, self.down.matrix, onto=onto)


@dataclass(frozen=True)
class ModelMatrices:
    """All that a rank holds of a model."""

    qkv: Matrix
    """Of each layer, as are the next three; the names are those within a layer."""
    o: Matrix
    gate_up: Matrix
    down: Matrix
    embedding: Matrix
    head: Matrix | None
    """`None` where it is the embedding."""
    head_rows: int
    """Of the largest part of the output head; the last ranks' parts may be smaller."""
    num_layers: int
    vectors: int
    """Numbers of a layer's norms and of what is added behind its sums over ranks."""

    @classmethod
    def of(cls, config: ModelConfig, split: Split | None = None) -> ModelMatrices:
        """Those of a rank's part of the model; of all of it where no part is given."""
        split = split or Split.of(config, ALONE)
        hidden, intermediate, size = config.hidden_size, config.intermediate_size, config.head_dim
        num_queries, num_keys = config.num_heads * size, config.num_kv_heads * size
        queries, keys = (slice(part.start * size, part.stop * size) for part in (split.heads, split.kv_heads))
        of_keys = (Projection(f"self_attn.{name}_proj", num_keys, hidden, keys) for name in "kv")
        of_mlp = (Projection(f"mlp.{name}_proj", intermediate, hidden, split.mlp) for name in ("gate", "up"))
        head = Projection("lm_head", config.vocab_size, hidden, split.vocabulary)
        return cls(
            qkv=Matrix((Projection("self_attn.q_proj", num_queries, hidden, queries), *of_keys), bias=config.qkv_bias),
            o=Matrix((Projection("self_attn.o_proj", hidden, num_queries, columns=queries),)),
            gate_up=Matrix(tuple(of_mlp)),
            down=Matrix((Projection("mlp.down_proj", hidden, intermediate, columns=split.mlp),)),
            embedding=Matrix((Projection("model.embed_tokens", config.vocab_size, hidden),)),
            head=None if config.tie_word_embeddings else Matrix((head,)),
            head_rows=split.vocabulary_room,
            num_layers=config.num_layers,
            vectors=hidden * (2 + config.o_bias) + 2 * size * config.qk_norm,
        )

    @property
    def numbers(self) -> int:
        """All of them; of the output head as many rows as the rank with the most has."""
        hidden, layer = self.embedding.shape[1], (self.qkv, self.o, self.gate_up, self.down)
        layers = self.num_layers * (sum(matrix.numbers for matrix in layer) + self.vectors)
        return layers + self.embedding.numbers + (self.head is not None) * self.head_rows * hidden + hidden

    @property
    def numbers_of_a_pass(self) -> int:
        """Those that every pass multiplies rows by: all but the embedding, of which rows are looked up."""
        whole = self.numbers - self.embedding.numbers
        return whole if self.head else whole + self.head_rows * self.embedding.shape[1]

    def num_bytes(self, dtype: torch.dtype) -> int:
        """What they take in memory."""
        return self.numbers * dtype.itemsize

    def bytes_of_a_pass(self, dtype: torch.dtype) -> int:
        """What of them every pass reads."""
        return self.numbers_of_a_pass * dtype.itemsize


def num_parameters(config: ModelConfig) -> int:
    """Number of a model's weights; a tied output head is not counted again."""
    return ModelMatrices.of(config).numbers


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
