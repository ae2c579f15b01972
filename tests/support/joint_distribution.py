"""The distribution of the first tokens that an engine samples: what it should be, what it is, and what was counted."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import replace

import pytest
import scipy.stats
import torch
from outcomes import Outcomes
from tiny import random_tokens
from triforce.offload import Engine, Sampling
from triforce.offload.speculation.sampling import distribution

VOCAB = 8
PROMPT = random_tokens(60, VOCAB, seed=5)
NUM_TOKENS = 3
SHAPE = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.5}
"""A model so small that every continuation of `NUM_TOKENS` tokens can be enumerated."""

SAMPLING = Sampling(temperature=1.3, top_p=0.92, top_k=6)
TWO_TOKENS = Sampling(temperature=1.3, top_p=1.0, top_k=2)
"""Two outcomes of a draw, so that all outcomes of a run can be had."""


@torch.inference_mode()
def enumerate_joint(model, sampling: Sampling) -> dict[tuple[int, ...], float]:
    """The exact probability of every continuation of `NUM_TOKENS` tokens, by transformers' logits."""
    prefixes = list(itertools.product(range(VOCAB), repeat=NUM_TOKENS))
    logits = model(torch.tensor([PROMPT + list(p) for p in prefixes])).logits[:, len(PROMPT) - 1 : -1]
    joint = {}
    for prefix, rows in zip(prefixes, logits, strict=True):
        steps = distribution(rows, sampling)
        joint[prefix] = math.prod(float(steps[i, token]) for i, token in enumerate(prefix))
    assert sum(joint.values()) == pytest.approx(1.0, abs=1e-4)
    return joint


def first_tokens(engine: Engine, sampling: Sampling) -> tuple[tuple[int, ...], dict[str, int]]:
    """The first three tokens of a run, and how many draft tokens were rejected on the way."""
    tokens: list[int] = []
    run = engine.stream(PROMPT, sampling, NUM_TOKENS + 4)  # room to draft for the third
    while len(tokens) < NUM_TOKENS:
        tokens += next(run).tokens
    done = run.statistics
    return tuple(tokens[:NUM_TOKENS]), {
        "draft": done.draft_proposed - done.draft_accepted,
        "retrieval": done.retrieval_proposed - done.retrieval_accepted,
    }


def exact_probabilities(
    engine: Engine, sampling: Sampling, least: float
) -> tuple[dict[tuple[int, ...], float], dict[str, float], float]:
    """Of three tokens: the probability of each continuation and the expected rejections, by running every outcome of a
    probability above `least`; and the probability that was left out."""
    joint: dict[tuple[int, ...], float] = defaultdict(float)
    rejections: dict[str, float] = defaultdict(float)
    outcomes = Outcomes(least)
    for (tokens, rejected), probability in outcomes.of(lambda: first_tokens(engine, sampling)):
        joint[tokens] += probability
        for name, count in rejected.items():
            rejections[name] += probability * count
    return joint, rejections, outcomes.left_out


def sample_counts(engine: Engine, runs: int) -> tuple[dict[tuple[int, ...], int], dict[str, int]]:
    """How often each beginning of three tokens came up, and how many draft tokens were rejected on the way."""
    counts: dict[tuple[int, ...], int] = defaultdict(int)
    rejections: dict[str, int] = defaultdict(int)
    for seed in range(runs):
        tokens, rejected = first_tokens(engine, replace(SAMPLING, seed=seed))
        counts[tokens] += 1
        for name, count in rejected.items():
            rejections[name] += count
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
