"""Presets: what they say of a model is so, and `triforce models` shows them."""

import json
import re

import pytest
import torch
from command import run_here
from triforce.tp import PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_complete(name):
    preset = PRESETS[name]
    assert preset.summary and preset.name == name
    if name != "embedded":
        assert all(re.fullmatch(r"[\w.-]+/[\w.-]+", one) for one in (preset.target, preset.draft)), "owner/name"
        target, draft = preset.raw_configs
        assert {"architectures", "vocab_size", "max_position_embeddings"} <= target.keys() & draft.keys()
    for entry in preset.published:
        assert entry.keys() <= {"gpus", "budget", "chunk_size", "draft_length", "block_length"}
        assert entry["gpus"] > 0 and all(isinstance(value, int) and value > 0 for value in entry.values())


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
