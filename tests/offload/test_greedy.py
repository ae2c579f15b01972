"""Greedy output equals transformers' token for token, whatever the tiers, budgets and lengths."""

import pytest
from tiny import SHAPES, agreeing_pair, greedy_oracle, random_tokens, save_llama
from triforce.offload import Engine, Sampling

RECENT_ROWS = 8
"""Tokens of a prompt that are computed again where all of it was there."""

GREEDY = Sampling(temperature=0.0)
PROMPT = random_tokens(300, seed=3)


class Pairs(dict):
    """For each shape: a model's directory, an unrelated draft's, and the next 128 tokens according to transformers.
    They are made when they are first asked for."""

    def __init__(self, root):
        self.root = root
        save_llama(root / "draft", seed=9, num_hidden_layers=1, hidden_size=32)

    def __missing__(self, name):
        if name == "agreeing":
            self[name] = agreeing_pair(self.root, PROMPT, 128)
        else:
            model = save_llama(self.root / name, seed=1, **SHAPES[name])
            self[name] = self.root / name, self.root / "draft", greedy_oracle(model, PROMPT, 128)
        return self[name]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return Pairs(tmp_path_factory.mktemp("pairs"))


def generate(pair, new_tokens=128, **settings):
    target, draft, _ = pair
    engine = Engine.load(target, draft, device="cpu", dtype="float32", **settings)
    return engine.generate(PROMPT, GREEDY, new_tokens)


def check_both(pairs, rejecting, **settings):
    """128 tokens of the tiers that agree, and those of about 100 passes that end with the first draft token."""
    assert generate(pairs["agreeing"], **settings).token_ids == pairs["agreeing"][2]
    n = min(128, 240 // settings["block_length"])
    assert generate(pairs[rejecting], n, **settings).token_ids == pairs[rejecting][2][:n]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tiers", [1, 2, 3])
@pytest.mark.slow(keep=("1-mqa", "3-heads-of-32"))
def test_greedy_equals_transformers_for_every_shape_and_tier_count(pairs, shape, tiers):
    result = generate(pairs[shape], tiers=tiers, budget=64)
    assert result.token_ids == pairs[shape][2]
    assert result.stats["settings"]["tiers"] == tiers


@pytest.mark.parametrize("budget", [8, 32, 160, 100_000])
@pytest.mark.parametrize("refresh", ["round", 3, "never", "auto"])
@pytest.mark.slow(keep=("round-160",))
def test_greedy_equals_transformers_for_every_budget_and_refresh(pairs, budget, refresh):
    check_both(pairs, "gqa", budget=budget, refresh=refresh, draft_length=3, block_length=7)


@pytest.mark.parametrize(("draft_length", "block_length"), [(1, 1), (5, 2), (1, 20), (8, 40)])
@pytest.mark.parametrize("chunk_size", [1, 8, 31])
@pytest.mark.slow(keep=("31-5-2",))
def test_greedy_equals_transformers_for_every_length_and_chunk(pairs, draft_length, block_length, chunk_size):
    check_both(pairs, "mha", budget=62, chunk_size=chunk_size, draft_length=draft_length, block_length=block_length)


@pytest.mark.slow
def test_the_pairs_of_these_tests_accept_and_reject_drafts(pairs):
    agreeing, rejecting = (
        generate(pairs[name], 128, budget=62, draft_length=3, block_length=7).stats["acceptance"]
        for name in ("agreeing", "gqa")
    )
    for tier in ("draft_per_token", "retrieval_per_token"):
        assert 0.5 < agreeing[tier] < 0.98, (tier, agreeing[tier])
        assert rejecting[tier] < 0.2, (tier, rejecting[tier])  # a processor's rounding decides between none and one


def test_a_budget_that_holds_everything_accepts_everything(pairs):
    stats = generate(pairs["mha"], tiers=2, budget=4096, block_length=6).stats
    assert stats["acceptance"]["retrieval"] == 1.0
    assert stats["acceptance"]["tokens_per_round"] > 6


def test_the_target_as_its_own_draft_is_accepted_within_the_window(pairs):
    target = pairs["mha"][0]
    engine = Engine.load(target, target, device="cpu", dtype="float32", budget=4096, draft_length=4, block_length=8)
    result = engine.generate(PROMPT[:20], GREEDY, 100)
    assert result.stats["acceptance"]["draft"] == 1.0


def test_a_follow_up_prompt_reuses_the_cache_and_changes_nothing(pairs):
    target, draft, want = pairs["gqa"]
    engine = Engine.load(target, draft, device="cpu", dtype="float32", budget=64)
    engine.generate(PROMPT[:200] + random_tokens(80, seed=8), GREEDY, 20)
    result = engine.generate(PROMPT, GREEDY, 128)
    assert result.stats["reused_tokens"] == 200
    assert result.token_ids == want
    again = engine.generate(PROMPT + want[:50], GREEDY, 78)
    assert again.stats["reused_tokens"] == len(PROMPT) + 50 - RECENT_ROWS
    assert again.token_ids == want[50:]


@pytest.mark.slow
def test_end_of_sequence_inside_a_block_ends_the_text_there(pairs, tmp_path):
    want = pairs["mha"][2]
    end = next(i for i in range(20, 128) if want[i] not in want[:i])
    model = save_llama(tmp_path, seed=1, eos_token_id=want[end])
    assert greedy_oracle(model, PROMPT, 128) == want[: end + 1]
    for tiers, block_length in ((1, None), (2, 6), (3, 30)):
        engine = Engine.load(
            tmp_path, pairs["mha"][1], device="cpu", tiers=tiers, budget=4096, block_length=block_length
        )
        result = engine.generate(PROMPT, GREEDY, 128)
        assert result.token_ids == want[: end + 1]
        assert result.stats["finish_reason"] == "eos"
        past = engine.stream(PROMPT, GREEDY, 128, ignore_eos=True)
        assert [t for event in past for t in event.tokens] == want


def test_generation_up_to_the_last_position(tmp_path):
    model = save_llama(tmp_path, seed=1, max_position_embeddings=340)
    want = greedy_oracle(model, PROMPT, 40)
    result = Engine.load(tmp_path, device="cpu", budget=64).generate(PROMPT, GREEDY, 40)
    assert result.token_ids == want
    assert result.stats["finish_reason"] == "length"


def test_a_prompt_of_one_token(tmp_path):
    model = save_llama(tmp_path, seed=1)
    want = greedy_oracle(model, [5], 60)
    result = Engine.load(tmp_path, tmp_path, device="cpu", budget=16).generate([5], GREEDY, 60)
    assert result.token_ids == want
