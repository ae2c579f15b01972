"""A prompt that is read in slices between the rounds of others: the same numbers, and nobody waits long."""

import time
from typing import Any

import pytest
from tiny import random_tokens, save_family, save_llama
from triforce.offload import Engine, Request, Sampling

TAIL_ROWS = 1024
"""Behind the last whole 4,096 tokens of a prompt, what prompts share is a multiple of these (docs/exactness.md)."""

GREEDY = Sampling(temperature=0.0)

BOOK = random_tokens(TAIL_ROWS + 300, seed=3)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    save_llama(root / "draft", seed=9, num_hidden_layers=1, hidden_size=32)
    return {
        family: (save_family(root / family, family, seed=1, head_dim=32, hidden_size=64), root / family)
        for family in ("llama", "mistral-window")
    }


def load(models, family="llama", **settings) -> Engine:
    directory = models[family][1]
    given: dict[str, Any] = {"device": "cpu", "dtype": "float32", "budget": 64} | settings
    return Engine.load(directory, directory.parent / "draft", **given)


def test_without_others_a_prompt_is_read_at_once(models):
    batch = load(models).batch([Request(BOOK, GREEDY, 3, ignore_eos=True)], in_slices=True)
    began = time.perf_counter()
    index, event = next(batch)
    assert index == event.index == 0 and event.seconds <= time.perf_counter() - began
    batch.close()
