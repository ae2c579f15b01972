"""Tiny random models, written by transformers as ordinary checkpoints, and the oracles that transformers gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SHAPES = {
    "mha": {},
    "gqa": {"num_key_value_heads": 2},
    "mqa": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "wide-heads": {"head_dim": 24, "num_key_value_heads": 2},
}
"""Differences from `llama_config`'s defaults, by name."""


def llama_config(**changes) -> LlamaConfig:
    """Three layers of width 64 with four heads; `changes` override."""
    shape = {
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
    return LlamaConfig(**(shape | changes))


def save_llama(directory: Path, seed: int = 0, **changes) -> LlamaForCausalLM:
    """Writes a random model in float32 to `directory` and returns it."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(llama_config(**changes)).eval()
    model.save_pretrained(directory)
    return model


def random_tokens(n: int, vocab_size: int = 97, seed: int = 0) -> list[int]:
    return torch.randint(vocab_size, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def greedy_oracle(model: LlamaForCausalLM, prompt: list[int], n: int) -> list[int]:
    """The next `n` tokens by transformers' own greedy generation."""
    ids = torch.tensor([prompt])
    generate: Callable[..., torch.Tensor] = getattr(model, "generate")  # noqa: B009 (its stubs do not bind)
    out = generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=n, pad_token_id=0)
    return out[0, len(prompt) :].tolist()
