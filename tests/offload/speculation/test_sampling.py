"""The warped distribution equals transformers', and the acceptance rule alone keeps a distribution exactly."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from triforce.offload.speculation.acceptance import accept, residual
from triforce.offload.speculation.sampling import Sampling, distribution, draw, read
from triforce.tp.errors import ModelError, UsageError


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 5, 500])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 1.0])
def test_distribution_equals_transformers(temperature, top_k, top_p):
    logits = torch.randn(20, 100, generator=torch.Generator().manual_seed(0)) * 3
    ids = torch.LongTensor()  # the warpers take them and do not look
    want: torch.Tensor = TemperatureLogitsWarper(temperature)(ids, logits)
    if top_k:
        want = TopKLogitsWarper(top_k)(ids, want)
    if top_p < 1:
        want = TopPLogitsWarper(top_p)(ids, want)
    got = distribution(logits, Sampling(temperature, top_p, top_k))
    assert torch.allclose(got, want.softmax(-1), atol=1e-6)


@pytest.mark.parametrize("sharpness", [0.0, 1.0, 6.0])  # flat, so that many tokens are kept, to peaked
def test_top_p_of_a_large_vocabulary_equals_transformers(sharpness):
    logits = torch.randn(6, 3000, generator=torch.Generator().manual_seed(0)) * sharpness
    logits += torch.arange(3000.0) * 1e-4  # no ties: which of them stay is nobody's promise
    want = TopPLogitsWarper(0.9)(torch.LongTensor(), logits).softmax(-1)  # pyright: ignore[reportArgumentType]
    assert torch.allclose(distribution(logits, Sampling(1.0, 0.9)), want, atol=1e-6)


def test_greedy_puts_all_mass_on_the_first_largest_logit():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    assert distribution(logits, Sampling(temperature=0.0)).tolist() == [[0.0, 1.0, 0.0, 0.0]]


def test_draws_follow_the_weights_and_never_fall_on_a_weight_of_zero():
    weights = torch.tensor([0.0, 3.0, 0.0, 1.0, 0.0])
    counts = draw(weights.expand(20_000, -1), torch.Generator().manual_seed(0)).bincount(minlength=5)
    assert counts[[0, 2, 4]].sum() == 0
    expected, deviation = 15_000, (20_000 * 0.75 * 0.25) ** 0.5
    assert abs(counts[1].item() - expected) < 5 * deviation, f"drawn {counts[1]} times, not about {expected}"


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("filters", [(0.0,), (1.0,), (0.6, 0.9), (0.6, 0.9, 5)])
def test_logits_that_are_no_numbers_are_noticed_when_their_token_is_read(broken, filters):
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
    logits[1, 7] = broken
    tokens = draw(distribution(logits, Sampling(*filters)), torch.Generator())
    assert len(read(tokens[[0, 2]])) == 2
    with pytest.raises(ModelError, match="not finite numbers"):
        read(tokens)
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(ModelError, match="not finite numbers"):
        accept(torch.tensor([1]), torch.full((1, 20), 0.05), distribution(logits[1:], Sampling(*filters)), generator)


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -0.1), ("temperature", float("nan")), ("top_p", 0.0), ("top_p", 1.1), ("top_k", -1)],
)
def test_impossible_sampling_is_refused_by_name_and_value(name, value):
    with pytest.raises(UsageError, match=f"{name.replace('_', '-')} is {value}"):
        Sampling(**{name: value})


def emitted_distribution(draft, target):
    """The distribution of the first emitted token for one proposed token, enumerated from the rule's own pieces."""
    rest = residual(target, draft)
    rest = rest / rest.sum()
    accepted = torch.minimum(target / draft.clamp_min(1e-30), torch.ones_like(target))
    return draft * accepted + (draft * (1 - accepted)).sum() * rest


rows = st.lists(st.integers(0, 9), min_size=5, max_size=5).filter(any)


@given(draft=rows, target=rows)
@examples(300)
def test_rejection_keeps_target_distribution(draft, target):
    p1, p2 = (torch.tensor(row, dtype=torch.float64) / sum(row) for row in (draft, target))
    error = (emitted_distribution(p1, p2) - p2).abs().max()
    assert error < 1e-12, f"the rule misses the target's distribution by {error}"


class ScriptedUniform:
    """Takes the place of `torch.rand` and returns given numbers."""

    def __init__(self, numbers):
        self.numbers = numbers

    def __call__(self, n, **_):
        return torch.tensor(self.numbers[:n])


def test_acceptance_follows_the_ratio_and_stops_at_the_first_rejection(monkeypatch):
    draft = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]])
    target = torch.tensor([[0.25, 0.75], [0.25, 0.75], [0.25, 0.75], [1.0, 0.0]])
    generator = torch.Generator().manual_seed(0)
    proposed = torch.tensor([0, 0, 1])  # each accepted with probability 0.5, 0.5, 1
    for pattern, want in (
        ((0.49, 0.49, 0.99), (3, 0)),
        ((0.49, 0.51, 0.99), (1, 1)),
        ((0.51, 0.1, 0.1), (0, 1)),
    ):
        monkeypatch.setattr(torch, "rand", ScriptedUniform(pattern))
        assert accept(proposed, draft, target, generator) == want


def test_nothing_proposed_draws_from_the_target():
    target = torch.tensor([[0.0, 0.0, 1.0]])
    empty = torch.empty(0, dtype=torch.int64)
    assert accept(empty, target, target, torch.Generator()) == (0, 2)


def test_tokens_of_equal_distributions_are_always_accepted():
    generator = torch.Generator().manual_seed(0)
    rows = torch.softmax(torch.randn(9, 6, generator=generator), -1)
    for proposed in itertools.islice(itertools.permutations(range(6)), 200):
        accepted, _ = accept(torch.tensor(proposed), rows[:6], rows[:7], generator)
        assert accepted == 6
