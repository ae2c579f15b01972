"""A draft whose vocabulary is padded otherwise than its target's drafts and changes nothing; another one is refused."""

import pytest
from joint_distribution import PROMPT, SHAPE, TWO_TOKENS, VOCAB, enumerate_joint, exact_probabilities
from tiny import greedy_oracle, random_tokens, save_llama
from triforce.offload import Engine, Sampling


@pytest.mark.parametrize("draft_vocab", [VOCAB - 2, VOCAB + 3])
@pytest.mark.slow
def test_a_padded_draft_keeps_the_joint_distribution_of_three_tokens(tmp_path, draft_vocab):
    target = save_llama(tmp_path / "target", seed=2, **SHAPE)
    save_llama(tmp_path / "draft", seed=7, **(SHAPE | {"num_hidden_layers": 1, "vocab_size": draft_vocab}))
    assert max(PROMPT) > VOCAB - 2, "the prompt must hold tokens that the smaller draft does not know"
    engine = Engine.load(
        tmp_path / "target", tmp_path / "draft", device="cpu", budget=8, draft_length=1, block_length=2, refresh="round"
    )
    want = enumerate_joint(target, TWO_TOKENS)
    unknown = sum(probability for tokens, probability in want.items() if max(tokens) >= VOCAB - 2)
    assert unknown > 0.5, "and so must the continuations"
    got, rejections, _ = exact_probabilities(engine, TWO_TOKENS, 0.0)
    assert rejections["draft"] > 0.5, rejections
    error = max(abs(got[tokens] - probability) for tokens, probability in want.items())
    assert error < 1e-6, f"a probability differs by {error:.1e}"


@pytest.mark.parametrize("draft_vocab", [80, 120])
@pytest.mark.slow(keep=1)
def test_greedy_tokens_do_not_depend_on_the_drafts_padding(tmp_path, draft_vocab):
    prompt = random_tokens(300, seed=3)
    want = greedy_oracle(save_llama(tmp_path / "target", seed=1), prompt, 60)
    save_llama(tmp_path / "draft", seed=2, num_hidden_layers=1, vocab_size=draft_vocab)
    result = Engine.load(tmp_path / "target", tmp_path / "draft", device="cpu", budget=64).generate(
        prompt, Sampling(temperature=0.0), 60
    )
    assert result.token_ids == want
