"""The warped distribution equals transformers', and the acceptance rule alone keeps a distribution exactly."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from triforce.kernels.cpu.library import Level, cpu_level
from triforce.kernels.selection import use_kernels
from triforce.offload.speculation.acceptance import accept, residual
from triforce.offload.speculation.distribution import NotFiniteError, check_finite, distribution
from triforce.offload.speculation.noise import CommonNoise, FreshNoise, key_of, mixed
from triforce.offload.speculation.sampler import Sampler
from triforce.offload.speculation.sampling import Sampling
from triforce.tp.errors import UsageError


@pytest.fixture(autouse=True, scope="module", params=["compiled", "plain"])
def kernels(request):
    """All tests here are of both: the compiled kernels, and PyTorch's operations."""
    if request.param == "compiled" and cpu_level() == Level.NONE:
        pytest.skip("there are no compiled kernels for sampling")
    with use_kernels(layers="plain" if request.param == "plain" else None):
        yield


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 5, 500])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.01, 0.2, 1.0])
def test_distribution_equals_transformers(temperature, top_k, top_p, min_p):
    logits = torch.randn(20, 100, generator=torch.Generator().manual_seed(0)) * 3
    ids = torch.LongTensor()  # the warpers take them and do not look
    want: torch.Tensor = TemperatureLogitsWarper(temperature)(ids, logits)
    if top_k:
        want = TopKLogitsWarper(top_k)(ids, want)
    if top_p < 1:
        want = TopPLogitsWarper(top_p)(ids, want)
    if min_p:
        want = MinPLogitsWarper(min_p)(ids, want)
    got = distribution(logits, Sampling(temperature, top_p, top_k, min_p=min_p))
    assert torch.allclose(got, want.softmax(-1), atol=1e-6)


@pytest.mark.parametrize("sharpness", [0.0, 1.0, 6.0])  # flat, so that many tokens are kept, to peaked
def test_top_p_of_a_large_vocabulary_equals_transformers(sharpness):
    logits = torch.randn(6, 3000, generator=torch.Generator().manual_seed(0)) * sharpness
    logits += torch.arange(3000.0) * 1e-4  # no ties: which of them stay is nobody's promise
    want = TopPLogitsWarper(0.9)(torch.LongTensor(), logits).softmax(-1)  # pyright: ignore[reportArgumentType]
    assert torch.allclose(distribution(logits, Sampling(1.0, 0.9)), want, atol=1e-6)


@pytest.mark.parametrize("top_p", [0.9, 1.0])
@pytest.mark.parametrize("min_p", [1e-50, 0.003, 0.7])
def test_min_p_of_many_rows_of_a_large_vocabulary_equals_transformers(top_p, min_p):
    ids, logits = torch.LongTensor(), torch.randn(5, 30_001, generator=torch.Generator().manual_seed(0)) * 2
    want = MinPLogitsWarper(min_p)(ids, TopPLogitsWarper(top_p)(ids, logits))
    assert torch.allclose(distribution(logits, Sampling(1.0, top_p, min_p=min_p)), want.softmax(-1), atol=1e-6)


@pytest.mark.parametrize("others", [0, 21])  # so that the likeliest stand in whole vectors and behind them
def test_a_min_p_of_one_keeps_the_likeliest_and_those_as_likely(others):
    logits = torch.tensor([[3.0, 1.0, 3.0, 2.999] + [0.0] * others + [3.0]])
    likely = distribution(logits, Sampling(1.7, top_p=1.0, min_p=1.0))[0]
    assert likely.nonzero().flatten().tolist() == [0, 2, 4 + others]
    assert torch.allclose(likely[likely > 0], torch.tensor(1 / 3))


def test_greedy_puts_all_mass_on_the_first_largest_logit():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    for greedy in (Sampling(0.0), Sampling(0.0, min_p=1.0), Sampling(0.0, 0.1, 3, min_p=0.5)):
        assert distribution(logits, greedy).tolist() == [[0.0, 1.0, 0.0, 0.0]]


@pytest.mark.parametrize("temperature", [1e-320, 1e-60, 1e60, 10**30, int(1.7e308)])
def test_temperatures_that_float32_does_not_hold_are_the_coldest_and_the_hottest(temperature):
    logits = torch.tensor([[1.0, 3.0, 2.999, float("-inf")], [0.0, 0.0, -60.0, -1e4]])
    likely = distribution(logits, Sampling(temperature, top_p=1.0))
    if temperature < 1:
        assert torch.equal(likely, torch.tensor([[0.0, 1.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0]]))
    else:
        assert torch.equal(likely[0], torch.tensor([1 / 3, 1 / 3, 1 / 3, 0.0]))
        assert torch.allclose(likely[1], torch.full((4,), 0.25), atol=1e-6)


def fresh(seed=0):
    return FreshNoise(torch.Generator().manual_seed(seed))


def accept_one(proposed, draft, target, noise, position):
    """`accept` for one sequence."""
    sampler = Sampler(Sampling(), noise, frozenset())
    return accept([proposed], [draft], target, [sampler], [position])[0][0]


NOISES = pytest.mark.parametrize("noise", [fresh(), CommonNoise(7)], ids=["fresh", "common"])


@NOISES
@pytest.mark.parametrize("others", [0, 200])  # many tokens of weight 0, and few
def test_draws_follow_the_weights_and_never_fall_on_a_weight_of_zero(noise, others):
    weights = torch.tensor([0.0, 3.0, 0.0, 1.0, 0.0] + [0.0] * others)
    counts = noise.draw(weights.expand(20_000, -1), 0).bincount(minlength=5)
    assert counts[[0, 2, 4]].sum() == 0
    expected, deviation = 15_000, (20_000 * 0.75 * 0.25) ** 0.5
    assert abs(counts[1].item() - expected) < 5 * deviation, f"drawn {counts[1]} times, not about {expected}"


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "sampling",
    [Sampling(0.0), Sampling(1.0), Sampling(0.6, 0.9), Sampling(0.6, 0.9, 5), Sampling(0.6, 1.0, min_p=0.1)],
)
@pytest.mark.parametrize("noise", [fresh(), CommonNoise(7), CommonNoise(None)], ids=["fresh", "common", "none"])
def test_logits_that_are_no_numbers_are_noticed_when_their_token_is_read(broken, sampling, noise):
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
    logits[1, 7] = broken
    tokens = [[token] for token in noise.draw(distribution(logits, sampling), 0).tolist()]
    check_finite("ac", tokens[::2])
    with pytest.raises(NotFiniteError, match="not finite numbers") as raised:
        check_finite("abc", tokens)
    assert raised.value.whose == ["b"]
    _, token = accept_one([1], torch.full((1, 20), 0.05), distribution(logits[1:], sampling), noise, 0)
    assert token < 0


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", value) for value in (-0.1, float("nan"), float("inf"), 10**400)]
    + [("top_p", 0.0), ("top_p", 1.1), ("top_k", -1)]
    + [("min_p", value) for value in (-0.1, 1.1, float("nan"), 10**400)],
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
    proposed = [0, 0, 1]  # each accepted with probability 0.5, 0.5, 1
    for pattern, want in (
        ((0.49, 0.49, 0.99), (3, 0)),
        ((0.49, 0.51, 0.99), (1, 1)),
        ((0.51, 0.1, 0.1), (0, 1)),
    ):
        monkeypatch.setattr(torch, "rand", ScriptedUniform(pattern))
        assert accept_one(proposed, draft, target, fresh(), 0) == want


def test_nothing_proposed_draws_from_the_target():
    target = torch.tensor([[0.0, 0.0, 1.0]])
    for noise in (fresh(), CommonNoise(1), CommonNoise(None)):
        assert accept_one([], None, target, noise, 0) == (0, 2)


def test_tokens_of_equal_distributions_are_always_accepted():
    generator = torch.Generator().manual_seed(0)
    rows = torch.softmax(torch.randn(9, 6, generator=generator), -1)
    for proposed in itertools.islice(itertools.permutations(range(6)), 200):
        accepted, _ = accept_one(list(proposed), rows[:6], rows[:7], FreshNoise(generator), 0)
        assert accepted == 6


def test_with_common_noise_a_token_is_accepted_where_the_target_draws_it():
    target = torch.softmax(torch.randn(5, 40, generator=torch.Generator().manual_seed(3)), -1)
    drawn = CommonNoise(11).draw(target, 100)
    for wrong in range(5):
        proposed = drawn[:4].clone()
        if wrong < 4:
            proposed[wrong] = (proposed[wrong] + 1) % 40
        want = wrong, int(drawn[wrong])
        assert accept_one(proposed.tolist(), target[:4], target, CommonNoise(11), 100) == want


def test_common_noise_of_a_row_depends_on_its_position_alone():
    rows = torch.softmax(4 * torch.randn(60, 3000, generator=torch.Generator().manual_seed(1)), -1)
    cut = rows.masked_fill(rows < 1e-3, 0.0)  # few tokens are left: noise is computed for these only
    for weights in (rows, cut):
        together = CommonNoise(5).draw(weights, 40)
        assert together.tolist() == [int(CommonNoise(5).draw(weights[i : i + 1], 40 + i)) for i in range(60)]
        assert together.tolist() != CommonNoise(5).draw(weights, 41).tolist()
        assert together.tolist() != CommonNoise(key_of(5, 1)).draw(weights, 40).tolist()
    assert key_of(5, 0) == 5


def test_common_noise_does_not_depend_on_whether_tokens_of_weight_zero_are_computed():
    wide = torch.zeros(50, 4000)
    wide[:, 100:140] = torch.rand(50, 40, generator=torch.Generator().manual_seed(2))
    some = CommonNoise(9).draw(wide, 0)
    all_tokens = CommonNoise(9).draw(wide.clamp_min(1e-30), 0)
    assert torch.equal(some, all_tokens)


def test_numbers_are_those_of_splitmix64():
    """The first outputs for the seed 1234567, as published with the generator's Java source."""
    step = 0x9E3779B97F4A7C15
    assert [mixed(1234567 + i * step) for i in (1, 2, 3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@pytest.mark.parametrize("ties", [10, 400])  # within the tokens that are looked at first, and beyond
def test_the_nucleus_of_a_row_does_not_depend_on_the_rows_beside_it(ties):
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(6, 3000, generator=generator)
    logits[0, torch.randperm(3000, generator=generator)[:ties]] = 12.0  # equally likely
    logits[1] = 0.0  # flat: nearly all tokens are kept
    sampling = Sampling(1.0, 0.5)
    together = distribution(logits, sampling) > 0
    for i in range(6):
        assert torch.equal(together[i : i + 1], distribution(logits[i : i + 1], sampling) > 0)
    tied = (logits[0] == 12.0).nonzero().squeeze(1)
    kept = together[0].nonzero().squeeze(1)
    assert torch.equal(kept, tied[: len(kept)]), "of equally likely tokens the first ones are kept"


@pytest.mark.parametrize("vocab", [9, 17, 3001])
def test_equal_logits_are_equally_likely_wherever_they_stand(vocab):
    for seed in range(50):
        logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(seed))
        logits[0, [3, vocab - 1]] = 1.5
        likely = distribution(logits, Sampling(0.7, 1.0))[0]
        assert likely[3] == likely[-1]
