"""Drafts that are looked up in the text: what is found, and that it changes no token."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from joint_distribution import SHAPE, TWO_TOKENS, VOCAB, enumerate_joint, exact_probabilities
from profiles import examples
from tiny import greedy_oracle, random_tokens, save_llama
from triforce.offload import Engine, Request, Sampling
from triforce.offload.speculation.lengths import LOOKUP_SECONDS, PassCost
from triforce.offload.speculation.lookup.occurrences import SHORTEST, Lookup, Occurrences
from triforce.offload.speculation.lookup.tier import LookupTier
from triforce.offload.speculation.switch import PROBE_EVERY, Switch
from triforce.tp.weights.registry import parse_draft

GREEDY = Sampling(temperature=0.0)
PASSAGE = random_tokens(40, seed=2)
PROMPT = PASSAGE + random_tokens(200, seed=3) + PASSAGE[:12]
"""Its end has come before."""


@given(
    steps=st.lists(
        st.one_of(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.integers(0, 20)), min_size=1, max_size=12
    )
)
@examples(300)
def test_the_longest_match_is_found_after_any_growing_and_cutting(steps):
    """Tokens are added, or so many cut off."""
    occurrences, text = Occurrences(), []
    for step in steps:
        if isinstance(step, list):
            text += step
        else:
            del text[max(0, len(text) - step) :]
        occurrences.follow(text)
    place, matching = occurrences.longest()
    run = text[-SHORTEST:]
    ends = [end for end in range(SHORTEST, len(text)) if text[end - SHORTEST : end] == run]
    if len(text) < SHORTEST or not ends:
        assert matching == 0
        return

    def length(end):
        n = SHORTEST
        while n < end and text[end - 1 - n] == text[len(text) - 1 - n]:
            n += 1
        return n

    latest = ends[::-1][:16]
    assert matching == max(map(length, latest))
    assert place == next(end for end in latest if length(end) == matching)
    assert occurrences.after(place, 5)[: len(text) - place] == text[place : place + 5]


def test_what_reaches_the_end_of_the_text_goes_on_as_it_began():
    occurrences = Occurrences()
    occurrences.follow([7, 1, 2, 3, 1, 2, 3])
    assert occurrences.longest() == (4, 3)
    assert occurrences.after(4, 8) == [1, 2, 3, 1, 2, 3, 1, 2]


@pytest.mark.parametrize(
    ("given", "model", "looks_up"),
    [("lookup", "none", True), ("a/b,lookup", "a/b", True), ("a/b", "a/b", False), (None, None, False)],
)
def test_a_draft_s_name_says_whether_it_is_looked_up(given, model, looks_up):
    assert parse_draft(given) == (model, looks_up)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    save_llama(root / "draft", seed=9, num_hidden_layers=1, hidden_size=32)
    return root, save_llama(root / "target", seed=1, num_key_value_heads=2)


def load(models, with_model, **settings):
    root, _ = models
    draft = f"{root / 'draft'},lookup" if with_model else "lookup"
    return Engine.load(root / "target", draft, device="cpu", dtype="float32", budget=64, **settings)


@pytest.mark.parametrize("with_model", [False, True])
def test_greedy_tokens_are_those_of_transformers(models, with_model):
    """The random model soon repeats itself, so that what is looked up is accepted."""
    want = greedy_oracle(models[1], PROMPT, 120)
    engine = load(models, with_model)
    result = engine.generate(PROMPT, GREEDY, 120)
    assert result.token_ids == want
    assert result.stats["settings"]["tiers"] == 3 and "lookup" in result.stats["draft"]
    again = engine.generate(PROMPT + want[:40] + PROMPT[:30], GREEDY, 30)
    assert again.token_ids == greedy_oracle(models[1], PROMPT + want[:40] + PROMPT[:30], 30)


@pytest.mark.parametrize("with_model", [False, True])
@pytest.mark.slow
def test_a_seed_and_company_change_nothing(models, with_model):
    sampling = [Sampling(1.2, 0.95, seed=3), GREEDY, Sampling(0.7, 1.0, 5, seed=4)]
    prompts = [PROMPT, PROMPT[:100] * 2, PROMPT[50:]]
    requests = [Request(prompt, s, 60, ignore_eos=True) for prompt, s in zip(prompts, sampling, strict=True)]
    batch = load(models, with_model).batch(requests)
    for _ in batch:
        pass
    plain = Engine.load(models[0] / "target", device="cpu", dtype="float32", tiers=1)
    for prompt, s, sequence in zip(prompts, sampling, batch.sequences, strict=True):
        want = plain.generate(prompt, s, 60, ignore_eos=True).token_ids
        assert sequence.statistics.token_ids == want


class Model:
    """Drafts ones, at a price."""

    def __init__(self, seconds):
        self.seconds, self.asked = seconds, []

    def choose_lengths(self, batch):
        return self.seconds

    def ends_early(self, tokens):
        return True

    def extend(self, sequences, counts, least_chance):
        self.asked.append(counts)
        return [([1] * count, torch.empty(0)) for count in counts]

    def judge(self, sequence, proposed, accepted):
        pass


def sequence_of(context) -> Any:
    sampler = SimpleNamespace(until_end=lambda tokens: tokens, noise=None)
    return SimpleNamespace(context=context, lookup=Lookup(), sampler=sampler)


def test_a_model_that_does_not_pay_is_left_out_and_tried_now_and_then():
    second = PassCost(1.0, 0.0)
    upper: Any = SimpleNamespace(
        decoder=SimpleNamespace(device="cpu"), cost=second, vocab_size=97, fixed=None, clock=None
    )
    upper.draft_tokens, upper.switch = 8, Switch()
    model: Any = Model(seconds=5.0)
    tier = LookupTier(model, upper, 8)
    new, known = sequence_of(list(range(90))), sequence_of(PASSAGE * 2)
    while tier.choose_lengths() > LOOKUP_SECONDS:  # a few times, to see what it is worth
        assert tier.extend([new], [8])[0][0] == [1] * tier.draft_tokens
        tier.judge(new, 1, 1)
        assert len(model.asked) < 8
    assert model.asked and tier.draft_tokens == 0 and new.lookup.model.rate > known.lookup.long.rate
    model.asked.clear()
    for _ in range(PROBE_EVERY):
        assert tier.extend([new], [8])[0][0] == []
    assert tier.extend([known], [8])[0][0] == PASSAGE[:8] and not model.asked
    assert tier._steady and tier.extend([new], [8])[0][0] == [1] and model.asked == [[1]] and not tier._steady
    known.lookup.model = new.lookup.model
    assert tier.extend([known], [8])[0][0] == PASSAGE[:8], "it costs nothing, though the model is right more often"
    model.seconds = 0.01
    assert LOOKUP_SECONDS < tier.choose_lengths() <= 0.01
    assert tier.extend([known, new], [8, 8])[0][0] == [1] * 8 and model.asked[1:] == [[8, 8]]


def every_run_of_three(vocab):
    """A text in which any three tokens come in a row."""
    text, seen = [0, 0], set()
    while len(seen) < vocab**3:
        following = [token for token in range(vocab) if (*text[-2:], token) not in seen]
        token = following[-1] if following else (text[-1] + 1) % vocab
        seen.add((*text[-2:], token))
        text.append(token)
    return text


@pytest.mark.slow
def test_every_outcome_adds_up_to_the_target_distribution(tmp_path):
    prompt = every_run_of_three(VOCAB)
    target = save_llama(tmp_path / "target", seed=2, **SHAPE)
    engine = Engine.load(
        tmp_path / "target", "lookup", device="cpu", budget=8, draft_length=2, block_length=2, refresh="round"
    )
    got, rejections, left_out = exact_probabilities(engine, TWO_TOKENS, 0.0, prompt)
    want = enumerate_joint(target, TWO_TOKENS, prompt)
    assert rejections["draft"] > 0.01, "nothing was looked up"
    assert max(abs(got[tokens] - p) for tokens, p in want.items()) < left_out + 1e-6
