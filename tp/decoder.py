"""The decoder, for Llama and similar architectures. It computes logits from token ids; the cache computes attention.

Decoding, prefill, verification and both draft tiers are the same `forward` with another cache and another number of
tokens. With several ranks, each rank computes its part of every layer; two sums per layer and one gather of the logits
join the parts. The decoder does not know where keys are stored, at which positions, or how tokens are sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.delta_rule import DeltaWeights
from ..kernels.layers import by_sigmoid, gated_norm, products_are_independent, rms_norm, rows_are_independent
from ..kernels.selection import STEP_ROWS
from .errors import CapacityError, ModelError
from .matrices import (
    ExpertMlps,
    GatedMlp,
    HostEmbedding,
    LockedMemory,
    Matrix,
    Mlp,
    ModelMatrices,
    SharedExpert,
    Weight,
)
from .model.config import ModelConfig
from .model.linear_attention import LinearAttention
from .parallel.ranks import ALONE, Ranks
from .parallel.split import Split
from .rope import Rope
from .weights.checkpoint import Checkpoint

PREFILL_ROWS = 4096
"""The maximum number of tokens that are computed together in a layer. It limits the activations of a long prefill."""

TAIL_ROWS = 1024
"""The maximum for tokens near the end of a prompt: those behind the last multiple of `PREFILL_ROWS` that is at least
`TAIL_ROWS` tokens before the end."""

PREFILL_TOKENS = 131_072
"""A longer prompt is computed in several passes of this many tokens. This limits the memory for hidden states, which
would be 8 GiB for a million tokens at a width of 4,096. Keys and values that stream cross the link again for each pass.
With this many tokens, that takes a hundredth of the time of their attention."""

END_ROWS = 256
"""See `Tiling.end_rows`; less than `STEP_ROWS`."""


@dataclass(frozen=True)
class Tiling:
    """How the rows of a prompt are divided into parts that are computed together. Sizes are in tokens."""

    prefill_rows: int = PREFILL_ROWS
    """Size of the parts up to `whole`."""
    tail_rows: int = TAIL_ROWS
    """Size of the parts behind `whole`."""
    prefill_tokens: int = PREFILL_TOKENS
    """Size of a pass of a prefill; see `prefill_stops`."""
    end_rows: int = 0
    """Size of the parts behind the last multiple of `tail_rows`, if the rows of a step do not depend on one another.
    Two prompts with the same last multiple can then share tokens up to any position behind it. 0: these rows are one
    part."""
    slice_work: int = 2**33
    """Multiplications of attention in a short slice, see `Decoder.slices`: they take about 0.05 s on two cores of an
    AMD EPYC (Zen 4). A short slice also has at least about `STEP_ROWS` rows."""

    def tiles(self, start: int, n: int, stop: int | None = None) -> list[int]:
        """The number of tokens of each part of a pass over `n` tokens from position `start` on. A step is one part.

        Parts end at multiples of `prefill_rows`; near the end of the prompt at multiples of `tail_rows`, and then at
        multiples of `end_rows`. A part with another number of rows may round differently, so parts end at fixed
        positions: wherever a prefill began, the parts are the same, if it began at the end of a part.

        Args:
            start, n: the position of the first token, and the number of tokens.
            stop: the end of the prompt; default: the end of these tokens.
        """
        if n <= STEP_ROWS:
            return [n]
        found, position, end = [], start, start + n
        stop = end if stop is None else stop
        whole, last = self.whole(stop), self._last(stop)
        while position < end:
            size = self.prefill_rows if position < whole else self.tail_rows
            if position >= last:
                size = self.end_rows or size
            found.append(min(end, (position // size + 1) * size) - position)
            position += found[-1]
        return found

    def prefill_stops(self, start: int, stop: int) -> list[int]:
        """The positions where the passes of a prefill of the tokens from `start` to `stop` end.

        A pass has at most `prefill_tokens + prefill_rows` tokens. The passes have the same `tiles` as one pass over all
        tokens. If there are several, the last is longer than `prefill_rows`, so it is not mistaken for a step.
        """
        first = (start // self.prefill_tokens + 1) * self.prefill_tokens
        return [*range(first, stop - self.prefill_rows, self.prefill_tokens), stop]

    def shareable(self, common: int, length: int, other: int) -> int:
        """How many tokens two prompts can share: those in parts that are the same in both. With `end_rows`, tokens
        behind the last multiple of `tail_rows` are shared one by one, if this multiple is the same in both.

        Args:
            common: the number of tokens with which both prompts begin.
            length, other: the lengths of the two prompts.
        """
        whole, other_whole = self.whole(length), self.whole(other)
        if self.end_rows and common >= self._last(length) == self._last(other):
            return common
        if whole == other_whole and common >= whole:
            return common // self.tail_rows * self.tail_rows
        return min(common // self.prefill_rows * self.prefill_rows, whole, other_whole)

    def parting(self, length: int) -> tuple[int, ...]:
        """Up to three positions, in ascending order: the last two positions up to which other prompts can share parts
        of a prompt of this length, and its end."""
        last = self._last(length)
        return tuple(dict.fromkeys(max(0, end) for end in (last - self.tail_rows, last, length)))

    def _last(self, length: int) -> int:
        """The last multiple of `tail_rows` in a prompt; fewer than `tail_rows` tokens follow."""
        return length // self.tail_rows * self.tail_rows

    def whole(self, length: int) -> int:
        """How many tokens of a prompt are in parts of `prefill_rows`.

        At least the last `tail_rows` tokens are in smaller parts. Prompts that begin alike may end with different
        questions, and the part with the question is not shared. The smaller it is, the more tokens are shared.
        """
        return max(0, length - self.tail_rows) // self.prefill_rows * self.prefill_rows


TILING = Tiling()


class Cache(Protocol):
    """Keeps the keys and values of the tokens so far, and computes attention of new queries to them. For layers with
    linear attention, it keeps their states, and computes the results of new tokens from these."""

    @property
    def length(self) -> int:
        """The number of tokens in the cache. It is also the position of the next token."""
        ...

    def prepare(self, n: int) -> None:
        """Announces a pass of `n` tokens; called before the first layer's `attend`."""
        ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Appends `n` tokens to a layer and computes causal attention to these and all earlier ones.

        Args:
            layer: the index among the layers with keys and values. Layers are called in ascending order, each with the
                same tokens in one or several parts.
            q: `[num_heads, n, head_dim]`, not yet rotated.
            k, v: `[num_kv_heads, n, head_dim]`, keys not yet rotated.

        Returns:
            `[num_heads, n, head_dim]` in `q`'s dtype.
        """
        ...

    def advance_states(self, layer: int, inputs: Tensor, gates: Tensor, weights: DeltaWeights) -> Tensor:
        """Advances the state of a layer by `n` tokens.

        Args:
            layer: the index among the layers with linear attention; see `attend`.
            inputs: `[n, channels]`, the inputs of the convolution for these tokens.
            gates: `[n, 2 * value_heads]`; see `kernels.delta_rule`.

        Returns:
            The results of the tokens, `[n, value_heads, value_dim]` in the dtype of `inputs`.
        """
        ...

    def keep_hidden(self, hidden: Tensor) -> None:
        """Receives the hidden states `[n, hidden]` of the `n` tokens of a pass behind the last layer, after all layers
        are computed."""
        ...

    def hidden_before(self, n: int) -> Tensor:
        """For each of the next `n` tokens, the model's hidden state of the one token before it, behind the norm:
        `[n, hidden]`. A multi-token-prediction head needs them. Called after `prepare`."""
        ...

    def rollback(self, length: int) -> None:
        """Removes every token from position `length` on, as if they had never been added. If the data for this length
        are gone, earlier tokens are removed too; afterwards, the cache's `length` says what is left."""
        ...


@dataclass(frozen=True)
class _Attention:
    """The weights of attention in a layer with keys and values."""

    inputs: Weight  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden]; with gates, query heads are twice as wide
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    o: Weight  # [hidden, num_heads * head_dim]
    o_bias: Tensor | None  # [hidden], added behind the sum over ranks

    @property
    def vectors(self) -> tuple[Tensor | None, ...]:
        """The tensors that are not matrices."""
        return self.q_norm, self.k_norm, self.o_bias


@dataclass(frozen=True)
class _LinearAttention:
    """The weights of attention in a layer with a state."""

    inputs: Weight  # [channels + values + 2 * value_heads, hidden]
    delta: DeltaWeights
    norm: Tensor  # [value_dim], for the results from the state, before they are multiplied by the gate
    o: Weight  # [hidden, values]
    o_bias = None

    @property
    def vectors(self) -> tuple[Tensor, ...]:
        """The tensors that are not matrices."""
        return *self.delta.tensors(), self.norm


@dataclass(frozen=True)
class _Layer:
    """This rank's weights of one layer."""

    place: int  # index among the layers with its kind of attention
    input_norm: Tensor  # [hidden]
    attention: _Attention | _LinearAttention
    attention_norm: Tensor | None  # [hidden], behind attention
    post_norm: Tensor  # [hidden]
    mlp: Mlp
    mlp_norm: Tensor | None  # [hidden], behind the MLP

    def tensors(self) -> Iterator[Tensor]:
        """All tensors of the layer."""
        vectors = self.input_norm, self.attention_norm, self.post_norm, self.mlp_norm, *self.attention.vectors
        yield from (vector for vector in vectors if vector is not None)
        for weight in self.weights:
            yield from weight.tensors()

    @property
    def weights(self) -> tuple[Weight, ...]:
        """All matrices."""
        return self.attention.inputs, self.attention.o, *self.mlp.weights


@dataclass(frozen=True)
class _Fusion:
    """The weights of the first operation of a multi-token-prediction head."""

    embedding_norm: Tensor  # [hidden]
    hidden_norm: Tensor  # [hidden]
    projection: Weight  # [hidden, 2 * hidden]

    def of(self, embedded: Tensor, before: Tensor, eps: float) -> Tensor:
        """Joins the embeddings of tokens and the hidden states of the tokens before them, all `[n, hidden]`."""
        both = rms_norm(embedded, self.embedding_norm, eps), rms_norm(before, self.hidden_norm, eps)
        return self.projection.times(torch.cat(both, dim=1))

    def tensors(self) -> Iterator[Tensor]:
        """All tensors."""
        yield from (self.embedding_norm, self.hidden_norm)
        yield from self.projection.tensors()


class Decoder:
    """A Llama-shaped decoder, or one rank's part of it, with its weights on one device.

    The multi-token-prediction head of a model is a decoder with one layer: see `mtp_head`.
    """

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        device: torch.device,
        ranks: Ranks = ALONE,
        tiling: Tiling = TILING,
        model: Decoder | None = None,
        host_memory: LockedMemory | None = None,
    ) -> None:
        """Reads the weights, or this rank's part of them.

        Args:
            config: that of the whole model.
            checkpoint: the source of the weights; its dtype and device are used.
            device: the device that computes.
            ranks: the ranks that share the model.
            tiling: how the rows of a long pass are computed together.
            model: for a multi-token-prediction head, the model whose embedding and output head it uses.
            host_memory: allocates host memory for the embedding, from which a GPU reads rows (`kernels.host_rows`). Not
                used if the embedding is also the output head. The embedding is on the device if this is `None`, or if
                the system refuses the memory.

        Raises:
            ModelError: see `Checkpoint`.
            UsageError: the model's heads cannot be split over this number of ranks.
        """
        split = Split.of(config, ranks)
        self.config = config
        self.part = split.config(config)
        """The heads and the MLP width that this rank holds."""
        self._kv_heads = split.kv_heads
        self.ranks = ranks
        self._tiling = tiling
        self.device = device
        self.rope = Rope(config, device)
        self.matrices = matrices = ModelMatrices.of(config, split)
        in_few_bits = config.quantisation
        self._fusion: _Fusion | None = None
        if model:
            assert matrices.fusion
            self._fusion = _Fusion(
                embedding_norm=_read_norm(config, checkpoint, "mtp.pre_fc_norm_embedding", config.hidden_size),
                hidden_norm=_read_norm(config, checkpoint, "mtp.pre_fc_norm_hidden", config.hidden_size),
                projection=matrices.fusion.read(checkpoint, "", in_few_bits),
            )
            self._embedding, self._head = model._embedding, model._head
        else:
            self._embedding = _read_embedding(matrices, checkpoint, host_memory)
        of_rank = config, self.part, split.key_heads.start, matrices, checkpoint
        self._layers = [_read_layer(*of_rank, i) for i in range(config.num_layers)]
        self._norm = _read_norm(config, checkpoint, "mtp.norm" if model else "model.norm", config.hidden_size)
        if not model:
            self._head = self._read_head(checkpoint, split.vocabulary)
        self._missing_logits = matrices.head_rows - len(range(config.vocab_size)[split.vocabulary])
        self.dtype = checkpoint.dtype
        # The factor of a scaled embedding is rounded, as in `transformers`.
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
        host_memory: LockedMemory | None = None,
    ) -> Decoder:
        """Loads the model of a Hugging Face directory, or this rank's part of it.

        Args:
            config: replaces the configuration of the directory.
            ranks, tiling, host_memory: see `__init__`.

        Raises:
            ModelError: see `ModelConfig.load` and `Checkpoint`.
            UsageError: the model's heads cannot be split over this number of ranks.
        """
        config = config or ModelConfig.load(directory)
        checkpoint = Checkpoint(directory, dtype, device)
        return cls(config, checkpoint, device, ranks, tiling, host_memory=host_memory)

    @classmethod
    def mtp_head(cls, checkpoint: Checkpoint, model: Decoder) -> Decoder:
        """The multi-token-prediction head of `model`, on the same device and ranks.

        It predicts the token after a given token from the embedding of that token and the model's hidden state of the
        token before. Its cache supplies the hidden states (`Cache.hidden_before`).

        Args:
            checkpoint: that of the head alone.
            model: the model that the head belongs to.

        Raises:
            ModelError: see `ModelConfig.mtp_head` and `Checkpoint`.
        """
        return cls(model.config.mtp_head, checkpoint, model.device, model.ranks, model._tiling, model)

    def readable(self, token_ids: Tensor) -> Tensor:
        """`token_ids` without ids that this model does not have: ids beyond its vocabulary become its last token, and
        negative ids its first. The caller must ensure that a replaced token does not stay in the text, or can
        only lower the acceptance of drafts."""
        return token_ids.clamp(0, self.config.vocab_size - 1)

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
            cache: that of the sequence; updated.
            num_logits: for how many tokens, counted from the last, logits are computed.
            on_progress: called after each part of a layer with the share of the work that is done, 0 to 1.
            stop: see `Tiling.tiles`.

        Returns:
            Logits `[num_logits, vocab_size]`, float32, the same on every rank.

        Raises:
            ValueError: `cache` has no room for the tokens.
            PeerError, HangError: with several ranks; see `Ranks`.
        """
        return _result_of(self.slices(token_ids, cache, num_logits=num_logits, on_progress=on_progress, stop=stop))

    def slices(
        self,
        token_ids: Tensor,
        cache: Cache,
        *,
        num_logits: int = 1,
        on_progress: Callable[[float], None] | None = None,
        stop: int | None = None,
        short: bool = False,
    ) -> Generator[None, None, Tensor]:
        """`forward` in slices: a generator that runs the same operations and pauses between slices. Needs inference
        mode.

        The first slice prepares the cache and looks up the embeddings, which takes memory. The last slice computes the
        logits, which the generator returns. Each slice between them computes the attention or the MLP of one part of
        the rows in one layer. With `short`, attention to many keys takes several slices, see `Tiling.slice_work`: if a
        CPU without other ranks computes it, and a row does not depend on others. This costs about 2 % of the time.

        Other passes may run between two slices, but then `cache` must again have what it prepared for this pass. If a
        slice other than the last fails on one of several ranks, it still ends on the others; their numbers are of no
        use.
        """
        start = cache.length
        cache.prepare(token_ids.shape[0])
        hidden = self._embedded(token_ids)
        if self._fusion:
            hidden = self._fusion.of(hidden, cache.hidden_before(len(token_ids)), self.config.rms_norm_eps)
        n = hidden.shape[0]
        # A step is one part. It does not need `self.tiling`, which asks every matrix.
        parts = [n] if n <= STEP_ROWS else self.tiling.tiles(start, n, stop)
        work = _Progress(self.config, start, hidden.shape[0], on_progress)
        divides = short and n > STEP_ROWS and self.is_on_one_cpu and self.rows_are_independent
        yield
        for layer in self._layers:
            keys = start
            for rows in hidden.split(parts):
                keys += len(rows)
                sizes = self._sizes(layer, len(rows), keys) if divides else None
                yield from self._attention(layer, rows, cache, sizes)
                yield
                self._mlp(layer, rows)
                work.add(rows.shape[0])
                yield
        cache.keep_hidden(hidden)
        return self._logits(hidden[-num_logits:])

    def normed(self, hidden: Tensor) -> Tensor:
        """The input of the output head for the hidden states behind the last layer, both `[n, hidden]`."""
        return self._rms_norm(hidden, self._norm)

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors on the device, each with the name of its part: `weights`, or `rope` for RoPE's tables."""
        kept = [self._norm, *(self._fusion.tensors() if self._fusion else self._head.tensors())]
        if not self._fusion and not isinstance(self._embedding, HostEmbedding):
            kept += self._embedding.tensors()
        yield from (("weights", tensor) for tensor in kept)
        yield from (("weights", tensor) for layer in self._layers for tensor in layer.tensors())
        yield from self.rope.held()

    @property
    def has_embedding_to_spare(self) -> bool:
        """Whether the embedding is on the device but could be in host memory; see `ModelMatrices.embedding_bytes`."""
        return self.matrices.embedding_bytes(self.dtype) > 0 and not isinstance(self._embedding, HostEmbedding)

    @property
    def is_on_one_cpu(self) -> bool:
        """Whether a CPU computes the model, and no other ranks compute a part of it."""
        return self.device.type == "cpu" and self.ranks.size == 1

    @property
    def tiling(self) -> Tiling:
        """How the rows of a long pass are computed together.

        The last parts have at most `END_ROWS` rows on a CPU, if the rows of a step do not depend on one another. This
        is not done with linear attention, whose states depend on where a pass ends. It is not done on several ranks
        either: they might have different kernels, but must share the same tokens.
        """
        ends = self.is_on_one_cpu and not self.part.linear and self.rows_are_independent
        return replace(self._tiling, end_rows=min(END_ROWS, self._tiling.tail_rows)) if ends else self._tiling

    @property
    def rows_are_independent(self) -> bool:
        """Whether the logits of a row of a step are the same, bit by bit, whatever other rows are in the step."""
        if not rows_are_independent(self.device, self.dtype, self.part.head_dim):
            return False
        if products_are_independent(self.device, self.dtype):  # with any weight
            return True
        weights = [self._head, *(one for layer in self._layers for one in layer.weights)]
        return all(weight.rows_are_independent(self.dtype) for weight in weights)

    @property
    def waits_in_steps(self) -> bool:
        """Whether the host waits for the device within a step. A step that waits cannot be captured."""
        return any(isinstance(layer.mlp, ExpertMlps) and layer.mlp.waits(self.dtype) for layer in self._layers)

    def mean_over_copies(self, values: list[Tensor]) -> list[Tensor]:
        """`values`, each `[num_kv_heads of this rank, m]`, averaged over the ranks that hold the same KV head."""
        whole = self.config.num_kv_heads
        if self.ranks.size <= whole:
            return values
        joined = values[0].new_zeros(len(values), whole, values[0].shape[1])
        joined[:, self._kv_heads] = torch.stack(values)
        self.ranks.sum(joined, "all_reduce_chunks").mul_(whole / self.ranks.size)
        return list(joined[:, self._kv_heads])

    def _read_head(self, checkpoint: Checkpoint, outputs: slice) -> Weight:
        if self.matrices.head:
            return self.matrices.head.read(checkpoint, "", self.config.quantisation)
        assert not isinstance(self._embedding, HostEmbedding)
        return self._embedding.outputs(outputs)

    def _embedded(self, token_ids: Tensor) -> Tensor:
        """The input of layer 0, `[n, hidden]`."""
        hidden = self._embedding.looked_up(token_ids, self.dtype)
        return hidden.mul_(self._root) if self.config.scaled_embedding else hidden

    def _sizes(self, layer: _Layer, n: int, keys: int) -> list[int] | None:
        """The numbers of rows of a part of `n` rows whose attention to up to `keys` keys is computed in a slice each;
        `None`: all in one."""
        if isinstance(layer.attention, _LinearAttention):
            return None
        window = self.part.sliding_window(layer.place)
        of_a_row = 2 * self.part.num_heads * self.part.head_dim * (min(keys, window + n) if window else keys)
        count = min(n // STEP_ROWS, n * of_a_row // self._tiling.slice_work)
        return [n // count + (i < n % count) for i in range(count)] if count > 1 else None

    def _attention(
        self, layer: _Layer, rows: Tensor, cache: Cache, sizes: list[int] | None
    ) -> Generator[None, None, None]:
        """Adds a layer's attention to `rows` `[n, hidden]`. Pauses between slices of it.

        Args: `sizes`: see `_sizes`.
        """
        part, o_bias = layer.attention, layer.attention.o_bias
        if self.ranks.size > 1:  # if a rank fails, it must still take part in the sum
            out = self._sum(rows, lambda: part.o.times(_result_of(self._heads(layer, rows, cache, None))))
        else:
            heads = yield from self._heads(layer, rows, cache, sizes)
            if o_bias is None and layer.attention_norm is None:
                part.o.times(heads, onto=rows)
                return
            out = part.o.times(heads)
        if o_bias is not None:
            out += o_bias
        rows += out if layer.attention_norm is None else self._rms_norm(out, layer.attention_norm)

    def _heads(
        self, layer: _Layer, rows: Tensor, cache: Cache, sizes: list[int] | None
    ) -> Generator[None, None, Tensor]:
        """The results of this rank's heads for `rows`, `[n, num_heads * head_dim]`."""
        inputs = layer.attention.inputs.times(rows, norm=layer.input_norm, eps=self.config.rms_norm_eps)
        if isinstance(layer.attention, _LinearAttention):
            return self._read_state(layer.place, layer.attention, inputs, cache)
        return (yield from self._attended(layer.place, layer.attention, inputs, cache, sizes))

    def _attended(
        self, place: int, attention: _Attention, qkv: Tensor, cache: Cache, sizes: list[int] | None
    ) -> Generator[None, None, Tensor]:
        config, n, gate = self.part, qkv.shape[0], None
        heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim
        if config.output_gate:
            both, kv = qkv.split((2 * heads * size, 2 * kv_heads * size), dim=1)
            q, gate = both.view(n, heads, 2, size).unbind(2)
            q = q.transpose(0, 1)
            k, v = kv.view(n, 2 * kv_heads, size).transpose(0, 1).chunk(2)
        else:
            qkv = qkv.view(n, heads + 2 * kv_heads, size).transpose(0, 1)
            q, k, v = qkv.split((heads, kv_heads, kv_heads))
        if attention.q_norm is not None and attention.k_norm is not None:
            q, k = self._rms_norm(q, attention.q_norm), self._rms_norm(k, attention.k_norm)
        if sizes is None:
            out = cache.attend(place, q, k, v).transpose(0, 1)
        else:
            outs: list[Tensor] = []
            for some in zip(q.split(sizes, dim=1), k.split(sizes, dim=1), v.split(sizes, dim=1), strict=True):
                if outs:
                    yield
                outs.append(cache.attend(place, *some).transpose(0, 1))
            out = torch.cat(outs)
        out = out.reshape(n, heads * size)  # from [n, num_heads, head_dim]
        return out if gate is None else by_sigmoid(out, gate.reshape(n, heads * size))

    def _read_state(self, place: int, attention: _LinearAttention, inputs: Tensor, cache: Cache) -> Tensor:
        linear, n = self.part.linear, inputs.shape[0]
        assert linear is not None
        values, gates = linear.value_heads * linear.value_dim, 2 * linear.value_heads
        mixed, z, of_gates = inputs.split((linear.channels, values, gates), dim=1)
        keys, together = linear.key_heads, linear.value_heads // linear.key_heads
        if linear.names.joint_gate:
            both = inputs[:, : linear.channels + values].view(n, keys, -1)
            sizes = linear.key_dim, linear.key_dim, *(together * linear.value_dim,) * 2
            q, k, v, z = (x.reshape(n, -1) for x in both.split(sizes, dim=2))
            mixed = torch.cat((q, k, v), dim=1)
        if linear.names.joint_decay:
            of_gates = torch.cat([x.reshape(n, -1) for x in of_gates.view(n, keys, -1).chunk(2, dim=2)], dim=1)
        out = cache.advance_states(place, mixed, of_gates, attention.delta)
        return gated_norm(out, z.reshape(out.shape), attention.norm, self.config.rms_norm_eps).view(n, -1)

    def _mlp(self, layer: _Layer, rows: Tensor) -> None:
        """Adds a layer's MLP to `rows` `[n, hidden]`."""
        norm, eps = layer.post_norm, self.config.rms_norm_eps
        if self.ranks.size == 1 and layer.mlp_norm is None:
            layer.mlp.of(rows, norm=norm, eps=eps, onto=rows)
            return
        out = self._sum(rows, lambda: layer.mlp.of(rows, norm=norm, eps=eps))
        rows += out if layer.mlp_norm is None else self._rms_norm(out, layer.mlp_norm)

    def _sum(self, rows: Tensor, part: Callable[[], Tensor]) -> Tensor:
        """The sum of `part` over all ranks, which is to be added to `rows`; both `[n, hidden]`.

        If `part` fails on a rank, the rank still takes part in the sum, because the others wait for it. It then sends
        `rows`, for which it needs no memory.
        """
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


def _result_of(slices: Generator[None, None, Tensor]) -> Tensor:
    """Computes all slices, and returns the result."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            return end.value


def forward_work(config: ModelConfig, start: int, n: int) -> float:
    """The number of multiplications of a forward of `n` tokens after `start` others, attention included."""
    attention = 2 * config.num_heads * config.head_dim * (start + n / 2)
    return n * (ModelMatrices.of(config).numbers_of_a_row + config.kv_layers * attention)


class _Progress:
    """Reports the progress of a forward as a share of its multiplications, attention included."""

    def __init__(self, config: ModelConfig, start: int, n: int, callback: Callable[[float], None] | None) -> None:
        self._callback, self._config = callback, config
        self._start, self._n, self._row = start, n, 0
        self._done = 0.0
        self._total = forward_work(config, start, n) if callback else 0.0

    def add(self, n: int) -> None:
        """Notes that a layer has computed `n` further rows."""
        if self._callback is None:
            return
        self._done += forward_work(self._config, self._start + self._row, n) / self._config.num_layers
        self._row = (self._row + n) % self._n
        self._callback(min(1.0, self._done / self._total))


def _read_embedding(
    matrices: ModelMatrices, checkpoint: Checkpoint, host_memory: LockedMemory | None
) -> Weight | HostEmbedding:
    """Reads the embedding; see `Decoder`. It is read to the device first, which has room as long as it is empty."""
    found = matrices.embedding.read(checkpoint, "", matrices.quantisation)
    if host_memory and matrices.head:
        with suppress(CapacityError):
            return HostEmbedding.of(found, host_memory)
    return found


def _read_layer(
    config: ModelConfig,
    part: ModelConfig,
    first_key_head: int,
    matrices: ModelMatrices,
    checkpoint: Checkpoint,
    index: int,
) -> _Layer:
    """Reads this rank's weights of one layer.

    Args:
        config: that of the whole model.
        part: that of this rank's part of the model.
        first_key_head: the first key head of linear attention in this part.
        index: that of the layer.
    """

    def read(name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return checkpoint.read(f"{prefix}{name}", *shape, dtype=dtype)

    def norm(name: str, width: int) -> Tensor:
        return _read_norm(config, checkpoint, f"{prefix}{name}", width)

    def weight(matrix: Matrix) -> Weight:
        return matrix.read(checkpoint, prefix, config.quantisation)

    prefix = matrices.prefix(index)
    hidden, head_dim, behind = config.hidden_size, config.head_dim, config.norms_behind
    of_linear = config.linear.layers if config.linear else ()
    before = sum(layer < index for layer in of_linear)
    if index in of_linear:
        assert config.linear and matrices.linear and part.linear
        attention: _Attention | _LinearAttention = _LinearAttention(
            inputs=weight(matrices.linear[0]),
            delta=_read_delta(config.linear, part.linear, first_key_head, read),
            norm=read("linear_attn.norm.weight", part.linear.value_dim),
            o=weight(matrices.linear[1]),
        )
    else:
        attention = _Attention(
            inputs=weight(matrices.qkv),
            q_norm=norm("self_attn.q_norm", head_dim) if config.qk_norm else None,
            k_norm=norm("self_attn.k_norm", head_dim) if config.qk_norm else None,
            o=weight(matrices.o),
            o_bias=read("self_attn.o_proj.bias", hidden) if config.o_bias else None,
        )
    return _Layer(
        place=before if index in of_linear else index - before,
        input_norm=norm("input_layernorm", hidden),
        attention=attention,
        attention_norm=norm("post_attention_layernorm", hidden) if behind else None,
        post_norm=norm("pre_feedforward_layernorm" if behind else "post_attention_layernorm", hidden),
        mlp=_read_mlp(config, matrices, checkpoint, prefix),
        mlp_norm=norm("post_feedforward_layernorm", hidden) if behind else None,
    )


def _read_delta(whole: LinearAttention, part: LinearAttention, first: int, read: Callable[..., Tensor]) -> DeltaWeights:
    """The weights with which a rank computes states; its first key head is `first`."""
    stop = first + part.key_heads
    keys = slice(first * whole.key_dim, stop * whole.key_dim)
    runs = whole.value_heads_of(slice(first, stop))
    heads = torch.cat([torch.arange(run.start, run.stop) for run in runs])
    conv = read("linear_attn.conv1d.weight", whole.channels, 1, whole.kernel).squeeze(1)
    heads = heads.to(conv.device)
    of_values = conv[2 * whole.keys :].unflatten(0, (whole.value_heads, -1))[heads].flatten(0, 1)
    parts = conv[keys], conv[whole.keys :][keys], of_values
    bias = read("linear_attn.dt_bias", whole.value_heads)[heads].float()
    if whole.plain_decay:
        decay = read("linear_attn.A_log", whole.value_heads, dtype=torch.float32)[heads]
    else:
        decay = -read("linear_attn.A_log", whole.value_heads)[heads].float().exp()
    taps = torch.cat(parts).float().t().contiguous()
    return DeltaWeights(taps, decay, bias, part.key_heads, whole.key_dim, whole.tiled)


def _read_norm(config: ModelConfig, checkpoint: Checkpoint, name: str, width: int) -> Tensor:
    """The factors of a norm, `[width]`."""
    norm = checkpoint.read(f"{name}.weight", width, dtype=torch.float32 if config.float32_norms else None)
    return norm.add_(1.0) if config.zero_centred_norms else norm


def _read_mlp(config: ModelConfig, matrices: ModelMatrices, checkpoint: Checkpoint, prefix: str) -> Mlp:
    """Reads the MLP or the experts of a layer.

    Raises:
        ModelError: see `Checkpoint`; or not all experts are stored in the same way.
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
    shared = None
    if matrices.shared:
        gate_up, down, gate = (matrix.read(checkpoint, prefix, in_few_bits) for matrix in matrices.shared)
        shared = SharedExpert(GatedMlp(gate_up, down), gate)
    kind = {"normalised": config.experts.normalised, "shared": shared}
    return ExpertMlps.of_experts(chooses, mlps, config.experts.used, **kind)
