"""Tiny checkpoints from a closed formula, and a tokenizer from a list: the same bytes on every machine, whatever
version of PyTorch or NumPy. Weights are whole numbers below 256 times a power of two, which bfloat16 holds as float32
does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY = 320
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP = 128, 4, 2, 32, 192


@dataclass(frozen=True)
class Shape:
    """One checkpoint."""

    architecture: str
    layers: int = 3
    noise: int = 0
    """Largest whole number that is added to each weight: with some of it, a draft agrees often, but not always."""
    template: str | None = None
    """The chat template of its tokenizer."""
    config: dict[str, Any] = field(default_factory=dict)
    """What its config.json has beyond the shape of all."""


TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]\n{{ message['content'] }}[end]\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)

CHECKPOINTS = {
    "target": Shape("LlamaForCausalLM"),
    "draft": Shape("LlamaForCausalLM", noise=4),
    "talker": Shape("LlamaForCausalLM", template=TEMPLATE),
    "stretched": Shape(
        "LlamaForCausalLM",
        config={
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "mistral": Shape("MistralForCausalLM", config={"sliding_window": 50}),
    "qwen2": Shape("Qwen2ForCausalLM", config={"tie_word_embeddings": True}),
    "qwen3": Shape("Qwen3ForCausalLM"),
    "deep": Shape("LlamaForCausalLM", layers=16),
    "ender": Shape("LlamaForCausalLM", config={"eos_token_id": list(range(1, VOCABULARY, 16))}),
    "small": Shape("LlamaForCausalLM", layers=2, config={"num_key_value_heads": 1}),
}
"""By name, which is the name of the directory too."""

_PAIRS = (
    "t h,h e,i n,e r,a n,r e,o n,a t,e n,n d,t i,e s,o r,t e,o f,e d,i s,i t,a l,a r,s t,t o,n t,n g,s e,h a,a s,o u,"
    "i o,l e,v e,c o,m e,d e,h i,r i,r o,i c,n e,e a,r a,c e,Ġ t,Ġ a,Ġ s,Ġ w,Ġ o,Ġ b,Ġ c,Ġ m,"
    "th e,Ġt he,in g,Ġa nd,Ġo f,Ġt o,Ġ in,Ġ he,Ġ it,Ġw as,Ġb e,Ġ th"
)
"""What the tokenizer joins, first things first; with the bytes and two special tokens these are `VOCABULARY` tokens."""


def save_checkpoints(root: Path, names: tuple[str, ...] = tuple(CHECKPOINTS)) -> Path:
    """Writes these into `root`, a directory each, and returns it."""
    for name in names:
        _save(root / name, name, CHECKPOINTS[name])
    return root


def numbers(count: int, below: int, seed: int) -> list[int]:
    """So many whole numbers from 0, which look random."""
    return (_mixed(count, seed) % np.uint64(below)).astype(np.int64).tolist()


def _mixed(count: int, seed: int) -> np.ndarray:
    """`[count]` uint64: SplitMix64 (Steele, Lea and Flood, 2014) of the numbers from `seed` × 2³² on."""
    with np.errstate(over="ignore"):
        x = (np.arange(count, dtype=np.uint64) + np.uint64(seed << 32)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _save(directory: Path, name: str, shape: Shape) -> None:
    directory.mkdir(parents=True)
    config = {
        "architectures": [shape.architecture],
        "model_type": shape.architecture.removesuffix("ForCausalLM").lower(),
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-05,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dtype": "float32",
        **shape.config,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    tensors = {key: _weights(key, size, shape, name) for key, size in _tensors(shape, config)}
    _write_safetensors(directory / "model.safetensors", tensors)
    _save_tokenizer(directory, shape.template)


def _tensors(shape: Shape, config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and sizes of a checkpoint's tensors."""
    q, kv = HEADS * HEAD_DIM, config["num_key_value_heads"] * HEAD_DIM
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    for layer in range(shape.layers):
        of = f"model.layers.{layer}."
        for part, rows, columns in (("q", q, HIDDEN), ("k", kv, HIDDEN), ("v", kv, HIDDEN), ("o", HIDDEN, q)):
            yield f"{of}self_attn.{part}_proj.weight", (rows, columns)
            if shape.architecture.startswith("Qwen2") and part != "o":
                yield f"{of}self_attn.{part}_proj.bias", (rows,)
        if shape.architecture.startswith("Qwen3"):
            yield f"{of}self_attn.q_norm.weight", (HEAD_DIM,)
            yield f"{of}self_attn.k_norm.weight", (HEAD_DIM,)
        yield f"{of}mlp.gate_proj.weight", (MLP, HIDDEN)
        yield f"{of}mlp.up_proj.weight", (MLP, HIDDEN)
        yield f"{of}mlp.down_proj.weight", (HIDDEN, MLP)
        yield f"{of}input_layernorm.weight", (HIDDEN,)
        yield f"{of}post_attention_layernorm.weight", (HIDDEN,)
    yield "model.norm.weight", (HIDDEN,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (VOCABULARY, HIDDEN)


def _weights(key: str, size: tuple[int, ...], shape: Shape, name: str) -> np.ndarray:
    """Norms from 1/2 to 3/2, all others around 0; attention matters a little less than the rest, so that a draft that
    sees less of the text still agrees now and then."""
    seed = sum((place + 1) * ord(letter) for place, letter in enumerate(key))
    count = math.prod(size)
    whole = (_mixed(count, seed) % np.uint64(255)).astype(np.int64) - 127
    if "norm" in key:
        return ((whole + 256) / 256).astype(np.float32).reshape(size)
    if shape.noise:
        extra = _mixed(count, seed + 2**20 + len(name)) % np.uint64(2 * shape.noise + 1)
        whole = whole + extra.astype(np.int64) - shape.noise
    power = 7 if "embed" in key else 12 if "o_proj" in key else 9
    return (whole / 2**power).astype(np.float32).reshape(size)


def _write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """The format by hand, so that the bytes are the same with any version of the package."""
    header, at = {}, 0
    for key, tensor in tensors.items():
        header[key] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    described = json.dumps(header).encode()
    described += b" " * (-len(described) % 8)
    body = b"".join(tensor.astype("<f4").tobytes() for tensor in tensors.values())
    path.write_bytes(len(described).to_bytes(8, "little") + described + body)


def _save_tokenizer(directory: Path, template: str | None) -> None:
    """A byte-level tokenizer, as GPT-2's: a letter stands for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = [chr(byte) for byte in plain] + [chr(256 + place) for place in range(len(others))]
    pairs = _PAIRS.split(",")
    words = ["<s>", "</s>", *sorted(letters), *(pair.replace(" ", "") for pair in pairs)]
    assert len(set(words)) == len(words) == VOCABULARY
    special = [
        {"id": place, "content": word, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        | {"special": True}
        for place, word in enumerate(words[:2])
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {word: place for place, word in enumerate(words)},
            "merges": pairs,
        },
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False, indent=1), encoding="utf-8")
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    described |= {"chat_template": template} if template else {}
    (directory / "tokenizer_config.json").write_text(json.dumps(described, indent=1), encoding="utf-8")
