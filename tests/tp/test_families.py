"""Every supported family and RoPE scaling computes what transformers computes, in either spelling of its config."""

from pathlib import Path

import pytest
import torch
from checkpoints import change_config
from scaled import LENGTHS, ROPES, save_scaled, theirs
from tiny import FAMILIES, SMOOTH, greedy_oracle, random_tokens, save_family
from transformers import AutoModelForCausalLM
from triforce.offload import Engine, Sampling

GREEDY = Sampling(temperature=0.0)


def ours(directory: Path, tokens: list[int]) -> torch.Tensor:
    """Our logits after the last token, and, where they do not depend on how long a prompt is, after each before it."""
    engine = Engine.load(directory, "none", device="cpu", dtype="float32")
    last = engine.logits(tokens, [])
    if "dynamic" in (directory / "config.json").read_text():
        return last
    each = engine.logits(tokens[:1], tokens[1:])
    assert (each[-1:] - last).abs().max() < 1e-4
    return each


def assert_equal_logits(directory: Path, scaling: str = "") -> None:
    if scaling == "linear":
        change_config(directory, max_position_embeddings=max(LENGTHS) + 1)  # nothing else depends on it there
    for n in LENGTHS:
        tokens = random_tokens(n, seed=n)
        got = ours(directory, tokens)
        error = (got - theirs(directory, tokens)[-len(got) :]).abs().max()
        assert error < 1e-4, f"logits over {n} tokens differ by {error}"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow(keep=("llama-tied", "mistral-window", "qwen2-layer-types", "qwen3-bias"))
def test_logits_of_every_family_equal_transformers(tmp_path, family):
    save_family(tmp_path, family, **SMOOTH.get(family, {}))
    assert_equal_logits(tmp_path)


@pytest.mark.parametrize("scaling", ROPES)
@pytest.mark.slow(keep=("dynamic", "yarn", "llama3"))
def test_logits_under_every_rope_scaling_equal_transformers(tmp_path, scaling):
    save_scaled(tmp_path, scaling)
    assert_equal_logits(tmp_path, scaling)


@pytest.mark.parametrize(
    ("family", "scaling"),
    [("qwen2", "yarn"), ("qwen3", "yarn"), ("llama-tied", "llama3"), ("qwen3.5", "yarn"), ("qwen3-next", "yarn")],
)
def test_logits_of_the_published_combinations_equal_transformers(tmp_path, family, scaling):
    save_scaled(tmp_path, scaling, family)
    assert_equal_logits(tmp_path)


def test_the_scalings_of_these_tests_matter(tmp_path):
    tokens = random_tokens(100)
    found = []
    for scaling in ROPES:
        save_scaled(tmp_path / scaling, scaling)
        found.append(ours(tmp_path / scaling, tokens)[-1])
    plain = {"rope_type": "default", "rope_theta": 1000.0}
    change_config(tmp_path / "linear", rope_parameters=plain, max_position_embeddings=512)
    found.append(ours(tmp_path / "linear", tokens)[-1])
    for i, a in enumerate(found):
        for b in found[:i]:
            assert (a - b).abs().max() > 0.1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow(keep=("mistral-window", "qwen3-bias"))
def test_greedy_tokens_of_every_family_equal_transformers(tmp_path, family):
    prompt = random_tokens(150, seed=3)
    want = greedy_oracle(save_family(tmp_path / "target", family, seed=1), prompt, 40)
    save_family(tmp_path / "draft", family, seed=2)
    for tiers in (1, 3):
        engine = Engine.load(tmp_path / "target", tmp_path / "draft", device="cpu", tiers=tiers, budget=32)
        assert engine.generate(prompt, GREEDY, 40).token_ids == want, f"{tiers} tiers"


@pytest.mark.parametrize("scaling", ROPES)
@pytest.mark.parametrize("prompt_length", [40, 150])
@pytest.mark.slow(keep=("40-yarn", "150-dynamic"))
def test_greedy_tokens_under_every_rope_scaling_equal_transformers(tmp_path, scaling, prompt_length):
    prompt = random_tokens(prompt_length, seed=3)
    want = greedy_oracle(save_scaled(tmp_path, scaling), prompt, 40)
    for tiers in (1, 3):
        engine = Engine.load(tmp_path, tmp_path, device="cpu", tiers=tiers, budget=32)
        assert engine.generate(prompt, GREEDY, 40).token_ids == want, f"{tiers} tiers"


@pytest.mark.slow
def test_dynamic_scaling_reuses_no_key_that_was_rotated_otherwise(tmp_path):
    save_scaled(tmp_path, "dynamic")
    engine = Engine.load(tmp_path, device="cpu", budget=32)
    prompt = random_tokens(100, seed=3)
    for length, reused in ((30, 0), (50, 30), (100, 0), (80, 0), (40, 0)):
        fresh = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        result = engine.generate(prompt[:length], GREEDY, 30)
        assert result.token_ids == greedy_oracle(fresh, prompt[:length], 30), f"prompt of {length}"
        assert result.stats["reused_tokens"] == reused, f"prompt of {length}"


LEGACY = {
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 64, "type": "yarn", "finetuned": True},
    "linear": {"type": "linear", "factor": 4.0},
    "dynamic": {"type": "dynamic", "factor": 6.0},
    "llama3": ROPES["llama3"],
    "none": None,
}


@pytest.mark.parametrize("scaling", LEGACY)
@pytest.mark.slow(keep=("yarn", "dynamic"))
def test_the_spelling_of_older_checkpoints_is_read_as_transformers_reads_it(tmp_path, scaling):
    save_scaled(tmp_path, scaling if scaling in ROPES else "yarn")
    change_config(
        tmp_path,
        rope_parameters="absent",
        rope_scaling=LEGACY[scaling],
        rope_theta=5000.0,
        dtype="absent",
        torch_dtype="float32",
        transformers_version="4.33.0",
        pretraining_tp=1,
        a_key_of_the_future={"of": "any kind"},
    )
    assert_equal_logits(tmp_path, scaling)


def test_code_that_a_checkpoint_brings_is_not_run(tmp_path):
    save_scaled(tmp_path, "yarn")
    before = ours(tmp_path, random_tokens(100))
    auto_map = {"AutoConfig": "configuration_llama.LlamaConfig", "AutoModelForCausalLM": "modeling_llama.Llama"}
    change_config(tmp_path, auto_map=auto_map)
    for name in ("configuration_llama.py", "modeling_llama.py"):
        (tmp_path / name).write_text("raise SystemExit('remote code ran')")
    assert torch.equal(ours(tmp_path, random_tokens(100)), before)
