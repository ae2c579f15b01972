"""Presets: what they say of a model is so, their settings are defaults, and `triforce models` shows them."""

import json
from typing import Any

import pytest
import torch
import transformers
from command import run_here
from triforce.offload import Engine
from triforce.offload.settings import Settings
from triforce.tp import PRESETS, find_pair
from triforce.tp.weights.hub import is_hub_name
from triforce.tp.weights.registry import Preset, published_settings


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_complete(name):
    preset = PRESETS[name]
    assert preset.summary and preset.name == name
    if name != "embedded":
        assert is_hub_name(preset.target) and is_hub_name(preset.draft)
        target, draft = preset.raw_configs
        assert {"architectures", "vocab_size", "max_position_embeddings"} <= target.keys() & draft.keys()
    for entry in preset.published:
        values: dict[str, Any] = {key: value for key, value in entry.items() if key != "gpus"}
        Settings(**values)


@pytest.mark.parametrize("name", PRESETS)
def test_shapes_have_as_many_parameters_as_transformers_counts(name):
    for config, raw in zip(PRESETS[name].configs(), PRESETS[name].raw_configs, strict=False):
        family = transformers.AutoConfig.for_model(**raw)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(family)
        assert config.num_parameters == sum(p.numel() for p in model.parameters())
        plain = raw.get("dual_chunk_attention_config", {}).get("original_max_position_embeddings")
        assert config.max_position_embeddings == (plain or family.max_position_embeddings)
        assert config.dtype.itemsize == 2 or "68m" in config.name


def test_the_caches_of_the_published_models_are_as_large_as_published():
    """TriForce (arXiv 2404.11912): the KV cache of a 7B Llama 2 at 128K takes 64 GB in 16 bits."""
    config = PRESETS["lwm-text-128k"].configs()[0]
    assert config.max_position_embeddings * config.kv_bytes_per_token(torch.float16) == 64 * 2**30


def test_the_long_models_have_the_positions_and_the_rope_that_they_were_published_with():
    """LWM: github.com/LargeWorldModel/LWM; Gradient: its model card; Qwen2.5-1M: arXiv 2501.15383."""
    published = {
        "lwm-text-chat-256k": (262_144, 1e7),
        "lwm-text-chat-512k": (524_288, 2.5e7),
        "lwm-text-chat-1m": (1_048_576, 5e7),
        "llama-3-8b-gradient-1048k": (1_048_576, 3580165449.0),
        "qwen2.5-7b-instruct-1m": (262_144, 1e7),
    }
    for name, (positions, theta) in published.items():
        config = PRESETS[name].configs()[0]
        assert (config.max_position_embeddings, config.rope.theta, config.rope.type) == (positions, theta, "default")
    qwen = PRESETS["qwen2.5-7b-instruct-1m"]
    assert "262,144" in qwen.summary and "dual chunk attention" in qwen.configs()[0].positions_note
    gradient = PRESETS["llama-3-8b-gradient-1048k"].configs()[0]
    assert gradient.kv_bytes_per_token(torch.bfloat16) * gradient.max_position_embeddings == 128 * 2**30


def test_settings_are_those_for_as_many_gpus_or_the_next_fewer():
    assert published_settings("lwm-text-128k", 1) == {"budget": 8192, "chunk_size": 8, "block_length": 12}
    for gpus in (2, 3, 8):
        assert published_settings("lwm-text-128k", gpus) == {"budget": 12288, "chunk_size": 8, "block_length": 16}
    assert published_settings("embedded", 1) == published_settings("some/where", 1) == {}


@pytest.fixture
def preset(pair, monkeypatch):
    """A preset of the tiny pair, with published settings."""
    settings = ({"gpus": 1, "budget": 64, "block_length": 5},)
    made = Preset("tiny", str(pair[0]), str(pair[1]), "for tests", settings, ())
    monkeypatch.setitem(PRESETS, "tiny", made)
    return made


def test_published_settings_are_defaults_that_options_override(preset, capfd):
    engine = Engine.load("tiny", device="cpu", block_length=7)
    assert engine.settings == Settings(budget=64, block_length=7)
    run = (
        "generate",
        "--model",
        "tiny",
        "--prompt",
        "a" * 100,
        "--max-new-tokens",
        3,
        "--json",
        "-",
        "--device",
        "cpu",
    )
    for option, want in (((), 64), (("--budget", "auto"), 64), (("--budget", 32), 32)):
        assert json.loads(run_here(capfd, *run, *option).out)["settings"]["budget"] == want


def test_a_preset_gives_its_draft_and_stands_for_it(preset, pair):
    assert find_pair("tiny") == pair
    assert find_pair("tiny", "none") == (pair[0], None)
    assert find_pair(pair[0], "tiny") == pair


def test_models_are_listed_within_80_columns(capfd, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    outcome = run_here(capfd, "models")
    assert outcome.code == 0
    table = outcome.out.split("\n\n")[0].splitlines()
    assert len(table) == 1 + len(PRESETS), "no row wraps"
    assert all(len(line) <= 80 for line in table)
    assert [line.split()[0] for line in table[1:]] == list(PRESETS)
    rows = {row["name"]: row for row in json.loads(run_here(capfd, "models", "--json").out)}
    assert rows["embedded"]["downloaded"] == {"target": True, "draft": True} and rows["embedded"]["fits"]
    lwm = rows["lwm-text-chat-128k"]
    assert lwm["downloaded"] == {"target": False, "draft": False}
    assert lwm["kv_bytes"] >= 64 * 2**30 and lwm["missing"] is None
    assert 0 <= lwm["fitting_tokens"] <= lwm["context"]
    assert lwm["fits"] == (lwm["fitting_tokens"] == lwm["context"])
