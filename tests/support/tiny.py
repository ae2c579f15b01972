"""Tiny random models, written by transformers as ordinary checkpoints, and the oracles that transformers gives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

SHAPES = {
    "mha": {},
    "gqa": {"num_key_value_heads": 2},
    "mqa": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "wide-heads": {"head_dim": 24, "num_key_value_heads": 2},
    "heads-of-32": {"head_dim": 32, "num_key_value_heads": 2},  # which the compiled kernels take
}
"""Differences from `llama_config`'s defaults, by name."""

HYBRID = {
    "num_key_value_heads": 2,
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
"""Differences of models with linear attention from the tiny shape."""

HYBRID_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
"""Of those of them that have experts, the further ones."""

FAMILIES = {
    "llama": (LlamaConfig, {}),
    "llama-tied": (LlamaConfig, {"tie_word_embeddings": True, "num_key_value_heads": 2}),
    "llama-bias": (LlamaConfig, {"attention_bias": True}),
    "mistral": (MistralConfig, {"num_key_value_heads": 2, "sliding_window": None}),
    "mistral-window": (MistralConfig, {"num_key_value_heads": 2, "sliding_window": 50}),
    "qwen2": (Qwen2Config, {"num_key_value_heads": 2}),
    "qwen2-window": (Qwen2Config, {"use_sliding_window": True, "sliding_window": 50, "max_window_layers": 1}),
    "qwen2-layer-types": (
        Qwen2Config,
        {
            "use_sliding_window": True,
            "sliding_window": 50,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3": (Qwen3Config, {"num_key_value_heads": 2, "head_dim": 24}),
    "mixtral": (MixtralConfig, {"num_key_value_heads": 2, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        Qwen3MoeConfig,
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    "gemma3": (
        Gemma3TextConfig,
        {
            "num_key_value_heads": 2,
            "head_dim": 24,
            "query_pre_attn_scalar": 40,
            "sliding_window": 50,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "tie_word_embeddings": False,  # or, as embeddings are scaled, a text would repeat one token
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 3.0},
            },
        },
    ),
    "qwen3-next": (Qwen3NextConfig, HYBRID | HYBRID_EXPERTS | {"norm_topk_prob": True}),
    "qwen3.5": (Qwen3_5TextConfig, HYBRID | {"linear_num_value_heads": 2}),
    "qwen3.5-moe": (Qwen3_5MoeTextConfig, HYBRID | HYBRID_EXPERTS),
    "qwen3-bias": (Qwen3Config, {"attention_bias": True, "head_dim": 16, "tie_word_embeddings": True}),
}
"""Configuration classes of transformers and differences from the tiny shape, by name."""

SMOOTH: dict[str, dict[str, Any]] = {
    family: {"initializer_range": 0.03} for family in ("qwen3-next", "qwen3.5", "qwen3.5-moe")
}
"""Further differences of families whose logits are compared: with weights as large as the others', those of models with
linear attention change by 0.003 where embeddings change by 2e-7 of themselves, in transformers too."""

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
"""`rope_parameters` of Llama 3's scaling, for the tiny shape."""


def tiny_shape() -> dict:
    """Three layers of width 64 with four heads."""
    return {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 4096,
        "initializer_range": 0.2,  # far from the usual 0.02, so that attention and logits are anything but flat
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": 0,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def llama_config(**changes) -> LlamaConfig:
    """The tiny shape; `changes` override."""
    return LlamaConfig(**(tiny_shape() | changes))


def save_family(directory: Path, family: str, seed: int = 0, **changes) -> PreTrainedModel:
    """Writes a random model of one of `FAMILIES` in float32 to `directory` and returns it."""
    kind, differences = FAMILIES[family]
    return save_model(directory, kind(**(tiny_shape() | differences | changes)), seed)


def save_families(root: Path, families: Iterable[str]) -> Path:
    """Writes to folders of `root` a target of each family, and a draft for all, large enough for compiled kernels;
    returns `root`."""
    save_llama(root / "draft", seed=1, num_hidden_layers=2, hidden_size=128)
    for family in families:
        save_family(root / family, family, seed=1, hidden_size=128, head_dim=32)
    return root


@torch.no_grad()
def save_model(directory: Path, config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Writes a random model in float32 to `directory` and returns it. Biases and norms are random too: transformers
    makes them zeros and ones, which a model that left them out would pass."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(std=0.5)
        elif "norm" in name:
            parameter.uniform_(0.5, 1.5)
    model.save_pretrained(directory)
    return model


def save_llama(directory: Path, seed: int = 0, **changes) -> LlamaForCausalLM:
    """Writes a random model in float32 to `directory` and returns it."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(llama_config(**changes)).eval()
    model.save_pretrained(directory)
    return model


def random_tokens(n: int, vocab_size: int = 97, seed: int = 0) -> list[int]:
    return torch.randint(vocab_size, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


_TEXTS: WeakKeyDictionary[PreTrainedModel, dict[tuple, list[int]]] = WeakKeyDictionary()
"""What models have written, by the prompt and the sums of the weights, which a test may change."""


@torch.inference_mode()
def greedy_oracle(model: PreTrainedModel, prompt: list[int], n: int, guess: list[int] | None = None) -> list[int]:
    """The next `n` tokens by transformers' own greedy generation.

    Args: `guess` is what a test has found. If one pass of transformers' model shows that it is the greedy text, it is
    not generated token by token. Not with dynamic RoPE, where one pass rotates otherwise. It is a greedy text, too, if
    rounding could choose a token's experts otherwise, and it is the text with these experts.
    """
    assert n > 0
    if guess and len(guess) == n and _is_greedy(model, prompt, guess):
        return guess
    weights = tuple(float(parameter.sum()) for parameter in model.parameters())
    known, asked = _TEXTS.setdefault(model, {}), (tuple(prompt), weights)
    if len(known.get(asked, [])) < n:
        known[asked] = _generated(model, prompt, n)
    return known[asked][:n]


ROUTER_ROUNDING = {True: 2e-3, False: 2e-5}
"""By how much the router's logits of two experts may differ in a float32 model, with linear attention and without,
where rounding decides between them: about twice as much as one logit of this program and of transformers differ. That
is at most 9e-4 and 6e-6 in 99 of 100 tokens, in the last layer, where they differ most (Qwen3-Next and Qwen3.5;
Qwen3-MoE and Mixtral; prompts of 300 and 1,400 tokens; AMD EPYC, Zen 5)."""

MOST_SWAPS = 2
"""The maximum number of choices of experts that are made otherwise to explain a text."""


def _is_greedy(model: PreTrainedModel, prompt: list[int], text: list[int]) -> bool:
    """Whether each token of `text` has the largest logit after those before. Then `text` is the greedy text. It is one,
    too, if that holds where two experts change places whose logits are so nearly equal that rounding decides."""
    if model.generation_config and model.generation_config.eos_token_id is not None:
        return False  # the text may end before
    rounding = ROUTER_ROUNDING["linear_attention" in (getattr(model.config, "layer_types", None) or ())]
    to_try, tried = [frozenset[tuple[int, int]]()], set[frozenset[tuple[int, int]]]()
    for swaps in to_try:
        logits, gaps = pass_with_swaps(model, [*prompt, *text[:-1]], swaps)
        undecided = {
            (layer, row) for layer, gap in enumerate(gaps) for row in (gap < rounding).nonzero()[:, 0].tolist()
        }
        if not swaps <= undecided:
            continue  # an earlier swap has moved a later one's experts apart
        if logits[len(prompt) - 1 :].argmax(dim=-1).tolist() == text:
            return True
        further = {swaps | {place} for place in undecided - swaps if len(swaps) < MOST_SWAPS} - tried
        tried |= further
        to_try += further
    return False


@torch.inference_mode()
def pass_with_swaps(
    model: PreTrainedModel, tokens: list[int], swaps: Collection[tuple[int, int]] = ()
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The logits of a pass over `tokens`; and for each layer with experts, for each position: by how much the router's
    logits of the last expert that is used and of the first that is not differ.

    Args: `swaps` says where these two experts change places, by layer and position.
    """
    gaps: list[torch.Tensor] = []

    def across(layer: int, gate: Any, rows: torch.Tensor) -> torch.Tensor:
        """The rows that this layer's router gets: those of `swaps` are moved just across the border."""
        flat = rows.reshape(-1, rows.shape[-1]).clone()
        best = (flat @ gate.weight.T).sort(dim=-1, descending=True)
        gaps.append(best.values[:, gate.top_k - 1] - best.values[:, gate.top_k])
        for _, row in (place for place in swaps if place[0] == layer):
            last, following = (gate.weight[best.indices[row, i]] for i in (gate.top_k - 1, gate.top_k))
            way = following - last
            flat[row] += way * (2 * gaps[-1][row] + 1e-5) / way.square().sum()
        return flat.reshape(rows.shape)

    gates = [module for name, module in model.named_modules() if name.endswith(".gate")]
    hooks = [
        gate.register_forward_pre_hook(lambda gate, given, layer=layer: (across(layer, gate, given[0]), *given[1:]))
        for layer, gate in enumerate(gates)
    ]
    try:
        return model(torch.tensor([tokens]), use_cache=False).logits[0], gaps
    finally:
        for hook in hooks:
            hook.remove()


def _generated(model: PreTrainedModel, prompt: list[int], n: int) -> list[int]:
    ids = torch.tensor([prompt])
    generate: Callable[..., torch.Tensor] = getattr(model, "generate")  # noqa: B009 (its stubs do not bind)
    out = generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=n, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


@torch.no_grad()
def agreeing_pair(root: Path, prompt: list[int], n: int) -> tuple[Path, Path, list[int]]:
    """A target and a draft that agree often, but not always: attention matters less, and the draft is the target with
    some noise. So the full cache accepts about nine draft tokens of ten and the retrieval cache six, while the tiers of
    unrelated models agree once in twenty times. And the next `n` tokens after `prompt`, by transformers."""
    target, draft = root / "agreeing", root / "agreeing-draft"
    model = save_llama(target, seed=1, num_key_value_heads=2)
    for name, parameter in model.named_parameters():
        if "o_proj" in name:
            parameter *= 0.01
    model.save_pretrained(target)
    want = greedy_oracle(model, prompt, n)
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter += 0.03 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(draft)
    return target, draft, want
