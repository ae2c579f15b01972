"""The distribution of the first tokens that an engine samples, counted, and the exact one by enumeration."""

from __future__ import annotations

import itertools
import math

import pytest
import scipy.stats
import torch
from tiny import random_tokens
from triforce.offload import Engine, Sampling
from triforce.offload.speculation.sampling import distribution

VOCAB = 8
PROMPT = random_tokens(60, VOCAB, seed=5)
FILTERS = {"temperature": 1.3, "top_p": 0.92, "top_k": 6}
NUM_TOKENS = 3
SHAPE = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.5}
"""A model so small that every continuation of `NUM_TOKENS` tokens can be enumerated."""


@torch.inference_mode()
def enumerate_joint(model) -> dict[tuple[int, ...], float]:
    """The exact probability of every continuation of `NUM_TOKENS` tokens, by transformers' logits."""
    sampling = Sampling(**FILTERS)
    prefixes = list(itertools.product(range(VOCAB), repeat=NUM_TOKENS))
    logits = model(torch.tensor([PROMPT + list(p) for p in prefixes])).logits[:, len(PROMPT) - 1 : -1]
    joint = {}
    for prefix, rows in zip(prefixes, logits, strict=True):
        steps = distribution(rows, sampling)
        joint[prefix] = math.prod(float(steps[i, token]) for i, token in enumerate(prefix))
    assert sum(joint.values()) == pytest.approx(1.0, abs=1e-4)
    return joint


def sample_counts(engine: Engine, runs: int) -> tuple[dict[tuple[int, ...], int], dict[str, int]]:
    """How often each beginning of three tokens came up, and how many draft tokens of each tier were not accepted."""
    counts: dict[tuple[int, ...], int] = {}
    rejections = {"draft": 0, "retrieval": 0}
    for seed in range(runs):
        tokens: list[int] = []
        run = engine.stream(PROMPT, Sampling(**FILTERS, seed=seed), NUM_TOKENS + 4)  # room to draft for the third
        while len(tokens) < NUM_TOKENS:
            tokens += next(run).tokens
        beginning = tuple(tokens[:NUM_TOKENS])
        counts[beginning] = counts.get(beginning, 0) + 1
        rejections["draft"] += run.statistics.draft_proposed - run.statistics.draft_accepted
        rejections["retrieval"] += run.statistics.retrieval_proposed - run.statistics.retrieval_accepted
    return counts, rejections


def p_value(counts: dict[tuple[int, ...], int], joint: dict[tuple[int, ...], float]) -> float:
    """Chi-square over all continuations; those expected fewer than five times share a bin."""
    assert all(joint[tokens] > 0 for tokens in counts), "a continuation came up that has probability 0"
    runs = sum(counts.values())
    common = [t for t, p in joint.items() if p * runs >= 5]
    observed = [counts.get(t, 0) for t in common]
    expected = [joint[t] * runs for t in common]
    rest = runs - sum(expected)
    if rest > 1e-6 * runs:
        observed.append(runs - sum(observed))
        expected.append(rest)
    expected = [e * sum(observed) / sum(expected) for e in expected]
    return float(scipy.stats.chisquare(observed, expected).pvalue)
