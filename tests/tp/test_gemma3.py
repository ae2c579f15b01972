"""Gemma 3: what its checkpoints say, wrapped among other models or alone, and where it differs from Llama."""

import json

import pytest
import torch
from checkpoints import change_config
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, random_tokens, save_family, tiny_shape
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration, Gemma3TextConfig
from triforce.kernels.layers import gated, linear, rms_norm
from triforce.kernels.selection import padded_rows
from triforce.offload.caches.full import FullCache
from triforce.tp.decoder import Decoder
from triforce.tp.errors import ModelError
from triforce.tp.matrices import num_parameters
from triforce.tp.model.config import ModelConfig

CPU = torch.device("cpu")

ONE_BILLION = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 262144,
}


def wrapped(**text):
    """A `config.json` that leaves most of its text model to what is usual."""
    scaling = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "text_config": {"model_type": "gemma3_text"} | scaling | text,
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
    }


PUBLISHED = {  # millions of parameters; bytes of keys and values of a token in 16 bits; positions; divisor of scores
    "1b": (ONE_BILLION, 1000, 26 * 2 * 256 * 2, 32768, 256),
    "4b": (
        wrapped(hidden_size=2560, intermediate_size=10240, num_hidden_layers=34),
        3880,
        34 * 2 * 4 * 256 * 2,
        131072,
        256,
    ),
    "12b": (
        wrapped(
            hidden_size=3840,
            intermediate_size=15360,
            num_attention_heads=16,
            num_hidden_layers=48,
            num_key_value_heads=8,
        ),
        11766,
        48 * 2 * 8 * 256 * 2,
        131072,
        256,
    ),
    "27b": (
        wrapped(
            head_dim=128,
            hidden_size=5376,
            intermediate_size=21504,
            num_attention_heads=32,
            num_hidden_layers=62,
            num_key_value_heads=16,
            query_pre_attn_scalar=168,
        ),
        27009,
        62 * 2 * 16 * 128 * 2,
        131072,
        168,
    ),
}
"""By what public copies of their `config.json` say."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_describe_the_models_they_should(tmp_path, name):
    raw, millions, kv_bytes, positions, scalar = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = ModelConfig.load(tmp_path)
    assert round(num_parameters(config) / 1e6) == millions
    assert config.kv_bytes_per_token(torch.bfloat16) == kv_bytes
    assert config.max_position_embeddings == positions and config.eos_token_ids == (1, 106)
    assert config.attention_scale == scalar**-0.5
    text = Gemma3TextConfig(**raw.get("text_config", raw))
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(text)
    assert num_parameters(config) == theirs.num_parameters()
    assert text.layer_types
    windows = [text.sliding_window if kind == "sliding_attention" else None for kind in text.layer_types]
    assert list(config.sliding_windows) == windows and windows.count(None) == config.num_layers // 6
    with torch.device("cpu"):
        rotary = type(theirs.model.rotary_emb)(text)
    for rope, kind in zip(config.ropes, ("full_attention", "sliding_attention"), strict=True):
        frequencies = rope.inverse_frequencies(config.head_dim, torch.ones(1, dtype=torch.int64))
        assert torch.allclose(frequencies, getattr(rotary, f"{kind}_inv_freq"), rtol=1e-6)


def logits(directory, tokens, dtype=torch.float32):
    decoder = Decoder.load(directory, dtype=dtype, device=CPU)
    cache = FullCache.on_device(decoder.config, decoder.rope, dtype=dtype, device=CPU, capacity=len(tokens))
    return decoder.forward(torch.tensor(tokens), cache, num_logits=len(tokens))


def save_wrapped(directory):
    """A model of text and images; transformers' own."""
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14, "model_type": "siglip_vision_model"}
    text = Gemma3TextConfig(**(tiny_shape() | FAMILIES["gemma3"][1] | {"tie_word_embeddings": True}))
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(config).eval()
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("names", ["model.language_model.", "language_model.model."])
def test_a_text_model_among_others_is_unwrapped(tmp_path, names):
    """The names that transformers writes, and those of the published files."""
    model = save_wrapped(tmp_path)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    of_text = [name for name in stored if "language_model" in name]
    assert of_text and len(of_text) < len(stored)
    prefix = of_text[0].partition("layers")[0].partition("embed_tokens")[0].partition("norm")[0]
    stored = {name.replace(prefix, names).replace("model.vision", "vision"): held for name, held in stored.items()}
    save_file({name: held.clone() for name, held in stored.items()}, path)
    tokens = random_tokens(150)
    with torch.inference_mode():
        want = model(torch.tensor([tokens])).logits[0]
    assert torch.allclose(logits(tmp_path, tokens), want, atol=1e-4)


def test_a_wrapped_configuration_without_its_text_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Gemma3ForConditionalGeneration"]}))
    with pytest.raises(ModelError, match="does not give 'text_config'"):
        ModelConfig.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping, which is not supported; supported: logits as"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"hidden_activation": "silu"}, "activation 'silu', which is not supported; supported: gelu_pytorch_tanh"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "RoPE scaling 'dynamic'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope", "factor": 4.0}}}, "RoPE scaling 'longrope'"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 8.0}},
            "rope_type, factor, without full_attention",
        ),
        ({"sliding_window": None}, "sliding_window None"),
        ({"layer_types": ["full_attention"]}, "one a layer"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, changes, words):
    save_family(tmp_path, "gemma3")
    change_config(tmp_path, **changes)
    with pytest.raises(ModelError) as caught:
        ModelConfig.load(tmp_path)
    assert words in str(caught.value)


FULL = {"rope_type": "linear", "rope_theta": 1e6, "factor": 3.0}
WINDOWED = {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize(
    "changes",
    [
        {"query_pre_attn_scalar": 24},
        {"sliding_window": 40},
        {"layer_types": ["full_attention"] * 3},
        {"rope_parameters": {"full_attention": FULL | {"factor": 1.0}, "sliding_attention": WINDOWED}},
        {"rope_parameters": {"full_attention": FULL, "sliding_attention": WINDOWED | {"rope_theta": 1e6}}},
    ],
    ids=str,
)
def test_its_features_matter(tmp_path, changes):
    save_family(tmp_path, "gemma3")
    tokens = random_tokens(100)
    before = logits(tmp_path, tokens)
    change_config(tmp_path, **changes)
    assert (logits(tmp_path, tokens) - before).abs().max() > 0.05


def test_older_configurations_give_both_ropes_apart(tmp_path):
    save_family(tmp_path, "gemma3")
    tokens = random_tokens(100)
    before = logits(tmp_path, tokens)
    scaling = {"rope_type": "linear", "factor": 3.0}
    change_config(tmp_path, rope_parameters="absent", rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling=scaling)
    assert torch.equal(logits(tmp_path, tokens), before)


def test_norms_multiply_by_one_and_more_in_float32(tmp_path):
    """1 + w has more digits than bfloat16, and is not rounded before the product is."""
    save_family(tmp_path, "gemma3")
    stored = load_file(tmp_path / "model.safetensors")["model.layers.0.input_layernorm.weight"]
    decoder = Decoder.load(tmp_path, dtype=torch.bfloat16, device=CPU)
    norms = [tensor for part, tensor in decoder.held() if part == "weights" and tensor.dtype == torch.float32]
    assert len(norms) == 3 * 6 + 1, "four of each layer, two of its heads, and the last"
    assert any(torch.equal(norm, 1 + stored) for norm in norms)
    x = torch.randn(5, 64, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1))
    norm, weight = 1 + stored, torch.randn(32, 64, dtype=torch.bfloat16)
    floats = x.float()
    want = (floats * torch.rsqrt(floats.pow(2).mean(-1, keepdim=True) + 1e-6) * norm).bfloat16()
    got = rms_norm(x, norm, 1e-6)
    assert got.dtype == torch.bfloat16
    assert (got.float() - want.float()).abs().max() <= want.float().abs().max() * 2**-8
    assert (got != want).float().mean() < 0.02, "but where a sum rounds otherwise"
    assert torch.equal(linear(x, weight, norm=norm, eps=1e-6), linear(got, weight))


def test_embeddings_are_scaled_by_a_rounded_root(tmp_path):
    """Of 640, whose root is 25.298: 25.25 in bfloat16."""
    save_family(tmp_path, "gemma3", hidden_size=640)
    decoder = Decoder.load(tmp_path, dtype=torch.bfloat16, device=CPU)
    stored = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"][5].bfloat16()
    assert torch.equal(decoder._embedded(torch.tensor([5]))[0], (stored.float() * 25.25).bfloat16())


def test_lists_of_names_of_a_wrapped_model_are_understood(tmp_path):
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    ignored = ["lm_head", "language_model.model.layers.1.mlp.down_proj", "model.language_model.layers.2.mlp.up_proj"]
    few_bits = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    (tmp_path / "config.json").write_text(
        json.dumps(wrapped() | {"quantization_config": few_bits | {"ignore": ignored}})
    )
    stored = ModelConfig.load(tmp_path).quantisation
    assert stored is not None
    covered = {name: stored.covers(f"model.layers.{name}") for name in ("0.mlp.down_proj", "1.mlp.up_proj")}
    covered |= {name: stored.covers(f"model.layers.{name}") for name in ("1.mlp.down_proj", "2.mlp.up_proj")}
    assert list(covered.values()) == [True, True, False, False]


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_a_row_is_activated_alike_in_any_company(activation):
    """PyTorch computes the ends of what each of three threads gets with other instructions."""
    torch.set_num_threads(3)
    both = torch.randn(17, 2 * 10240, generator=torch.Generator().manual_seed(0)).mul_(3)
    gate, up = both.chunk(2, dim=-1)
    with padded_rows(True):
        alone = [gated(gate[i : i + 1], up[i : i + 1], activation) for i in range(17)]
        for n in (2, 7, 17):
            assert torch.equal(gated(gate[:n], up[:n], activation), torch.cat(alone[:n]))
