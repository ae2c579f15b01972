"""The Llama-shaped decoder that `train_pair.py` trains, and its losses.

Parameter names are those of `transformers`' `LlamaForCausalLM`, so a state dict saved from here opens there. The
class exists because training wants what that class does not offer: positions with gaps inside one sequence
(transformers takes a jump for the border of a packed sequence), blocks that compile as one region, and a loss that
never holds all logits at once. Nothing here knows about texts, tokenizers or schedules.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LOGIT_PER_FREQUENCY = 6.0  # of the planted look at the token before, per RoPE frequency used
LOGIT_OF_NEARNESS = 0.6  # of the other heads' planted preference for near tokens, per RoPE frequency
LOGIT_OF_MATCH = 25.0  # of the planted match of a token with its code
STILL_SPAN, STILL_TURNS, STILL_FACTOR = 4096, (1.0, 4.0), 4096.0
LOSS_ROWS = 2048  # rows of logits held at a time: 2,048 x 4,096 floats are 32 MB


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder; `width` is the hidden size and `mlp` the width inside the MLP.

    With `still`, RoPE is that of Llama 3.1, set so that pairs of dimensions that turn less than once in 4,096 tokens
    hardly turn at all, and those that turn four times or more are as without: half of each head then sees content
    alone, however far it is.
    """

    layers: int
    width: int
    heads: int
    head_dim: int
    mlp: int
    vocab: int = 5440
    rope_theta: float = 1e6
    max_positions: int = 131072
    eps: float = 1e-5
    still: bool = False

    @property
    def rope(self) -> dict:
        """The `rope_parameters` of `config.json`."""
        if not self.still:
            return {"rope_type": "default", "rope_theta": self.rope_theta}
        return {
            "rope_type": "llama3",
            "rope_theta": self.rope_theta,
            "factor": STILL_FACTOR,
            "low_freq_factor": STILL_TURNS[0],
            "high_freq_factor": STILL_TURNS[1],
            "original_max_position_embeddings": STILL_SPAN,
        }

    @property
    def inverse_frequencies(self) -> Tensor:
        """Radians a position, [head_dim / 2] in float32."""
        inverse = self.rope_theta ** -(torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim)
        if not self.still:
            return inverse
        low, high = STILL_TURNS
        kept = ((STILL_SPAN * inverse / (2 * math.pi) - low) / (high - low)).clamp(0.0, 1.0)
        return inverse * kept + inverse / STILL_FACTOR * (1 - kept)

    @classmethod
    def of(cls, config: dict) -> "Shape":
        """The shape that a `config.json` written here describes."""
        return cls(
            layers=config["num_hidden_layers"],
            width=config["hidden_size"],
            heads=config["num_attention_heads"],
            head_dim=config["head_dim"],
            mlp=config["intermediate_size"],
            vocab=config["vocab_size"],
            rope_theta=config["rope_parameters"]["rope_theta"],
            still=config["rope_parameters"]["rope_type"] == "llama3",
        )

    def config(self) -> dict:
        """The contents of the `config.json` that describes this shape."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab,
            "hidden_size": self.width,
            "intermediate_size": self.mlp,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.eps,
            "rope_parameters": self.rope,
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "dtype": "bfloat16",
        }


FIRST = Shape(layers=6, width=256, heads=4, head_dim=64, mlp=688, vocab=4096)
TARGET = Shape(layers=6, width=320, heads=4, head_dim=64, mlp=688, still=True)
DRAFT = Shape(layers=2, width=160, heads=5, head_dim=32, mlp=416)


def rotary(positions: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of RoPE [B, 1, n, head_dim], float32, at `positions` [B, n]; `inverse`: [head_dim / 2]."""
    angle = positions[:, None, :, None].float() * inverse.to(positions.device)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE in the half-split layout of Llama checkpoints; x: [B, heads, n, head_dim]."""
    left, right = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-right, left), dim=-1) * sin).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, crowd: Tensor | None) -> Tensor:
    """Causal attention, all [B, heads, n, head_dim]; `crowd` [B, n] is added to every logit of a key.

    A key with log(w) added counts as w keys, so a sample of 8K can be attended as one of 32K whose far part is this
    part w times over: the model learns to keep its attention off the crowd without paying for the crowd. The addend
    travels as one more dimension of the heads (eight, for alignment), which keeps the fused causal kernels usable.
    """
    if crowd is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    head_dim = q.shape[-1]
    one = torch.full_like(q[..., :1], head_dim**0.5)
    extra = crowd[:, None, :, None].to(k.dtype).expand_as(k[..., :1])
    q, k, v = (
        F.pad(torch.cat((q, one), -1), (0, 7)),
        F.pad(torch.cat((k, extra), -1), (0, 7)),
        F.pad(v, (0, 8)),
    )
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=head_dim**-0.5)
    return out[..., :head_dim]


class Attention(nn.Module):
    """Causal multi-head attention over the whole sequence."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.heads = shape.heads
        inner = shape.heads * shape.head_dim
        self.q_proj = nn.Linear(shape.width, inner, bias=False)
        self.k_proj = nn.Linear(shape.width, inner, bias=False)
        self.v_proj = nn.Linear(shape.width, inner, bias=False)
        self.o_proj = nn.Linear(inner, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, crowd: Tensor | None) -> Tensor:
        batch, n, _ = x.shape
        q, k, v = (
            project(x).view(batch, n, self.heads, -1).transpose(1, 2)  # [B, heads, n, head_dim]
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = attend(rotate(q, cos, sin), rotate(k, cos, sin), v, crowd)
        return self.o_proj(out.transpose(1, 2).reshape(batch, n, -1))


class Mlp(nn.Module):
    """The SwiGLU feed-forward of Llama."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.mlp, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.mlp, bias=False)
        self.down_proj = nn.Linear(shape.mlp, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One decoder layer: attention and MLP, each behind an RMSNorm and added to the residual stream."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.width, eps=shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.width, eps=shape.eps)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, crowd: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, crowd)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Token ids [B, n] and positions [B, n] to normalised hidden states [B, n, width]; `logits` projects those."""

    def __init__(self, shape: Shape, compiled: bool = False):
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.width)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=shape.eps)
        self._block = compile_if(compiled, _run_block)
        self._initialise()

    def _initialise(self) -> None:
        for name, weight in self.named_parameters():
            if name == "embed_tokens.weight":
                nn.init.normal_(weight, std=0.04)
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(weight)
            elif weight.ndim == 2:
                nn.init.normal_(weight, std=0.5 * weight.shape[1] ** -0.5)

    def forward(
        self, ids: Tensor, positions: Tensor, crowd: Tensor | None = None, sizes: list[Tensor] | None = None
    ) -> Tensor:
        """Hidden states; `sizes` takes the logarithms [B, n] of what enters each layer, as a root mean square."""
        cos, sin = rotary(positions, self.shape.inverse_frequencies)
        x = self.embed_tokens(ids)
        for layer in self.layers:
            if sizes is not None:
                sizes.append(0.5 * x.square().mean(-1).log())
            x = self._block(layer, x, cos, sin, crowd)
        return self.norm(x)

    def trace(self, ids: Tensor, layer: int, after_attention: bool = False) -> Tensor:
        """The residual stream [B, n, width] where it enters a layer, or its MLP."""
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        cos, sin = rotary(positions, self.shape.inverse_frequencies)
        x = self.embed_tokens(ids)
        for block in self.layers[:layer]:
            x = block(x, cos, sin, None)
        if after_attention:
            block = cast(Block, self.layers[layer])
            x = x + block.self_attn(block.input_layernorm(x), cos, sin, None)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Unnormalised log-probabilities [..., vocab] of the token after each hidden state."""
        return F.linear(hidden, self.embed_tokens.weight)

    def hf_state(self) -> dict[str, Tensor]:
        """Weights in bfloat16 under the names of a `LlamaForCausalLM` checkpoint, which ties the output projection."""
        return {
            f"model.{name}": w.detach().to("cpu", torch.bfloat16).contiguous() for name, w in self.state_dict().items()
        }

    def load_hf_state(self, state: dict[str, Tensor]) -> None:
        """The inverse of `hf_state`."""
        self.load_state_dict({name.removeprefix("model."): weight.float() for name, weight in state.items()})


def compile_if(compiled: bool, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function, dynamic=False) if compiled else function


def _run_block(block: Block, x: Tensor, cos: Tensor, sin: Tensor, crowd: Tensor | None) -> Tensor:
    return block(x, cos, sin, crowd)


@torch.no_grad()
def plant_attention(model: Decoder) -> None:
    """Starts a fresh model with a circuit that continues repeated sequences ("induction", arXiv 2209.11895).

    Left to gradient descent it did not emerge within the tokens of a CPU schedule here. One head of the first layer
    looks at the token before, by position alone, through a direction all embeddings share, and notes a code of it.
    Two heads of the second look for the place whose note is the code of the current token, in those dimensions that
    RoPE turns slowly, and copy what stands there. Training then owns these weights like all others.
    """
    shape = model.shape
    width, head_dim, half = shape.width, shape.head_dim, shape.head_dim // 2
    basis = torch.linalg.qr(torch.randn(width, width)).Q.T  # orthonormal rows
    shared, rest = basis[0], basis[1:]
    embedding = model.embed_tokens.weight
    embedding -= embedding @ shared[:, None] * shared
    common = 0.5 * embedding.norm(dim=1).mean()
    embedding += common * shared
    spread = embedding.norm(dim=1).mean()
    level = width**0.5 * common / spread  # of the shared direction in a normalised hidden state
    token = (width - width * (common / spread) ** 2) ** 0.5  # norm of the rest of it

    fast, slow = half * 3 // 8, half * 7 // 16
    slow_rows = torch.cat((torch.arange(slow, half), torch.arange(half + slow, head_dim)))
    size = len(slow_rows)
    codes, notes = rest[:size], rest[size : 2 * size]
    code_norm = token * (size / width) ** 0.5

    first, second = (cast(Block, layer).self_attn for layer in model.layers[:2])
    peak = (LOGIT_PER_FREQUENCY * head_dim**0.5) ** 0.5 / level
    turn = shape.rope_theta ** -(torch.arange(fast) / half)
    query, key = torch.zeros(head_dim), torch.zeros(head_dim)
    query[:fast], query[half : half + fast], key[:fast] = turn.cos(), -turn.sin(), 1.0
    first.q_proj.weight[:head_dim] = peak * query[:, None] * shared
    first.k_proj.weight[:head_dim] = peak * key[:, None] * shared
    first.v_proj.weight[:head_dim] = 0.0
    first.v_proj.weight[:size] = codes
    first.o_proj.weight[:, :size] = notes.T * (0.5 * spread / code_norm)

    match = (LOGIT_OF_MATCH * head_dim**0.5) ** 0.5 / code_norm
    for head in range(2):
        rows = slice(head * head_dim, (head + 1) * head_dim)
        for projection, directions in ((second.q_proj, codes), (second.k_proj, 1.5 * notes)):
            placed = torch.zeros(head_dim, width)
            placed[slow_rows] = match * directions
            projection.weight[rows] = placed
        copied = rest[torch.arange(head * head_dim, (head + 1) * head_dim) % len(rest)]
        second.v_proj.weight[rows] = copied
        second.o_proj.weight[:, rows] = copied.T * (2.0 * spread / token)

    nearness = (LOGIT_OF_NEARNESS * head_dim**0.5) ** 0.5 / level * shared
    for index, layer in enumerate(model.layers):
        attention = cast(Block, layer).self_attn
        for head in range((1, 2, 0)[min(index, 2)], shape.heads):
            rows = slice(head * head_dim, head * head_dim + half)
            attention.q_proj.weight[rows] += nearness
            attention.k_proj.weight[rows] += nearness


class Losses:
    """Losses whose logits never exist all at once, each with its backward pass.

    The logits of a long sample do not fit in the cache (nor, at 32K, comfortably in memory), so they are made, used
    and dropped `LOSS_ROWS` at a time, and the hidden states receive the summed gradient once.
    """

    def __init__(self, compiled: bool = False):
        self._prediction = compile_if(compiled, _prediction_loss)
        self._imitation = compile_if(compiled, _imitation_loss)

    def predict(
        self, model: Decoder, hidden: Tensor, targets: Tensor, weights: Tensor, more: Tensor | None = None
    ) -> float:
        """Mean cross-entropy in nats of `targets` [B, n], weighted by `weights` [B, n]; `more` [] is what to lower
        besides.
        """
        embedding = model.embed_tokens.weight

        def part(rows: slice, h: Tensor) -> Tensor:
            return self._prediction(h, embedding, targets.flatten()[rows], weights.flatten()[rows])

        return _backward_in_parts(hidden, part, weights.sum(), more)

    def imitate(
        self, model: Decoder, hidden: Tensor, teacher: Decoder, wanted: Tensor, weights: Tensor, agreement: float = 0.0
    ) -> float:
        """Mean loss in nats against the teacher's distribution; `wanted`: its hidden states [B, n, its width].

        The share `agreement` of it is the negative logarithm of the overlap, which is what acceptance counts, and the
        rest is cross-entropy, which also learns where the two do not overlap yet.
        """
        ours, theirs = model.embed_tokens.weight, teacher.embed_tokens.weight.detach()
        wanted = wanted.flatten(0, 1)

        def part(rows: slice, h: Tensor) -> Tensor:
            return self._imitation(h, ours, wanted[rows], theirs, weights.flatten()[rows], agreement)

        return _backward_in_parts(hidden, part, weights.sum())


def _backward_in_parts(
    hidden: Tensor, part: Callable[[slice, Tensor], Tensor], total: Tensor, more: Tensor | None = None
) -> float:
    leaf = hidden.detach().flatten(0, 1).requires_grad_()
    loss = 0.0
    for start in range(0, len(leaf), LOSS_ROWS):
        rows = slice(start, start + LOSS_ROWS)
        value = part(rows, leaf[rows]) / total.clamp(min=1.0)
        value.backward()
        loss += value.item()
    gradient = cast(Tensor, leaf.grad).view_as(hidden)
    if more is None:
        hidden.backward(gradient)
    else:
        torch.autograd.backward((hidden, more), (gradient, torch.ones_like(more)))
    return loss


def _prediction_loss(hidden: Tensor, embedding: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    losses = F.cross_entropy(F.linear(hidden, embedding).float(), targets, reduction="none")
    return (losses * weights).sum()


def _imitation_loss(
    hidden: Tensor, embedding: Tensor, wanted: Tensor, teacher: Tensor, weights: Tensor, agreement: float
) -> Tensor:
    theirs = F.linear(wanted, teacher).float().softmax(-1)
    ours = F.linear(hidden, embedding).float().log_softmax(-1)
    losses = -(theirs * ours).sum(-1)
    if agreement:
        overlap = torch.minimum(theirs, ours.exp()).sum(-1)
        losses = (1 - agreement) * losses - agreement * overlap.log()
    return (losses * weights).sum()
