"""Sequences that join a batch start from saved contexts of their own, and save what they read, while others run."""

from contextlib import suppress
from typing import Any

import pytest
from hooked_disk import HookedDisk
from tiny import greedy_oracle, random_tokens, save_llama
from triforce.offload import ContextError, ContextRequest, ContextStore, Engine, Request, Sampling

TAIL_ROWS = 1024
"""Behind the last whole 4,096 tokens of a prompt, what prompts share is a multiple of these (docs/exactness.md)."""

GREEDY = Sampling(temperature=0.0)
ONE, TWO = random_tokens(TAIL_ROWS + 200, seed=1), random_tokens(TAIL_ROWS + 300, seed=2)
QUESTION = random_tokens(20, seed=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    root = tmp_path_factory.mktemp("model")
    save_llama(root / "draft", seed=9, num_hidden_layers=1, hidden_size=32)
    return root, save_llama(root / "target", seed=1, head_dim=32)


@pytest.fixture(params=[None, 0.0], ids=["resident", "streamed"])
def load(request, model, tmp_path):
    """Loads an engine that knows nothing but what others have saved."""
    root, store = model[0], ContextStore(tmp_path)
    given: dict[str, Any] = {"device": "cpu", "dtype": "float32", "budget": 64, "resident": request.param}
    return lambda: Engine.load(root / "target", root / "draft", store=store, **given)


@pytest.fixture
def engine(load):
    return load()


def running(engine, **options):
    """A batch whose first sequence has begun."""
    batch = engine.batch([Request(ONE, GREEDY, 200, ignore_eos=True)], in_slices=True, **options)
    next(batch)
    return batch


def step_until_ended(batch, index):
    while index >= len(batch.sequences) or batch.sequences[index].state != "ended":
        next(batch)
    return batch.sequences[index]


@pytest.mark.parametrize("contexts", [ContextRequest(name="two"), ContextRequest(find=True)], ids=["name", "find"])
def test_what_joins_starts_from_what_is_saved_of_its_own_text(load, model, contexts):
    load().read(TWO, "two")
    batch = running(load())
    prompt = TWO + QUESTION
    one = step_until_ended(batch, batch.add(Request(prompt, GREEDY, 8, ignore_eos=True, contexts=contexts)))
    assert one.statistics.reused_tokens == len(TWO)
    assert one.statistics.token_ids == greedy_oracle(model[1], prompt, 8)
    assert batch.sequences[0].is_unfinished
    text = batch.sequences[0].statistics.token_ids
    assert text == greedy_oracle(model[1], ONE, len(text), text)
    batch.close()


def test_what_is_in_memory_is_gone_on_from_where_little_more_is_saved(load, model):
    load().read(TWO, "two")
    engine = load()
    engine.generate(TWO[:-100], GREEDY, 1)
    run = engine.stream(TWO + QUESTION, GREEDY, 8, ignore_eos=True, contexts=ContextRequest(name="two"))
    tokens = [token for event in run for token in event.tokens]
    assert run.statistics.reused_tokens == len(TWO) - 100 and run.stats()["context"] is None
    assert tokens == greedy_oracle(model[1], TWO + QUESTION, 8, tokens)


@pytest.mark.parametrize("new_tokens", [8, 1200])
def test_what_joins_shares_the_text_of_others_and_restores_nothing_over_it(engine, model, new_tokens):
    engine.read(ONE, "one")
    batch = running(engine, contexts=ContextRequest(name="one"))
    prompt = ONE + QUESTION
    index = batch.add(Request(prompt, GREEDY, new_tokens, ignore_eos=True, contexts=ContextRequest(find=True)))
    while index >= len(batch.sequences) or len(batch.sequences[index].statistics.token_ids) < 8:
        next(batch)
    one = batch.sequences[index]
    shared = len(ONE) // 8 * 8 if engine.target.rows_are_independent else TAIL_ROWS
    assert one.error is None and one.statistics.reused_tokens == shared
    assert one.statistics.token_ids[:8] == greedy_oracle(model[1], prompt, 8)
    batch.close()


def test_what_joins_is_saved_while_others_go_on(engine, model):
    batch = running(engine)
    contexts = ContextRequest(save="two", required=True)
    one = step_until_ended(batch, batch.add(Request(TWO, GREEDY, 1, contexts=contexts)))
    assert one.error is None and batch.sequences[0].is_unfinished
    found = engine.contexts.store.load("two")
    assert found.saved == len(TWO) and not any(wrong for _, wrong in engine.contexts.store.verify("two"))
    batch.close()
    result = engine.generate(TWO + QUESTION, GREEDY, 8, ignore_eos=True, reuse=0, contexts=ContextRequest(name="two"))
    assert result.token_ids == greedy_oracle(model[1], TWO + QUESTION, 8)
    assert result.stats["reused_tokens"] == len(TWO)


def test_a_context_is_free_for_others_once_it_is_written_though_its_answer_goes_on(engine):
    batch = running(engine)
    index = batch.add(Request(TWO, GREEDY, 1500, ignore_eos=True, contexts=ContextRequest(save="two")))
    taken, store = True, engine.contexts.store
    while taken and (len(batch.sequences) <= index or batch.sequences[index].state != "ended"):
        next(batch)
        if "two" in store.names() and store.load("two").saved == len(TWO):
            with suppress(ContextError):
                store.remove("two")
                taken = False
    assert not taken and batch.sequences[index].is_unfinished
    batch.close()


def test_what_cannot_be_saved_or_restored_fails_alone(engine, model):
    batch = running(engine)
    missing = batch.add(Request(TWO, GREEDY, 4, contexts=ContextRequest(name="nothing")))

    def full(what, *_):
        if what == "write":
            raise OSError(28, "No space left on device")

    engine.contexts.store.disk = HookedDisk(full)
    unsaved = batch.add(Request(TWO, GREEDY, 1, contexts=ContextRequest(save="two", required=True)))
    for index in (missing, unsaved):
        assert isinstance(step_until_ended(batch, index).failure, ContextError)
    assert "No space" in (batch.sequences[unsaved].error or "")
    for _ in batch:
        pass
    assert batch.sequences[0].statistics.token_ids == greedy_oracle(model[1], ONE, 200)
