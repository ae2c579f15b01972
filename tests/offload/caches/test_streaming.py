"""Keys and values that stream from host memory give the tokens of those that do not, at the speed of the link, once."""

import pytest
from spmd import run_jobs
from tiny import greedy_oracle, random_tokens, save_llama
from triforce.offload import Engine, Request, Sampling

PROMPT = random_tokens(900, seed=3)

NEW_TOKENS = 40


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A target's directory, a draft's, and greedy tokens according to transformers."""
    root = tmp_path_factory.mktemp("models")
    save_llama(root / "draft", seed=9, num_hidden_layers=1, hidden_size=32)
    model = save_llama(root / "target", seed=1, num_key_value_heads=2)
    return root / "target", root / "draft", greedy_oracle(model, PROMPT, NEW_TOKENS)


def load(models, **settings):
    return Engine.load(models[0], models[1], device="cpu", dtype="float32", **settings)


def test_streamed_samples_equal_those_of_a_cache_on_the_device(models):
    sampling = Sampling(1.0, 1.0, 0, 11)
    settings = {"budget": 64, "refresh": "never"}  # a refresh during the next verification comes a round later
    all_on_device = load(models, **settings).generate(PROMPT, sampling, NEW_TOKENS)
    streamed = load(models, resident=0, **settings).generate(PROMPT, sampling, NEW_TOKENS)
    assert streamed.token_ids == all_on_device.token_ids


@pytest.mark.parametrize("resident", [0, None])
@pytest.mark.slow(keep=("0",))
def test_a_prefill_that_is_broken_off_leaves_nothing_that_a_later_run_trusts(models, resident):
    def stop(share: float) -> None:
        if share > 0.4:
            raise InterruptedError

    engine, more = load(models, resident=resident, budget=64), [*PROMPT, *random_tokens(700, seed=5)]
    engine.generate(PROMPT, Sampling(temperature=0.0), 60)
    with pytest.raises(InterruptedError):
        for _ in engine.stream(more, Sampling(temperature=0.0), 20, on_prefill=stop):
            pass
    again = engine.generate(more, Sampling(temperature=0.0), 20)
    fresh = load(models, resident=resident, budget=64).generate(more, Sampling(temperature=0.0), 20)
    assert again.token_ids == fresh.token_ids


def test_taking_host_memory_is_told_layer_by_layer(tmp_path):
    save_llama(tmp_path, num_hidden_layers=4)
    engine = Engine.load(tmp_path, device="cpu", resident=0.0, tiers=1)
    shares: list[float] = []
    engine.stream(random_tokens(300), Sampling(0.0), 4, on_memory=shares.append)
    assert shares == [0.25, 0.5, 0.75, 1.0]
    engine.stream(random_tokens(300), Sampling(0.0), 4, on_memory=shares.append)
    assert len(shares) == 4, "the memory is there already"


def test_follow_up_question_finds_its_book(models):
    engine = load(models, resident=0, budget=64)
    first = engine.generate(PROMPT, Sampling(temperature=0.0), NEW_TOKENS)
    for question in (random_tokens(20, seed=5), random_tokens(700, seed=6)):
        prompt = PROMPT + first.token_ids[:30] + question
        again = engine.generate(prompt, Sampling(temperature=0.0), NEW_TOKENS // 2)
        fresh = load(models, budget=64).generate(prompt, Sampling(temperature=0.0), NEW_TOKENS // 2)
        assert again.token_ids == fresh.token_ids
        assert again.stats["reused_tokens"] >= len(PROMPT)


@pytest.mark.parametrize("before", ["logits", "batch"])
def test_a_run_goes_back_to_the_middle_of_what_logits_or_a_batch_have_read(models, before):
    engine, prompt = load(models, resident=0, budget=64), [*PROMPT[:300], 5, 6, 7]
    if before == "logits":
        engine.logits(PROMPT, [1])
    else:
        list(engine.batch([Request(PROMPT, Sampling(0.0), 2)]))
    again = engine.generate(prompt, Sampling(0.0), 4)
    assert again.token_ids == load(models, budget=64).generate(prompt, Sampling(0.0), 4).token_ids
    assert again.stats["reused_tokens"] >= 290


@pytest.mark.slow
def test_two_streaming_ranks_equal_one_that_does_not(models):
    job = {
        "model": str(models[0]),
        "draft": str(models[1]),
        "prompt": PROMPT,
        "new_tokens": NEW_TOKENS,
        "settings": {"budget": 64, "resident": 0.0},
    }
    (reports,) = run_jobs([job], 2)
    assert [report["token_ids"] for report in reports] == [models[2]] * 2
