"""RoPE that a user scales: `--rope-scaling yarn:FACTOR`."""

import pytest
from tiny import greedy_oracle, random_tokens, save_llama
from triforce.offload import Engine, Sampling
from triforce.tp.errors import UsageError
from triforce.tp.model.config import ModelConfig

PROMPT = random_tokens(700, seed=3)


@pytest.mark.parametrize(("asked", "original"), [("yarn:4", 256), ("yarn:4.5:200", 200)])
def test_text_beyond_the_models_positions_is_that_of_transformers_with_the_same_scaling(tmp_path, asked, original):
    scaling = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": float(asked.split(":")[1])}
    scaling["original_max_position_embeddings"] = original
    oracle = save_llama(tmp_path / "scaled", seed=1, max_position_embeddings=1024, rope_parameters=scaling)
    want = greedy_oracle(oracle, PROMPT, 40)
    save_llama(tmp_path / "target", seed=1, max_position_embeddings=256)
    for tiers in (1, 2):
        given = {"device": "cpu", "dtype": "float32", "tiers": tiers, "budget": 64, "rope_scaling": asked}
        engine = Engine.load(tmp_path / "target", "none", **given)
        assert engine.generate(PROMPT, Sampling(0.0), 40).token_ids == want


def test_a_model_has_as_many_positions_as_it_is_scaled_to(tmp_path):
    save_llama(tmp_path, max_position_embeddings=256)
    config = ModelConfig.load(tmp_path)
    assert config.with_rope_scaling("yarn:4").max_position_embeddings == 1024
    assert config.with_rope_scaling("yarn:4:128").max_position_embeddings == 512
    assert config.with_rope_scaling(None) is config


@pytest.mark.parametrize(
    "asked",
    [
        "yarn",
        "yarn:",
        "yarn:1",
        "yarn:x",
        "yarn:inf",
        "linear:2",
        "yarn:2:0",
        "yarn:2:x",
        "",
        "yarn:1e308",
        "yarn:4:" + "9" * 400,
    ],
)
def test_what_is_no_scaling_is_refused(tmp_path, asked):
    save_llama(tmp_path)
    with pytest.raises(UsageError, match=r"rope-scaling is '.*'; it is yarn:FACTOR"):
        ModelConfig.load(tmp_path).with_rope_scaling(asked)


def test_a_model_that_is_scaled_already_is_refused(tmp_path):
    save_llama(tmp_path, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(UsageError, match=r"RoPE of .* is scaled already"):
        ModelConfig.load(tmp_path).with_rope_scaling("yarn:2")
