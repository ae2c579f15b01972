"""One engine, several runs: seeds, fixed lengths, 16-bit formats, and statistics that add up."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import random_tokens, save_llama
from transformers import AutoModelForCausalLM
from triforce.offload import Engine, Sampling
from triforce.offload.planning.placement import block_size_for
from triforce.offload.speculation.lengths import Acceptance, PassCost
from triforce.offload.speculation.tiers import PROBE_EVERY
from triforce.offload.system import System
from triforce.offload.transfer.make import make_blocks
from triforce.tp import CapacityError, ModelError, UsageError

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


@pytest.mark.parametrize(("accepted", "shortest", "longest"), [(0, 0, 1), (995, 8, 8)])
def test_adapted_lengths_follow_acceptance(pair, accepted, shortest, longest):
    run = Engine.load(*pair, device="cpu").stream(random_tokens(200), Sampling(), 60)
    verify, retrieval, draft = run.batch.tiers
    for tier in (verify, retrieval):
        tier.acceptance = Acceptance(accepted=accepted, tested=1000)
    draft.cost = PassCost(retrieval.cost.base / 100, 0.0)
    verify.choose_lengths()
    assert shortest <= retrieval.draft_tokens <= longest
    assert (verify.draft_tokens <= 1) == (accepted == 0)


def test_a_tier_that_stopped_drafting_tries_again_at_times_without_a_clock(pair):
    run = Engine.load(*pair, device="cpu").stream(random_tokens(200), Sampling(seed=1), 60)
    _, retrieval, draft = run.batch.tiers
    retrieval.adapts_to_time = False
    retrieval.acceptance = Acceptance(accepted=0, tested=1000)
    draft.cost = PassCost(retrieval.cost.base, 0.0)
    tries = []
    for _ in range(300):
        retrieval.counts.passes += 11  # passes of a round; not a divisor of the interval
        run.batch.tiers[0].choose_lengths()
        tries.append(retrieval.draft_tokens)
    assert set(tries) == {0, 1}
    assert sum(tries) == pytest.approx(300 * 11 / PROBE_EVERY, rel=0.3)


def test_a_new_run_ends_the_one_before(pair):
    engine = Engine.load(*pair, device="cpu", dtype="float32")
    prompt = random_tokens(100)
    first = engine.stream(prompt, Sampling(temperature=0.0), 40)
    next(first)
    want = engine.generate(prompt, Sampling(temperature=0.0), 40)
    assert list(first) == []
    assert first.stats()["finish_reason"] == "interrupted"
    assert want.token_ids[:1] == first.statistics.token_ids


def test_a_cache_grows_for_a_longer_run_and_keeps_what_is_shared(pair):
    engine = Engine.load(*pair, device="cpu", dtype="float32", budget=64)
    greedy = Sampling(temperature=0.0)
    short, long = random_tokens(90), random_tokens(1500)
    engine.generate(short, greedy, 10)
    small = engine._kept.cache
    grown = engine.generate(long, greedy, 10)
    assert engine._kept.cache is not None and engine._kept.cache is not small
    assert grown.stats["reused_tokens"] == 90
    assert engine._kept.cache.blocks.block_size == block_size_for(1510, 8)
    fresh = Engine.load(*pair, device="cpu", dtype="float32", budget=64).generate(long, greedy, 10)
    assert grown.token_ids == fresh.token_ids
    engine.generate(random_tokens(50, seed=5), greedy, 10)
    assert engine._kept.cache.capacity < 1500, "nothing is shared, so a short run gets a cache of its own size"


def test_a_cache_that_finds_no_memory_beside_the_one_before_takes_its_place(pair):
    greedy, made = Sampling(temperature=0.0), []

    def make_one(*given, **named):
        made.append(engine._kept.cache is None)
        if engine._kept.cache is not None:
            raise CapacityError("no memory is left beside it")
        return make_blocks(*given, **named)

    system = System(make_blocks=make_one)
    engine = Engine.load(*pair, device="cpu", dtype="float32", budget=64, system=system)
    engine.generate(random_tokens(90), greedy, 10)
    grown = engine.generate(random_tokens(1500), greedy, 10)
    assert made == [True, False, True] and grown.stats["reused_tokens"] == 0
    fresh = Engine.load(*pair, device="cpu", dtype="float32", budget=64).generate(random_tokens(1500), greedy, 10)
    assert grown.token_ids == fresh.token_ids


def test_room_for_more_keeps_a_cache_in_its_place(pair):
    prompt = random_tokens(300)
    tight, roomy = (Engine.load(*pair, device="cpu", dtype="float32", room=room) for room in (0, 2000))
    places = set()
    for length in range(20, 300, 40):
        found = [engine.generate(prompt[:length], Sampling(temperature=0.0), 8) for engine in (tight, roomy)]
        assert found[0].token_ids == found[1].token_ids
        places.add(id(roomy._kept.cache))
    cache = roomy._kept.cache
    assert len(places) == 1 and cache and cache.capacity >= 300 + 8
    most = roomy.target.config.max_position_embeddings
    roomy.generate(random_tokens(most - 8, seed=2), Sampling(temperature=0.0), 8, reuse=0)
    cache = roomy._kept.cache
    assert cache and cache.capacity < most + 64, "no more room than the model has positions"


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "the prompt is empty"),
        ([1, 97], "token 97; target knows 0 to 96"),
        (torch.zeros(1, 5, dtype=torch.int64), "2-dimensional tensor"),
        ([0.5, 1.0], "float32"),
    ],
)
def test_a_prompt_that_is_none_is_refused(pair, prompt, words):
    with pytest.raises(UsageError, match=words):
        Engine.load(*pair, device="cpu").generate(prompt)


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
