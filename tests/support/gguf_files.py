"""GGUF files of random models, written by the package `gguf`, and transformers' models with the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Form
from gguf_blocks import numbers_of, random_blocks
from mtp import Head
from tiny import save_family
from transformers import PreTrainedModel

ROUTER = "mlp.gate.weight"
GATE = "shared_expert_gate.weight"
HYBRIDS = {"qwen3.5": "qwen35", "qwen3.5-moe": "qwen35moe", "qwen3-next": "qwen3next"}
"""Architectures of the families with linear attention."""
PARTS = {
    "mlp.gate": "ffn_gate_inp",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_PARTS = PARTS | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
HYBRID_PARTS = PARTS | {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.in_proj_qkvz": "ssm_in",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
HEAD_PARTS = {
    "mtp.fc": "nextn.eh_proj",
    "mtp.pre_fc_norm_embedding": "nextn.enorm",
    "mtp.pre_fc_norm_hidden": "nextn.hnorm",
    "mtp.norm": "nextn.shared_head_norm",
}
ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
SMALL = {"vocab_size": 300, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "eos_token_id": 298}
"""Differences from `tiny.tiny_shape`: rows of whole blocks of 256, and a token for each byte."""
GEMMA = {"num_hidden_layers": 7, "layer_types": None, "query_pre_attn_scalar": 64, "tie_word_embeddings": False}
"""Further ones of Gemma 3: every sixth layer has no window, and scores are what llama.cpp makes of these sizes. With a
head that is the embedding, which is scaled, a random model says its last token again and again."""

HYBRID = {"linear_num_value_heads": 6, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
"""The same of models with linear attention; as their sizes are, so that llama.cpp takes them."""
HYBRID_EXPERTS = {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
"""And of those with experts."""

BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]
"""Those that stand for themselves in the vocabularies of byte-level BPE."""


def vocabulary(size: int = 300) -> dict[str, Any]:
    """A tokenizer's keys: a token for each byte, some of two letters, and two control tokens, the last."""
    others = [byte for byte in range(256) if byte not in BYTES]
    letters = [chr(byte) if byte in BYTES else chr(256 + others.index(byte)) for byte in range(256)]
    pairs = [(first, second) for first in "theorn" for second in "haeiours"][: size - 258]
    tokens = [*letters, *(first + second for first, second in pairs), "<|end|>", "<|im_end|>"]
    kinds = [1] * (size - 2) + [3, 3]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [f"{first} {second}" for first, second in pairs],
        "tokenizer.ggml.eos_token_id": size - 2,
    }


def gguf_name(name: str, parts: Mapping[str, str] = PARTS) -> str:
    """Of one of transformers' weights."""
    stem, _, end = name.rpartition(".")
    if stem in ENDS:
        return f"{ENDS[stem]}.{end}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{parts[part]}.{end}"


def halves_to_pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of heads in transformers' order, in that of rotated pairs."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def save_gguf(
    directory: Path,
    family: str,
    form_of: Callable[[str], Form],
    *,
    seed: int = 0,
    keys: Mapping[str, Any] | None = None,
    rope_freqs: bool = False,
    whole_inputs: bool = False,
    fused_experts: bool = False,
    predicting: bool = False,
    **changes: Any,
) -> PreTrainedModel:
    """Writes a random model to `directory` as a checkpoint, and to `directory.gguf` as a GGUF file; returns
    transformers' model with the numbers of the file.

    Args:
        form_of: how a matrix of this name (transformers') is stored.
        keys: further ones, or others.
        rope_freqs: whether the scaling of RoPE is written as divisors of its frequencies.
        whole_inputs: whether Qwen3-Next's projections are whole, as in files before 2026.
        fused_experts: whether gate and up projections of a layer's experts are in one tensor.
        predicting: whether a block that predicts a further token is behind the layers: `Head(model, 2)`, in F32.
        changes: of the configuration.
    """
    is_gemma = family.startswith("gemma3")
    differs = GEMMA if is_gemma else HYBRID if family in HYBRIDS else {}
    differs = differs | (HYBRID_EXPERTS if family in ("qwen3-next", "qwen3.5-moe") else {})
    model = save_family(directory, family, seed, **(SMALL | differs | changes))
    config, rng = model.config, np.random.default_rng(seed)
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    architecture = (
        HYBRIDS[family]
        if family in HYBRIDS
        else "qwen3moe"
        if family == "qwen3-moe"
        else "qwen3"
        if family.startswith("qwen3")
        else "qwen2"
        if family.startswith("qwen2")
        else "gemma3"
        if is_gemma
        else "llama"
    )
    writer = gguf.GGUFWriter(directory.with_suffix(".gguf"), architecture)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    if architecture != "qwen35moe":
        writer.add_feed_forward_length(config.intermediate_size)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if architecture not in ("llama", "mixtral"):
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_block_count(config.num_hidden_layers + predicting)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if is_gemma:
        _add_windows(writer, config)
    else:
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if family in HYBRIDS:
        _add_linear_shape(writer, config, architecture)
    if predicting:
        writer.add_nextn_predict_layers(1)
        _add_head(writer, model)
    for key, value in (vocabulary(config.vocab_size) | dict(keys or {})).items():
        _add(writer, key.format(arch=architecture), value)
    if rope_freqs:
        scaled = model.get_submodule("model.rotary_emb").inv_freq
        plain = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy())
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        form = form_of(name) if tensor.dim() > 1 and not name.endswith((ROUTER, "conv1d.weight", GATE)) else Form.F32
        if family in HYBRIDS and (".linear_attn." in name or name.endswith(GATE)):
            found = _add_linear(
                writer, name, tensor, form, config, rng, tiled=architecture != "qwen3next", whole=whole_inputs
            )
            model.get_parameter(name).data = found
            continue
        if tensor.dim() == 3:
            numbers = [
                _add_experts(writer, name, part, projections, form, rng)
                for part, projections in _of_experts(name, tensor, fused=fused_experts)
            ]
            model.get_parameter(name).data = torch.cat(numbers, dim=1)
            continue
        parts = GEMMA_PARTS if is_gemma else HYBRID_PARTS if family in HYBRIDS else PARTS
        if (is_gemma or family in HYBRIDS) and tensor.dim() == 1:
            stored = tensor.numpy() + 1.0  # as the converter writes norms
            writer.add_tensor(gguf_name(name, parts), stored)
            model.get_parameter(name).data = torch.from_numpy(stored - 1.0)
            continue
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2], 0)
        heads = heads if architecture == "llama" else 0
        stored, numbers = _in_form(tensor, form, rng)
        stored = halves_to_pairs(stored, heads) if heads else stored
        writer.add_tensor(gguf_name(name, parts), np.ascontiguousarray(stored), raw_dtype=form)
        model.get_parameter(name).data = torch.from_numpy(np.ascontiguousarray(numbers))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _in_form(tensor: torch.Tensor, form: Form, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """What is stored of a matrix, and the numbers that this stands for: in few bits others than it has."""
    if form == Form.BF16:
        return tensor.bfloat16().view(torch.uint8).numpy(), tensor.bfloat16().float().numpy()
    if form == Form.F16:
        return tensor.half().numpy(), tensor.half().float().numpy()
    if form == Form.F32:
        return tensor.numpy(), tensor.numpy()
    blocks = random_blocks(form.name, tensor.shape[0], tensor.shape[1], int(rng.integers(2**31)))
    return blocks.numpy(), numbers_of(blocks, form.name).numpy()


def _add_linear_shape(writer: gguf.GGUFWriter, config: Any, architecture: str) -> None:
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_full_attention_interval(config.layer_types.index("full_attention") + 1)
    rotated = int(config.head_dim * config.rope_parameters["partial_rotary_factor"])
    writer.add_rope_dimension_count(rotated)
    if architecture == "qwen3next":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
        return
    writer.add_rope_dimension_sections([rotated // 2 - 4, 2, 2, 0])
    if architecture == "qwen35moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _add_linear(
    writer: gguf.GGUFWriter,
    name: str,
    tensor: torch.Tensor,
    form: Form,
    config: Any,
    rng: np.random.Generator,
    *,
    tiled: bool,
    whole: bool,
) -> torch.Tensor:
    """Writes a tensor of linear attention as the converter does, or the gate of a shared expert; the numbers of the
    file in transformers' order.

    Args: `tiled` says in which order value heads are, `whole` whether Qwen3-Next's projections are.
    """
    layer, part = name.split(".")[2], name.split(".", 3)[3]
    if part.endswith(GATE):
        writer.add_tensor(f"blk.{layer}.ffn_gate_inp_shexp.weight", tensor[0].numpy())
        return tensor
    if part == "linear_attn.norm.weight":
        writer.add_tensor(f"blk.{layer}.ssm_norm.weight", tensor.numpy())
        return tensor
    key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
    keys, width = key_heads * config.linear_key_head_dim, config.linear_value_head_dim
    of_heads = torch.arange(value_heads).view(key_heads, -1)
    of_heads = of_heads.t().flatten() if tiled else of_heads.flatten()
    of_values = (of_heads.unsqueeze(1) * width + torch.arange(width)).flatten()
    rows = columns = None
    if part.endswith(("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight")):
        rows = of_heads
    elif part.endswith("in_proj_z.weight"):
        rows = of_values
    elif part.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        rows = torch.cat((torch.arange(2 * keys), 2 * keys + of_values))
    elif part.endswith("in_proj_qkvz.weight") and not whole:
        of_key_heads = torch.arange(len(tensor)).view(key_heads, -1)
        key, values = config.linear_key_head_dim, value_heads // key_heads * width
        rows = torch.cat([x.flatten() for x in of_key_heads.split((key, key, values, values), dim=1)])
    elif part.endswith("out_proj.weight"):
        columns = of_values
    moved = tensor if rows is None else tensor[rows]
    moved = moved if columns is None else moved[:, columns]
    if part.endswith(("A_log", "dt_bias")):
        stored = -moved.exp() if part.endswith("A_log") else moved
        writer.add_tensor(f"blk.{layer}.{'ssm_a' if part.endswith('A_log') else 'ssm_dt.bias'}", stored.numpy())
        return tensor
    stored, numbers = _in_form(moved.squeeze(1) if tensor.dim() == 3 else moved, form, rng)
    pieces = [(HYBRID_PARTS[part.removesuffix(".weight")], stored)]
    if part.endswith("in_proj_qkvz.weight") and not whole:
        channels = 2 * keys + value_heads * width
        pieces = [("attn_qkv", stored[:channels]), ("attn_gate", stored[channels:])]
    for theirs, piece in pieces:
        writer.add_tensor(f"blk.{layer}.{theirs}.weight", np.ascontiguousarray(piece), raw_dtype=form)
    numbers, back = torch.from_numpy(np.ascontiguousarray(numbers)).view(tensor.shape), torch.empty_like(tensor)
    at_rows = torch.arange(len(tensor)) if rows is None else rows
    back[at_rows] = numbers
    if columns is not None:
        back[:, columns] = numbers
    return back


def _add_head(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    """Writes a multi-token-prediction head, and a tensor that none has."""
    layer, parts = model.config.num_hidden_layers, HYBRID_PARTS | HEAD_PARTS
    for name, tensor in Head(model, 2).tensors().items():
        part = name.removeprefix("mtp.layers.0.").removesuffix(".weight")
        if tensor.dim() == 3:
            found = _of_experts(part, tensor, fused=False)
        elif name.endswith(GATE):
            found = [(parts[part], tensor[0])]
        else:  # as the converter writes norms
            found = [(parts[part], tensor + 1.0 if tensor.dim() == 1 else tensor)]
        for theirs, of_it in found:
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", of_it.contiguous().numpy())
    writer.add_tensor(f"blk.{layer}.ssm_a.weight", np.ones(3, np.float32))


def _add_windows(writer: gguf.GGUFWriter, config: Any) -> None:
    """Gemma 3's window and both kinds of RoPE, without what llama.cpp takes where a file does not say it."""
    full, windowed = (config.rope_parameters[f"{kind}_attention"] for kind in ("full", "sliding"))
    writer.add_rope_freq_base(full["rope_theta"])
    if full["rope_type"] != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(full["rope_type"]))
        writer.add_rope_scaling_factor(full["factor"])
    if windowed["rope_theta"] != 1e4:
        writer.add_rope_freq_base_swa(windowed["rope_theta"])
    if "sliding_attention" in config.layer_types:
        writer.add_sliding_window(config.sliding_window)


def _of_experts(name: str, tensor: torch.Tensor, *, fused: bool) -> list[tuple[str, torch.Tensor]]:
    """GGUF's parts of what transformers has in a tensor `[experts, outputs, inputs]`."""
    if name.endswith("down_proj"):
        return [("ffn_down_exps", tensor)]
    if fused:
        return [("ffn_gate_up_exps", tensor)]
    return list(zip(("ffn_gate_exps", "ffn_up_exps"), tensor.chunk(2, dim=1), strict=True))


def _add_experts(
    writer: gguf.GGUFWriter, name: str, part: str, tensor: torch.Tensor, form: Form, rng: np.random.Generator
) -> torch.Tensor:
    """Writes a tensor of all of a layer's experts; the numbers of the file."""
    gguf_part = f"blk.{name.split('.')[2]}.{part}.weight"
    if form == Form.F32:
        writer.add_tensor(gguf_part, np.ascontiguousarray(tensor.numpy()))
        return tensor
    stored, numbers = _in_form(tensor.flatten(0, 1), form, rng)
    writer.add_tensor(gguf_part, stored.reshape(*tensor.shape[:2], -1), raw_dtype=form)
    return torch.from_numpy(numbers).view(tensor.shape)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)
