"""The decoder, for Llama and similar architectures: token ids in, logits out; attention is computed by the cache.

Decoding, prefill, verification and both draft tiers are the same `forward` with another cache and another number of
tokens. On several ranks each computes its part of every layer; two sums per layer and one gather of the logits join the
parts. The decoder does not know where keys are stored, at which positions, or how tokens are sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.layers import rms_norm, rows_are_independent
from ..kernels.selection import STEP_ROWS
from .errors import ModelError
from .matrices import ExpertMlps, GatedMlp, Matrix, Mlp, ModelMatrices, Weight, layer_prefix
from .model.config import ModelConfig
from .parallel.ranks import ALONE, Ranks
from .parallel.split import Split
from .rope import Rope
from .weights.checkpoint import Checkpoint

PREFILL_ROWS = 4096
"""Tokens that are computed together in a layer at most, which bounds the activations of a long prefill."""

TAIL_ROWS = 1024
"""The same for the last tokens of a prompt, behind the last whole `PREFILL_ROWS`."""

PREFILL_TOKENS = 131_072
"""Tokens of a longer prompt that go through all layers before the next ones do, which bounds their hidden states: of a
million tokens these would take 8 GiB at a width of 4,096. Keys and values that stream cross the link again for each
part, which of so many tokens takes a hundredth of the time of their attention."""


@dataclass(frozen=True)
class Tiling:
    """How the rows of a prompt are computed together, in tokens."""

    prefill_rows: int = PREFILL_ROWS
    tail_rows: int = TAIL_ROWS
    prefill_tokens: int = PREFILL_TOKENS

    def tiles(self, start: int, n: int, stop: int | None = None) -> list[int]:
        """The tokens of each part of a pass over `n` tokens from position `start` on.

        A part ends at a multiple of `prefill_rows`, and behind the last of those at multiples of `tail_rows`: another
        number of rows rounds otherwise, so parts must not depend on where a reading began, if that was where one
        begins.

        Args: `stop` is where the prompt ends, if not behind these tokens.
        """
        if n <= STEP_ROWS:
            return [n]
        found, position, end = [], start, start + n
        whole = self.whole(end if stop is None else stop)
        while position < end:
            size = self.prefill_rows if position < whole else self.tail_rows
            found.append(min(end, (position // size + 1) * size) - position)
            position += found[-1]
        return found

    def prefill_stops(self, start: int, stop: int) -> list[int]:
        """Where passes over the tokens from `start` to `stop` end, each of them over at most `prefill_tokens` and a
        few. They have the same `tiles` as one pass over all, and the last one is not so short that it would be taken
        for a step."""
        first = (start // self.prefill_tokens + 1) * self.prefill_tokens
        return [*range(first, stop - self.prefill_rows, self.prefill_tokens), stop]

    def shareable(self, common: int, length: int, other: int) -> int:
        """Of `common` tokens that two prompts of these lengths begin with, those whose parts are the same in both."""
        whole, other_whole = self.whole(length), self.whole(other)
        if whole == other_whole and common >= whole:
            return common // self.tail_rows * self.tail_rows
        return min(common // self.prefill_rows * self.prefill_rows, whole, other_whole)

    def whole(self, length: int) -> int:
        """Of a prompt's tokens those in parts of `prefill_rows`. The last `tail_rows` are not: where prompts that begin
        alike end with questions of their own, these do not take so large a part from what the prompts share."""
        return max(0, length - self.tail_rows) // self.prefill_rows * self.prefill_rows


TILING = Tiling()


class Cache(Protocol):
    """Keeps the keys and values of the tokens so far, and computes attention of new queries to them."""

    @property
    def length(self) -> int:
        """Tokens in the cache, which is the position of the next token."""
        ...

    def prepare(self, n: int) -> None:
        """Announces a pass of `n` tokens; called before the first layer's `attend`."""
        ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Appends `n` tokens to a layer and computes causal attention to these and all earlier ones.

        Args:
            layer: layers are called in ascending order, each with the same tokens in one or several parts.
            q: `[num_heads, n, head_dim]`, not yet rotated.
            k, v: `[num_kv_heads, n, head_dim]`, keys not yet rotated.

        Returns:
            `[num_heads, n, head_dim]` in `q`'s dtype.
        """
        ...

    def rollback(self, length: int) -> None:
        """Removes every token from position `length` on, exactly as if they had never been added."""
        ...


@dataclass(frozen=True)
class _Layer:
    """This rank's weights of one layer."""

    input_norm: Tensor  # [hidden]
    qkv: Weight  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden]
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    o: Weight  # [hidden, num_heads * head_dim]
    o_bias: Tensor | None  # [hidden], added behind the sum over ranks
    attention_norm: Tensor | None  # [hidden], behind attention
    post_norm: Tensor  # [hidden]
    mlp: Mlp
    mlp_norm: Tensor | None  # [hidden], behind the MLP

    def tensors(self) -> Iterator[Tensor]:
        """What is held."""
        of_attention = self.input_norm, self.q_norm, self.k_norm, self.o_bias, self.attention_norm
        vectors = *of_attention, self.post_norm, self.mlp_norm
        yield from (vector for vector in vectors if vector is not None)
        for weight in (self.qkv, self.o, *self.mlp.weights):
            yield from weight.tensors()


class Decoder:
    """A Llama-shaped decoder, or one rank's part of it, with its weights on one device."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        device: torch.device,
        ranks: Ranks = ALONE,
        tiling: Tiling = TILING,
    ) -> None:
        """Reads the weights, or this rank's part of them.

        Args:
            ranks: those that share the model.
            tiling: how the rows of a long pass are computed together.

        Raises:
            ModelError: see `Checkpoint`.
            UsageError: the model's heads cannot be split over so many ranks.
        """
        split = Split.of(config, ranks)
        self.config = config
        self.part = split.config(config)
        """The heads and the MLP width that this rank holds."""
        self._kv_heads = split.kv_heads
        self.ranks = ranks
        self.tiling = tiling
        self.device = device
        self.rope = Rope(config, device)
        self.matrices = matrices = ModelMatrices.of(config, split)
        self._embedding = matrices.embedding.read(checkpoint, "", config.quantisation)
        self._layers = [_read_layer(config, matrices, checkpoint, i) for i in range(config.num_layers)]
        self._norm = _read_norm(config, checkpoint, "model.norm", config.hidden_size)
        tied = self._embedding.outputs(split.vocabulary)
        self._head = matrices.head.read(checkpoint, "", config.quantisation) if matrices.head else tied
        self._missing_logits = matrices.head_rows - len(range(config.vocab_size)[split.vocabulary])
        self.dtype = checkpoint.dtype
        # What a scaled embedding is multiplied by is rounded, as it is in `transformers`.
        self._root = torch.tensor(config.hidden_size**0.5, dtype=self.dtype).item()
        checkpoint.check_all_read()

    @classmethod
    def load(
        cls,
        directory: Path,
        config: ModelConfig | None = None,
        *,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks = ALONE,
        tiling: Tiling = TILING,
    ) -> Decoder:
        """Builds the model of a Hugging Face directory, or the part of it that is this rank's.

        Args: `config` is another configuration than the directory's.

        Raises:
            ModelError: see `ModelConfig.load` and `Checkpoint`.
            UsageError: the model's heads cannot be split over so many ranks.
        """
        config = config or ModelConfig.load(directory)
        return cls(config, Checkpoint(directory, dtype, device), device, ranks, tiling)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        cache: Cache,
        *,
        num_logits: int = 1,
        on_progress: Callable[[float], None] | None = None,
        stop: int | None = None,
    ) -> Tensor:
        """Runs `n` tokens that follow those in `cache` through the model, layer by layer, and adds them to the cache.

        All tokens pass one layer before the next begins, so that a long prompt needs the keys of one layer at a time.

        Args:
            token_ids: `[n]` int64.
            num_logits: number of last tokens whose logits are computed.
            on_progress: called after each part of a layer with the share of the work that is done, 0 to 1.
            stop: see `Tiling.tiles`.

        Returns:
            Logits `[num_logits, vocab_size]`, float32, the same on every rank.
        """
        slices = self.slices(token_ids, cache, num_logits=num_logits, on_progress=on_progress, stop=stop)
        while True:
            try:
                next(slices)
            except StopIteration as end:
                return end.value

    def slices(
        self,
        token_ids: Tensor,
        cache: Cache,
        *,
        num_logits: int = 1,
        on_progress: Callable[[float], None] | None = None,
        stop: int | None = None,
    ) -> Generator[None, None, Tensor]:
        """`forward` in slices: the same operations, with stops between them. The first takes memory, the last computes
        the logits, and each between them the attention or the MLP of one part of the rows in one layer. Needs inference
        mode.

        Between two slices other passes may run, if `cache` has what it prepared for this one afterwards. On several
        ranks a slice that failed on one, but for the last, has ended on the others, with numbers of no use.
        """
        start = cache.length
        cache.prepare(token_ids.shape[0])
        hidden = self._embedded(token_ids)
        parts = self.tiling.tiles(start, hidden.shape[0], stop)
        work = _Progress(self.config, start, hidden.shape[0], on_progress)
        yield
        for index, layer in enumerate(self._layers):
            for rows in hidden.split(parts):
                self._attention(index, layer, rows, cache)
                yield
                self._mlp(layer, rows)
                work.add(rows.shape[0])
                yield
        return self._logits(hidden[-num_logits:])

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors on the device, by part: `weights`, and `rope` of its tables."""
        kept = [*self._embedding.tensors(), self._norm, *self._head.tensors()]
        yield from (("weights", tensor) for tensor in kept)
        yield from (("weights", tensor) for layer in self._layers for tensor in layer.tensors())
        yield from self.rope.held()

    @property
    def rows_are_independent(self) -> bool:
        """Whether a row of a step has the same logits, bit by bit, whatever rows come with it."""
        weights = [self._head, *(one for layer in self._layers for one in (layer.qkv, layer.o, *layer.mlp.weights))]
        attention = rows_are_independent(self.device, self.dtype, self.part.head_dim)
        return attention and all(weight.rows_are_independent(self.dtype) for weight in weights)

    @property
    def waits_in_steps(self) -> bool:
        """Whether the host waits for the device within a step, which then cannot be captured."""
        return any(isinstance(layer.mlp, ExpertMlps) and layer.mlp.waits for layer in self._layers)

    def mean_over_copies(self, values: list[Tensor]) -> list[Tensor]:
        """`values`, each `[num_kv_heads of this rank, m]`, averaged over the ranks that hold the same KV head."""
        whole = self.config.num_kv_heads
        if self.ranks.size <= whole:
            return values
        joined = values[0].new_zeros(len(values), whole, values[0].shape[1])
        joined[:, self._kv_heads] = torch.stack(values)
        self.ranks.sum(joined, "all_reduce_chunks").mul_(whole / self.ranks.size)
        return list(joined[:, self._kv_heads])

    def _embedded(self, token_ids: Tensor) -> Tensor:
        """What layer 0 gets, `[n, hidden]`."""
        hidden = self._embedding.looked_up(token_ids, self.dtype)
        return hidden.mul_(self._root) if self.config.scaled_embedding else hidden

    def _attention(self, index: int, layer: _Layer, rows: Tensor, cache: Cache) -> None:
        """Adds a layer's attention to `rows` `[n, hidden]`."""
        if self.ranks.size == 1 and layer.o_bias is None and layer.attention_norm is None:
            layer.o.times(self._heads(index, layer, rows, cache), onto=rows)
            return
        out = self._sum(rows, lambda: layer.o.times(self._heads(index, layer, rows, cache)))
        if layer.o_bias is not None:
            out += layer.o_bias
        rows += out if layer.attention_norm is None else self._rms_norm(out, layer.attention_norm)

    def _heads(self, index: int, layer: _Layer, rows: Tensor, cache: Cache) -> Tensor:
        """What this rank's heads give for `rows`, `[n, num_heads * head_dim]`."""
        config = self.part
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = layer.qkv.times(rows, norm=layer.input_norm, eps=config.rms_norm_eps)
        qkv = qkv.view(rows.shape[0], heads + 2 * kv_heads, config.head_dim).transpose(0, 1)
        q, k, v = qkv.split((heads, kv_heads, kv_heads))
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._rms_norm(q, layer.q_norm), self._rms_norm(k, layer.k_norm)
        out = cache.attend(index, q, k, v)  # [num_heads, n, head_dim]
        return out.transpose(0, 1).reshape(rows.shape[0], heads * config.head_dim)

    def _mlp(self, layer: _Layer, rows: Tensor) -> None:
        """Adds a layer's MLP to `rows` `[n, hidden]`."""
        norm, eps = layer.post_norm, self.config.rms_norm_eps
        if self.ranks.size == 1 and layer.mlp_norm is None:
            layer.mlp.of(rows, norm=norm, eps=eps, onto=rows)
            return
        out = self._sum(rows, lambda: layer.mlp.of(rows, norm=norm, eps=eps))
        rows += out if layer.mlp_norm is None else self._rms_norm(out, layer.mlp_norm)

    def _sum(self, rows: Tensor, part: Callable[[], Tensor]) -> Tensor:
        """The sum of every rank's `part` of what is added to `rows`, both `[n, hidden]`. A rank whose own fails takes
        part in it with `rows`, for which it needs no memory, as the others wait for it."""
        try:
            own = part()
        except Exception:
            self.ranks.sum(rows)
            raise
        return self.ranks.sum(own)

    def _logits(self, rows: Tensor) -> Tensor:
        part = self._head.times(rows, norm=self._norm, eps=self.config.rms_norm_eps)
        if self._missing_logits:
            part = F.pad(part, (0, self._missing_logits))
        return self.ranks.gather_columns(part)[:, : self.config.vocab_size].float()

    def _rms_norm(self, rows: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(rows, weight, self.config.rms_norm_eps)


def forward_work(config: ModelConfig, start: int, n: int) -> float:
    """Multiplications of a forward of `n` tokens after `start` others, attention included."""
    attention = 2 * config.num_heads * config.head_dim * (start + n / 2)
    return n * (ModelMatrices.of(config).numbers_of_a_row + config.num_layers * attention)


class _Progress:
    """Reports the progress of a forward as a share of its multiplications, attention included."""

    def __init__(self, config: ModelConfig, start: int, n: int, callback: Callable[[float], None] | None) -> None:
        self._callback, self._config = callback, config
        self._start, self._n, self._row = start, n, 0
        self._done = 0.0
        self._total = forward_work(config, start, n) if callback else 0.0

    def add(self, n: int) -> None:
        if self._callback is None:
            return
        self._done += forward_work(self._config, self._start + self._row, n) / self._config.num_layers
        self._row = (self._row + n) % self._n
        self._callback(min(1.0, self._done / self._total))


def _read_layer(config: ModelConfig, matrices: ModelMatrices, checkpoint: Checkpoint, index: int) -> _Layer:
    def read(name: str, *shape: int) -> Tensor:
        return checkpoint.read(f"{prefix}{name}", *shape)

    def norm(name: str, width: int) -> Tensor:
        return _read_norm(config, checkpoint, f"{prefix}{name}", width)

    def weight(matrix: Matrix) -> Weight:
        return matrix.read(checkpoint, prefix, config.quantisation)

    prefix = layer_prefix(index)
    hidden, head_dim, behind = config.hidden_size, config.head_dim, config.norms_behind
    return _Layer(
        input_norm=norm("input_layernorm", hidden),
        qkv=weight(matrices.qkv),
        q_norm=norm("self_attn.q_norm", head_dim) if config.qk_norm else None,
        k_norm=norm("self_attn.k_norm", head_dim) if config.qk_norm else None,
        o=weight(matrices.o),
        o_bias=read("self_attn.o_proj.bias", hidden) if config.o_bias else None,
        attention_norm=norm("post_attention_layernorm", hidden) if behind else None,
        post_norm=norm("pre_feedforward_layernorm" if behind else "post_attention_layernorm", hidden),
        mlp=_read_mlp(config, matrices, checkpoint, prefix),
        mlp_norm=norm("post_feedforward_layernorm", hidden) if behind else None,
    )


def _read_norm(config: ModelConfig, checkpoint: Checkpoint, name: str, width: int) -> Tensor:
    """What a norm multiplies by."""
    norm = checkpoint.read(f"{name}.weight", width, dtype=torch.float32 if config.float32_norms else None)
    return norm.add_(1.0) if config.zero_centred_norms else norm


def _read_mlp(config: ModelConfig, matrices: ModelMatrices, checkpoint: Checkpoint, prefix: str) -> Mlp:
    """Raises:
    ModelError: see `Checkpoint`; or experts are not all stored alike.
    """
    of_mlps, in_few_bits = matrices.mlps, config.quantisation
    read = [[matrix.read(checkpoint, prefix, in_few_bits) for matrix in both] for both in of_mlps]
    mlps = [GatedMlp(gate_up, down, config.activation) for gate_up, down in read]
    if config.experts is None or matrices.router is None:
        return mlps[0]
    sizes = {tuple(one.num_bytes(torch.float32, in_few_bits, prefix) for one in both) for both in of_mlps}
    if len(sizes) > 1:
        raise ModelError(f"the experts of {prefix.removesuffix('.')} are not all stored alike, which is not supported")
    (router,) = matrices.router.projections
    chooses = checkpoint.read(f"{prefix}{router.name}.weight", *router.held, dtype=torch.float32)
    return ExpertMlps.of_experts(chooses, mlps, config.experts.used, normalised=config.experts.normalised)
