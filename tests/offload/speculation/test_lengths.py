"""Lengths follow from costs and acceptance; the refresh policy from what a refresh costs and brings."""

import pytest
from triforce.offload.speculation.lengths import Acceptance, PassCost, StepCost, expected_tokens
from triforce.offload.speculation.refresh import RefreshPolicy
from triforce.tp.errors import UsageError


def test_expected_tokens_is_the_sum_over_runs_of_acceptances():
    assert expected_tokens(0.0, 5) == 1
    assert expected_tokens(1.0, 5) == 6
    assert expected_tokens(0.5, 3) == pytest.approx(1 + 0.5 + 0.25 + 0.125)


def test_pass_cost_learns_a_line_and_forgets_the_model():
    cost = PassCost(base=100.0, per_row=0.0)
    for i in range(400):
        rows = 1 + i % 17
        cost.observe(rows, 2.0 + 0.5 * rows)
    assert cost.seconds(1) == pytest.approx(2.5, rel=0.2)
    assert cost.seconds(9) == pytest.approx(6.5, rel=0.05)
    assert cost.seconds(20) == pytest.approx(12.0, rel=0.1)


def test_pass_cost_keeps_the_modelled_proportion_while_all_passes_are_alike():
    cost = PassCost(base=1.0, per_row=0.1)
    for i in range(200):
        cost.observe(5, 30.0 if i % 2 else 33.0)
    assert cost.seconds(5) == pytest.approx(31.5, rel=0.02)
    assert cost.seconds(15) / cost.seconds(5) == pytest.approx(2.5 / 1.5, rel=0.02)


def test_pass_cost_shrugs_off_a_disturbance():
    cost = PassCost(base=1.0, per_row=0.1)
    for i in range(100):
        cost.observe(1 + i % 9, 200.0 if i % 25 == 24 else 1.0 + 0.1 * (1 + i % 9))
    assert cost.seconds(5) == pytest.approx(1.5, rel=0.15)
    assert cost.seconds(9) < 2 * cost.seconds(1)


def test_pass_cost_never_expects_a_longer_pass_to_be_cheaper():
    cost = PassCost(base=1.0, per_row=0.1)
    for rows, seconds in ((9, 1.0), (1, 5.0), (9, 1.0), (1, 5.0)):
        cost.observe(rows, seconds)
    assert cost.seconds(20) >= cost.seconds(1)


def test_acceptance_counts_only_what_was_tested():
    rate = Acceptance()
    for _ in range(500):
        rate.observe(accepted=1, proposed=4)  # one accepted, one rejected, two not tested
    assert rate.rate == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
    ("draft_seconds", "rate", "want"),
    [(2.0, 0.99, 0), (0.001, 0.995, 16), (0.1, 0.0, 0)],
)
def test_best_length_at_the_extremes(draft_seconds, rate, want):
    cost = PassCost(base=1.0, per_row=0.001)
    assert StepCost(cost, draft_seconds, rate).best(0, 16)[0] == want


def test_best_length_drafts_further_when_more_is_accepted():
    cost = PassCost(base=1.0, per_row=0.01)
    lengths = [StepCost(cost, 0.05, rate).best(0, 30)[0] for rate in (0.2, 0.5, 0.8, 0.95, 0.99)]
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


def play(policy, rounds, refresh_seconds):
    """Feeds rounds of (accepted, proposed) that take a second each; which of them were refreshed after."""
    due = []
    for accepted, proposed in rounds:
        due.append(policy.due(accepted, proposed))
        if due[-1]:
            policy.done(refresh_seconds, 1.0)
    return due


def test_auto_refreshes_every_round_while_it_is_free():
    assert all(play(RefreshPolicy("auto"), [(10, 10)] * 5, 0.001))


def test_auto_refreshes_on_a_drop_when_it_costs():
    policy = RefreshPolicy("auto")
    play(policy, [(9, 10)] * 40, 50.0)
    assert not any(play(policy, [(0, 2)] * 2, 50.0)), "two short rounds are no drop yet"
    assert any(play(policy, [(2, 10)] * 17, 50.0))
    policy = RefreshPolicy("auto")
    play(policy, [(9, 10)] * 40, 50.0)
    assert not any(play(policy, [(9, 10)] * 19, 50.0)), "without a drop it waits"


def test_one_slow_refresh_is_not_for_ever():
    policy = RefreshPolicy("auto")
    play(policy, [(10, 10)], 0.9)
    due = play(policy, [(10, 10)] * 40, 0.001)
    assert not due[0]
    assert all(due[20:])
