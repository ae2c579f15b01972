"""Slices of a prefill from within: how long they take, and memory that runs out in one."""

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tiny import greedy_oracle, random_tokens, save_family, save_llama
from triforce.offload import Engine, Request, Sampling
from triforce.offload.batch.reading import Reading
from triforce.offload.batch.run import Progress
from triforce.offload.limits import Limits
from triforce.offload.system import System
from triforce.offload.transfer.link import Traffic
from triforce.tp import CapacityError
from triforce.tp.decoder import Decoder, Tiling

TAIL_ROWS = 1024
"""Behind the last whole 4,096 tokens of a prompt, what prompts share is a multiple of these (docs/exactness.md)."""

GREEDY = Sampling(temperature=0.0)

BOOK = random_tokens(TAIL_ROWS + 300, seed=3)

JOINING = {
    "another text": random_tokens(TAIL_ROWS + 200, seed=5),
    "the same text, more": BOOK[:TAIL_ROWS] + random_tokens(2 * TAIL_ROWS + 50, seed=6),
    "the same text, a question": BOOK + random_tokens(30, seed=7),
}


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


@pytest.fixture
def one_slice_at_a_time(monkeypatch):
    monkeypatch.setattr(Reading, "due", 1)


def join(engine, prompt, *, in_slices, running=400):
    """A batch whose first sequence has begun and another joins, run until that one has its first token; and the events
    on the way."""
    requests = [Request(BOOK, GREEDY, running, ignore_eos=True), Request(prompt, GREEDY, 12, ignore_eos=True)]
    batch = engine.batch(requests[:1], in_slices=in_slices)
    events = [next(batch), next(batch)]
    batch.add(requests[1])
    while events[-1][0] != 1:
        events.append(next(batch))
    return batch, events


@pytest.mark.parametrize("text", JOINING)
@pytest.mark.parametrize("resident", [None, 0.0], ids=["resident", "streamed"])
@pytest.mark.parametrize("family", ["llama", "mistral-window"])
@pytest.mark.slow(keep=("llama-streamed-the same text, more",))
@pytest.mark.usefixtures("one_slice_at_a_time")
def test_keys_values_and_tokens_are_those_of_a_reading_without_slices(models, family, resident, text):
    prompt = JOINING[text]

    def read(in_slices):
        batch, events = join(load(models, family, resident=resident), prompt, in_slices=in_slices)
        full = batch.sequences[1].active.full
        full.blocks.drain()
        own = [full.blocks.export(layer, 0, full.length - full.start)() for layer in range(full.config.num_layers)]
        while batch.sequences[1].is_unfinished:
            next(batch)
        tokens = [sequence.statistics.token_ids for sequence in batch.sequences]
        batch.close()
        return torch.cat([piece for pieces in own for piece in pieces], dim=2), tokens, len(events)

    kv, tokens, _ = read(False)
    sliced_kv, sliced_tokens, events = read(True)
    assert torch.equal(kv, sliced_kv)
    assert sliced_tokens[1] == tokens[1] == greedy_oracle(models[family][0], prompt, 12)
    assert sliced_tokens[0] == greedy_oracle(models[family][0], BOOK, len(sliced_tokens[0]))
    assert events > 4 or "question" in text


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("resident", [None, 0.0], ids=["resident", "streamed"])
@pytest.mark.parametrize("family", ["llama", "mistral-window"])
@pytest.mark.usefixtures("one_slice_at_a_time")
def test_attention_that_takes_long_is_divided_and_has_the_same_bits(models, family, resident, dtype):
    prompt, found = JOINING["the same text, more"], []
    for tiling in (Tiling(), Tiling(slice_work=1)):
        system = System(limits=Limits(tiling=tiling))
        engine = load(models, family, resident=resident, dtype=dtype, system=system)
        if not engine.target.rows_are_independent:
            pytest.skip("attention of a row depends on other rows without compiled kernels")
        batch, _ = join(engine, prompt, in_slices=True)
        full = batch.sequences[1].active.full
        full.blocks.drain()
        own = [full.blocks.export(layer, 0, full.length - full.start)() for layer in range(full.config.num_layers)]
        while batch.sequences[1].is_unfinished:
            next(batch)
        kv = torch.cat([piece for pieces in own for piece in pieces], dim=2)
        sizes = engine.target._sizes(engine.target._layers[0], TAIL_ROWS, 2 * TAIL_ROWS)
        found.append((kv, batch.sequences[1].statistics.token_ids, sizes))
        batch.close()
    (kv, tokens, whole), (divided_kv, divided_tokens, sizes) = found
    assert torch.equal(kv, divided_kv) and tokens == divided_tokens
    assert whole is None and sizes == [342, 341, 341]


@pytest.mark.usefixtures("one_slice_at_a_time")
def test_others_go_on_while_a_prompt_is_read_and_it_is_said_how_far_it_is(models):
    told: list[tuple[int, float, int]] = []
    engine = load(models)
    batch = engine.batch(
        [Request(BOOK, GREEDY, 400, ignore_eos=True)],
        in_slices=True,
        on_prefill=lambda index, share: told.append((index, share, batch.sequences[0].statistics.rounds)),
    )
    next(batch)
    batch.add(Request(JOINING["another text"], GREEDY, 2, ignore_eos=True))
    while batch.sequences[-1].state != "running" or len(batch.sequences) < 2:
        next(batch)
    shares, rounds = zip(*((share, rounds) for index, share, rounds in told if index == 1), strict=True)
    assert list(shares) == sorted(shares) and shares[-1] == pytest.approx(1)
    assert len(set(rounds)) > 2, "rounds took place between slices"
    statistics = batch.sequences[1].statistics
    assert statistics.prefill_s < statistics.ttft_s
    assert sum(batch.sequences[0].statistics.token_s) > statistics.prefill_s, "who runs is told what it waited"
    assert batch.stats()["decode_s"] < batch.sequences[0].statistics.decode_s
    batch.close()


def reading_of(slices_s, **how):
    """A prompt whose slices take so many seconds, and the time that they take it in."""
    time = SimpleNamespace(now=0.0)

    def slices():
        for seconds in slices_s:
            time.now += seconds
            yield False
        return torch.empty(0)

    blocks = SimpleNamespace(drain=lambda: None, device=torch.device("cpu"))
    sequence = SimpleNamespace(active=SimpleNamespace(full=SimpleNamespace(blocks=blocks)))
    return Reading(cast(Any, sequence), slices(), System(clock=lambda: time.now), **how), time


@pytest.mark.parametrize(
    "slices_s",
    [
        [0.01] * 100,
        [0.3] * 100,
        [1.7] * 100,
        [40.0] * 20,
        ([0.25] * 10 + [1.0] * 10) * 5,
        ([1.0] * 10 + [0.1] * 10) * 5,
    ],
    ids=["shortest", "short", "long", "longest", "short and long", "long and short"],
)
def test_reading_takes_no_more_time_than_the_rounds_between(slices_s):
    reading, time = reading_of(slices_s)
    rounds_s, longest = 0.0, 0.0
    while True:
        before = time.now
        if reading.go_on(reading.due):
            break
        longest = max(longest, time.now - before)
        time.now, rounds_s = time.now + 1.0, rounds_s + 1.0
        reading.grant(1.0)
    whole = sum(slices_s)
    assert reading.seconds == pytest.approx(whole)
    # How long a slice takes is known from the ones before.
    assert longest <= max(slices_s) * (1 + (1 + max(slices_s)) / min(slices_s))
    assert abs(rounds_s - whole) <= 2 * max(slices_s) + 2, "as much as the rounds, as nearly as slices allow"


def test_one_long_slice_after_many_short_ones_is_the_last_of_its_turn():
    """Otherwise as many would be computed as if all were short."""
    slices_s, turns, whole = [0.001] * 50 + [0.5] * 50, [], False
    reading, time = reading_of(slices_s, timed=True)
    while not whole:
        reading.grant(0.05)
        before = time.now
        whole = reading.go_on(reading.due)
        turns.append(time.now - before)
        assert len(turns) < 1000
    assert max(turns) <= 0.5 + 0.05
    assert len(turns) * 0.05 == pytest.approx(sum(slices_s), rel=0.05), "half of the time, as before"


@pytest.mark.usefixtures("one_slice_at_a_time")
def test_one_that_nobody_waits_for_any_more_is_not_read_to_its_end(models):
    batch = load(models).batch([Request(BOOK, GREEDY, 60, ignore_eos=True)], in_slices=True)
    next(batch)
    index = batch.add(Request(JOINING["the same text, more"], GREEDY, 2, ignore_eos=True))
    while len(batch.sequences) < 2 or batch.sequences[1].state == "waiting":
        next(batch)
    assert batch.sequences[1].state == "reading"
    batch.end(index)
    next(batch)
    next(batch)
    assert batch.sequences[1].state == "ended" and batch.sequences[1].active_or_none is None
    assert batch.sequences[1].statistics.token_ids == []
    later = batch.add(Request(BOOK[:50], GREEDY, 3, ignore_eos=True))
    for _ in batch:
        pass
    assert batch.sequences[0].statistics.token_ids == greedy_oracle(models["llama"][0], BOOK, 60)
    assert batch.sequences[later].statistics.token_ids == greedy_oracle(models["llama"][0], BOOK[:50], 3)


@pytest.mark.usefixtures("one_slice_at_a_time")
def test_one_that_memory_does_not_suffice_for_fails_alone(models, monkeypatch):
    batch = load(models).batch([Request(BOOK, GREEDY, 40, ignore_eos=True)], in_slices=True)
    next(batch)
    mlp, calls = Decoder._mlp, 0

    def short(self, layer, rows):
        nonlocal calls
        calls += rows.shape[0] == TAIL_ROWS
        if calls == 2 and rows.shape[0] == TAIL_ROWS:
            raise CapacityError("no memory is left")
        return mlp(self, layer, rows)

    monkeypatch.setattr(Decoder, "_mlp", short)
    batch.add(Request(JOINING["another text"], GREEDY, 2, ignore_eos=True))
    for _ in batch:
        pass
    assert [sequence.error for sequence in batch.sequences] == [None, "no memory is left"]
    assert batch.sequences[0].statistics.token_ids == greedy_oracle(models["llama"][0], BOOK, 40)


def test_a_link_is_measured_once_enough_has_crossed_it(models):
    """Of a prompt that is shorter than a block nothing has, when it is read."""
    batch = load(models, resident=0).batch([Request(random_tokens(40), GREEDY, 600, ignore_eos=True)])
    next(batch)
    setup, cost = batch.run._setup, batch.tiers[0].control.cost
    made = setup._current
    assert made and made.to_measure is not None
    setup.traffic = lambda: Traffic(bytes_in=2**30, busy_s=1.0)
    setup.use_measured_link()
    assert made.to_measure is None and batch.tiers[0].control.cost is not cost
    batch.close()


def test_a_run_that_is_closed_within_a_prefill_over_streamed_blocks_leaves_whole_caches(models):
    """A rollback brings the block back that the prefill had begun to write home."""
    times = itertools.count()
    system = System(clock=lambda: next(times) * 0.05)
    engine = load(models, resident=0.0, tiers=1, system=system)
    alone = greedy_oracle(models["llama"][0], BOOK, 4)
    assert engine.generate(BOOK, GREEDY, 4, ignore_eos=True).token_ids == alone
    requests = [Request([*BOOK, *random_tokens(2 * TAIL_ROWS, seed=8)], GREEDY, 4, ignore_eos=True)]
    run = engine.run(lambda waits: requests.pop() if requests else None)
    share = 0.0
    while share < 0.5:
        event = next(run)
        assert isinstance(event, Progress)
        share = event.sequence.read_share
    run.close()
    assert engine.generate(BOOK, GREEDY, 4, ignore_eos=True).token_ids == alone
