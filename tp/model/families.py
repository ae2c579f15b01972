"""Supported architectures: how each differs from Llama, and the defaults for keys that its `config.json` may omit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from .linear_attention import LinearNames

MOST_EXPERTS = 4096
"""The maximum number of experts of a layer. No model has more. A file that claims more would take memory for each."""


@dataclass(frozen=True)
class ExpertNames:
    """The names that a family uses for its mixtures of experts. Names of projections are without the layer's prefix."""

    count: tuple[str, str]
    """The keys of `config.json` for the number of experts of a layer: the usual key, and another that transformers
    writes."""
    width: str
    """The key for the width of an expert."""
    router: str
    """The projection that gives each expert a logit."""
    gate: str
    """The gate projection of an expert; `{}` stands for the number of the expert."""
    up: str
    """The up projection, likewise."""
    down: str
    """The down projection, likewise."""
    normalised: bool | None = None
    """Whether the shares of a row's experts sum to 1; `None`: given by the key `norm_topk_prob`."""
    shared: str = ""
    """The beginning of the names of the expert that all rows use in addition; empty if there is none."""


@dataclass(frozen=True)
class Experts:
    """The mixture of experts that each layer has in place of one MLP.

    The result of a row is the sum over the `used` experts with the highest probabilities, weighted by these.
    """

    count: int
    """The number of experts of a layer."""
    used: int
    """The number of experts that a row uses."""
    normalised: bool
    """Whether the shares of the experts that a row uses sum to 1."""
    names: ExpertNames
    shared_width: int = 0
    """The width of the expert that all rows use, whose result is multiplied by a gate; 0 if there is none."""

    def __post_init__(self) -> None:
        """Checks the numbers of experts.

        Raises:
            ValueError: there are too few experts, or more than `MOST_EXPERTS`.
        """
        if not 1 <= self.used <= self.count <= MOST_EXPERTS:
            supported = f"from 1 to all of them, of at most {MOST_EXPERTS} experts"
            raise ValueError(f"num_experts_per_tok {self.used} of {self.count} experts (supported: {supported})")


@dataclass(frozen=True)
class Family:
    """How an architecture differs from Llama."""

    qkv_bias: bool = False
    """The projections of queries, keys and values always have a bias; the output projection has none."""
    attention_bias: bool = False
    """The key `attention_bias` is used: if true, all four projections of attention have a bias."""
    qk_norm: bool = False
    """Queries and keys have an RMS norm over `head_dim` before the rotation."""
    windows: Literal["none", "all", "all or none", "some", "most"] = "none"
    """Which layers have a sliding window.

    * `all or none`: all if `use_sliding_window` is true;
    * `some`: if `use_sliding_window` is true, those given by `layer_types` or `max_window_layers`;
    * `most`: those given by `layer_types`, or all except every `sliding_window_pattern`th. These layers have a RoPE of
      their own. `max_position_embeddings` already includes the RoPE scaling of the other layers.
    """
    activation: Literal["silu", "gelu_pytorch_tanh"] = "silu"
    """The activation of the gates of MLPs."""
    float32_norms: bool = False
    """All norms multiply in float32, before they round."""
    zero_centred_norms: bool = False
    """All norms multiply by 1 + w. If w includes the 1 in a GGUF file, the `config.json` that is made for it sets a key
    of this name to false."""
    norms_behind: bool = False
    """Attention and the MLP also have a norm behind them, before their results are added."""
    scaled_embedding: bool = False
    """Embeddings are multiplied by the square root of their width."""
    experts: ExpertNames | None = None
    """The names for mixtures of experts, if layers have these in place of MLPs."""
    linear: LinearNames | None = None
    """The names of the projections of linear attention, if some layers have it."""
    output_gate: bool = False
    """The result of attention is multiplied by the sigmoid of a gate, which is projected with the queries."""
    rotated_share: float | None = None
    """The share of a head that is rotated, unless the key `partial_rotary_factor` gives it; `None`: always all."""
    wrapped: bool = False
    """The text model is one of several models, and is described in `text_config`."""
    predicts_further: bool = False
    """Checkpoints include a multi-token-prediction head. The key `mtp_num_hidden_layers` gives its number of layers,
    by default 1."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The values of keys that are missing in `config.json`, as in `transformers`."""


_GEMMA3 = Family(
    attention_bias=True,
    qk_norm=True,
    windows="most",
    activation="gelu_pytorch_tanh",
    float32_norms=True,
    zero_centred_norms=True,
    norms_behind=True,
    scaled_embedding=True,
    defaults={
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    },
)

_QWEN_DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

_HYBRID = Family(
    attention_bias=True,
    qk_norm=True,
    float32_norms=True,
    zero_centred_norms=True,
    linear=LinearNames.of("qkv", "z", "b", "a"),
    output_gate=True,
    rotated_share=0.25,
    wrapped=True,
    predicts_further=True,
    defaults={
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
)
"""Qwen3.5."""

_EXPERTS = ExpertNames(
    count=("num_experts", "num_local_experts"),
    width="moe_intermediate_size",
    router="mlp.gate",
    gate="mlp.experts.{}.gate_proj",
    up="mlp.experts.{}.up_proj",
    down="mlp.experts.{}.down_proj",
)
"""The names that Qwen uses."""

_SHARED_EXPERTS = replace(_EXPERTS, shared="mlp.shared_expert")

_HYBRID_MOE = replace(
    _HYBRID,
    experts=replace(_SHARED_EXPERTS, normalised=True),
    defaults={
        **_HYBRID.defaults,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
)

_QWEN3_NEXT = replace(
    _HYBRID_MOE,
    experts=_SHARED_EXPERTS,
    linear=LinearNames.of("qkvz", "ba"),
    wrapped=False,
    defaults={
        **_HYBRID_MOE.defaults,
        "vocab_size": 151936,
        "num_hidden_layers": 48,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
    },
)

FAMILIES = {
    "LlamaForCausalLM": Family(attention_bias=True, defaults={"max_position_embeddings": 2048, "eos_token_id": 2}),
    "MistralForCausalLM": Family(
        windows="all",
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
            "eos_token_id": 2,
        },
    ),
    "MixtralForCausalLM": Family(
        windows="all",
        experts=ExpertNames(
            count=("num_local_experts", "num_experts"),
            width="intermediate_size",
            router="block_sparse_moe.gate",
            gate="block_sparse_moe.experts.{}.w1",
            up="block_sparse_moe.experts.{}.w3",
            down="block_sparse_moe.experts.{}.w2",
            normalised=True,
        ),
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "eos_token_id": 2,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 14336,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
    ),
    "Qwen2ForCausalLM": Family(qkv_bias=True, windows="some", defaults=_QWEN_DEFAULTS),
    "Qwen3ForCausalLM": Family(
        attention_bias=True, qk_norm=True, windows="some", defaults=_QWEN_DEFAULTS | {"head_dim": 128}
    ),
    "Qwen3MoeForCausalLM": Family(
        attention_bias=True,
        qk_norm=True,
        windows="all or none",
        experts=_EXPERTS,
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
    ),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": replace(_GEMMA3, wrapped=True),
    "Qwen3NextForCausalLM": _QWEN3_NEXT,
    "Qwen3_5ForCausalLM": replace(_HYBRID, wrapped=False),
    "Qwen3_5ForConditionalGeneration": _HYBRID,
    "Qwen3_5MoeForCausalLM": replace(_HYBRID_MOE, wrapped=False),
    "Qwen3_5MoeForConditionalGeneration": _HYBRID_MOE,
}
"""The architectures that the decoder supports, by their names in `config.json`."""


_WRAPPED = re.compile(r"(?:language_model\.|(model\.)language_model\.)(.*)")


def plain_name(name: str) -> str:
    """The name of a tensor of a text model, without the prefix that it has if the text model is one of several models.
    The prefix is `language_model.`, alone or after `model.`."""
    wrapped = _WRAPPED.fullmatch(name)
    return (wrapped[1] or "") + wrapped[2] if wrapped else name


def experts_of(family: Family, raw: dict[str, Any]) -> Experts | None:
    """Reads the mixtures of experts from a `config.json`; `None` if the family has none.

    Raises:
        KeyError, TypeError, ValueError: the number of experts is missing or impossible.
    """
    names = family.experts
    if names is None:
        return None
    usual, other = names.count
    count, normalised = raw[other if other in raw else usual], names.normalised
    if normalised is None:
        normalised = bool(raw.get("norm_topk_prob", False))
    shared_width = int(raw["shared_expert_intermediate_size"]) if names.shared else 0
    return Experts(int(count), int(raw["num_experts_per_tok"]), normalised, names, shared_width)


def sliding_windows(family: Family, raw: dict[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """For each layer, the number of tokens that a token attends to, including itself; `None` for all. Empty if no layer
    has a window.

    Raises:
        TypeError, ValueError: the window is impossible, or layer types are unknown, or there is not one for each layer.
    """
    if family.windows == "none" or (family.windows == "all or none" and not raw.get("use_sliding_window")):
        return ()
    types = ["sliding_attention"] * num_layers
    window = raw.get("sliding_window")
    if family.windows == "most":
        every = int(raw.get("sliding_window_pattern") or 6)
        types = raw.get("layer_types") or [
            "full_attention" if layer % every == every - 1 else "sliding_attention" for layer in range(num_layers)
        ]
    if family.windows == "some":
        window = window if raw.get("use_sliding_window") else None
        first = num_layers if window is None else int(raw["max_window_layers"])
        types = raw.get("layer_types") or [
            "sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)
        ]
    if len(types) != num_layers or not set(types) <= {"sliding_attention", "full_attention"}:
        raise ValueError(f"layer_types {types} (known: sliding_attention, full_attention; one a layer)")
    if "sliding_attention" not in types or (window is None and family.windows.startswith("all")):
        return ()
    if window is None or int(window) < 1:
        raise ValueError(f"sliding_window {window} (in use: 1 or more)")
    return tuple(int(window) if kind == "sliding_attention" else None for kind in types)


_QWEN_1M = 1_010_000
"""The positions in the `config.json` of Qwen's 1M models, with or without `dual_chunk_attention_config`."""

_QWEN_TRAINED = 262_144
"""The positions that these models were trained with, and to which they attend without dual chunk attention (arXiv
2501.15383)."""


def plain_positions(raw: dict[str, Any], positions: int) -> int:
    """How many of the `positions` in a `config.json` do not need dual chunk attention, which is not supported.

    Raises:
        KeyError, TypeError, ValueError: the configuration of dual chunk attention does not give this number.
    """
    dual_chunk = raw.get("dual_chunk_attention_config")
    if dual_chunk:
        return min(positions, int(dual_chunk.get("original_max_position_embeddings") or dual_chunk["chunk_size"]))
    return _QWEN_TRAINED if positions == _QWEN_1M else positions
