"""Prompts that wait are read in one pass, where what is left of them fits into one."""

from collections import deque
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny import greedy_oracle, random_tokens
from triforce.offload import Ended, Progress, Request, Sampling, Tokens
from triforce.offload.caches.together import JoinedFullCache
from triforce.tp import CapacityError
from triforce.tp.decoder import Decoder

GREEDY = Sampling(temperature=0.0)
BOOK = random_tokens(700, seed=3)
ASKS = [BOOK + random_tokens(n, seed=n) for n in (5, 9, 20, 30, 60, 100)]
"""Behind the book 224 tokens, which are fewer than the rows of a step."""

pytestmark = pytest.mark.usefixtures("independent")


@pytest.fixture
def independent(models):
    if not models.engine("llama").target.rows_are_independent:
        pytest.skip("rows of a step depend on one another without compiled kernels for AVX-512 BF16")


@pytest.fixture
def passes(monkeypatch):
    """The tokens of each pass."""
    seen, forward = [], Decoder.forward

    def noted(decoder, token_ids, *args, **kwargs):
        seen.append(len(token_ids))
        return forward(decoder, token_ids, *args, **kwargs)

    monkeypatch.setattr(Decoder, "forward", noted)
    return seen


def requests_of(prompts, new_tokens=12):
    return [Request(prompt, GREEDY, new_tokens, ignore_eos=True) for prompt in prompts]


def answers(engine, requests, **how):
    """The tokens of each request to one run, or what it has failed with."""
    waiting = deque(replace(request, tag=index) for index, request in enumerate(requests))
    found: list[Any] = [[] for _ in requests]
    run = engine.run(lambda waits: waiting.popleft() if waiting else None, **how)
    for event in run:
        if isinstance(event, Tokens):
            found[event.sequence.tag] += event.round.tokens
        elif isinstance(event, Ended) and event.sequence.failure:
            found[event.sequence.tag] = event.sequence.failure
    return found


@pytest.mark.parametrize("in_slices", [False, True])
@pytest.mark.parametrize("resident", [None, 0.0])
def test_questions_about_a_text_that_is_known_are_read_in_one_pass(models, passes, resident, in_slices):
    engine = models.engine("llama", resident=resident)
    engine.generate([*BOOK, 1, 2, 3], GREEDY, 1)
    passes.clear()
    batch = engine.batch(requests_of(ASKS), in_slices=in_slices)
    texts = {}
    for index, event in batch:
        texts.setdefault(index, []).extend(event.tokens)
    assert [texts[i] for i in range(len(ASKS))] == [greedy_oracle(models["llama"][1], one, 12) for one in ASKS]
    read = sum(len(one) for one in ASKS) - sum(one.statistics.reused_tokens for one in batch.sequences)
    assert passes[0] == read, "all of it in the first pass"


@pytest.mark.parametrize(("tokens", "at_once"), [(5, True), (25, True), (60, False)])
def test_a_short_question_that_joins_is_read_between_two_rounds(models, tokens, at_once):
    engine = models.engine("llama")
    engine.generate([*BOOK, 1, 2, 3], GREEDY, 1)
    waiting = [Request(ASKS[0], GREEDY, 400, ignore_eos=True, tag="first")]
    waiting.append(Request(BOOK + random_tokens(tokens, seed=tokens), GREEDY, 6, ignore_eos=True, tag="joins"))
    rounds, before, found = 0, None, []
    more = lambda waits: waiting.pop(0) if len(waiting) == 2 or (waiting and rounds > 3) else None  # noqa: E731
    run = engine.run(more, tiers=1)
    for event in run:
        if event.sequence.tag == "joins" and isinstance(event, Progress):
            before = rounds if before is None else before
        elif event.sequence.tag == "joins" and isinstance(event, Tokens):
            before = rounds if before is None else before
            if not found:
                assert (rounds > before) == (not at_once), "a longer question is read in slices, with rounds between"
            found += event.round.tokens
        elif isinstance(event, Ended) and event.sequence.tag == "joins":
            run.end_all()
        elif isinstance(event, Tokens):
            rounds += event.round.index > 0
    assert not waiting and found == greedy_oracle(models["llama"][1], BOOK + random_tokens(tokens, seed=tokens), 6)


@pytest.mark.parametrize("clients", [2, 3, 7])
def test_who_asks_again_and_again_does_not_keep_others_from_their_rounds(models, clients):
    """Each client asks as soon as it has its answer of one token."""
    engine = models.engine("llama")
    engine.generate([*BOOK, 1, 2, 3], GREEDY, 1)
    first = [Request(ASKS[0], GREEDY, 60, ignore_eos=True, tag="first")]
    asks, asked, since = list(range(clients)), 0, 0

    def more(waits):
        nonlocal asked
        if first:
            return first.pop()
        if not asks:
            return None
        asked += 1
        return Request(BOOK + random_tokens(5, seed=asked), GREEDY, 1, ignore_eos=True, tag=asks.pop())

    run = engine.run(more, tiers=1)
    for event in run:
        if isinstance(event, Ended) and event.sequence.tag == "first":
            run.end_all()
        elif isinstance(event, Ended):
            asks.append(event.sequence.tag)
            since += 1
            assert since <= 2 * clients, "the running answer has no rounds"
        elif isinstance(event, Tokens) and event.sequence.tag == "first":
            since = 0
    assert asked > 20


def test_what_does_not_fit_is_read_by_itself_behind_them(models):
    prompts = [*ASKS[:3], BOOK + random_tokens(400, seed=8), *ASKS[3:]]
    engine = models.engine("llama")
    engine.generate([*BOOK, 1, 2, 3], GREEDY, 1)
    assert answers(engine, requests_of(prompts)) == [greedy_oracle(models["llama"][1], one, 12) for one in prompts]


@pytest.mark.parametrize("resident", [None, 0.0])
def test_where_the_pass_fails_each_is_read_by_itself(models, resident, monkeypatch):
    """Once a layer has the tokens, and another has not."""
    engine = models.engine("llama", resident=resident)
    engine.generate([*BOOK, 1, 2, 3], GREEDY, 1)
    attend, failed = JoinedFullCache.attend, []

    def fail_once(cache, layer, *tensors):
        if layer == 1 and not failed:
            failed.append(sum(cache.counts))
            raise CapacityError("none is left")
        return attend(cache, layer, *tensors)

    monkeypatch.setattr(JoinedFullCache, "attend", fail_once)
    assert answers(engine, requests_of(ASKS)) == [greedy_oracle(models["llama"][1], one, 12) for one in ASKS]
    assert failed and failed[0] > 200


@pytest.mark.parametrize("family", ["mistral-window", "gemma3"])
def test_families_with_windows_are_read_together_too(models, family):
    engine = models.engine(family)
    engine.generate([*BOOK, 1, 2, 3], GREEDY, 1)
    assert answers(engine, requests_of(ASKS)) == [greedy_oracle(models[family][1], one, 12) for one in ASKS]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_keys_and_values_are_the_bits_of_a_prompt_read_alone(models, dtype):
    """Behind the text that all begin with, and of it where it ends in the same rows."""
    together, alone = models.engine("llama", dtype=dtype), models.engine("llama", dtype=dtype)
    batch = together.batch([Request([*BOOK, 1, 2, 3], GREEDY, 40, ignore_eos=True), *requests_of(ASKS, 1)])
    for _ in batch:
        pass
    for one in ASKS:
        again = together.stream(one, GREEDY, 1)
        assert [token for event in again for token in event.tokens] and again.statistics.reused_tokens >= len(one) - 16
        run = alone.stream(one, GREEDY, 1, reuse=0)
        assert [event.tokens for event in run]
        (kept,) = alone._kept.caches
        found = max(together._kept.caches, key=lambda cache: cache.length == len(one))
        for layer in range(kept.config.num_layers):
            for mine, theirs in zip(found.slice(layer, 0, len(one)), kept.slice(layer, 0, len(one)), strict=True):
                assert torch.equal(mine, theirs)


def test_what_shares_more_with_one_that_is_read_waits_for_it(models):
    """It is opened once that is read, and reads its own tokens alone."""
    new = random_tokens(150, seed=5)
    prompts = [[*BOOK, *new, *random_tokens(n, seed=n)] for n in (5, 9)]
    engine = models.engine("llama")
    engine.generate([*BOOK, 1, 2, 3], GREEDY, 1)
    batch = engine.batch(requests_of(prompts))
    texts = {}
    for index, event in batch:
        texts.setdefault(index, []).extend(event.tokens)
    assert [texts[0], texts[1]] == [greedy_oracle(models["llama"][1], one, 12) for one in prompts]
    assert batch.sequences[1].statistics.reused_tokens >= len(BOOK) + len(new) - 8


def test_one_that_is_not_wanted_any_more_is_let_go(models):
    engine = models.engine("llama")
    engine.generate([*BOOK, 1, 2, 3], GREEDY, 1)
    batch, texts = engine.batch(requests_of(ASKS)), {}
    for index, event in batch:
        if index == 0 and event.index == 0:
            batch.end(2)  # it has been read by now, and has no token yet
        texts.setdefault(index, []).extend(event.tokens)
    assert 2 not in texts
    assert [texts[i] for i in (0, 1, 3, 4, 5)] == [
        greedy_oracle(models["llama"][1], ASKS[i], 12) for i in (0, 1, 3, 4, 5)
    ]
    again = engine.generate(ASKS[2], GREEDY, 12, ignore_eos=True)
    assert again.token_ids == greedy_oracle(models["llama"][1], ASKS[2], 12)


def test_a_run_that_ends_meanwhile_leaves_what_can_be_gone_on_from(models):
    engine = models.engine("llama")
    engine.generate([*BOOK, 1, 2, 3], GREEDY, 1)
    batch = engine.batch(requests_of(ASKS))
    next(batch)
    batch.close()
    for one in ASKS[:2]:
        found = engine.generate(one, GREEDY, 6, ignore_eos=True)
        assert found.token_ids == greedy_oracle(models["llama"][1], one, 6)
        assert found.stats["reused_tokens"] >= len(one) - 16, "what was read stays known"
