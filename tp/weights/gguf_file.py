"""Writes a model directory as a GGUF file for llama.cpp: the same weights, in the dtype of the run.

Differences from safetensors:

* names of tensors;
* the order of the rows of query and key matrices in Llama-shaped models: llama.cpp rotates neighbouring pairs, and
  transformers rotates halves;
* RoPE scalings, which are a divisor for each frequency.

The file has no tokenizer, because llama.cpp gets and returns token ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf  # pyright: ignore[reportMissingImports]
import torch
from torch import Tensor

from ..errors import ModelError
from ..model.config import ModelConfig
from .checkpoint import Checkpoint

_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_FORMATS = {
    "float32": gguf.GGMLQuantizationType.F32,
    "bfloat16": gguf.GGMLQuantizationType.BF16,
    "float16": gguf.GGMLQuantizationType.F16,
}
_FILE_TYPES = {
    "float32": gguf.LlamaFileType.ALL_F32,
    "bfloat16": gguf.LlamaFileType.MOSTLY_BF16,
    "float16": gguf.LlamaFileType.MOSTLY_F16,
}


@dataclass(frozen=True)
class _Entry:
    """A tensor of the file."""

    name: str
    """Its name in the file."""
    source: str
    """Its name in the checkpoint."""
    shape: tuple[int, ...]
    heads: int = 0
    """The number of heads, if it has queries or keys whose rows are reordered; 0: rows are not reordered."""


def write_gguf(directory: Path, path: Path, dtype: str) -> None:
    """Writes the model in `directory` to `path`, matrices in `dtype`, vectors in float32.

    Args:
        dtype: `float32`, `bfloat16` or `float16`.

    Raises:
        ModelError: the model cannot be read, or llama.cpp does not compute it in the same way.
    """
    config = ModelConfig.load(directory)
    if config.quantisation is not None:
        raise ModelError(
            f"{config.name} has weights in {config.quantisation.name}, which cannot be converted for llama.cpp"
        )
    if config.experts is not None:
        raise ModelError(f"{config.name} has mixtures of experts, which cannot be converted for llama.cpp")
    architecture = _architecture(directory, config)
    checkpoint = Checkpoint(directory, getattr(torch, dtype), torch.device("cpu"))
    writer = gguf.GGUFWriter(path, architecture)
    _add_shape(writer, config, dtype)
    entries = list(_entries(config, reordered=architecture == "llama"))
    divisors = _frequency_divisors(config, architecture, directory)
    if divisors is not None:
        writer.add_tensor_info("rope_freqs.weight", divisors.shape, divisors.numpy().dtype, divisors.nbytes)
    for entry in entries:
        size = 4 if len(entry.shape) == 1 else getattr(torch, dtype).itemsize
        kind = _FORMATS["float32"] if len(entry.shape) == 1 else _FORMATS[dtype]
        num_bytes = torch.Size(entry.shape).numel() * size
        writer.add_tensor_info(entry.name, entry.shape, _PLAIN, num_bytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if divisors is not None:
        writer.write_tensor_data(divisors.numpy())
    for entry in entries:
        tensor = _reordered(checkpoint.read(entry.source, *entry.shape), entry.heads)
        tensor = tensor.float() if tensor.dim() == 1 else tensor
        writer.write_tensor_data(tensor.contiguous().view(torch.uint8).numpy())
    writer.close()
    checkpoint.check_all_read()


_PLAIN = torch.empty(0).numpy().dtype
"""The dtype that the writer asks for in addition to the format. It only uses it if it is a dtype of bytes."""


def _architecture(directory: Path, config: ModelConfig) -> str:
    raw: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    name = next((name for name in raw["architectures"] if name in _ARCHITECTURES), None)
    if name is None:
        raise ModelError(
            f"{config.name} is a {', '.join(raw['architectures'])}, which cannot be converted for llama.cpp; "
            f"supported: {', '.join(_ARCHITECTURES)}"
        )
    if config.sliding_windows:
        raise ModelError(f"{config.name} has sliding windows, which llama.cpp does not read for {name}")
    return _ARCHITECTURES[name]


def _add_shape(writer: gguf.GGUFWriter, config: ModelConfig, dtype: str) -> None:
    writer.add_name(config.name)
    writer.add_file_type(_FILE_TYPES[dtype])
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_layers)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("no_vocab")


def _entries(config: ModelConfig, *, reordered: bool) -> Iterator[_Entry]:
    """Every tensor, in the order of the file. A tied output head is left out; llama.cpp then uses the embedding."""
    hidden, mlp = config.hidden_size, config.intermediate_size
    yield _Entry("token_embd.weight", "model.embed_tokens.weight", (config.vocab_size, hidden))
    yield _Entry("output_norm.weight", "model.norm.weight", (hidden,))
    if not config.tie_word_embeddings:
        yield _Entry("output.weight", "lm_head.weight", (config.vocab_size, hidden))
    for index in range(config.num_layers):
        ours, theirs = f"model.layers.{index}.", f"blk.{index}."
        yield _Entry(f"{theirs}attn_norm.weight", f"{ours}input_layernorm.weight", (hidden,))
        for part, heads, bias in (
            ("q", config.num_heads, config.qkv_bias),
            ("k", config.num_kv_heads, config.qkv_bias),
            ("v", config.num_kv_heads, config.qkv_bias),
        ):
            rows, turned = heads * config.head_dim, heads if reordered and part != "v" else 0
            source = f"{ours}self_attn.{part}_proj"
            yield _Entry(f"{theirs}attn_{part}.weight", f"{source}.weight", (rows, hidden), turned)
            if bias:
                yield _Entry(f"{theirs}attn_{part}.bias", f"{source}.bias", (rows,), turned)
            if config.qk_norm and part != "v":
                norm = f"{ours}self_attn.{part}_norm.weight"
                yield _Entry(f"{theirs}attn_{part}_norm.weight", norm, (config.head_dim,))
        width = config.num_heads * config.head_dim
        yield _Entry(f"{theirs}attn_output.weight", f"{ours}self_attn.o_proj.weight", (hidden, width))
        if config.o_bias:
            yield _Entry(f"{theirs}attn_output.bias", f"{ours}self_attn.o_proj.bias", (hidden,))
        yield _Entry(f"{theirs}ffn_norm.weight", f"{ours}post_attention_layernorm.weight", (hidden,))
        for name, part, shape in (
            ("ffn_gate", "gate_proj", (mlp, hidden)),
            ("ffn_up", "up_proj", (mlp, hidden)),
            ("ffn_down", "down_proj", (hidden, mlp)),
        ):
            yield _Entry(f"{theirs}{name}.weight", f"{ours}mlp.{part}.weight", shape)


def _reordered(tensor: Tensor, heads: int) -> Tensor:
    """Reorders the rows of each head: the two rows of a rotated pair, half a head apart, become neighbours."""
    if not heads:
        return tensor
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _frequency_divisors(config: ModelConfig, architecture: str, directory: Path) -> Tensor | None:
    """The divisors of RoPE's frequencies for llama.cpp, float32 `[head_dim / 2]`; `None` for no scaling."""
    rope = config.rope
    if rope.type == "default":
        return None
    if architecture != "llama" or rope.type == "dynamic" or rope.attention_factor != 1.0:
        raise ModelError(
            f"{directory / 'config.json'} asks for RoPE scaling {rope.type!r}, which cannot be converted for llama.cpp"
        )
    lengths = torch.ones(1, dtype=torch.int64)
    plain = type(rope)(rope.theta).inverse_frequencies(config.head_dim, lengths)
    return (plain / rope.inverse_frequencies(config.head_dim, lengths)).float()
