"""The distribution of the first tokens that an engine samples: what it should be; what it is, by running the engine
once for every outcome of its random numbers; and what was counted."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import pytest
import torch
from tiny import random_tokens, save_llama
from torch import Tensor
from triforce.offload import Engine, Request, Sampling
from triforce.offload.settings import Settings
from triforce.offload.speculation.acceptance import accept
from triforce.offload.speculation.distribution import distribution
from triforce.offload.speculation.noise import FreshNoise, gumbel_max, row_keys

VOCAB = 8
PROMPT = random_tokens(60, VOCAB, seed=5)
NUM_TOKENS = 3
TOGETHER = 20
"""Sequences that are decoded together where many texts are drawn."""
SHAPE = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.5}
"""A model so small that every continuation of `NUM_TOKENS` tokens can be enumerated."""

SAMPLING = Sampling(temperature=1.3, top_p=0.92, top_k=6)
TWO_TOKENS = Sampling(temperature=1.3, top_p=1.0, top_k=2)
"""Two outcomes of a draw, so that all outcomes of a run can be had."""
LIKELY = Sampling(temperature=2.6, top_p=1.0, min_p=0.2)
"""What is left out is so by min-p alone."""


@torch.inference_mode()
def enumerate_joint(model, sampling: Sampling, prompt: list[int] = PROMPT) -> dict[tuple[int, ...], float]:
    """The exact probability of every continuation of `NUM_TOKENS` tokens, by transformers' logits."""
    prefixes = list(itertools.product(range(VOCAB), repeat=NUM_TOKENS))
    logits = model(torch.tensor([prompt + list(p) for p in prefixes])).logits[:, len(prompt) - 1 : -1]
    joint = {}
    for prefix, rows in zip(prefixes, logits, strict=True):
        steps = distribution(rows, sampling)
        joint[prefix] = math.prod(float(steps[i, token]) for i, token in enumerate(prefix))
    assert sum(joint.values()) == pytest.approx(1.0, abs=1e-4)
    return joint


def first_tokens(
    engine: Engine, sampling: Sampling, prompt: list[int] = PROMPT, accept: Callable[..., Any] = accept
) -> tuple[tuple[int, ...], dict[str, int]]:
    """The first three tokens of a run, and how many draft tokens were rejected on the way.

    Args: `accept` is the acceptance rule.
    """
    tokens: list[int] = []
    run = engine.stream(prompt, sampling, NUM_TOKENS + 4)  # room to draft for the third
    for tier in run.batch.tiers:
        tier.accept = accept
    while len(tokens) < NUM_TOKENS:
        tokens += next(run).tokens
    done = run.statistics
    return tuple(tokens[:NUM_TOKENS]), {
        "draft": done.draft_proposed - done.draft_accepted,
        "retrieval": done.retrieval_proposed - done.retrieval_accepted,
    }


def exact_probabilities(
    engine: Engine,
    sampling: Sampling,
    least: float,
    prompt: list[int] = PROMPT,
    accept: Callable[..., Any] = accept,
) -> tuple[dict[tuple[int, ...], float], dict[str, float], float]:
    """Of three tokens: the probability of each continuation and the expected rejections, by running every outcome of a
    probability above `least`; and the probability that was left out. `accept` is the acceptance rule."""
    joint: dict[tuple[int, ...], float] = defaultdict(float)
    rejections: dict[str, float] = defaultdict(float)
    outcomes = Outcomes(least)
    for (tokens, rejected), probability in outcomes.of(lambda: first_tokens(engine, sampling, prompt, accept)):
        joint[tokens] += probability
        for name, count in rejected.items():
            rejections[name] += probability * count
    return joint, rejections, outcomes.left_out


def sample_counts(engine: Engine, runs: int) -> tuple[dict[tuple[int, ...], int], dict[str, int]]:
    """How often each beginning of three tokens came up with fresh noise, and how many draft tokens were rejected on the
    way. Runs are `TOGETHER` sequences at a time."""
    counts: dict[tuple[int, ...], int] = defaultdict(int)
    rejections: dict[str, int] = defaultdict(int)
    for seed in range(runs // TOGETHER):
        with patch("secrets.randbelow", lambda _, seed=seed: seed):
            batch = engine.batch([Request(PROMPT, SAMPLING, NUM_TOKENS + 4)] * TOGETHER)
        while any(len(sequence.statistics.token_ids) < NUM_TOKENS for sequence in batch.sequences):
            next(batch)
        for done in (sequence.statistics for sequence in batch.sequences):
            counts[tuple(done.token_ids[:NUM_TOKENS])] += 1
            rejections["draft"] += done.draft_proposed - done.draft_accepted
            rejections["retrieval"] += done.retrieval_proposed - done.retrieval_accepted
        batch.close()
    return counts, rejections


def drawn_texts(
    rows: dict[tuple[int, ...], Tensor], seeds: int, position_of: Callable[[int], int] = lambda i: len(PROMPT) + i
) -> list[tuple[int, ...]]:
    """The beginnings of three tokens that are drawn with common noise, one for each seed from 0 on.

    Args:
        rows: the distribution `[1, VOCAB]` that follows each beginning.
        position_of: the position whose noise the token `i` of the text is drawn with.
    """
    texts: list[tuple[int, ...]] = [()] * seeds
    for i in range(NUM_TOKENS):
        keys = row_keys(torch.arange(seeds), torch.tensor(position_of(i)))
        drawn = gumbel_max(torch.cat([rows[text] for text in texts]), keys).tolist()
        texts = [(*text, token) for text, token in zip(texts, drawn, strict=True)]
    return texts


@torch.inference_mode()
def next_distributions(model, sampling: Sampling) -> dict[tuple[int, ...], Tensor]:
    """The distribution `[1, VOCAB]` after each beginning of up to two tokens, by transformers' logits."""
    rows: dict[tuple[int, ...], Tensor] = {}
    for length in range(NUM_TOKENS):
        for prefix in itertools.product(range(VOCAB), repeat=length):
            rows[prefix] = distribution(model(torch.tensor([PROMPT + list(prefix)])).logits[0, -1:], sampling)
    return rows


def p_value(counts: dict[tuple[int, ...], int], joint: dict[tuple[int, ...], float]) -> float:
    """Chi-square over all continuations; those expected fewer than five times share a bin."""
    import scipy.stats  # its import takes longer than most tests

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


Result = TypeVar("Result")


class Outcomes:
    """Takes the place of the engine's random numbers, and goes through all that may come of them, depth first.

    A draw from weights gives each token in turn, with its share of them. A uniform number `u` (what `torch.rand` gives)
    is known by what the acceptance rule asks of it, `u * offered < wanted`: true with the probability
    min(1, wanted / offered).
    """

    def __init__(self, least: float = 0.0) -> None:
        """Args:
        least: where a possibility makes the outcome less probable than this, only the likeliest of its choice is run.
        """
        self.least = least
        self.left_out = 0.0
        """The probability of all that was not run."""
        self._path: list[_Choice] = []
        self._at = 0
        self._probability = 1.0

    def of(self, run: Callable[[], Result]) -> Iterator[tuple[Result, float]]:
        """What `run` returns for each outcome of its choices, and the probability of that outcome."""
        while True:
            self._at, self._probability = 0, 1.0
            with (
                patch.object(FreshNoise, "draw", lambda _, weights, __: self._draw(weights)),
                patch("torch.rand", lambda count, **_: _Uniform(count, self)),
            ):
                result = run()
            yield result, self._probability
            while self._path and not self._advance(self._path[-1]):
                self._path.pop()
            if not self._path:
                return

    def choose(self, probabilities: list[float]) -> int:
        """One of so many possibilities: the one that this run takes."""
        if self._at == len(self._path):
            self._path.append(_Choice(probabilities, self._probability))
        choice = self._path[self._at]
        self._at += 1
        taken = choice.order[choice.current]
        self._probability = choice.before * choice.probabilities[taken]
        return taken

    def _advance(self, choice: _Choice) -> bool:
        """Goes on to the next possibility, if one is left that is probable enough."""
        choice.current += 1
        left = [choice.before * choice.probabilities[i] for i in choice.order[choice.current :]]
        if left and left[0] > self.least:
            return True
        self.left_out += sum(left)
        return False

    def _draw(self, weights: Tensor) -> Tensor:
        rows = weights.double() / weights.double().sum(-1, keepdim=True)
        return torch.tensor([self.choose(row) for row in rows.tolist()])


class _Choice:
    def __init__(self, probabilities: list[float], before: float) -> None:
        """Args: `before`: the probability of all choices before this one."""
        self.probabilities, self.before = probabilities, before
        self.order = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])
        self.current = 0
        """The place in `order` of the possibility that is taken."""


class _Uniform:
    """`count` uniform numbers."""

    def __init__(self, count: int, outcomes: Outcomes) -> None:
        self.count, self.outcomes = count, outcomes

    def __mul__(self, offered: Tensor) -> _Scaled:
        assert offered.shape == (self.count,)
        return _Scaled(offered, self.outcomes)


class _Scaled:
    """Uniform numbers times `offered`."""

    def __init__(self, offered: Tensor, outcomes: Outcomes) -> None:
        self.offered, self.outcomes = offered, outcomes

    def __lt__(self, wanted: Tensor) -> Tensor:
        """Where they are less; after the first that is not, nobody looks, and nothing is chosen."""
        below: list[bool] = []
        for chance in (wanted.double() / self.offered.double()).clamp(max=1.0).tolist():
            below.append(all(below) and self.outcomes.choose([chance, 1.0 - chance]) == 0)
        return torch.tensor(below)


def load_three_tiers(root: Path, **changes: Any) -> tuple[Engine, Any]:
    """An engine of three tiers, and its target as a model of transformers."""
    target = save_llama(root / "target", seed=2, **(SHAPE | changes))
    save_llama(root / "draft", seed=7, **(SHAPE | {"num_hidden_layers": 1}))
    engine = Engine.load(
        root / "target", root / "draft", device="cpu", budget=8, draft_length=2, block_length=3, refresh="round"
    )
    return engine, target


def with_lengths(engine: Engine, draft_length: int, block_length: int) -> Settings:
    """The settings of an engine, with these lengths."""
    return replace(engine.settings, draft_length=draft_length, block_length=block_length)
