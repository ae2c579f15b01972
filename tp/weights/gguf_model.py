"""Makes a model directory for a GGUF file: configuration, tokenizer and the places of tensors, in Hugging Face's names.

The directory is made in the user's cache when a file is first used, and used again as long as the file is the same. It
contains no weights: `model.gguf.index.json` says where they are. Differences from a checkpoint of Hugging Face:

* names of tensors;
* the order of the rows of queries and keys of Llama, which llama.cpp rotates in neighbouring pairs;
* Llama 3's RoPE scaling, which is a divisor for each frequency;
* norms of Gemma 3 and of models with linear attention, whose weights include the 1 that is added to those of a
  checkpoint;
* for models with linear attention, the differences in `_Configuration._of_linear`.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ..errors import ModelError
from ..home import user_home
from ..model.families import FAMILIES, MOST_EXPERTS, Experts
from .gguf_header import DENSE_FORMS, GgufHeader, GgufTensor, form_bytes
from .gguf_tokenizer import GEMMA_TURNS, tokenizer_files
from .weight_files import GGUF_INDEX, SHARD

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "qwen3next": "Qwen3NextForCausalLM",
    "qwen35": "Qwen3_5ForCausalLM",
    "qwen35moe": "Qwen3_5MoeForCausalLM",
}
"""The architectures of `config.json`, by those of GGUF. Mistral and Mixtral are also `llama`."""

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Hugging Face's names within a layer, by those of GGUF."""

NAMES_BEHIND = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Other names, if attention and the MLP also have norms behind them."""

LINEAR_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
"""Other names, if some layers have linear attention."""

HEAD_NAMES = {
    "nextn.eh_proj.weight": "mtp.fc.weight",
    "nextn.enorm.weight": "mtp.pre_fc_norm_embedding.weight",
    "nextn.hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
    "nextn.shared_head_norm.weight": "mtp.norm.weight",
}
"""Full names within the block of a multi-token-prediction head, except those of its layer."""

_OWN_ENDS = ".nextn.embed_tokens.weight", ".nextn.shared_head_head.weight"
"""Endings of the names of an embedding and an output head of a multi-token-prediction head itself. A head that has them
is not supported."""

LINEAR_VECTORS = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
"""Full names within a layer with linear attention."""

SHARED_NAMES = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
"""Other names, if layers have an expert for all rows."""

_MODEL_TYPES = {
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Gemma3ForCausalLM": "gemma3_text",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
}
"""The `model_type` in `config.json`, where it is not GGUF's architecture."""

EXPERT_NAMES = {
    "ffn_gate_exps": ("gate",),
    "ffn_up_exps": ("up",),
    "ffn_gate_up_exps": ("gate", "up"),
    "ffn_down_exps": ("down",),
}
"""Tensors `[experts, outputs, inputs]`, and the fields of `ExpertNames` for the projections in them, in order."""

_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_END_TEXTS = {"<|end_of_text|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"}
_CONTROL = 3
"""The value of `tokenizer.ggml.token_type` for control tokens."""
_ROPE_DIVISORS = "rope_freqs.weight"
_IN_LAYER = re.compile(r"blk\.(\d{1,6})\.(.*)")
_NOT_BY_TYPE = "mlp.shared_expert_gate.weight", "linear_attn.conv1d.weight"
"""Tensors of a layer that are always in F32, whatever the type of the file."""
_FILES = "config.json", GGUF_INDEX, "tokenizer.json", "tokenizer_config.json"
_FORMAT = 4
"""The version of the format of directories. A directory in another format, or from another version of this package, is
not used; a new one is made."""


def gguf_directory(path: Path) -> Path:
    """The directory for the model in a GGUF file. Makes the directory if necessary.

    Args:
        path: the file; if the model is in shards, the first shard.

    Raises:
        ModelError: the file cannot be read or is not supported, or a shard is missing.
    """
    files = _shards(path)
    known = xxhash.xxh3_64(f"{_FORMAT} {metadata.version('triforce-cli')}".encode())
    for file in files:
        stat = file.stat()
        numbers = stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino
        known.update(os.fsencode(file.resolve()) + repr(numbers).encode())
    shard = SHARD.fullmatch(path.name)
    directory = user_home() / "gguf" / known.hexdigest() / (shard[1] if shard else path.stem)
    if _is_whole(directory):
        return directory
    contents = _contents(files)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
            made = Path(scratch) / "made"
            made.mkdir()
            for name in _FILES:
                (made / name).write_text(json.dumps(contents[name]), encoding="utf-8")
            if directory.is_dir():  # it lacks a file
                shutil.rmtree(directory)
            made.rename(directory)
    except OSError as error:
        if not _is_whole(directory):  # otherwise, another process has made it
            raise ModelError(f"{directory}, which says what is in {path}, cannot be written: {error}") from error
    return directory


def _is_whole(directory: Path) -> bool:
    return all((directory / name).is_file() for name in _FILES)


def _shards(path: Path) -> list[Path]:
    found = SHARD.fullmatch(path.name)
    if found is None:
        return [path]
    if int(found[2]) != 1:
        raise ModelError(f"{path} is a later part of a model; give its first, {found[1]}-00001-of-{found[3]}.gguf")
    files = [path.with_name(f"{found[1]}-{number:05}-of-{found[3]}.gguf") for number in range(1, int(found[3]) + 1)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelError(f"{path.parent} lacks {', '.join(missing[:3])}, parts of the same model; download them again")
    return files


def _contents(files: list[Path]) -> dict[str, Any]:
    """The contents of the directory's files, by name."""
    path, headers = files[0], [GgufHeader.read(file) for file in files]
    tensors: dict[str, tuple[int, GgufTensor]] = {}
    for number, header in enumerate(headers):
        for tensor in header.tensors:
            if tensor.name in tensors:
                raise ModelError(
                    f"{files[number]} has the tensor {tensor.name[:80]!r} again: it came before, in this file or in an "
                    "earlier part of the model"
                )
            tensors[tensor.name] = number, tensor
    config = _Configuration(headers[0].metadata, path)
    divisors = tensors.pop(_ROPE_DIVISORS, None)
    placed: dict[str, dict[str, Any]] = {}
    has_own_ends = any(name.endswith(_OWN_ENDS) for name in tensors)
    for number, tensor in tensors.values():
        parts = _parts_of
        if config.is_behind(tensor.name):
            if has_own_ends or config.further_layers != 1:
                continue
            parts = _parts_of_head
        heads = config.interleaved_heads(tensor.name)
        for name, offset, shape in parts(tensor, config, path):
            if name in placed:
                raise ModelError(f"{path} has two tensors that mean the same one, such as blk.0 and blk.00")
            placed[name] = {"file": number, "offset": offset, "form": tensor.form, "shape": shape, "heads": heads}
    raw = config.raw(placed, None if divisors is None else _read_floats(files[divisors[0]], divisors[1]))
    few_bits = {
        name.removesuffix(".weight"): one["form"] for name, one in placed.items() if one["form"] not in DENSE_FORMS
    }
    if few_bits:
        raw["quantization_config"] = {"quant_method": "gguf", "forms": few_bits}
    return {
        "config.json": raw,
        GGUF_INDEX: {"files": [str(file.resolve()) for file in files], "tensors": placed},
        **tokenizer_files(headers[0].metadata, path),
    }


def _parts_of(tensor: GgufTensor, config: _Configuration, path: Path) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """The name of a tensor in Hugging Face's checkpoints, its offset in the file in bytes, and its shape. For a tensor
    with all experts of a layer, yields these for each expert."""
    stem, _, end = tensor.name.rpartition(".")
    experts = config.experts
    layer, shape = re.fullmatch(r"blk\.(\d{1,6})\.(\w+)", stem), tensor.shape
    vector = _IN_LAYER.fullmatch(tensor.name)
    if config.is_linear and vector and vector[2] in LINEAR_VECTORS:
        yield f"model.layers.{int(vector[1])}.{LINEAR_VECTORS[vector[2]]}", tensor.offset, shape
        return
    if experts and layer and layer[2] in EXPERT_NAMES and end == "weight":
        names = [getattr(experts.names, part) for part in EXPERT_NAMES[layer[2]]]
        if len(shape) != 3 or shape[0] != experts.count or shape[1] % len(names):
            raise ModelError(
                f"{path} has {tensor.name} of the shape {shape}; it must have three dimensions, the first for the "
                f"{experts.count} experts, the second a multiple of {len(names)}"
            )
        each = shape[1] // len(names), shape[2]
        for i in range(experts.count * len(names)):
            name = names[i % len(names)].format(i // len(names))
            yield f"model.layers.{int(layer[1])}.{name}.weight", tensor.offset + i * form_bytes(tensor.form, each), each
        return
    name = f"model.layers.{int(layer[1])}.{config.layer_names.get(layer[2], '')}" if layer else _NAMES.get(stem, "")
    if experts and re.fullmatch(r"blk\.\d+\.ffn_(gate|up|down)\.\d+", stem):
        raise ModelError(
            f"{path} has a tensor for each expert ({tensor.name}), as files before 2024-04 do; use a newer one"
        )
    if end not in ("weight", "bias") or not name or name.endswith("."):
        raise ModelError(
            f"{path} has the tensor {tensor.name[:80]!r} ({tensor.form}), which supported models do not have"
        )
    if name.endswith("conv1d") and len(shape) == 2:
        shape = shape[0], 1, shape[1]
    if name.endswith("shared_expert_gate") and len(shape) == 1:
        shape = 1, shape[0]
    yield f"{name}.{end}", tensor.offset, shape


def _parts_of_head(
    tensor: GgufTensor, config: _Configuration, path: Path
) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """The same as `_parts_of`, for a tensor of a multi-token-prediction head. Yields nothing if it is not used."""
    _, _, part = tensor.name.split(".", 2)
    if part in HEAD_NAMES:
        yield HEAD_NAMES[part], tensor.offset, tensor.shape
    elif part.rpartition(".")[0] in config.layer_names or part.removesuffix(".weight") in EXPERT_NAMES:
        for name, offset, shape in _parts_of(replace(tensor, name=f"blk.0.{part}"), config, path):
            yield name.replace("model.layers.0.", "mtp.layers.0."), offset, shape


def _read_floats(path: Path, tensor: GgufTensor) -> np.ndarray:
    if tensor.form != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > 2**16:
        raise ModelError(
            f"{path} has {tensor.name!r} of the shape {tensor.shape} in {tensor.form}; it must be one row of at most "
            "65,536 numbers in F32"
        )
    return np.fromfile(path, "<f4", tensor.shape[0], offset=tensor.offset)


class _Configuration:
    """The configuration of a model from the keys of its file."""

    def __init__(self, keys: Mapping[str, Any], path: Path) -> None:
        self._metadata, self._path = keys, path
        self._architecture = str(keys.get("general.architecture"))
        if self._architecture not in ARCHITECTURES:
            raise ModelError(
                f"{path} has the architecture {self._architecture[:80]!r}, which is not supported; supported: "
                f"{', '.join(ARCHITECTURES)}"
            )
        self._family = ARCHITECTURES[self._architecture]
        if self._architecture == "llama" and keys.get("llama.expert_count"):
            self._family = "MixtralForCausalLM"
        family = FAMILIES[self._family]
        self.is_linear = family.linear is not None
        """Whether the model has layers with linear attention."""
        self.experts = self._experts()
        self.layer_names = (
            LAYER_NAMES
            | (LINEAR_NAMES if self.is_linear else {})
            | (SHARED_NAMES if self.experts and self.experts.names.shared else {})
            | ({"ffn_gate_inp": self.experts.names.router} if self.experts else {})
            | (NAMES_BEHIND if family.norms_behind else {})
        )
        """Hugging Face's names within a layer, by those of GGUF."""
        self._heads = self._whole("attention.head_count")
        self._kv_heads = self._whole("attention.head_count_kv", self._heads)

    @property
    def _blocks(self) -> int:
        """The number of blocks: layers, and those of the multi-token-prediction head behind them."""
        return self._whole("block_count")

    @property
    def further_layers(self) -> int:
        """The number of blocks of the multi-token-prediction head, which are the last blocks."""
        key = "nextn_predict_layers"
        found = self._metadata.get(self._key(key), 0) if self.is_linear else 0
        if type(found) is not int or not 0 <= found < self._blocks:
            raise self._odd(key, f"{str(found)[:80]!r} of {self._blocks:,} blocks")
        return found

    @property
    def _layers(self) -> int:
        return self._blocks - self.further_layers

    def is_behind(self, name: str) -> bool:
        """Whether a tensor belongs to a block of the multi-token-prediction head."""
        block = _IN_LAYER.fullmatch(name) if self.is_linear else None
        return block is not None and self._layers <= int(block[1]) < self._blocks

    def _experts(self) -> Experts | None:
        """The mixtures of experts of the model. In llama.cpp, the shares of a row's experts always sum to 1."""
        names = FAMILIES[self._family].experts
        if names is None:
            return None
        count, used = self._whole("expert_count"), self._whole("expert_used_count")
        shared = 0
        if names.shared:
            shared = self._whole(
                "expert_shared_feed_forward_length", self._metadata.get(self._key("feed_forward_length"))
            )
        try:
            return Experts(count, used, True, names, shared)
        except ValueError:
            supported = f"from 1 to all of them, and at most {MOST_EXPERTS:,} experts, are supported"
            raise self._odd("expert_used_count", f"{used:,} of {count:,} experts; {supported}") from None

    def interleaved_heads(self, name: str) -> int:
        """The number of heads of queries or keys whose rows are in the order of rotated pairs. 0: rows have the order
        of Hugging Face's checkpoints."""
        part = name.split(".")[-2] if self._architecture == "llama" and name.startswith("blk.") else ""
        return {"attn_q": self._heads, "attn_k": self._kv_heads}.get(part, 0)

    def raw(self, tensors: Mapping[str, Mapping[str, Any]], divisors: np.ndarray | None) -> dict[str, Any]:
        """The content of `config.json`.

        Args:
            tensors: the tensors of the index, by name.
            divisors: the divisors of RoPE's frequencies, if the file has them.
        """
        hidden, layers = self._whole("embedding_length"), self._layers
        size = self._whole("attention.key_length", hidden // max(1, self._heads))
        rotated = self._whole("rope.dimension_count", size)
        for key in ("attention.value_length", *(() if self.is_linear else ("rope.dimension_count",))):
            if self._whole(key, size) != size:
                raise self._odd(key, f"{self._whole(key)}; {size}, the size of a head, is supported")
        if rotated > size or rotated % 2:
            raise self._odd("rope.dimension_count", f"{rotated:,}; an even number up to {size}, the size of a head")
        named = [int(name.split(".")[2]) for name in tensors if name.startswith("model.layers.")]
        if max(named, default=-1) + 1 != layers:
            raise self._odd(
                "block_count", f"{self._blocks:,}; there are tensors of {max(named, default=-1) + 1:,} layers"
            )
        embedding = tensors.get("model.embed_tokens.weight")
        if embedding is None:
            raise ModelError(f"{self._path} lacks the tensor token_embd.weight")
        experts, router = self.experts, f"{self.experts.names.router}.weight" if self.experts else ""
        forms = {
            one["form"]
            for name, one in tensors.items()
            if len(one["shape"]) > 1
            and not (experts and name.endswith(router))
            and not name.endswith(_NOT_BY_TYPE)
            and not name.startswith("mtp.")
        }
        base, key = self._float("rope.freq_base", 10000.0), "expert_feed_forward_length"
        of_each = self._metadata.get(self._key(key)) if self.is_linear else None  # some files give only this key
        width = self._whole("feed_forward_length", of_each)
        of_experts: dict[str, Any] = {}
        if experts:
            of_experts = {experts.names.count[0]: experts.count, "num_experts_per_tok": experts.used}
            of_experts |= {"moe_intermediate_size": self._whole(key, width), "norm_topk_prob": experts.normalised}
        if experts and experts.shared_width:
            of_experts["shared_expert_intermediate_size"] = experts.shared_width
        return {
            "architectures": [self._family],
            "model_type": _MODEL_TYPES.get(self._family, self._architecture),
            "vocab_size": embedding["shape"][0],
            "hidden_size": hidden,
            "intermediate_size": width,
            **of_experts,
            "num_hidden_layers": layers,
            "num_attention_heads": self._heads,
            "num_key_value_heads": self._kv_heads,
            "head_dim": size,
            "hidden_act": FAMILIES[self._family].activation,
            "max_position_embeddings": self._whole("context_length"),
            "rms_norm_eps": self._float("attention.layer_norm_rms_epsilon"),
            "rope_theta": base,
            "rope_scaling": self._scaling(divisors, base, rotated),
            "tie_word_embeddings": "lm_head.weight" not in tensors,
            "attention_bias": self._architecture != "qwen2" and "model.layers.0.self_attn.q_proj.bias" in tensors,
            **(self._of_gemma(hidden, layers, size) if self._architecture == "gemma3" else self._without_windows()),
            **(self._of_linear(tensors) | {"partial_rotary_factor": rotated / size} if self.is_linear else {}),
            "torch_dtype": {("F32",): "float32", ("F16",): "float16"}.get(tuple(forms), "bfloat16"),
            "bos_token_id": self._metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._ends(embedding["shape"][0]),
        }

    def _without_windows(self) -> dict[str, Any]:
        if f"{self._architecture}.attention.sliding_window" in self._metadata:
            raise self._odd("attention.sliding_window", "a window; sliding windows are not supported for this kind")
        return {"use_sliding_window": False}

    def _of_gemma(self, hidden: int, layers: int, size: int) -> dict[str, Any]:
        """The keys for Gemma 3, as llama.cpp reads them (`LLM_ARCH_GEMMA3` of github.com/ggml-org/llama.cpp,
        src/llama-model.cpp). No key gives the divisor of scores; the model with 62 layers is known to have another
        divisor. Without the key for the window, all layers see all tokens."""
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if self._float(key, 0.0) != 0.0:
                raise self._odd(key, f"{self._float(key):g}, which is not supported")
        window = self._metadata.get("gemma3.attention.sliding_window", 0)
        has_windows = type(window) is not int or window != 0
        return {
            "sliding_window": self._whole("attention.sliding_window") if has_windows else None,
            "sliding_window_pattern": self._whole("attention.sliding_window_pattern", 6) if has_windows else 1,
            "rope_local_base_freq": self._float("rope.freq_base_swa", 10000.0),
            "query_pre_attn_scalar": hidden // self._heads if layers == 62 else size,
            "zero_centred_norms": False,
        }

    def _of_linear(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The keys for models with linear attention, as llama.cpp's converter writes them (`Qwen3NextModel` and
        `_LinearAttentionVReorderBase` of github.com/ggml-org/llama.cpp, conversion/qwen.py). Value heads of Qwen3.5 are
        tiled. `ssm_a` is the decay. Qwen3-Next's projections are split, except that of beta and the decay; in files
        before 2026, they are not split."""
        values, width = self._whole("ssm.time_step_rank"), self._whole("ssm.inner_size")
        if width % values:
            raise self._odd("ssm.inner_size", f"{width:,}, which {values:,} heads cannot share")
        ends = {name.rpartition(".in_proj_")[2].removesuffix(".weight") for name in tensors if ".in_proj_" in name}
        inputs = ("qkv", "z", "b", "a")
        if self._architecture == "qwen3next":
            inputs = ("qkvz", "ba") if "qkvz" in ends else ("qkv", "z", "ba")
        return {
            "layer_types": self._layer_types(),
            "linear_num_key_heads": self._whole("ssm.group_count"),
            "linear_num_value_heads": values,
            "linear_key_head_dim": self._whole("ssm.state_size"),
            "linear_value_head_dim": width // values,
            "linear_conv_kernel_dim": self._whole("ssm.conv_kernel"),
            "linear_inputs": inputs,
            "linear_tiled": self._architecture != "qwen3next",
            "linear_plain_decay": True,
            "zero_centred_norms": False,
            "mtp_num_hidden_layers": self.further_layers if "mtp.fc.weight" in tensors else 0,
        }

    def _layer_types(self) -> list[str]:
        every = self._whole("full_attention_interval", 4)
        is_linear: Any = [(layer + 1) % every != 0 for layer in range(self._layers)]
        listed = self._metadata.get(self._key("attention.recurrent_layers"))
        if listed is not None:
            if not isinstance(listed, np.ndarray) or listed.dtype != bool or len(listed) != self._blocks:
                raise self._odd("attention.recurrent_layers", f"no list of {self._blocks:,} truth values")
            is_linear = listed[: self._layers]
        return ["linear_attention" if one else "full_attention" for one in is_linear]

    def _ends(self, vocabulary: int) -> list[int]:
        """The tokens that end a generation: those that the file names as the end of a sequence, a turn or a message,
        and those with a text of `_END_TEXTS`, because the file does not name all. The latter must be control tokens,
        except `GEMMA_TURNS`."""
        found = [self._metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
        texts, kinds = (self._metadata.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
        if isinstance(texts, list) and isinstance(kinds, np.ndarray) and len(texts) == len(kinds):
            ends = ((token, text) for token, text in enumerate(texts) if text in _END_TEXTS)
            found += [token for token, text in ends if kinds[token] == _CONTROL or text in GEMMA_TURNS]
        return sorted({token for token in found if type(token) is int and 0 <= token < vocabulary})

    def _scaling(self, divisors: np.ndarray | None, base: float, size: int) -> dict[str, Any] | None:
        """The `rope_scaling` of `config.json`. As in llama.cpp, a scaling without a type is linear, `rope.scale_linear`
        is the old name of the factor, and a factor of 0 means no scaling."""
        kind = str(self._metadata.get(f"{self._architecture}.rope.scaling.type", "linear"))
        factor = self._float("rope.scaling.factor", self._float("rope.scale_linear", 0.0)) or 1.0
        if factor <= 0:
            raise self._odd("rope.scaling.factor", f"{factor:g}; a number above 0 belongs there")
        is_scaled = kind != "none" and (kind != "linear" or factor != 1.0)
        if divisors is not None:
            if is_scaled:
                raise self._odd(
                    "rope.scaling.type", f"{kind[:80]!r} beside {_ROPE_DIVISORS}; only one of them is supported"
                )
            return self._divided(divisors, base, size)
        if not is_scaled:
            return None
        if kind not in ("linear", "yarn"):
            raise self._odd("rope.scaling.type", f"{kind[:80]!r}; none, linear and yarn are supported")
        found: dict[str, Any] = {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            original = self._whole("rope.scaling.original_context_length")
            found |= {"original_max_position_embeddings": original}
            for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
                if f"{self._architecture}.rope.scaling.{theirs}" in self._metadata:
                    found[ours] = self._float(f"rope.scaling.{theirs}")
            attention = self._float("rope.scaling.attn_factor", 1.0)
            if attention != 1.0:
                found["attention_factor"] = attention * (1.0 + 0.1 * math.log(found["factor"]))
        return found

    def _divided(self, divisors: np.ndarray, base: float, size: int) -> dict[str, Any] | None:
        """The scaling that has these divisors of RoPE's frequencies: linear if all are equal, otherwise Llama 3's."""
        if len(divisors) != size // 2 or not np.isfinite(divisors).all() or divisors.min() <= 0:
            raise ModelError(
                f"{self._path} has {len(divisors)} numbers in {_ROPE_DIVISORS}, which do not fit the heads, or are not "
                "above 0 and finite"
            )
        factor = float(divisors.max())
        factor = float(round(factor)) if abs(factor - round(factor)) < 1e-4 * factor else factor
        if np.allclose(divisors, factor, rtol=1e-4):
            return None if factor == 1 else {"rope_type": "linear", "factor": factor}
        wavelengths = 2 * math.pi * base ** (np.arange(0, size, 2, dtype=np.float64) / size)

        def misses_by(original: int) -> float:
            kept = np.clip((original / wavelengths - 1.0) / 3.0, 0.0, 1.0)
            return float(np.abs(divisors * (kept + (1.0 - kept) / factor) - 1.0).max())

        original = min((2**power for power in range(5, 21)), key=misses_by)
        if misses_by(original) < 1e-4:
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }
        raise ModelError(
            f"{self._path} divides RoPE's frequencies ({_ROPE_DIVISORS}) in a way that is not Llama 3's, which is not "
            "supported"
        )

    def _key(self, key: str) -> str:
        return f"{self._architecture}.{key}"

    def _whole(self, key: str, default: int | None = None) -> int:
        found = self._metadata.get(f"{self._architecture}.{key}", default)
        if type(found) is not int or not 0 < found < 2**31:
            raise self._odd(key, f"{str(found)[:80]!r}; a whole number above 0 belongs there")
        return found

    def _float(self, key: str, default: float | None = None) -> float:
        found = self._metadata.get(f"{self._architecture}.{key}", default)
        if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
            raise self._odd(key, f"{str(found)[:80]!r}; a number belongs there")
        return float(found)

    def _odd(self, key: str, found: str) -> ModelError:
        return ModelError(f"{self._path} gives {self._architecture}.{key} as {found}")
