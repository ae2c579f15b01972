"""Every supported family and RoPE scaling computes what transformers computes, in either spelling of its config."""

from pathlib import Path

import pytest
import torch
from checkpoints import change_config
from tiny import FAMILIES, greedy_oracle, random_tokens, save_family
from transformers import AutoModelForCausalLM, PreTrainedModel
from triforce.offload import Engine, Sampling
from triforce.offload.caches.full import FullCache
from triforce.offload.caches.retrieval import RetrievalCache
from triforce.tp.model.decoder import Decoder
from triforce.tp.weights.checkpoint import Checkpoint

CPU = torch.device("cpu")
GREEDY = Sampling(temperature=0.0)
LENGTHS = (20, 300)
"""Tokens within the original context of every scaling below, and far beyond it."""

ROPES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 6.0},
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    "yarn-given-factor": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 0.7,
        "beta_fast": 6.0,
        "beta_slow": 0.5,
        "truncate": False,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.5,
        "mscale_all_dim": 0.5,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def save_scaled(directory: Path, scaling: str, family: str = "llama", theta: float = 1000.0) -> PreTrainedModel:
    """A random model with heads of 32 and one of `ROPES`, whose original context is 64."""
    positions = 64 if scaling in ("linear", "dynamic") else 512
    rope = ROPES[scaling] | {"rope_theta": theta}
    return save_family(directory, family, head_dim=32, max_position_embeddings=positions, rope_parameters=rope)


def ours(directory: Path, tokens: list[int], parts: int | None = None) -> torch.Tensor:
    """All logits of our decoder."""
    decoder = Decoder.load(directory, dtype=torch.float32, device=CPU)
    decoder.rope.begin(len(tokens))
    cache = FullCache.on_device(decoder.config, decoder.rope, dtype=torch.float32, device=CPU, capacity=len(tokens))
    pieces = torch.tensor(tokens).split(parts or len(tokens))
    return torch.cat([decoder.forward(piece, cache, num_logits=len(piece)) for piece in pieces])


@torch.inference_mode()
def theirs(directory: Path, tokens: list[int]) -> torch.Tensor:
    """All logits of transformers, from a model that has seen nothing before."""
    return AutoModelForCausalLM.from_pretrained(directory).eval()(torch.tensor([tokens])).logits[0]


def assert_equal_logits(directory: Path, *parts: int) -> None:
    """In one pass, or with so many tokens a pass, for each of `parts`."""
    for n in LENGTHS:
        tokens = random_tokens(n, seed=n)
        want = theirs(directory, tokens)
        for size in parts or (n,):
            error = (ours(directory, tokens, size) - want).abs().max()
            assert error < 1e-4, f"logits over {n} tokens, {size} a pass, differ by {error}"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow(keep=("llama-tied", "mistral-window", "qwen2-layer-types", "qwen3-bias"))
def test_logits_of_every_family_equal_transformers(tmp_path, family):
    save_family(tmp_path, family)
    assert_equal_logits(tmp_path, max(LENGTHS), 37)


@pytest.mark.slow
def test_a_window_ends_at_the_right_key_wherever_a_block_begins(tmp_path):
    save_family(tmp_path, "mistral-window")
    assert_equal_logits(tmp_path, 1)


@pytest.mark.parametrize("scaling", ROPES)
@pytest.mark.slow(keep=("dynamic", "yarn", "llama3"))
def test_logits_under_every_rope_scaling_equal_transformers(tmp_path, scaling):
    save_scaled(tmp_path, scaling)
    assert_equal_logits(tmp_path, max(LENGTHS), 37)


@pytest.mark.parametrize(("family", "scaling"), [("qwen2", "yarn"), ("qwen3", "yarn"), ("llama-tied", "llama3")])
def test_logits_of_the_published_combinations_equal_transformers(tmp_path, family, scaling):
    save_scaled(tmp_path, scaling, family)
    assert_equal_logits(tmp_path)


@pytest.mark.parametrize(
    ("family", "without"),
    [
        ("llama-bias", {"attention_bias": False}),
        ("mistral-window", {"sliding_window": None}),
        ("qwen2", {"architectures": ["LlamaForCausalLM"]}),
        ("qwen2-window", {"max_window_layers": 2}),
        ("qwen2-layer-types", {"layer_types": ["full_attention"] * 3}),
        ("qwen3", {"architectures": ["LlamaForCausalLM"]}),
        ("qwen3-bias", {"attention_bias": False}),
    ],
)
def test_the_features_of_these_tests_matter(tmp_path, monkeypatch, family, without):
    save_family(tmp_path, family)
    tokens = random_tokens(100)
    with_it = ours(tmp_path, tokens)
    changes = {"layer_types": "absent"} | without if family.startswith("qwen") else without
    change_config(tmp_path, **changes)
    monkeypatch.setattr(Checkpoint, "check_all_read", lambda self: None)  # the tensors of what is taken away
    assert (ours(tmp_path, tokens) - with_it).abs().max() > 0.1


def test_the_scalings_of_these_tests_matter(tmp_path):
    tokens = random_tokens(100)
    found = []
    for scaling in ROPES:
        save_scaled(tmp_path / scaling, scaling)
        found.append(ours(tmp_path / scaling, tokens))
    change_config(tmp_path / "linear", rope_parameters={"rope_type": "default", "rope_theta": 1000.0})
    found.append(ours(tmp_path / "linear", tokens))
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


def test_a_retrieval_cache_that_holds_the_window_equals_the_full_cache(tmp_path):
    save_family(tmp_path, "mistral-window")
    decoder = Decoder.load(tmp_path, dtype=torch.float32, device=CPU)
    probe = torch.tensor([1, 2, 3])
    for budget, equal in ((64, True), (24, False)):
        full = FullCache.on_device(
            decoder.config, decoder.rope, dtype=torch.float32, device=CPU, capacity=400, chunk_size=4
        )
        decoder.forward(torch.tensor(random_tokens(303)), full)
        cache = RetrievalCache(full, decoder.rope, budget=budget, chunk_size=4)
        cache.refresh()
        got = decoder.forward(probe, cache, num_logits=3)
        want = decoder.forward(probe, full, num_logits=3)
        assert torch.allclose(got, want, atol=1e-4) == equal


def test_a_window_is_read_where_it_reaches_only(tmp_path):
    save_family(tmp_path, "mistral-window")
    decoder = Decoder.load(tmp_path, dtype=torch.float32, device=CPU)
    cache = FullCache.on_device(decoder.config, decoder.rope, dtype=torch.float32, device=CPU, capacity=640)
    decoder.forward(torch.tensor(random_tokens(600)), cache)
    cache.reads.num_bytes = 0
    decoder.forward(torch.tensor([1]), cache)
    assert cache.reads.num_bytes < (50 + 2 * cache.blocks.block_size) * cache.token_bytes < 600 * cache.token_bytes


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
    assert_equal_logits(tmp_path)


def test_code_that_a_checkpoint_brings_is_not_run(tmp_path):
    save_scaled(tmp_path, "yarn")
    before = ours(tmp_path, random_tokens(100))
    auto_map = {"AutoConfig": "configuration_llama.LlamaConfig", "AutoModelForCausalLM": "modeling_llama.Llama"}
    change_config(tmp_path, auto_map=auto_map)
    for name in ("configuration_llama.py", "modeling_llama.py"):
        (tmp_path / name).write_text("raise SystemExit('remote code ran')")
    assert torch.equal(ours(tmp_path, random_tokens(100)), before)
