"""Draws that do not follow the target's distribution are noticed."""

from dataclasses import replace

import pytest
from joint_distribution import (
    SAMPLING,
    TWO_TOKENS,
    drawn_texts,
    enumerate_joint,
    exact_probabilities,
    first_tokens,
    next_distributions,
    with_lengths,
)
from triforce.offload.speculation.acceptance import accept


@pytest.mark.slow
def test_that_test_notices_a_draw_that_is_not_from_the_residual(engine_and_target, monkeypatch):
    engine, target = engine_and_target

    def redrawn(proposed, drafts, target, samplers, positions, logits):
        """After a rejection the next token is drawn from the target's distribution."""
        ((count, token),), rated = accept(proposed, drafts, target, samplers, positions, logits)
        if count < len(proposed[0]):
            token = int(samplers[0].noise.draw(target[count : count + 1], positions[0] + count))
        return [(count, token)], rated

    monkeypatch.setattr(engine, "settings", with_lengths(engine, 1, 2))
    got, _, left_out = exact_probabilities(engine, TWO_TOKENS, 1e-3, accept=redrawn)
    error = max(abs(got[tokens] - p) for tokens, p in enumerate_joint(target, TWO_TOKENS).items())
    assert error > left_out + 0.01, f"the wrong rule passed: probabilities within {error:.1e} of the right ones"


@pytest.mark.parametrize("wrong", ["the draft's draws", "noise of another position"])
@pytest.mark.slow
def test_that_test_notices_a_tier_that_uses_what_is_another_s(engine_and_target, monkeypatch, wrong):
    """What the upper tiers emit where they accept all that is drafted, or draw with noise of the position before."""
    engine, target = engine_and_target

    def accept_all(proposed, drafts, target, samplers, positions, logits):
        count = len(proposed[0])
        return [(count, int(samplers[0].noise.draw(target[-1:], positions[0] + count)))], [[1.0] * (count + 1)]

    def accept_shifted(proposed, drafts, target, samplers, positions, logits):
        return accept(proposed, drafts, target, samplers, [positions[0] - 1], logits)

    rule = accept_all if wrong == "the draft's draws" else accept_shifted
    monkeypatch.setattr(engine, "settings", with_lengths(engine, 2, 3))
    wanted = drawn_texts(next_distributions(target, SAMPLING), 40)
    got = [first_tokens(engine, replace(SAMPLING, seed=seed), accept=rule)[0] for seed in range(40)]
    assert sum(a != b for a, b in zip(got, wanted, strict=True)) > 5
