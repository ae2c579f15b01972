"""Lengths follow from costs and acceptance; the refresh policy from what a refresh costs and brings."""

import pytest
from tiny import random_tokens, save_llama
from triforce.offload import Engine, Sampling
from triforce.offload.pacing import Acceptance, PassCost, best_length, expected_tokens
from triforce.offload.refresh import RefreshPolicy
from triforce.tp.errors import UsageError


def test_expected_tokens_is_the_sum_over_runs_of_acceptances():
    assert expected_tokens(0.0, 5) == 1
    assert expected_tokens(1.0, 5) == 6
    assert expected_tokens(0.5, 3) == pytest.approx(1 + 0.5 + 0.25 + 0.125)


def test_pass_cost_learns_a_line_and_forgets_the_model():
    cost = PassCost(base=100.0, per_row=0.0)
    for i in range(400):
        rows = 1 + i % 9
        cost.observe(rows, 2.0 + 0.5 * rows)
    assert cost.seconds(1) == pytest.approx(2.5, rel=0.05)
    assert cost.seconds(20) == pytest.approx(12.0, rel=0.1)


def test_pass_cost_never_expects_a_longer_pass_to_be_cheaper():
    cost = PassCost(base=1.0, per_row=0.1)
    for rows, seconds in ((9, 1.0), (1, 5.0), (9, 1.0), (1, 5.0)):
        cost.observe(rows, seconds)
    assert cost.seconds(20) >= cost.seconds(1)


def test_acceptance_counts_only_what_was_tested():
    rate = Acceptance()
    for _ in range(500):
        rate.observe(accepted=1, proposed=4)  # one stood, one fell, two were never tested
    assert rate.rate == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
    ("draft_seconds", "rate", "want"),
    [(2.0, 0.99, 0), (0.001, 0.995, 16), (0.1, 0.0, 0)],
)
def test_best_length_at_the_extremes(draft_seconds, rate, want):
    cost = PassCost(base=1.0, per_row=0.001)
    assert best_length(cost, draft_seconds, rate, 16)[0] == want


def test_best_length_drafts_further_when_more_stands():
    cost = PassCost(base=1.0, per_row=0.01)
    lengths = [best_length(cost, 0.05, rate, 30)[0] for rate in (0.2, 0.5, 0.8, 0.95, 0.99)]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]


def test_refresh_words():
    for word in ("auto", "round", "never", 3, "3"):
        RefreshPolicy(word)
    for word in ("often", 0, "-1", "1.5"):
        with pytest.raises(UsageError, match="refresh is"):
            RefreshPolicy(word)


def test_refresh_by_count():
    policy = RefreshPolicy(3)
    due = []
    for _ in range(7):
        due.append(policy.due(4, 5))
        if due[-1]:
            policy.done(0.1, 1.0)
    assert due == [False, False, True, False, False, True, False]


def test_auto_refreshes_every_round_while_it_is_free_and_on_a_drop_when_it_is_not():
    policy = RefreshPolicy("auto")
    for _ in range(5):
        assert policy.due(10, 10)
        policy.done(0.001, 1.0)
    policy.due(10, 10)
    policy.done(0.5, 1.0)
    assert not any(policy.due(10, 10) for _ in range(5))
    assert any(policy.due(2, 10) for _ in range(3))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    save_llama(root / "target", seed=1)
    save_llama(root / "draft", seed=2, num_hidden_layers=1)
    return root / "target", root / "draft"


def test_a_seed_gives_the_same_tokens_again(pair):
    prompt = random_tokens(200)
    results = [
        Engine.load(*pair, device="cpu", budget=32).generate(prompt, Sampling(temperature=1.0, seed=seed), 80)
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
    stats = engine.generate(random_tokens(200), Sampling(temperature=0.0), 60).stats
    assert (stats["settings"]["draft_length"], stats["settings"]["block_length"]) == (5, 9)


@pytest.mark.parametrize(("stood", "shortest", "longest"), [(0, 0, 1), (995, 8, 8)])
def test_adapted_lengths_follow_acceptance(pair, stood, shortest, longest):
    run = Engine.load(*pair, device="cpu").stream(random_tokens(200), Sampling(), 60)
    verify, retrieval, draft = run._tiers
    for tier in (verify, retrieval):
        tier.acceptance = Acceptance(accepted=stood, tested=1000)
    draft.cost = PassCost(retrieval.cost.base / 100, 0.0)
    verify.pace()
    assert shortest <= retrieval.lookahead <= longest
    assert (verify.lookahead <= 1) == (stood == 0)


def test_a_new_run_ends_the_one_before(pair):
    engine = Engine.load(*pair, device="cpu", dtype="float32")
    prompt = random_tokens(100)
    first = engine.stream(prompt, Sampling(temperature=0.0), 40)
    next(first)
    want = engine.generate(prompt, Sampling(temperature=0.0), 40)
    assert list(first) == []
    assert first.stats()["finish_reason"] == "interrupted"
    assert want.token_ids[:1] == first.statistics.token_ids


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
    # 3 layers, keys and values, 4 heads of 16 in float32; the last token's are not in the cache yet.
    assert stats["memory"]["kv_bytes"] == (100 + 60 - 1) * 3 * 2 * 64 * 4
    assert stats["link"]["bytes_streamed"] > 0
