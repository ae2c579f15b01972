"""Published `config.json` files describe the models that they should, and unsupported ones are refused by name."""

import json

import pytest
import torch
from checkpoints import change_config
from tiny import save_family, save_llama
from transformers import AutoConfig, AutoModelForCausalLM
from triforce.offload.checks import check_context
from triforce.tp import PRESETS
from triforce.tp.errors import CapacityError, ModelError
from triforce.tp.matrices import num_parameters
from triforce.tp.model.config import ModelConfig

LLAMA_2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vocab_size": 32000,
}
YARN_LLAMA_2 = LLAMA_2 | {
    "max_position_embeddings": 131072,
    "rope_scaling": {"factor": 32.0, "finetuned": True, "original_max_position_embeddings": 4096, "type": "yarn"},
}
LLAMA_3 = LLAMA_2 | {
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
}
QWEN3 = QWEN2 | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "head_dim": 128}

# What each config.json says of the model's shape, its parameters (millions), bytes of KV a token in 16 bit, positions.
PUBLISHED = {
    "Yarn-Llama-2-7b-128k": (YARN_LLAMA_2, 6738, 524288, 131072),
    "Yarn-Llama-2-13b-128k": (
        YARN_LLAMA_2
        | {
            "hidden_size": 5120,
            "intermediate_size": 13824,
            "num_attention_heads": 40,
            "num_hidden_layers": 40,
            "num_key_value_heads": 40,
        },
        13016,
        819200,
        131072,
    ),
    "LWM-Text-Chat-128K": (
        LLAMA_2 | {"max_position_embeddings": 131072, "rope_theta": 10000000.0},
        6738,
        524288,
        131072,
    ),
    "Llama-3.1-8B": (LLAMA_3, 8030, 131072, 131072),
    "Llama-3.2-1B": (
        LLAMA_3
        | {
            "head_dim": 64,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "rope_scaling": LLAMA_3["rope_scaling"] | {"factor": 32.0},
            "tie_word_embeddings": True,
        },
        1236,
        32768,
        131072,
    ),
    "Qwen2.5-7B-Instruct": (
        QWEN2
        | {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "max_window_layers": 28,
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
            "sliding_window": 131072,
            "vocab_size": 152064,
        },
        7616,
        57344,
        131072,
    ),
    "Qwen2.5-0.5B": (
        QWEN2
        | {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "max_window_layers": 24,
            "num_attention_heads": 14,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "sliding_window": 32768,
            "tie_word_embeddings": True,
            "vocab_size": 151936,
        },
        494,
        12288,
        32768,
    ),
    "Qwen3-8B": (
        QWEN3
        | {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "max_position_embeddings": 40960,
            "max_window_layers": 36,
            "num_attention_heads": 32,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "vocab_size": 151936,
        },
        8191,
        147456,
        40960,
    ),
    "Mistral-7B-v0.1": (
        LLAMA_3
        | {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "max_position_embeddings": 32768,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
            "vocab_size": 32000,
        },
        7242,
        131072,
        32768,
    ),
    "llama-68m": (
        LLAMA_2
        | {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "max_position_embeddings": 2048,
            "num_attention_heads": 12,
            "num_hidden_layers": 2,
            "num_key_value_heads": "absent",
            "rms_norm_eps": 1e-06,
        },
        68,
        6144,
        2048,
    ),
}


@pytest.mark.parametrize(
    "dual_chunk",
    [
        {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144},
        {"chunk_size": 262144},
        "absent",
    ],
)
def test_positions_end_where_dual_chunk_attention_would_begin(tmp_path, dual_chunk):
    """`config.json` of Qwen2.5-7B-Instruct-1M, with and without what it says of dual chunk attention."""
    raw = LLAMA_2 | QWEN2 | {"max_position_embeddings": 1010000, "rope_theta": 1e7}
    raw |= {} if dual_chunk == "absent" else {"dual_chunk_attention_config": dual_chunk}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = ModelConfig.load(tmp_path)
    assert config.max_position_embeddings == 262144
    check_context(config, 262000, 144)
    with pytest.raises(CapacityError, match="262,144 positions without dual chunk attention, which is not supported"):
        check_context(config, 262000, 145)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_describe_the_models_they_should(tmp_path, name):
    raw, millions, kv_bytes, positions = PUBLISHED[name]
    raw = {key: value for key, value in raw.items() if value != "absent"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = ModelConfig.load(tmp_path)
    assert round(num_parameters(config) / 1e6) == millions
    assert config.kv_bytes_per_token(torch.float16) == kv_bytes
    assert config.max_position_embeddings == positions
    published = AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(published)
    assert num_parameters(config) == model.num_parameters()
    window = getattr(published, "sliding_window", None)
    assert config.sliding_windows == ((window,) * config.num_layers if window else ())
    frequencies = config.rope.inverse_frequencies(config.head_dim, torch.ones(1, dtype=torch.int64))
    with torch.device("cpu"):
        rotary = type(model.model.rotary_emb)(published)
    assert torch.allclose(frequencies, rotary.inv_freq, rtol=1e-5)
    assert config.rope.attention_factor == pytest.approx(rotary.attention_scaling)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"architectures": ["GemmaForCausalLM"]},
            "GemmaForCausalLM, which is not supported; supported: LlamaForCausalLM, MistralForCausalLM, "
            "MixtralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM, Gemma3ForCausalLM, "
            "Gemma3ForConditionalGeneration",
        ),
        (
            {"rope_scaling": {"type": "longrope", "factor": 4.0}},
            "RoPE scaling 'longrope', which is not supported; supported: default, linear, dynamic, yarn, llama3",
        ),
        ({"rope_scaling": {"full_attention": {"rope_type": "default"}}}, "RoPE parameters that differ by layer"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "RoPE scaling by 0.5 from 4096 positions"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 2.0, "low_freq_factor": 1.0}},
            "does not give 'high_freq_factor'",
        ),
        (
            {"rope_scaling": {"type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 1}},
            "low_freq_factor 4 and high_freq_factor 1",
        ),
        ({"rope_theta": 0.5, "rope_parameters": "absent"}, "rope_theta 0.5, which must be above 1"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window 0"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["sliding_attention"] * 3},
            "sliding_window None",
        ),
        (
            {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "layer_types": ["chunked_attention"]},
            "known: sliding_attention, full_attention; one a layer",
        ),
    ],
)
def test_what_is_not_supported_is_named_with_what_is(tmp_path, changes, words):
    save_llama(tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(ModelError) as caught:
        ModelConfig.load(tmp_path)
    assert words in str(caught.value)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_end_of_sequence_that_is_not_given_is_that_of_transformers(tmp_path, family):
    save_family(tmp_path, family)
    path = tmp_path / "config.json"
    raw = {key: value for key, value in json.loads(path.read_text()).items() if key != "eos_token_id"}
    path.write_text(json.dumps(raw))
    (tmp_path / "generation_config.json").unlink()
    theirs = AutoConfig.from_pretrained(tmp_path).eos_token_id
    assert ModelConfig.load(tmp_path).eos_token_ids == (() if theirs is None else (theirs,))


@pytest.mark.parametrize("name", PRESETS)
def test_shapes_have_as_many_parameters_as_transformers_counts(name):
    for config, raw in zip(PRESETS[name].configs(), PRESETS[name].raw_configs, strict=False):
        family = AutoConfig.for_model(**raw).get_text_config()
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(family)
        assert num_parameters(config) == sum(p.numel() for p in model.parameters())
        plain = raw.get("dual_chunk_attention_config", {}).get("original_max_position_embeddings")
        assert config.max_position_embeddings == (plain or family.max_position_embeddings)
        assert config.dtype.itemsize == 2 or "68m" in config.name
