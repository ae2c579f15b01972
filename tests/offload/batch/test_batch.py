"""Sequences that are decoded together: each has the tokens that it has alone, whoever keeps it company."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from tiny import FAMILIES, greedy_oracle, random_tokens
from triforce.kernels import Level, cpu_level, use_kernels
from triforce.offload import Batch, Engine, Request, Sampling

TAIL_ROWS = 1024
"""Behind the last whole 4,096 tokens of a prompt, what prompts share is a multiple of these (docs/exactness.md)."""

GREEDY = Sampling(temperature=0.0)

BOOK = random_tokens(2 * TAIL_ROWS + 300, seed=3)
"""What prompts begin with."""


def finish(batch: Batch) -> list[list[int]]:
    """The tokens of each sequence, which are those of its rounds."""
    brought: dict[int, list[int]] = {}
    for index, event in batch:
        brought.setdefault(index, []).extend(event.tokens)
    texts = [sequence.statistics.token_ids for sequence in batch.sequences]
    assert texts == [brought.get(i, []) for i in range(len(texts))]
    return texts


def prompts_of(draw) -> list[list[int]]:
    """Prompts some of which begin alike: with parts of one text, or with parts of each other."""
    prompts: list[list[int]] = []
    for seed in range(draw(st.integers(1, 9))):
        shared = draw(st.sampled_from([0, 3, 700, TAIL_ROWS, TAIL_ROWS + 40, 2 * TAIL_ROWS + 10]))
        base = draw(st.sampled_from([BOOK, *prompts]))
        own = draw(st.sampled_from([1, 9, 60, 290, TAIL_ROWS + 5]))
        prompts.append(base[:shared] + random_tokens(own, seed=100 + seed))
    return prompts


@given(data=st.data())
@examples(40)
@pytest.mark.slow
def test_greedy_tokens_are_those_of_transformers_for_each_prompt_alone(models, data):
    prompts = prompts_of(data.draw)
    family = data.draw(st.sampled_from(sorted(FAMILIES)))
    tiers = data.draw(st.sampled_from([1, 2, 3, 3]))
    resident = data.draw(st.sampled_from([None, None, 0.0, 1e-4]))
    new_tokens = data.draw(st.lists(st.integers(1, 24), min_size=len(prompts), max_size=len(prompts)))
    together = data.draw(st.sampled_from([2, 64]))
    later = data.draw(st.integers(0, len(prompts) - 1))  # so many join while the others run
    requests = [
        Request(prompt, GREEDY, count, ignore_eos=True) for prompt, count in zip(prompts, new_tokens, strict=True)
    ]
    engine = models.engine(family, tiers=tiers, resident=resident)
    batch = engine.batch(requests[: len(requests) - later], max_sequences=together)
    texts: dict[int, list[int]] = {}
    waiting = requests[len(requests) - later :]
    for index, event in batch:
        texts.setdefault(index, []).extend(event.tokens)
        if waiting:
            assert batch.add(waiting.pop(0)) < len(requests)
    for i, (prompt, count) in enumerate(zip(prompts, new_tokens, strict=True)):
        if i < len(batch.sequences):
            assert texts[i] == greedy_oracle(models[family][1], prompt, count), i
    assert len(batch.sequences) == len(requests) - len(waiting)


@pytest.mark.parametrize("resident", [None, 0.0])
@pytest.mark.parametrize("family", ["llama", "mistral-window"])
@pytest.mark.slow(keep=("llama-0.0",))
def test_questions_about_one_text_are_answered_as_alone(models, family, resident):
    prompts = [BOOK + random_tokens(n, seed=n) for n in (5, 30, 70)]
    engine = models.engine(family, resident=resident)
    texts = finish(engine.batch([Request(prompt, GREEDY, 12, ignore_eos=True) for prompt in prompts]))
    assert texts == [greedy_oracle(models[family][1], prompt, 12) for prompt in prompts]


def test_what_prompts_begin_with_is_read_once(models):
    prompts = [BOOK + random_tokens(n, seed=n) for n in (5, 30, 70)]
    engine = models.engine("llama")
    batch = engine.batch([Request(prompt, GREEDY, 12, ignore_eos=True) for prompt in prompts])
    finish(batch)
    # Where rows are independent, all of it, in whole chunks; else what is computed in the same parts.
    shared = len(BOOK) // 8 * 8 if engine.target.rows_are_independent else 2 * TAIL_ROWS
    assert [sequence.statistics.reused_tokens for sequence in batch.sequences] == [0, shared, shared]
    documents = batch.stats()["sequences"]
    assert [len(document["token_ids"]) for document in documents] == [12, 12, 12]


ARITHMETICS = [
    pytest.param("float32", "auto", False, id="float32"),
    pytest.param("bfloat16", "on", False, id="bfloat16, padded"),
    pytest.param("bfloat16", "on", True, id="bfloat16, padded, plain"),
    pytest.param(
        "bfloat16",
        "off",
        False,
        id="bfloat16, compiled",
        marks=pytest.mark.skipif(
            cpu_level() < Level.AVX512_BF16, reason="the compiled kernels are not installed, or not for this CPU"
        ),
    ),
]


IN_COMPANY = ("llama", "qwen3-moe", "mixtral fp8", "gemma3 gptq", "qwen3.5", "qwen3-next", "qwen3.5-moe gptq")


@pytest.mark.parametrize(("dtype", "exact", "plain"), ARITHMETICS)
@pytest.mark.parametrize("resident", [None, 0.0])
@pytest.mark.parametrize("family", IN_COMPANY)
@pytest.mark.slow(keep=("llama-None-float32", "qwen3-next-0.0-bfloat16, padded"))
def test_a_sequence_has_one_text_alone_and_in_any_company(models, family, dtype, exact, plain, resident):
    if plain and (resident is None or family.startswith("gemma3")):
        pytest.skip("without compiled kernels a prefill in 16 bits depends on how large blocks and windows are")
    sampling = [GREEDY, Sampling(0.8, 0.9, seed=5), Sampling(1.0, 1.0, 20, seed=5), Sampling(0.8, 0.9, seed=6)]
    lengths = (5, 30, 70, TAIL_ROWS + 40)
    requests = [
        Request(BOOK + random_tokens(n, seed=n), s, 16, ignore_eos=True, number=i)
        for i, (n, s) in enumerate(zip(lengths, sampling, strict=True))
    ]
    backends: dict[str, Any] = {"attention": "plain", "layers": "plain"} if plain else {}
    with use_kernels(**backends):
        engine = models.engine(family, dtype=dtype, exact=exact, resident=resident)
        alone = [finish(engine.batch([request], reuse=0))[0] for request in requests]
        for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3]):
            together = finish(engine.batch([requests[i] for i in order], reuse=0))
            assert together == [alone[i] for i in order], order


@pytest.mark.slow
def test_numbers_of_one_seed_have_texts_of_their_own_and_the_first_is_the_seed_s(models):
    engine, sampling = models.engine("llama"), Sampling(1.0, 1.0, seed=8)
    prompt = BOOK[:200]
    texts = finish(engine.batch([Request(prompt, sampling, 20, ignore_eos=True, number=i) for i in range(4)]))
    assert texts[0] == engine.generate(prompt, sampling, 20, ignore_eos=True).token_ids
    assert len({tuple(text) for text in texts}) == 4


def test_a_bad_request_fails_alone(models):
    requests = [
        Request([], GREEDY, 4),
        Request(BOOK[:50], GREEDY, 4, ignore_eos=True),
        Request(BOOK, GREEDY, 10_000),
        Request([97], GREEDY, 4),
        Request(BOOK[:60], GREEDY, 0),
        Request(BOOK[:70], GREEDY, 4, ignore_eos=True),
    ]
    batch = models.engine("llama").batch(requests)
    texts = finish(batch)
    assert [len(text) for text in texts] == [0, 4, 0, 0, 0, 4]
    errors = [sequence.error or "" for sequence in batch.sequences]
    for error, part in zip(errors, ("empty", "", "4096 positions", "token 97", "max-new-tokens is 0", ""), strict=True):
        assert part in error.replace(",", "") and bool(part) == bool(error)
    assert batch.stats()["new_tokens"] == 8


def test_a_short_prompt_does_not_make_the_retrieval_caches_of_others_small(models):
    engine = models.engine("llama", budget=None)
    batch = engine.batch([Request([5], GREEDY, 2), Request(BOOK, GREEDY, 4), Request([6, 7], GREEDY, 2)])
    finish(batch)
    assert [sequence.error for sequence in batch.sequences] == [None] * 3
    assert batch.document(1)["settings"]["budget"] == 256


@pytest.mark.slow
def test_a_shared_text_crosses_the_link_once_a_verification(models):
    def streamed(count: int) -> float:
        engine = models.engine("llama", resident=0.0, block_length=3, draft_length=2, refresh="never")
        prompts = [BOOK + random_tokens(20, seed=i) for i in range(count)]
        batch = engine.batch([Request(prompt, GREEDY, 10, ignore_eos=True) for prompt in prompts])
        for _ in range(2 * count):  # the first round fetches what retrieval caches begin with
            next(batch)
        traffic = batch.sequences[0].active.full.traffic
        before = traffic().bytes_in
        for _ in range(count):
            next(batch)
        found = traffic().bytes_in - before
        batch.close()
        return found

    assert streamed(1) == streamed(6) > 0


def test_of_a_long_text_that_others_share_a_little_of_only_that_crosses_the_link(models):
    engine = models.engine("llama", resident=0.0, block_length=3, draft_length=2, refresh="never")
    first = Request([*BOOK, *random_tokens(200, seed=7)], GREEDY, 8, ignore_eos=True)
    prompt = BOOK[: TAIL_ROWS + 20]
    batch = engine.batch([first, Request(prompt, GREEDY, 40, ignore_eos=True)])
    while batch.sequences[0].state != "ended":
        next(batch)
    full = batch.sequences[1].active.full
    assert full.start == TAIL_ROWS
    before = full.traffic().bytes_in
    next(batch)
    blocks = full.holders[0].blocks
    assert full.traffic().bytes_in - before == -(-TAIL_ROWS // blocks.block_size) * blocks.block_size * full.token_bytes
    for _ in batch:
        pass
    assert batch.sequences[1].statistics.token_ids == greedy_oracle(models["llama"][1], prompt, 40)


def test_three_prompts_that_begin_with_one_another_are_read_one_after_the_other(models):
    """Where the second one ends the third one goes on, over what the first one holds and streams."""
    prompts = [BOOK, BOOK[:TAIL_ROWS] + random_tokens(TAIL_ROWS, seed=5)]
    prompts.append(prompts[1] + random_tokens(TAIL_ROWS + 60, seed=6))
    engine = models.engine("llama", resident=0.0)
    batch = engine.batch([Request(prompt, GREEDY, 6, ignore_eos=True) for prompt in prompts])
    assert finish(batch) == [greedy_oracle(models["llama"][1], prompt, 6) for prompt in prompts]
    assert [sequence.statistics.reused_tokens for sequence in batch.sequences] == [0, TAIL_ROWS, 2 * TAIL_ROWS]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"resident": 0.0}], ids=["resident", "streamed"])
def test_a_further_sequence_takes_the_memory_that_is_planned_for_it(settings):
    """Counted in tensors that are there between rounds, of the embedded pair; within 10 %."""
    import gc

    def held() -> int:
        gc.collect()
        tensors = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor]
        return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())

    engine = Engine.load("embedded", device="cpu", dtype="float32", block_length=16, draft_length=4, **settings)
    prompts = [random_tokens(4000 + i, seed=i, vocab_size=4000) for i in range(4)]
    batch = engine.batch([Request(prompts[0], GREEDY, 600, ignore_eos=True)])
    next(batch)
    next(batch)
    for prompt in prompts[1:]:
        before = held()
        index = batch.add(Request(prompt, GREEDY, 600, ignore_eos=True))
        while index >= len(batch.sequences) or batch.sequences[index].statistics.rounds < 2:
            next(batch)
        plan = engine.plan(len(prompt) + 600)
        planned = plan.kv + plan.retrieval + plan.open_stretches + plan.ring
        assert held() - before == pytest.approx(planned, rel=0.1)
    batch.close()


def test_a_sequence_that_is_ended_leaves_and_the_others_go_on(models):
    prompts = [BOOK[:100], BOOK[:120]]
    batch = models.engine("llama").batch([Request(prompt, GREEDY, 30, ignore_eos=True) for prompt in prompts])
    for count, (_index, _) in enumerate(batch):
        if count == 3:
            batch.end(0)
    first, second = batch.sequences
    assert first.state == second.state == "ended"
    assert 0 < len(first.statistics.token_ids) < 30 and first.statistics.finish_reason == "interrupted"
    want = greedy_oracle(models["llama"][1], prompts[1], 30)
    assert second.statistics.token_ids == want and second.statistics.finish_reason == "length"


@pytest.mark.slow
def test_drafting_begins_again_after_many_rounds_without(models):
    """The draft model's caches then lack more tokens in all than a pass over several sequences takes."""
    prompts = [BOOK[: 300 + i] for i in range(8)]
    batch = models.engine("llama").batch([Request(prompt, GREEDY, 70, ignore_eos=True) for prompt in prompts])
    for count, _ in enumerate(batch):
        top = batch.tiers[0].control
        top.fixed = 0 if count < 8 * 45 else 6
        top.draft_tokens = top.fixed
    for prompt, sequence in zip(prompts, batch.sequences, strict=True):
        assert sequence.statistics.token_ids == greedy_oracle(models["llama"][1], prompt, 70)


def test_a_batch_of_nothing_that_can_be_answered_ends(models):
    batch = models.engine("llama").batch([Request([], GREEDY, 4), Request([10_000], GREEDY, 4)])
    assert list(batch) == []
    assert [bool(sequence.error) for sequence in batch.sequences] == [True, True]
