"""Drafts that are looked up in the text: what is found, and that it changes no token."""

import pytest
from joint_distribution import SHAPE, TWO_TOKENS, VOCAB, enumerate_joint, exact_probabilities
from tiny import greedy_oracle, random_tokens, save_llama
from triforce.offload import Engine, Request, Sampling

GREEDY = Sampling(temperature=0.0)

PASSAGE = random_tokens(40, seed=2)

PROMPT = PASSAGE + random_tokens(200, seed=3) + PASSAGE[:12]
"""Its end has come before."""


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
