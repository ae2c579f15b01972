"""Tokens of sequences in company follow the target's distribution, each its own, and are independent of one another."""

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from joint_distribution import NUM_TOKENS, PROMPT, SAMPLING, SHAPE, VOCAB, enumerate_joint, p_value
from profiles import profile_name
from tiny import save_llama
from triforce.offload import Engine, Request
from triforce.offload.caches.together import JoinedCache, JoinedFullCache
from triforce.offload.limits import Limits
from triforce.offload.system import System
from triforce.tp.decoder import Tiling

TEXTS = 20_000
"""Texts of four sequences that `pytest --campaign` draws."""

PROMPTS = [[*PROMPT, *tail] for tail in ([1], [2, 5], [1, 3, 3], [6])]


@pytest.fixture(scope="module")
def engine_and_target(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    target = save_llama(root / "target", seed=2, **(SHAPE | {"num_hidden_layers": 1}))
    save_llama(root / "draft", seed=7, **(SHAPE | {"num_hidden_layers": 1}))
    lengths: Any = {"budget": 8, "draft_length": 2, "block_length": 3, "refresh": "round"}
    shares_short_prompts = System(limits=Limits(tiling=Tiling(tail_rows=32)))
    engine = Engine.load(root / "target", root / "draft", device="cpu", **lengths, system=shares_short_prompts)
    return engine, target


def drawn(engine, batches, seeded=False, numbers=(0, 1, 2, 3)):
    """The beginnings of three tokens of all four sequences in so many batches, and the batches that shared a prefix.
    Those of one number share their noise."""
    texts, sharing = [], 0
    for seed in range(batches):
        sampling = replace(SAMPLING, seed=seed) if seeded else SAMPLING
        numbered = zip(PROMPTS, numbers, strict=True)
        requests = [Request(prompt, sampling, NUM_TOKENS + 4, number=number) for prompt, number in numbered]
        with patch("secrets.randbelow", lambda _, seed=seed: seed):
            batch = engine.batch(requests, reuse=0)
        for _ in batch:
            if all(len(sequence.statistics.token_ids) >= NUM_TOKENS for sequence in batch.sequences):
                break
        texts.append([tuple(sequence.statistics.token_ids[:NUM_TOKENS]) for sequence in batch.sequences])
        sharing += batch.sequences[1].statistics.reused_tokens == 32
        batch.close()
    return texts, sharing


def p_of_each(texts, target):
    """How likely texts that differ so much from the target's distribution are, for each sequence."""
    found = []
    for prompt, of in zip(PROMPTS, zip(*texts, strict=True), strict=True):
        joint = enumerate_joint(target, SAMPLING, prompt)
        found.append(p_value(Counter(of), joint) if all(joint[text] > 0 for text in of) else 0.0)
    return found


def p_of_pairs(texts):
    """How likely the tokens of two sequences are to be so much alike, if they are independent: for each two sequences,
    and each place in the text by itself."""
    import scipy.stats

    found = []
    for i, j, place in itertools.product(range(len(PROMPTS)), range(len(PROMPTS)), range(NUM_TOKENS)):
        if i <= j:
            continue
        table = [[0] * VOCAB for _ in range(VOCAB)]
        for text in texts:
            table[text[i][place]][text[j][place]] += 1
        rows = [row for row in table if sum(row)]
        columns = [list(column) for column in zip(*rows, strict=True) if sum(column)]
        outcome: Any = scipy.stats.chi2_contingency(columns)
        found.append(outcome.pvalue)
    return found


def batches(full):
    """Of a full run, and never less: a fifth of them would leave chi-square a single bin. A campaign draws `TEXTS`
    texts."""
    return TEXTS // len(PROMPTS) if profile_name() == "campaign" else full


@pytest.mark.parametrize("seeded", [False, True], ids=["fresh noise", "seeds"])
@pytest.mark.slow
def test_texts_of_four_sequences_follow_the_target_distribution_and_are_independent(engine_and_target, seeded):
    engine, target = engine_and_target
    count = batches(120)
    texts, sharing = drawn(engine, count, seeded)
    assert sharing == count
    assert min(p_of_each(texts, target)) > 1e-3 / len(PROMPTS)
    assert min(p_of_pairs(texts)) > 1e-3 / 18


@pytest.mark.slow
def test_that_test_notices_noise_that_two_sequences_share(engine_and_target):
    engine, _ = engine_and_target
    texts, _ = drawn(engine, 100, seeded=True, numbers=(0, 0, 0, 0))
    assert min(p_of_pairs(texts)) < 1e-6


@pytest.mark.parametrize("kind", [JoinedCache, JoinedFullCache])
@pytest.mark.slow
def test_that_test_notices_caches_that_are_mixed_up(engine_and_target, monkeypatch, kind):
    """The rows of the last sequence meet the keys of the one before it. In the drafting tiers that changes no text."""
    engine, target = engine_and_target
    attend = kind.attend

    def mixed(self, layer, q, k, v):
        out = attend(self, layer, q, k, v).clone()
        if len(set(self.counts)) == 1 and len(self.counts) == len(PROMPTS):
            n = self.counts[0]
            out[:, -n:] = out[:, -2 * n : -n].clone()
        return out

    monkeypatch.setattr(kind, "attend", mixed)
    texts, _ = drawn(engine, 150)
    p = min(p_of_each(texts, target))
    assert p < 1e-6 if kind is JoinedFullCache else p > 1e-4
