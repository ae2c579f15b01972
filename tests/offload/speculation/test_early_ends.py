"""Drafts that end early: lossless under both rules, at any length, and where they end follows from costs."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from joint_distribution import SAMPLING, SHAPE, TWO_TOKENS, enumerate_joint, exact_probabilities, first_tokens
from profiles import examples, profile_name, share
from tiny import agreeing_pair, random_tokens, save_llama
from triforce.offload import Engine, Request, Sampling
from triforce.offload.settings import Settings
from triforce.offload.speculation.confidence import Confidence
from triforce.offload.speculation.distribution import certainties
from triforce.offload.speculation.drafting_pays import DraftingPays
from triforce.offload.speculation.lengths import PassCost, StepCost
from triforce.offload.speculation.tiers import Tier
from triforce.tp.errors import UsageError

GREEDY = Sampling(temperature=0.0)
PROMPT = random_tokens(300, seed=3)
LIKELY = 0.62
"""Of two tokens, the likelier one is about as often more likely than this as not."""


@pytest.fixture(scope="module")
def engine_and_target(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    target = save_llama(root / "target", seed=2, **SHAPE)
    save_llama(root / "draft", seed=7, **(SHAPE | {"num_hidden_layers": 1}))
    given: dict[str, Any] = {"device": "cpu", "budget": 8, "refresh": "round", "early_end": LIKELY}
    return Engine.load(root / "target", root / "draft", draft_length=2, block_length=2, **given), target


@pytest.fixture
def ends(monkeypatch):
    """Has a token's chance be its certainty, and counts the drafts of each tier: those that ended
    early, and all."""
    monkeypatch.setattr(Confidence, "chance", lambda _, certainty: certainty)
    monkeypatch.setattr(Confidence, "rate", 1.0)
    counts: dict[str, list[int]] = {"draft": [0, 0], "retrieval": [0, 0]}
    extend = Tier.extend

    def counted(self, sequences, limits, least_chance=0.0):
        found = extend(self, sequences, limits, least_chance)
        for (tokens, _), limit in zip(found, limits, strict=True):
            counts[self.name][0] += len(tokens) < limit
            counts[self.name][1] += limit > 1
        return found

    monkeypatch.setattr(Tier, "extend", counted)
    return counts


@pytest.mark.parametrize(
    "lengths",
    [(1, 2), pytest.param((2, 2), marks=pytest.mark.slow), *([(2, 3)] if profile_name() == "campaign" else [])],
)
def test_every_outcome_adds_up_to_the_target_distribution(engine_and_target, monkeypatch, ends, lengths):
    engine, target = engine_and_target
    settings = replace(engine.settings, draft_length=lengths[0], block_length=lengths[1])
    monkeypatch.setattr(engine, "settings", settings)
    got, _, left_out = exact_probabilities(engine, TWO_TOKENS, 0.0 if sum(lengths) < 5 else 1e-6)
    want = enumerate_joint(target, TWO_TOKENS)
    for name in ("draft", "retrieval") if lengths[1] > 2 else ("retrieval",):
        early, drafts = ends[name]
        assert 0.1 * drafts < early < 0.9 * drafts, (name, ends)
    error = max(abs(got[tokens] - probability) for tokens, probability in want.items())
    assert left_out < 1e-3
    assert error < left_out + 1e-6, f"a probability differs by {error:.1e}"


@pytest.mark.slow
def test_that_test_notices_an_end_before_the_token_that_it_is_for(engine_and_target, monkeypatch, ends):
    """A draft that is ended by what its next token would be leaves that token out more often than it should."""
    engine, target = engine_and_target
    extend = Tier.extend

    def without_unlikely(self, sequences, limits, least_chance=0.0):
        found = extend(self, sequences, limits, least_chance)
        cut = []
        for sequence, (tokens, rows) in zip(sequences, found, strict=True):
            rated = sequence.rated[self.name]
            kept = next((i for i, chance in enumerate(rated) if chance < LIKELY and i), len(tokens))
            cut.append((tokens[:kept], rows[:kept]))
            sequence.rated[self.name] = rated[:kept]
        return cut

    monkeypatch.setattr(Tier, "extend", without_unlikely)
    got, _, left_out = exact_probabilities(engine, TWO_TOKENS, 1e-3)
    error = max(abs(got[tokens] - p) for tokens, p in enumerate_joint(target, TWO_TOKENS).items())
    assert error > left_out + 0.005, f"the wrong rule passed: probabilities within {error:.1e} of the right ones"


def test_a_seed_s_text_does_not_depend_on_where_drafts_end(engine_and_target, monkeypatch):
    engine, _ = engine_and_target
    for seed in range(share(40)):
        texts = set()
        for early_end in ("off", 0.2, LIKELY, 0.95):
            monkeypatch.setattr(engine, "settings", replace(engine.settings, early_end=early_end, block_length=5))
            texts.add(first_tokens(engine, replace(SAMPLING, seed=seed))[0])
        assert len(texts) == 1, (seed, texts)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A pair that agrees often, and 300 tokens by transformers."""
    return agreeing_pair(tmp_path_factory.mktemp("agreeing"), PROMPT, 300)


@pytest.mark.parametrize("lookup", [False, True], ids=["model", "model and lookup"])
@pytest.mark.parametrize("early_end", [0.3, 0.01])  # without early ends: see test_greedy
@pytest.mark.slow(keep=("0.01-model and lookup", "0.3-model"))
def test_greedy_equals_transformers_at_lengths_to_128(pair, early_end, lookup):
    target, draft, want = pair
    engine = Engine.load(
        target, f"{draft},lookup" if lookup else draft, device="cpu", dtype="float32", budget=160,
        block_length=128, draft_length=30 if lookup else 5, early_end=early_end, resident=0.0,
    )  # fmt: skip
    run = engine.stream(PROMPT, GREEDY, 300)
    proposed = [event.proposed for event in itertools.islice(run, 1, None)]
    assert run.statistics.token_ids == want
    if early_end == "off":
        assert max(proposed) == 128
    else:
        assert len(set(proposed)) > 2 and max(proposed) > 8, "drafts have ended at different lengths"


@pytest.mark.parametrize("lookup", [False, True], ids=["model", "model and lookup"])
@pytest.mark.slow
def test_greedy_equals_transformers_where_lengths_and_ends_adapt(pair, lookup, monkeypatch):
    """As over a slow link: verifications are taken to be expensive, so drafts grow to their limit."""
    target, draft, want = pair
    engine = Engine.load(
        target, f"{draft},lookup" if lookup else draft, device="cpu", dtype="float32", budget=4096, resident=0.0
    )
    monkeypatch.setattr(PassCost, "observe", lambda *given: None)
    run = engine.stream(PROMPT, GREEDY, 300)
    verify = run.batch.tiers[0].control
    verify.cost = PassCost(100 * verify.cost.base, 0.0)
    monkeypatch.setattr(DraftingPays, "note", lambda *given: None)
    proposed = [event.proposed for event in itertools.islice(run, 1, None)]
    assert run.statistics.token_ids == want
    assert verify.longest == 128 and max(proposed) > 24
    assert verify.least_chance > 0


@pytest.mark.slow
def test_sequences_in_company_end_their_drafts_and_have_the_tokens_that_they_have_alone(pair):
    target, draft, want = pair
    engine = Engine.load(
        target, f"{draft},lookup", device="cpu", dtype="float32", budget=64, block_length=60, early_end=0.2
    )
    prompts = [PROMPT, PROMPT[:150], PROMPT + want[:40]]
    batch = engine.batch([Request(prompt, GREEDY, 60 + 20 * i) for i, prompt in enumerate(prompts)])
    for _ in batch:
        pass
    plain = Engine.load(target, device="cpu", dtype="float32", tiers=1)
    for i, (prompt, sequence) in enumerate(zip(prompts, batch.sequences, strict=True)):
        assert sequence.statistics.token_ids == plain.generate(prompt, GREEDY, 60 + 20 * i).token_ids


def test_certainty_is_a_token_s_probability_beside_its_strongest_rival_s():
    logits = torch.tensor([[0.0, 2.0, 1.0], [0.0, 2.0, 1.0], [0.0, 2.0, 1.0], [5.0, 5.0, 1.0], [float("nan")] * 3])
    probabilities = logits.softmax(dim=-1)
    got = certainties(logits, torch.tensor([1, 2, 0, 1, -1])).tolist()
    p = probabilities[0].tolist()
    assert got == pytest.approx([p[1] / (p[1] + p[2]), p[2] / (p[2] + p[1]), p[0] / (p[0] + p[1]), 0.5, 0.0])


def test_chances_are_those_of_tokens_with_such_certainties():
    confidence = Confidence()
    assert confidence.chance(0.2) == pytest.approx(confidence.rate) == pytest.approx(confidence.chance(0.9999))
    for i in range(400):
        confidence.observe([0.97, 0.97, 0.4, 0.97], 4 if i % 2 else 2)  # the third is accepted every other time
    assert confidence.chance(0.98) > 0.95
    assert confidence.chance(0.45) == pytest.approx(0.5, abs=0.1)
    assert confidence.chance(0.1) == pytest.approx(confidence.rate, abs=0.01), "nothing is known of such tokens"


costs = st.floats(1e-4, 1.0)


@given(
    base=costs,
    row=costs,
    draft=costs,
    rate=st.floats(0.0, 0.995),
    overhead=st.floats(0.0, 0.1),
    most=st.integers(0, 128),
)
@examples(200)
def test_the_best_number_of_draft_tokens_is_that_of_a_search_of_all(base, row, draft, rate, overhead, most):
    step = StepCost(PassCost(base, row / 50), draft / 20, rate, 3, overhead=overhead, drafted=0.7)
    best, seconds = step.best(0, most)
    assert seconds == pytest.approx(min(step.seconds_per_token(n) for n in range(most + 1)))
    assert seconds == pytest.approx(step.seconds_per_token(best))


@given(base=costs, row=costs, draft=costs, rate=st.floats(0.1, 0.99))
@examples(200)
def test_where_all_tokens_are_alike_a_draft_ends_where_its_best_length_does(base, row, draft, rate):
    step = StepCost(PassCost(base, row / 50), draft / 20, rate)
    best, seconds = step.best(0, 400)
    if 0 < best < 400:
        least = step.least_chance(best, seconds)
        assert rate**best >= least * (1 - 1e-6)
        assert rate ** (best + 1) <= least * (1 + 1e-6)


def test_settings_of_early_ends():
    for asked, least in (("auto", None), ("off", 0.0), (0.25, 0.25), ("0.25", 0.25)):
        assert Settings(early_end=asked).least_chance == least
    for wrong in ("never", 0.0, 1.0, -0.5, float("nan")):
        with pytest.raises(UsageError, match="early-end is"):
            Settings(early_end=wrong)
