"""The shape of a model, read from the `config.json` of its Hugging Face directory. No remote code, no weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .errors import ModelError

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM",)


@dataclass(frozen=True)
class ModelConfig:
    """What the decoder needs to know; names are those of Hugging Face's `config.json`.

    `eos_token_ids` may be empty; `dtype` is the checkpoint's own.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    name: str

    @property
    def num_parameters(self) -> int:
        """Weights of the model; a tied head is counted once."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        heads = 1 if self.tie_word_embeddings else 2
        return self.num_layers * layer + heads * self.vocab_size * self.hidden_size + self.hidden_size

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values of one token over all layers, when kept in `dtype`."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize

    @classmethod
    def load(cls, directory: Path) -> ModelConfig:
        """Reads `directory/config.json` (and the end-of-sequence ids of `generation_config.json`, if any).

        Raises:
            ModelError: no such file, not JSON, an unsupported architecture, or a value missing or impossible.
        """
        raw = _read_json(directory / "config.json")
        generation = directory / "generation_config.json"
        eos = _read_json(generation).get("eos_token_id") if generation.is_file() else None
        return cls.from_json(raw if eos is None else raw | {"eos_token_id": eos}, directory)

    @classmethod
    def from_json(cls, raw: dict[str, Any], directory: Path) -> ModelConfig:
        """What `load` makes of a `config.json` that holds `raw`; `directory`, which need not be there, names the model.

        Raises:
            ModelError: as `load`.
        """
        architectures = raw.get("architectures") or []
        if not isinstance(architectures, list) or not set(map(str, architectures)) & set(SUPPORTED_ARCHITECTURES):
            found = ", ".join(map(str, architectures)) if isinstance(architectures, list) else str(architectures)
            raise ModelError(
                f"{directory / 'config.json'} names the architecture {found or '(none)'}, which is not supported; "
                f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
            )
        if not isinstance(_rope_parameters(raw), dict):
            raise ModelError(f"{directory / 'config.json'} gives RoPE parameters that are not an object")
        _refuse_unsupported(raw, directory)
        return cls._from_raw(raw, raw.get("eos_token_id"), directory)

    @classmethod
    def _from_raw(cls, raw: dict[str, Any], eos: Any, directory: Path) -> ModelConfig:
        try:
            num_heads = int(raw["num_attention_heads"])
            hidden_size = int(raw["hidden_size"])
            config = cls(
                vocab_size=int(raw["vocab_size"]),
                hidden_size=hidden_size,
                intermediate_size=int(raw["intermediate_size"]),
                num_layers=int(raw["num_hidden_layers"]),
                num_heads=num_heads,
                num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
                head_dim=int(raw.get("head_dim") or hidden_size // num_heads),
                max_position_embeddings=int(raw.get("max_position_embeddings", 2048)),
                rope_theta=_rope_theta(raw),
                rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
                tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
                dtype=_dtype(raw),
                eos_token_ids=_token_ids(eos),
                name=directory.name,
            )
        except KeyError as error:
            raise ModelError(f"{directory / 'config.json'} does not give {error}") from error
        except (TypeError, ValueError, ArithmeticError) as error:
            raise ModelError(f"{directory / 'config.json'} has a value of the wrong kind: {error}") from error
        sizes = (
            config.vocab_size,
            config.hidden_size,
            config.num_layers,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
        )
        if min(sizes) < 1 or config.num_heads % config.num_kv_heads or config.head_dim % 2:
            raise ModelError(
                f"{directory / 'config.json'} describes no possible model: {config.num_layers} layers, "
                f"width {config.hidden_size}, {config.num_heads} heads of {config.head_dim}, "
                f"{config.num_kv_heads} key/value heads (heads must be a multiple of those, head size even)"
            )
        return config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path} does not exist; a model is a directory with config.json and its weights") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path} holds a JSON {type(raw).__name__}, not an object")
    return raw


def _rope_parameters(raw: dict[str, Any]) -> dict[str, Any]:
    """transformers 5 writes `rope_parameters`; older checkpoints `rope_theta` and `rope_scaling` (or its `type`)."""
    return raw.get("rope_parameters") or raw.get("rope_scaling") or {}


def _rope_theta(raw: dict[str, Any]) -> float:
    return float(_rope_parameters(raw).get("rope_theta") or raw.get("rope_theta") or 10000.0)


def _refuse_unsupported(raw: dict[str, Any], directory: Path) -> None:
    rope = _rope_parameters(raw)
    scaling = rope.get("rope_type") or rope.get("type") or "default"
    unsupported = {
        f"RoPE scaling {scaling!r}": scaling != "default",
        "attention_bias": bool(raw.get("attention_bias")),
        "mlp_bias": bool(raw.get("mlp_bias")),
        "quantised weights (quantization_config)": bool(raw.get("quantization_config")),
        f"activation {raw.get('hidden_act')!r}": raw.get("hidden_act", "silu") != "silu",
    }
    for feature, present in unsupported.items():
        if present:
            raise ModelError(f"{directory / 'config.json'} asks for {feature}, which is not supported yet")


def _token_ids(value: Any) -> tuple[int, ...]:
    """Ids given as one, several, or none."""
    return tuple(int(token) for token in (value if isinstance(value, list) else [value]) if token is not None)


def _dtype(raw: dict[str, Any]) -> torch.dtype:
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    dtype = getattr(torch, str(name), None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype {name!r} (known: float32, bfloat16, float16)")
    return dtype
