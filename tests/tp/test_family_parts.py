"""Every family and RoPE scaling fed in parts, windows where they end, and that what the tests are about matters."""

from pathlib import Path

import pytest
import torch
from checkpoints import change_config
from scaled import LENGTHS, ROPES, save_scaled, theirs
from tiny import FAMILIES, SMOOTH, random_tokens, save_family
from triforce.offload.caches.full import FullCache
from triforce.offload.caches.retrieval import RetrievalCache
from triforce.tp.decoder import Decoder
from triforce.tp.weights.checkpoint import Checkpoint

CPU = torch.device("cpu")


def ours(directory: Path, tokens: list[int], parts: int | None = None) -> torch.Tensor:
    """All logits of our decoder."""
    decoder = Decoder.load(directory, dtype=torch.float32, device=CPU)
    decoder.rope.begin(len(tokens))
    cache = FullCache.on_device(decoder.config, decoder.rope, dtype=torch.float32, device=CPU, capacity=len(tokens))
    pieces = torch.tensor(tokens).split(parts or len(tokens))
    return torch.cat([decoder.forward(piece, cache, num_logits=len(piece)) for piece in pieces])


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
def test_logits_of_every_family_in_parts_equal_transformers(tmp_path, family):
    save_family(tmp_path, family, **SMOOTH.get(family, {}))
    assert_equal_logits(tmp_path, max(LENGTHS), 37)


@pytest.mark.parametrize("scaling", ROPES)
@pytest.mark.slow(keep=("dynamic", "yarn", "llama3"))
def test_logits_under_every_rope_scaling_in_parts_equal_transformers(tmp_path, scaling):
    save_scaled(tmp_path, scaling)
    assert_equal_logits(tmp_path, max(LENGTHS), 37)


@pytest.mark.slow
def test_a_window_ends_at_the_right_key_wherever_a_block_begins(tmp_path):
    save_family(tmp_path, "mistral-window")
    assert_equal_logits(tmp_path, 1)


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
        ("gemma3", {"layer_types": ["full_attention"] * 3}),
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
