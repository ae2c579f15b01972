"""The target's own probabilities of the tokens of an answer, before temperature and filters."""

import pytest
import torch
from tiny import random_tokens, save_llama
from triforce.offload import Engine, Request, Sampling

PROMPTS = [random_tokens(n, seed=n) for n in (30, 70, 120)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    save_llama(root / "target", seed=1, head_dim=32)
    save_llama(root / "draft", seed=9, num_hidden_layers=1, hidden_size=32)
    return root / "target", root / "draft"


@pytest.mark.parametrize("tiers", [1, 2, 3])
def test_they_are_those_of_one_pass_over_prompt_and_answer(pair, tiers):
    engine = Engine.load(*pair, device="cpu", dtype="float32", budget=64, tiers=tiers)
    samplings = [Sampling(0.0), Sampling(0.7, 0.8, 5, seed=3), Sampling(1.3, 1.0)]
    wanted = [0, 4, 20]
    requests = [
        Request(prompt, sampling, 20, ignore_eos=True, top_logprobs=top)
        for prompt, sampling, top in zip(PROMPTS, samplings, wanted, strict=True)
    ]
    batch = engine.batch([*requests, Request(PROMPTS[0], Sampling(0.0), 20, ignore_eos=True)])
    for _ in batch:
        pass
    assert batch.sequences[3].logprobs == []
    for prompt, top, sequence in zip(PROMPTS, wanted, batch.sequences[:3], strict=True):
        tokens = sequence.statistics.token_ids
        assert [one.token for one in sequence.logprobs] == tokens and len(tokens) == 20
        rows = engine.logits(prompt, tokens)[:-1].log_softmax(dim=-1)
        own = rows[range(20), tokens]
        torch.testing.assert_close(torch.tensor([one.logprob for one in sequence.logprobs]), own, atol=1e-4, rtol=1e-4)
        for one, row in zip(sequence.logprobs, rows, strict=True):
            best = row.topk(top)
            assert len(one.top) == top
            torch.testing.assert_close(torch.tensor([value for _, value in one.top]), best.values, atol=1e-4, rtol=1e-4)


def test_asking_for_them_changes_no_token(pair):
    engine = Engine.load(*pair, device="cpu", dtype="float32", budget=64)
    texts = []
    for top in (None, 3):
        requests = [Request(prompt, Sampling(0.9, seed=4), 16, top_logprobs=top) for prompt in PROMPTS]
        batch = engine.batch(requests, reuse=0)
        for _ in batch:
            pass
        texts.append([sequence.statistics.token_ids for sequence in batch.sequences])
    assert texts[0] == texts[1]
