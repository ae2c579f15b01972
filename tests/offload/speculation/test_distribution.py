"""At temperature above 0 the emitted tokens follow the target's own distribution.

With fresh noise this is shown twice. Exactly: the engine runs once for every outcome that its random choices can have,
and the probabilities add up to what transformers' logits give; this finds any wrong rule, by more than 1e-6 in the
probability of any continuation. And by chi-square over runs with random numbers as they are, which also finds numbers
that are not independent of one another. With common noise a text is what the target alone draws with its seed
(`test_seeds` shows it for whole runs), so texts are drawn from transformers' logits, for as many seeds as chi-square
wants, and some of the engine's are compared with them.
"""

from collections import Counter
from dataclasses import replace

import pytest
from joint_distribution import (
    LIKELY,
    PROMPT,
    SAMPLING,
    TWO_TOKENS,
    drawn_texts,
    enumerate_joint,
    exact_probabilities,
    first_tokens,
    load_three_tiers,
    next_distributions,
    p_value,
    sample_counts,
    with_lengths,
)
from profiles import profile_name, share


@pytest.mark.parametrize(
    ("draft_length", "block_length", "sampling", "least"),
    [
        (1, 2, TWO_TOKENS, 0.0),
        (1, 2, replace(LIKELY, top_k=2), 0.0),
        pytest.param(2, 2, TWO_TOKENS, 0.0, marks=pytest.mark.slow),
        *([(1, 2, replace(SAMPLING, top_k=3), 1e-7)] if profile_name() == "campaign" else []),
    ],
)
def test_every_outcome_of_three_tiers_adds_up_to_the_target_distribution(
    engine_and_target, monkeypatch, draft_length, block_length, sampling, least
):
    engine, target = engine_and_target
    monkeypatch.setattr(engine, "settings", with_lengths(engine, draft_length, block_length))
    want = enumerate_joint(target, sampling)
    got, rejections, left_out = exact_probabilities(engine, sampling, least)
    # The tiers must disagree, or the test would show nothing.
    assert rejections["draft"] > 0.5, rejections
    assert rejections["retrieval"] > 0.05, rejections
    assert left_out < 1e-5
    error = max(abs(got[tokens] - probability) for tokens, probability in want.items())
    assert error < left_out + 1e-6, f"a probability differs by {error:.1e}"


@pytest.mark.slow
def test_sampled_texts_of_three_tiers_follow_the_target_distribution(tmp_path):
    """With 6,000 runs, those of a campaign, this finds, in 99 of 100 tests, probabilities that are wrong by 12 % of
    themselves (root mean square, weighted by the probability), with 2,000 those that are by 21 %. A draw that is not
    from the residual makes them wrong by 48 %: with one layer the tiers disagree much more often than with two, where
    it is 25 %."""
    runs = 6_000 if profile_name() == "campaign" else 2_000
    engine, target = load_three_tiers(tmp_path, num_hidden_layers=1)
    counts, rejections = sample_counts(engine, runs)
    assert rejections["draft"] > runs, rejections
    assert rejections["retrieval"] > runs, rejections
    p = p_value(counts, enumerate_joint(target, SAMPLING))
    assert p > 1e-3, f"chi-square p-value {p:.2e} over {len(counts)} continuations"


SEEDS = 20_000
FILTERS = pytest.mark.parametrize("sampling", [SAMPLING, LIKELY], ids=["top-k and top-p", "min-p"])


@FILTERS
def test_texts_of_seeds_follow_the_target_distribution(engine_and_target, sampling):
    _, target = engine_and_target
    counts = Counter(drawn_texts(next_distributions(target, sampling), SEEDS))
    p = p_value(counts, enumerate_joint(target, sampling))
    assert p > 1e-3, f"chi-square p-value {p:.2e} over {len(counts)} continuations"


@pytest.mark.parametrize(
    "position_of", [lambda _: len(PROMPT), lambda i: len(PROMPT) + min(i, 1)], ids=["all the same", "two the same"]
)
@pytest.mark.slow(keep=1)
def test_that_test_notices_noise_that_positions_share(engine_and_target, position_of):
    _, target = engine_and_target
    counts = Counter(drawn_texts(next_distributions(target, SAMPLING), SEEDS, position_of))
    assert p_value(counts, enumerate_joint(target, SAMPLING)) < 1e-9


@FILTERS
def test_the_engine_draws_the_text_of_a_seed_whatever_drafts(engine_and_target, monkeypatch, sampling):
    engine, target = engine_and_target
    texts = drawn_texts(next_distributions(target, sampling), share(150))
    rejected = 0
    for seed, want in enumerate(texts):
        monkeypatch.setattr(engine, "settings", with_lengths(engine, 1 + seed % 3, 1 + seed % 4))
        tokens, rejections = first_tokens(engine, replace(sampling, seed=seed))
        assert tokens == want, f"seed {seed}"
        rejected += sum(rejections.values())
    assert rejected > len(texts) / 2, "the tiers must disagree, or this shows nothing"
