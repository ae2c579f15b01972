"""Random models whose matrices are stored in four or eight bits, and what they stand for, by numpy alone.

Each format is written here from its description, without anything of the program's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mtp import Head
from safetensors.torch import load_file, save_file
from tiny import save_family
from transformers import PreTrainedModel

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The outputs whose numbers the fields of a word have, lowest first."""


@dataclass
class Stored:
    """A quantised matrix: the tensors of a file, by the end of their names, and its numbers in float32."""

    tensors: dict[str, torch.Tensor]
    numbers: np.ndarray


@dataclass(frozen=True)
class Format:
    config: dict[str, Any]
    """The `quantization_config`."""
    store: Callable[[np.random.Generator, int, int], Stored]
    """Makes a random matrix of so many outputs and inputs."""
    left_out: tuple[str, ...] = field(default=())
    """Ends of the names of matrices that are stored as usual."""


def _words(fields: np.ndarray, bits: int) -> np.ndarray:
    """`[n, fields]` whole numbers as int32 words, the first in the lowest bits."""
    found = np.zeros(len(fields), dtype=np.uint32)
    for place in range(fields.shape[1]):
        found |= fields[:, place].astype(np.uint32) << np.uint32(bits * place)
    return found.view(np.int32)


def _packed(values: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """`[n, m]` with neighbours of the second dimension in one word."""
    n, m = values.shape
    fields = values.reshape(n, m * bits // 32, 32 // bits)
    fields = fields[:, :, order] if order else fields
    return torch.from_numpy(_words(fields.reshape(-1, 32 // bits), bits).reshape(n, -1))


def _draw(
    rng: np.random.Generator, outputs: int, inputs: int, size: int, bits: int, zeros: np.ndarray | int | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    groups = -(-inputs // size)
    q = rng.integers(0, 2**bits, (outputs, inputs))
    scales = (rng.uniform(0.5, 1.5, (outputs, groups)) * 4 / 2**bits * inputs**-0.5).astype(np.float16)
    if zeros is None:
        zeros = rng.integers(1, 2**bits, (outputs, groups))
    return q, scales, np.broadcast_to(np.asarray(zeros), (outputs, groups))


def _numbers(q: np.ndarray, scales: np.ndarray, zeros: np.ndarray, group_of: np.ndarray) -> np.ndarray:
    return scales.astype(np.float32)[:, group_of] * (q - zeros[:, group_of]).astype(np.float32)


def gptq(bits: int, size: int, *, v2: bool = False, symmetric: bool = False, act_order: bool = False) -> Format:
    def store(rng: np.random.Generator, outputs: int, inputs: int) -> Stored:
        each = size if size > 0 else inputs
        q, scales, zeros = _draw(rng, outputs, inputs, each, bits, 2 ** (bits - 1) if symmetric else None)
        group_of = np.arange(inputs) // each
        if act_order:
            group_of = rng.permutation(group_of)
        tensors = {
            "qweight": _packed(q.T.reshape(inputs * bits // 32, 32 // bits, outputs).transpose(0, 2, 1)
                               .reshape(-1, 32 // bits), bits).reshape(inputs * bits // 32, outputs),
            "qzeros": _packed(np.ascontiguousarray(zeros.T) - (not v2), bits),
            "scales": torch.from_numpy(np.ascontiguousarray(scales.T)),
            "g_idx": torch.from_numpy(group_of.astype(np.int32)),
        }  # fmt: skip
        return Stored(tensors, _numbers(q, scales, zeros, group_of))

    form = {"checkpoint_format": "gptq_v2"} if v2 else {}
    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": symmetric, "desc_act": act_order}
    return Format(config | form, store)


def awq(size: int) -> Format:
    def store(rng: np.random.Generator, outputs: int, inputs: int) -> Stored:
        q, scales, zeros = _draw(rng, outputs, inputs, size, 4)
        tensors = {
            "qweight": _packed(np.ascontiguousarray(q.T), 4, _AWQ_ORDER),
            "qzeros": _packed(np.ascontiguousarray(zeros.T), 4, _AWQ_ORDER),
            "scales": torch.from_numpy(np.ascontiguousarray(scales.T)),
        }
        return Stored(tensors, _numbers(q, scales, zeros, np.arange(inputs) // size))

    config = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}
    config["modules_to_not_convert"] = ["model.layers.1.mlp", "lm_head"]
    return Format(config, store, ("layers.1.mlp.gate_proj", "layers.1.mlp.up_proj", "layers.1.mlp.down_proj"))


def compressed(form: str, bits: int, size: int, *, symmetric: bool = True, strategy: str = "group") -> Format:
    """compressed-tensors; `size` inputs a group."""
    number = "float" if form == "float-quantized" else "int"

    def store(rng: np.random.Generator, outputs: int, inputs: int) -> Stored:
        each = size if strategy == "group" else inputs
        q, scales, zeros = _draw(rng, outputs, inputs, each, bits, 2 ** (bits - 1) if symmetric else None)
        if strategy == "tensor":
            scales = np.broadcast_to(scales[:1, :1], scales.shape)
        group_of, half = np.arange(inputs) // each, 2 ** (bits - 1)
        found: dict[str, torch.Tensor] = {}
        if number == "float":
            values = torch.from_numpy(rng.normal(size=(outputs, inputs)).astype(np.float32)).to(torch.float8_e4m3fn)
            found["weight"], q, zeros = values, values.float().numpy(), np.zeros_like(zeros)
        elif form == "pack-quantized":
            found["weight_packed"] = _packed(q, bits)
            found["weight_shape"] = torch.tensor([outputs, inputs])
            if not symmetric:
                words = _packed(np.ascontiguousarray(zeros.T), bits)  # of neighbouring outputs
                found["weight_zero_point"] = words.T.contiguous()
        else:
            found["weight"] = torch.from_numpy((q - half).astype(np.int8))
            if not symmetric:
                found["weight_zero_point"] = torch.from_numpy((zeros - half).astype(np.int8))
        stored = scales[:1, 0] if strategy == "tensor" else scales
        found["weight_scale"] = torch.from_numpy(stored.copy())
        if number == "float":
            found["input_scale"] = torch.ones(1)  # of activations, which are not quantised
        return Stored(found, _numbers(q, scales, zeros, group_of))

    weights: dict[str, Any] = {"num_bits": bits, "type": number, "symmetric": symmetric, "strategy": strategy}
    weights["group_size"] = size if strategy == "group" else None
    activations = {"num_bits": 8, "type": "float", "dynamic": False} if number == "float" else None
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": scheme}}
    return Format(
        config | {"ignore": ["lm_head", r"re:.*layers\.2\.self_attn\.o_proj$"]}, store, ("2.self_attn.o_proj",)
    )


def fp8(block: tuple[int, int] | None) -> Format:
    def store(rng: np.random.Generator, outputs: int, inputs: int) -> Stored:
        values = torch.from_numpy(rng.normal(size=(outputs, inputs)).astype(np.float32)).to(torch.float8_e4m3fn)
        rows, columns = block or (outputs, inputs)
        scales = rng.uniform(0.05, 0.2, (-(-outputs // rows), -(-inputs // columns))).astype(np.float32)
        numbers = values.float().numpy() * scales[np.arange(outputs) // rows][:, np.arange(inputs) // columns]
        inverse = torch.from_numpy(scales) if block else torch.tensor(scales[0, 0])
        return Stored({"weight": values, "weight_scale_inv": inverse}, numbers)

    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    return Format(config | ({"weight_block_size": list(block)} if block else {}), store)


FORMATS = {
    "gptq": gptq(4, 32),
    "gptq-v2": gptq(4, 16, v2=True),
    "gptq-symmetric": gptq(4, 32, symmetric=True),
    "gptq-act-order": gptq(4, 32, act_order=True),
    "gptq-one-group": gptq(4, -1),
    "gptq-8-bits": gptq(8, 32),
    "awq": awq(32),
    "packed": compressed("pack-quantized", 4, 32),
    "packed-zeros": compressed("pack-quantized", 4, 32, symmetric=False),
    "packed-8-bits": compressed("pack-quantized", 8, 16),
    "packed-channel": compressed("pack-quantized", 4, 0, strategy="channel"),
    "int8": compressed("int-quantized", 8, 0, strategy="channel"),
    "int8-zeros": compressed("int-quantized", 8, 0, symmetric=False, strategy="channel"),
    "float8": compressed("float-quantized", 8, 0, strategy="tensor"),
    "fp8": fp8((32, 48)),
    "fp8-one-scale": fp8(None),
}


def _stored_experts(
    form: Format, name: str, experts: torch.Tensor, rng: np.random.Generator, *, is_mixtral: bool
) -> dict[str, torch.Tensor]:
    """The tensors of a file for a layer's `experts`, which transformers has in one, named so; it is given the numbers
    that they stand for."""
    stem, _, part = name.rpartition(".")
    kinds = {"down_proj": ["down_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}[part]
    of_mixtral = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    found: dict[str, torch.Tensor] = {}
    for number, expert in enumerate(experts):
        for kind, numbers in zip(kinds, expert.chunk(len(kinds)), strict=True):
            projection = f"{stem}.{number}.{kind}"
            if is_mixtral:
                projection = f"{stem.replace('mlp', 'block_sparse_moe')}.{number}.{of_mixtral[kind]}"
            if f"{stem.replace('.experts', '')}.{kind}".endswith(form.left_out):
                found[f"{projection}.weight"] = numbers.clone()
                continue
            stored = form.store(rng, *numbers.shape)
            found |= {f"{projection}.{end}": tensor for end, tensor in stored.tensors.items()}
            numbers.copy_(torch.from_numpy(stored.numbers))
    return found


def save_quantised(
    directory: Path, form: Format, family: str = "llama", seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """Writes a random model of one of `tiny.FAMILIES` to `directory`, its layers' matrices in a format; returns
    transformers' model with the numbers that they stand for, in float32."""
    model = save_family(directory, family, seed, **changes)
    rng, tensors = np.random.default_rng(seed), dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    few = [name for name in tensors if _HAS_FEW_OUTPUTS.search(name)]
    config = dict(form.config)
    if few:
        _leave_out(config, few)
    for name in [name for name in tensors if re.search(r"_proj(_qkvz?|_z)?\.weight", name)]:
        projection = name.removesuffix(".weight")
        if projection.endswith(form.left_out):
            continue
        stored = form.store(rng, *tensors.pop(name).shape)
        tensors |= {f"{projection}.{end}": tensor for end, tensor in stored.tensors.items()}
        model.get_submodule(projection).weight.data = torch.from_numpy(stored.numbers)
    for name in [name for name in tensors if "mlp.experts." in name]:
        tensors |= _stored_experts(form, name, tensors.pop(name), rng, is_mixtral=family == "mixtral")
    if family == "mixtral":
        tensors = {name.replace("mlp.gate.", "block_sparse_moe.gate."): tensor for name, tensor in tensors.items()}
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, directory / "model.safetensors")
    written = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(written | {"quantization_config": config}))
    return model


def save_quantised_head(directory: Path, form: Format, head: Head, seed: int = 0) -> None:
    """Writes a multi-token-prediction head beside a model's weights, the matrices of its layer in the model's format;
    `head` gets the numbers that they stand for."""
    rng, tensors = np.random.default_rng(seed), head.tensors()
    for name, parameter in head.layer.named_parameters():
        stored_as = f"mtp.layers.0.{name}"
        if ".experts." in name:
            numbers = tensors.pop(stored_as).detach().clone()
            tensors |= _stored_experts(form, stored_as, numbers, rng, is_mixtral=False)
        elif name.endswith("_proj.weight"):
            stored = form.store(rng, *tensors.pop(stored_as).shape)
            ends = stored.tensors.items()
            tensors |= {f"{stored_as.removesuffix('.weight')}.{end}": tensor for end, tensor in ends}
            numbers = torch.from_numpy(stored.numbers)
        else:
            continue
        parameter.data = numbers
    path = directory / "model.safetensors"
    save_file({name: x.contiguous().clone() for name, x in (load_file(path) | tensors).items()}, path)


_HAS_FEW_OUTPUTS = re.compile(r"in_proj_(b|a|ba)\.|shared_expert_gate\.")


def _leave_out(config: dict[str, Any], names: list[str]) -> None:
    """Has a `quantization_config` say that these are stored as usual, as published models do."""
    names = [name.removesuffix(".weight") for name in names]
    if config["quant_method"] == "gptq":
        config["dynamic"] = {f"-:.*{name.rpartition('.')[2]}": {} for name in names} | {"lm_head": {}}
    else:
        key = "ignore" if config["quant_method"] == "compressed-tensors" else "modules_to_not_convert"
        config[key] = [*config.get(key, []), *names]
