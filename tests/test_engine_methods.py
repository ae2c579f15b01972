"""Each method of an engine does what its page says, through the names that `triforce.offload` exports alone."""

import os

import psutil
import pytest
import torch
from command import VOCABULARY, Fork, save_tokenizer
from tiny import greedy_oracle, random_tokens, save_llama
from tokenizers import Tokenizer
from triforce.offload import (
    Batch,
    ContextError,
    ContextRequest,
    ContextStore,
    Engine,
    Generation,
    Grammar,
    Request,
    Sampling,
)
from triforce.tp import CapacityError, ModelError, UsageError

PROMPT = random_tokens(300)
GREEDY = Sampling(temperature=0.0)
NEW = 24


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    """The directory of a tiny target, the model by transformers, and what it writes after `PROMPT`."""
    directory = tmp_path_factory.mktemp("target")
    model = save_llama(directory, num_key_value_heads=2)
    save_llama(directory / "draft", seed=1, num_hidden_layers=2)
    return directory, model, greedy_oracle(model, PROMPT, NEW)


@pytest.fixture
def load(oracle):
    """Loads an engine of the tiny pair."""

    def make(**settings):
        fixed = {"draft": oracle[0] / "draft", "device": "cpu", "dtype": "float32", "budget": 64}
        return Engine.load(oracle[0], **(fixed | settings))

    return make


def test_generate_gives_the_tokens_and_the_json(load, oracle):
    result = load().generate(PROMPT, GREEDY, NEW)
    assert result.token_ids == oracle[2] == result.stats["token_ids"]
    assert (result.stats["prompt_tokens"], result.stats["new_tokens"]) == (len(PROMPT), NEW)


def test_a_stream_is_an_event_a_round_and_its_json_grows_with_it(load, oracle):
    run = load().stream(torch.tensor(PROMPT), GREEDY, NEW)
    assert isinstance(run, Generation)
    tokens = []
    for event in run:
        tokens += event.tokens
        assert run.stats()["new_tokens"] == len(tokens)
    assert tokens == oracle[2]


def test_an_answer_has_the_form_that_is_asked_for(tmp_path):
    save_tokenizer(tmp_path)
    save_llama(tmp_path, vocab_size=VOCABULARY, eos_token_id=1)
    engine = Engine.load(tmp_path, "none", device="cpu", dtype="float32")
    found = engine.generate([5, 6, 7], GREEDY, NEW, grammar=Grammar("regex", "[ab]{3}")).token_ids
    text = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).decode(found[:-1])
    assert len(text) == 3 and set(text) <= {"a", "b"} and found[-1] == 1
    with pytest.raises(UsageError, match="cannot be followed"):
        engine.generate([5], GREEDY, NEW, grammar=Grammar("regex", "("))


def test_a_batch_gives_rounds_with_the_index_of_their_request(load, oracle):
    other = random_tokens(200, seed=5)
    batch = load().batch([Request(PROMPT, GREEDY, NEW), Request([], GREEDY, NEW)])
    assert isinstance(batch, Batch)
    assert batch.add(Request(other, GREEDY, 10)) == 2
    tokens = {0: [], 1: [], 2: []}
    for index, event in batch:
        tokens[index] += event.tokens
    assert tokens == {0: oracle[2], 1: [], 2: greedy_oracle(oracle[1], other, 10)}, "an empty prompt fails alone"


def test_logits_are_those_of_transformers(load, oracle):
    _, model, answer = oracle
    with torch.inference_mode():
        want = model(torch.tensor([PROMPT + answer])).logits[0, len(PROMPT) - 1 :]
    got = load().logits(PROMPT, answer)
    assert got.shape == want.shape
    assert (got - want).abs().max() < 1e-4 * want.abs().max()


def test_an_answer_is_drawn_again_token_by_token(load, oracle):
    engine = load()
    assert engine.drawn_alone(PROMPT, oracle[2], GREEDY) == oracle[2]
    seeded = Sampling(temperature=1.0, seed=3)
    answer = engine.generate(PROMPT, seeded, NEW).token_ids
    assert engine.drawn_alone(PROMPT, answer, seeded) == answer
    with pytest.raises(UsageError, match="seed"):
        engine.drawn_alone(PROMPT, answer, Sampling(temperature=1.0))


def test_what_was_read_is_saved_and_runs_start_from_it(load, oracle, tmp_path):
    store = ContextStore(tmp_path, segment_tokens=64)
    load(store=store).read(PROMPT[:256], "book")
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["book"]
    result = load(store=store, context="book").generate(PROMPT, GREEDY, NEW)
    assert (result.token_ids, result.stats["context"]) == (oracle[2], "book")
    assert result.stats["reused_tokens"] > 200
    with pytest.raises(ContextError, match="book"):
        load(store=store).read(PROMPT[5:], "book")  # another text
    found = load(store=store).generate(PROMPT, GREEDY, NEW, contexts=ContextRequest(find=True))
    assert (found.token_ids, found.stats["context"]) == (oracle[2], "book")


def test_reading_is_a_run_that_tells_how_far_it_is(load, tmp_path):
    store, shares = ContextStore(tmp_path, segment_tokens=64), []
    for _ in load(store=store).reading(PROMPT, "book", on_prefill=shares.append):
        pass
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert load(store=store, context="book").generate([*PROMPT, 5], GREEDY, 1).stats["reused_tokens"] > 200


def test_a_plan_counts_weights_and_keys_and_values(load, oracle):
    _, model, _ = oracle
    config = model.config
    head_dim = config.hidden_size // config.num_attention_heads
    of_a_token = 4 * 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim  # bytes in float32
    engine = load(draft="none")
    for context in (1000, 4000):
        plan = engine.plan(context)
        assert plan.weights == 4 * model.num_parameters()
        assert context * of_a_token <= plan.resident_kv < (context + 2048) * of_a_token, "more than a block too much"
        assert engine.plan(context, answer=1).retrieval < plan.retrieval, "an answer's room is that of its tokens"


def test_what_is_held_is_what_was_planned(load, oracle):
    _, model, _ = oracle
    engine = load(draft="none")
    assert {part for part, _ in engine.held()} == {"weights", "rope"}, "before the first run"
    run = engine.stream(PROMPT, GREEDY, NEW)
    next(run)
    next(run)  # before whose round the retrieval cache comes
    plan, held = engine.plan(len(PROMPT) + NEW), {}
    for part, tensor in {tensor.data_ptr(): (part, tensor) for part, tensor in engine.held()}.values():
        held[part] = held.get(part, 0) + tensor.nbytes
    assert held["weights"] == plan.weights == 4 * model.num_parameters()
    assert held["resident_kv"] == plan.resident_kv
    assert 0 < held["retrieval"] <= plan.retrieval


def test_one_rank_follows_nobody_and_an_engine_can_be_closed(load, oracle):
    engine = load()
    with pytest.raises(RuntimeError, match="rank 0"):
        engine.follow()
    engine.finish()
    assert engine.generate(PROMPT, GREEDY, NEW).token_ids == oracle[2]
    engine.close()


def test_what_cannot_be_is_refused_with_the_value(load, oracle, tmp_path):
    with pytest.raises(ModelError, match="nothing-here"):
        Engine.load(tmp_path / "nothing-here", device="cpu")
    engine = load()
    with pytest.raises(UsageError, match="97"):
        engine.generate([97], GREEDY, 1)
    with pytest.raises(UsageError, match="tiers is 4"):
        engine.generate(PROMPT, GREEDY, 1, tiers=4)
    with pytest.raises(CapacityError, match="4,096 positions"):
        engine.generate(PROMPT, GREEDY, 4096)


def test_threads_that_are_started_early_are_not_started_later(load):
    engine = load(resident=0, link_gbps=50.0)
    before = psutil.Process().num_threads()
    engine.start_threads()
    started = psutil.Process().num_threads()
    run = engine.stream(PROMPT, GREEDY, NEW)
    during = [psutil.Process().num_threads() for _ in run]
    assert run.stats()["link"]["bytes_streamed"] > 0
    assert before + 1 < started and max(during) <= started, (before, started, max(during))


def test_reserved_memory_is_taken_at_once_and_used_by_runs(load, oracle):
    def check():
        assert load().generate(PROMPT, GREEDY, NEW).token_ids == oracle[2]  # what is run for the first time is read
        engine, process = load(host_memory=0.4), psutil.Process()
        before = process.memory_info().rss
        size = engine.reserve_memory()
        taken = process.memory_info().rss - before
        assert 2**24 < size < 0.4 * 2**30 and 0.95 * size < taken < 1.05 * size + 2**22
        assert engine.generate(PROMPT, GREEDY, NEW).token_ids == oracle[2]
        assert load().reserve_memory() == 0

    with open(os.devnull, "rb") as nothing:
        fork = Fork(check, (nothing.fileno(), 1, 2), os.environ)  # what is reserved stays with a process
        assert fork.wait(120) == 0
