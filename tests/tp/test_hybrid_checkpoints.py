"""Qwen3-Next and Qwen3.5 as they are published: wrapped beside a vision model, all experts of a layer in one tensor,
and the `config.json` of each size."""

import json
import re
from typing import Any

import pytest
import torch
from checkpoints import change_config, stack_experts, to_bin
from safetensors.torch import load_file, save_file
from spmd import run_jobs
from tiny import FAMILIES, greedy_oracle, random_tokens, save_family, tiny_shape
from transformers import (
    AutoModelForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)
from triforce.offload import Engine
from triforce.tp import PRESETS
from triforce.tp.decoder import Decoder
from triforce.tp.errors import ModelError
from triforce.tp.matrices import num_parameters
from triforce.tp.model.config import ModelConfig
from triforce.tp.weights.checkpoint import Checkpoint, _SafetensorsFile

CPU = torch.device("cpu")

# ai-dynamo/aiconfigurator, src/aiconfigurator/model_configs/Qwen--Qwen3-Next-80B-A3B-Thinking_config.json, but for
# keys that no reader of this model has.
QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def wrapped(architecture: str, *, tied: bool = False, **text: Any) -> dict[str, Any]:
    """A `config.json` of Qwen3.5 with what all sizes have.

    That, for the 27B: NVIDIA-NeMo/Megatron-Bridge, tests/unit_tests/models/qwen/test_qwen35_bridge.py. Shapes of the
    sizes: p-doom/omegalax, omegalax/models/qwen3_5/config.py; of some of them THUDM/slime, scripts/models/qwen3.5-*.sh.
    Positions: xorbitsai/inference, doc/source/models/builtin/llm/qwen3.5.rst.
    """
    kind = "qwen3_5_moe" if "Moe" in architecture else "qwen3_5"
    common = {
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "model_type": f"{kind}_text",
        "mtp_num_hidden_layers": 1,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": tied,
        "vocab_size": 248320,
    }
    return {
        "architectures": [architecture],
        "model_type": kind,
        "text_config": common | text,
        "tie_word_embeddings": tied,
        "vision_config": {"depth": 12, "hidden_size": 768, "model_type": kind},
    }


def dense(hidden: int, width: int, layers: int, heads: int, kv_heads: int, value_heads: int, *, tied: bool = False):
    return wrapped(
        "Qwen3_5ForConditionalGeneration",
        tied=tied,
        hidden_size=hidden,
        intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        linear_num_value_heads=value_heads,
    )


THIRTY_FIVE = wrapped(
    "Qwen3_5MoeForConditionalGeneration",
    hidden_size=2048,
    num_hidden_layers=40,
    num_attention_heads=16,
    num_key_value_heads=2,
    linear_num_value_heads=32,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    num_experts=256,
    num_experts_per_tok=8,
)

PUBLISHED = {  # layers with keys and values, and KV heads; those with states, value heads
    "next-80b-a3b": (QWEN3_NEXT, (12, 2), (36, 32)),
    "0.8b": (dense(1024, 3584, 24, 8, 2, 16, tied=True), (6, 2), (18, 16)),
    "2b": (dense(2048, 6144, 24, 8, 2, 16, tied=True), (6, 2), (18, 16)),
    "4b": (dense(2560, 9216, 32, 16, 4, 32, tied=True), (8, 4), (24, 32)),
    "9b": (dense(4096, 12288, 32, 16, 4, 32), (8, 4), (24, 32)),
    "27b": (dense(5120, 17408, 64, 24, 4, 48), (16, 4), (48, 48)),
    "35b-a3b": (THIRTY_FIVE, (10, 2), (30, 32)),
}
CLASSES = {
    "Qwen3NextForCausalLM": Qwen3NextConfig,
    "Qwen3_5ForConditionalGeneration": Qwen3_5TextConfig,
    "Qwen3_5MoeForConditionalGeneration": Qwen3_5MoeTextConfig,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_describe_the_models_they_should(tmp_path, name):
    raw, (kv_layers, kv_heads), (layers, value_heads) = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = ModelConfig.load(tmp_path)
    assert config.max_position_embeddings == 262_144 and config.dtype == torch.bfloat16
    assert config.kv_layers == kv_layers
    assert config.kv_bytes_per_token(torch.bfloat16) == kv_layers * 2 * kv_heads * 256 * 2
    assert config.linear and config.rotated == 64 and config.rope.theta == 1e7
    state, seen = value_heads * 128 * 128 * 4, 3 * (2 * 16 + value_heads) * 128 * 2
    assert config.linear.state_bytes(torch.bfloat16) == layers * (state + seen)
    text = CLASSES[raw["architectures"][0]](**raw.get("text_config", raw))
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(text)
    assert num_parameters(config) == theirs.num_parameters()
    assert config.linear.layers == tuple(i for i, kind in enumerate(text.layer_types) if kind == "linear_attention")


def test_four_bits_of_the_official_checkpoints_are_of_mlps_and_experts_alone():
    """`dynamic` of their `quantization_config`: onnxruntime/mobius, pull request 18."""
    for preset, mlp in (("qwen3.5-27b-gptq", "mlp.up_proj"), ("qwen3.5-35b-a3b-gptq", "mlp.experts.7.up_proj")):
        stored = PRESETS[preset].configs()[0].quantisation
        assert stored and stored.covers(f"model.layers.0.{mlp}")
        for name in ("0.linear_attn.in_proj_qkv", "3.self_attn.o_proj", "0.mlp.shared_expert.up_proj"):
            assert not stored.covers(f"model.layers.{name}")


def logits(directory, tokens: list[int]) -> torch.Tensor:
    return Engine.load(directory, "none", device="cpu", dtype="float32").logits(tokens[:1], tokens[1:])


WRAPPED = {
    "qwen3.5": (Qwen3_5Config, Qwen3_5ForConditionalGeneration),
    "qwen3.5-moe": (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration),
}


@torch.no_grad()
def save_wrapped(directory, family: str):
    """A model of text and images; transformers' own."""
    kind, model_class = WRAPPED[family]
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4}
    vision |= {"out_hidden_size": 64, "num_position_embeddings": 16}
    torch.manual_seed(0)
    model = model_class(kind(text_config=tiny_shape() | FAMILIES[family][1], vision_config=vision)).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter += torch.empty_like(parameter).uniform_(-0.5, 0.5)
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("family", WRAPPED)
def test_a_text_model_beside_a_vision_model_is_unwrapped(tmp_path, family):
    model = save_wrapped(tmp_path, family)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    beginnings = {re.match(r"model\.language_model|model\.visual|lm_head", name) for name in stored}
    assert None not in beginnings and len({one[0] for one in beginnings if one}) == 3
    save_file(stored | {"mtp.fc.weight": torch.ones(64, 128), "mtp.layers.0.mlp.up_proj.weight": torch.ones(3)}, path)
    tokens = random_tokens(150)
    with torch.inference_mode():
        want = model(torch.tensor([tokens])).logits[0]
    assert (logits(tmp_path, tokens) - want).abs().max() < 1e-3, "of logits up to 10"


EXPERTS = ("qwen3.5-moe", "qwen3-next")


@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_experts_in_one_tensor_are_those_stored_one_by_one(tmp_path, family, form):
    save_family(tmp_path, family)
    tokens = random_tokens(60)
    want = logits(tmp_path, tokens)
    stack_experts(tmp_path)
    if form == "bin":
        to_bin(tmp_path)
    assert torch.equal(logits(tmp_path, tokens), want)


def test_two_ranks_read_their_parts_of_experts_in_one_tensor(tmp_path):
    model = save_family(tmp_path, "qwen3.5-moe")
    stack_experts(tmp_path)
    prompt = random_tokens(60)
    job = {"model": str(tmp_path), "draft": "none", "dtype": "float32", "prompt": prompt, "new_tokens": 12}
    (reports,) = run_jobs([job | {"temperature": 0.0, "settings": {"tiers": 1}}], ranks=2)
    want = greedy_oracle(model, prompt, 12)
    for report in reports:
        assert report["token_ids"] == want


def test_an_expert_is_read_without_the_others(tmp_path, monkeypatch):
    save_family(tmp_path, "qwen3.5-moe")
    one_by_one = load_file(tmp_path / "model.safetensors")
    stack_experts(tmp_path)
    checkpoint, read = Checkpoint(tmp_path, torch.float32, CPU), []
    get = _SafetensorsFile.__getitem__

    def counted(file, name):
        found = get(file, name)
        part = found.part
        object.__setattr__(found, "part", lambda wanted: read.append(part(wanted)) or read[-1])
        return found

    monkeypatch.setattr(_SafetensorsFile, "__getitem__", counted)
    for kind, shape in {"gate": (32, 64), "up": (32, 64), "down": (64, 32)}.items():
        name = f"model.layers.1.mlp.experts.5.{kind}_proj.weight"
        whole = checkpoint.read(name, *shape)
        assert torch.equal(whole, one_by_one[name])
        some = checkpoint.read(name, *shape, rows=slice(8, 24), columns=slice(3, 20))
        assert torch.equal(some, one_by_one[name][8:24, 3:20])
    assert [part.numel() for part in read] == [32 * 64, 16 * 17] * 3


def _changed(directory, change) -> None:
    """Has the file hold what `change` makes of one tensor of all experts."""
    stack_experts(directory)
    path = directory / "model.safetensors"
    stored = load_file(path)
    name = "model.layers.2.mlp.experts.gate_up_proj"
    stored[name] = change(stored[name]).clone()
    save_file(stored, path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda experts: experts[:7], "lack the tensor model.layers.2.mlp.experts.7.gate_proj.weight"),
        (lambda experts: experts[:, :-1], r"experts.0.gate_proj.weight in .* has shape \(31, 64\)"),
        (lambda experts: experts[:, :, 1:], r"has shape \(32, 63\); its config says \(32, 64\)"),
        (lambda experts: experts[0], "lack the tensor model.layers.2.mlp.experts.0.gate_proj.weight"),
        (lambda experts: torch.cat((experts, experts[:1])), "does not have: model.layers.2.mlp.experts.8.gate_proj"),
        (lambda experts: experts.to(torch.int8), "experts.0.gate_proj.weight in .* is I8"),
    ],
)
def test_experts_that_do_not_fit_the_config_are_named(tmp_path, change, words):
    save_family(tmp_path, "qwen3.5-moe")
    _changed(tmp_path, change)
    with pytest.raises(ModelError, match=words):
        Decoder.load(tmp_path, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attn_output_gate": False}, "attn_output_gate False, which is not supported; supported: true"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type 'sigmoid', which is not supported; supported: swish"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype 'bfloat16', which is not supported; supported: float32"),
        ({"hidden_act": "gelu"}, "activation 'gelu', which is not supported; supported: silu"),
        ({"layer_types": ["mamba"] * 4}, "4 layer_types for 4 layers, of them mamba (known: linear_attention,"),
        ({"layer_types": ["full_attention"]}, "1 layer_types for 4 layers"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types without full_attention"),
        ({"linear_num_value_heads": 3}, "2 key heads and 3 value heads (which must be a multiple)"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.01}}, "partial_rotary_factor 0.01"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_named(tmp_path, changes, words):
    save_family(tmp_path, "qwen3.5-moe")
    change_config(tmp_path, **changes)
    with pytest.raises(ModelError) as caught:
        ModelConfig.load(tmp_path)
    assert words in str(caught.value)


def test_what_published_configs_say_beside_the_shape_is_let_pass(tmp_path):
    save_family(tmp_path, "qwen3.5")
    before = ModelConfig.load(tmp_path)
    change_config(tmp_path, attn_output_gate=True, output_gate_type="swish", mamba_ssm_dtype="float32")
    change_config(tmp_path, mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False, mlp_only_layers=[])
    assert ModelConfig.load(tmp_path) == before
