"""One engine, several runs: seeds, fixed lengths, 16-bit formats, and statistics that add up."""

from array import array

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import random_tokens, save_llama
from transformers import AutoModelForCausalLM
from triforce.offload import Engine, Sampling
from triforce.tp import ModelError, UsageError

RECENT_ROWS = 8
"""Tokens of a prompt that are computed again where all of it was there."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    save_llama(root / "target", seed=1)
    save_llama(root / "draft", seed=2, num_hidden_layers=1)
    return root / "target", root / "draft"


def test_a_seed_gives_the_same_tokens_again(pair):
    prompt = random_tokens(200)
    results = [
        Engine.load(*pair, device="cpu", budget=32).generate(prompt, Sampling(temperature=1.0, seed=seed), 40)
        for seed in (7, 7, 8)
    ]
    assert results[0].token_ids == results[1].token_ids != results[2].token_ids
    assert results[0].stats["seed"] == 7


def test_without_a_seed_one_is_drawn_and_reported(pair):
    engine = Engine.load(*pair, device="cpu")
    seeds = {engine.generate([1, 2, 3], max_new_tokens=2).stats["seed"] for _ in range(3)}
    assert len(seeds) == 3


def test_fixed_lengths_stay(pair):
    engine = Engine.load(*pair, device="cpu", budget=8, draft_length=5, block_length=9)
    stats = engine.generate(random_tokens(200), Sampling(temperature=0.0), 20).stats
    assert (stats["settings"]["draft_length"], stats["settings"]["block_length"]) == (5, 9)


def test_a_new_run_ends_the_one_before(pair):
    engine = Engine.load(*pair, device="cpu", dtype="float32")
    prompt = random_tokens(100)
    first = engine.stream(prompt, Sampling(temperature=0.0), 40)
    next(first)
    want = engine.generate(prompt, Sampling(temperature=0.0), 40)
    assert list(first) == []
    assert first.stats()["finish_reason"] == "interrupted"
    assert want.token_ids[:1] == first.statistics.token_ids


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "the prompt is empty"),
        ([1, 97], "token 97; target knows 0 to 96"),
        (torch.zeros(1, 5, dtype=torch.int64), "2-dimensional tensor"),
        ([0.5, 1.0], "float32"),
        ([1 + 2j, 3], "complex"),
        (torch.zeros(0, dtype=torch.bfloat16), "the prompt is empty"),
        ([1, 2**70], f"token {2**70}; target knows 0 to 96"),
        (array("i"), "the prompt is empty"),
        (array("i", [1, 97]), "token 97; target knows 0 to 96"),
        (array("h", [1, -1]), "token -1; target knows 0 to 96"),
        (array("f", [0.5, 1.0]), "float"),
    ],
)
def test_a_prompt_that_is_none_is_refused(pair, prompt, words):
    with pytest.raises(UsageError, match=words):
        Engine.load(*pair, device="cpu").generate(prompt)


@pytest.mark.parametrize("kind", "iqH")
def test_an_array_is_the_prompt_that_its_numbers_are(pair, kind):
    engine, prompt = Engine.load(*pair, device="cpu", dtype="float32"), random_tokens(50)
    want = engine.generate(prompt, Sampling(temperature=0.0), 5).token_ids
    assert engine.generate(array(kind, prompt), Sampling(temperature=0.0), 5).token_ids == want


@pytest.mark.parametrize("tiers", [1, 2])
def test_logits_that_are_no_numbers_are_an_error_not_a_text(tmp_path, tiers):
    save_llama(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] *= 1e5  # beyond what float16 holds
    save_file(weights, tmp_path / "model.safetensors")
    engine = Engine.load(tmp_path, device="cpu", dtype="float16", tiers=tiers)
    with pytest.raises(ModelError, match=r"not finite numbers.*--dtype"):
        engine.generate(random_tokens(50), Sampling(temperature=0.0), 10)


def test_the_coldest_temperature_is_greedy(pair):
    engine = Engine.load(*pair, device="cpu", dtype="float32")
    cold = engine.generate(random_tokens(80), Sampling(temperature=1e-39, seed=1), 30)
    assert cold.token_ids == engine.generate(random_tokens(80), Sampling(temperature=0.0), 30).token_ids


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_runs_through_all_tiers(pair, dtype):
    stats = Engine.load(*pair, device="cpu", dtype=dtype, budget=32).generate(random_tokens(200), Sampling(), 30).stats
    assert stats["dtype"] == dtype
    assert stats["new_tokens"] == 30
    assert stats["memory"]["kv_bytes"] == (200 + 30 - 1) * 3 * 2 * 64 * 2


def test_statistics_add_up(pair):
    run = Engine.load(*pair, device="cpu", budget=32).stream(random_tokens(100), Sampling(seed=1), 60)
    events = list(run)
    stats = run.stats()
    assert [t for e in events for t in e.tokens] == stats["token_ids"]
    assert stats["new_tokens"] == 60
    assert stats["rounds"] == len(events) - 1
    assert stats["decode_s"] == pytest.approx(sum(e.seconds for e in events[1:]))
    assert stats["tbt_ms"]["mean"] == pytest.approx(stats["decode_s"] * 1e3 / 59)
    assert sum(stats["time_s"].values()) == pytest.approx(stats["decode_s"], rel=1e-6)
    assert stats["acceptance"]["retrieval"] == pytest.approx(
        sum(e.accepted for e in events) / sum(e.proposed for e in events)
    )
    tested = sum(min(e.accepted + 1, e.proposed) for e in events)
    assert run.statistics.retrieval_acceptance == sum(e.accepted for e in events) / tested
    assert stats["acceptance"]["retrieval_per_token"] == run.statistics.retrieval_acceptance
    assert stats["acceptance"]["draft_per_token"] == run.statistics.draft_acceptance
    # 3 layers, keys and values, 4 heads of 16 in float32; the last token's are not in the cache yet.
    assert stats["memory"]["kv_bytes"] == (100 + 60 - 1) * 3 * 2 * 64 * 4
    # Every pass reads the whole prompt; nothing crosses a link where the cache lives beside the model.
    assert stats["kv_read"]["bytes"] > stats["rounds"] * 100 * 3 * 2 * 64 * 4
    assert 0 < stats["kv_read"]["s"] < stats["time_s"]["verify"]
    assert stats["link"]["bytes_streamed"] == 0


def test_logits_of_an_answer_are_those_it_was_decoded_from(pair):
    """Against transformers, for a prompt and the answer that follows it."""
    engine = Engine.load(*pair, device="cpu", dtype="float32")
    oracle = AutoModelForCausalLM.from_pretrained(pair[0]).eval()
    prompt, answer = random_tokens(300, seed=3), random_tokens(9, seed=4)
    rows = engine.logits(prompt, answer)
    with torch.inference_mode():
        wanted = oracle(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 :]
    assert rows.shape == wanted.shape
    torch.testing.assert_close(rows, wanted, atol=1e-4, rtol=1e-4)
    assert engine.generate(prompt, Sampling(temperature=0.0), 5).stats["reused_tokens"] == len(prompt) - RECENT_ROWS
