"""Tiny models under every RoPE scaling, and all logits that transformers gives."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny import FAMILIES, SMOOTH, save_family
from transformers import AutoModelForCausalLM, PreTrainedModel

LENGTHS = (20, 300)
"""Tokens within the original context of every scaling below, and far beyond it."""

ROPES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 6.0},
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    "yarn-given-factor": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 0.7,
        "beta_fast": 6.0,
        "beta_slow": 0.5,
        "truncate": False,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.5,
        "mscale_all_dim": 0.5,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def save_scaled(directory: Path, scaling: str, family: str = "llama", theta: float = 1000.0) -> PreTrainedModel:
    """A random model with heads of 32 and one of `ROPES`, whose original context is 64. What the family rotates of a
    head is rotated still."""
    positions = 64 if scaling in ("linear", "dynamic") else 512
    usual = FAMILIES[family][1].get("rope_parameters", {})
    given = {"head_dim": 32, "max_position_embeddings": positions} | SMOOTH.get(family, {})
    return save_family(directory, family, **given, rope_parameters=usual | ROPES[scaling] | {"rope_theta": theta})


@torch.inference_mode()
def theirs(directory: Path, tokens: list[int]) -> torch.Tensor:
    """All logits of transformers, from a model that has seen nothing before."""
    return AutoModelForCausalLM.from_pretrained(directory).eval()(torch.tensor([tokens])).logits[0]
