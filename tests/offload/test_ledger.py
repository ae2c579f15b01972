"""Memory of a simulated GPU is counted: between rounds what lives there is what its owners say they hold."""

import math
import weakref
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ledger
import pytest
import torch
from cuda_simulator import Simulator
from profiles import profile_name
from recorder import Recorder
from simulated_gpu import as_on_a_gpu, simulated_system
from tiny import random_tokens, save_llama
from triforce.offload import Engine, Request, Sampling
from triforce.offload.caches.full import BlockAttention, FullCache, QueryRows, RecentMass
from triforce.offload.caches.retrieval import RetrievalCache
from triforce.offload.caches.streaming import SLACK, StreamingCache
from triforce.offload.graphs.passes import JOINED, Pieces, _CapturedPass
from triforce.offload.held import bytes_by_part
from triforce.offload.planning.run_plan import make_plan
from triforce.offload.speculation.refresh import RefreshPolicy
from triforce.offload.speculation.tiers import Tier
from triforce.offload.system import System
from triforce.offload.transfer.host_blocks import Ring
from triforce.offload.transfer.streamed_blocks import StreamedBlocks
from triforce.tp import CapacityError
from triforce.tp.decoder import Tiling


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return ledger.save_models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("first", [0, 1000])
@pytest.mark.slow(keep=("0",))
def test_everything_on_the_device_is_held_by_somebody(models, first):
    """2,000 histories in a campaign: `python tests/support/simulator/ledger.py`."""
    for seed in range(first, first + (1000 if profile_name() == "campaign" else 2)):
        assert ledger.play(models, seed, steps=3).checks


@pytest.mark.parametrize("seed", [2, 7])
@pytest.mark.slow(keep=("2",))
def test_everything_on_the_device_of_each_of_two_ranks_is_held_there(models, seed):
    one, other = ledger.play_on_ranks(models, seed, steps=3)
    assert one == other > 0


def test_histories_come_to_a_disk_and_to_captured_passes(models):
    def replays(seed):
        capture = ledger.play(models, seed, steps=1).engine._capture
        return isinstance(capture, Recorder) and capture.replays

    assert any(ledger.play(models, seed, steps=1).peaks["disk_kv"] for seed in range(1, 40, 4))
    assert any(replays(seed) for seed in range(12, 60, 3))


@pytest.mark.parametrize("refresh", ["auto", "round", "never", 7])
@pytest.mark.parametrize("block_length", [24])
@pytest.mark.slow(keep=("24-auto",))
def test_persistent_parts_are_as_planned_and_nothing_grows(models, refresh, block_length):
    """Of an answer whose retrieval cache holds all of the text, so that nearly all draft tokens are accepted."""
    rooms, planned = rooms_of_tails(models, refresh, block_length, 90)
    assert rooms == {planned}


def rooms_of_tails(models, refresh, block_length, new_tokens, budget=1024):
    """The tokens that retrieval caches had room for in an answer, up to the first that are more than were planned; and
    those that were planned."""
    simulator = Simulator()
    settings = {"resident": 0, "budget": budget, "refresh": refresh, "block_length": block_length, "dtype": "float32"}
    system = simulated_system(simulator, limits=ledger.LIMITS)
    engine = Engine.load(models / "target", models / "draft", device="cpu", system=system, **settings)
    prompt = random_tokens(300, seed=3)
    with as_on_a_gpu(), simulator:
        run = engine.stream(prompt, Sampling(0.0), new_tokens, ignore_eos=True)
        request = engine._models.request(len(prompt) + new_tokens, answer=new_tokens)
        plan, rooms = make_plan(request), set()
        planned = plan.budget // plan.chunk_size * plan.chunk_size + plan.tail
        for event in run:
            held = bytes_by_part(engine.held())
            for part in ("weights", "rope", "draft_kv", "ring", "open_stretches", "resident_kv"):
                assert held.get(part, 0) == getattr(plan, part), (part, event.index)
            retrieval = run.sequence.active.retrieval
            assert retrieval
            rooms |= {keys.shape[1] for keys, _ in retrieval._buffers}
            assert rooms or not event.index  # there before the first round
            if max(rooms, default=0) > planned:
                break
        run.close()
    assert budget < 1024 or run.stats()["acceptance"]["tokens_per_round"] > 3
    return rooms, planned


def test_a_tail_that_grows_is_noticed(models, monkeypatch):
    """As it did once: while all that is drafted is accepted, nothing had chunks chosen anew."""
    monkeypatch.setattr(RetrievalCache, "tail_is_full", False)
    monkeypatch.setattr(RefreshPolicy, "due", lambda *_: False)
    rooms, planned = rooms_of_tails(models, "auto", 24, 240, budget=304)
    assert max(rooms) > planned


class Capturing(ledger.Measuring):
    """Notes which passes run to be captured next, since `passes` was emptied: by their model, their tokens and, in
    pieces, their logits."""

    def __init__(self, simulator):
        super().__init__(simulator)
        self.passes = []

    def warm_up(self, run):
        one = getattr(run, "__self__")  # noqa: B009 (of a method)
        self.passes.append((one._decoder, one._n, getattr(one, "_num_logits", None)))
        return super().warm_up(run)


class Addresses:
    """Where tensors of a conversation are. All are kept here, so that none of their addresses is given to another."""

    def __init__(self):
        self.moved: set[str] = set()
        """Names by which tensors came that were elsewhere, or others, when they came by it first."""
        self._known, self._kept = {}, []

    def note(self, name, held, *parts):
        """Takes note of those of `held` that are of these parts."""
        tensors = [(part, x) for part, x in held if part in parts]
        self._kept.append(tensors)
        places = [(part, x.data_ptr(), x.numel()) for part, x in tensors]
        assert places
        if self._known.setdefault(name, places) != places:
            self.moved.add(name)


def conversation(models, turns=3, room=2000, *, answer=12, in_one_run=False, **settings):
    """What moved, or was captured twice within a turn, in a conversation whose passes are captured; how many were in
    each turn, and replays in all.

    Args: `answer` is the tokens of each answer. `in_one_run` is whether a run lasts as long as turns come; then what
    drafts stays, too.
    """
    simulator, addresses, captured = Simulator(), Addresses(), []
    system = simulated_system(simulator, limits=ledger.LIMITS)
    given: Any = {"device": "cpu", "dtype": "float32", "system": system, "block_length": 6, "draft_length": 3}
    engine = Engine.load(models / "target", models / "draft", **given | settings)
    engine._kept.room = room
    engine._capture = capture = Capturing(simulator)
    prompt, before = random_tokens(300, seed=3), 0

    def request():
        return Request(prompt, Sampling(0.8, seed=len(captured)), answer, ignore_eos=True)

    def events():
        if in_one_run:
            run = engine.run(lambda waits: request() if waits and len(captured) < turns else None)
            yield from ((event.sequence, getattr(event, "round", None)) for event in run)
            return
        for _ in range(turns):
            run = engine.stream(prompt, request().sampling, answer, ignore_eos=True)
            yield from ((run.sequence, event) for event in run)
            yield run.sequence, None

    with as_on_a_gpu(), simulator:
        for sequence, event in events():
            turn = len(captured)
            of_turn = "" if in_one_run else f" in turn {turn}"
            if event:
                caches = sequence.active
                assert settings.get("resident") is None or not caches.full.all_on_device
                addresses.note("full cache", caches.full.blocks.held(), "resident_kv", "ring", "open_stretches")
                if event.index:
                    assert caches.streaming and caches.retrieval
                    addresses.note(f"mass in turn {turn}", caches.full.mass.held(), "mass")
                    addresses.note(f"draft's cache{of_turn}", caches.streaming.held(), "draft_kv")
                    addresses.note(f"retrieval cache{of_turn}", buffers_of(caches.retrieval), "retrieval")
            elif len(sequence.statistics.token_ids) == answer:
                assert not turn or sequence.statistics.reused_tokens > 300
                if len(capture.passes) > len(set(capture.passes)):
                    addresses.moved.add("a captured pass")
                if not in_one_run:
                    capture.passes.clear()
                captured.append(capture.captures - before)
                before = capture.captures
                prompt = prompt + sequence.statistics.token_ids + random_tokens(100, seed=turn)
    assert len(captured) == turns
    return addresses.moved, captured, capture.replays


def buffers_of(retrieval):
    return (("retrieval", one) for layer in retrieval._buffers for one in layer)


@pytest.mark.parametrize("refresh", ["auto", "round"])
@pytest.mark.parametrize("budget", [64, 1024])
@pytest.mark.parametrize("resident", [1e-4, None])
@pytest.mark.slow(keep=("0.0001-1024-auto",))
def test_addresses_stay_over_turns_and_no_pass_is_captured_twice_in_one(models, resident, budget, refresh):
    """What a full cache has on the device stays from turn to turn. Retrieval cache, draft's cache and attention mass
    stay from a turn's first round to its last. Those of the next run are others, and so are its captured passes, as a
    run that ends gives back all but its full cache."""
    answer = 24 if budget == 1024 else 12  # of the larger one nearly all draft tokens are accepted, in fewer rounds
    moved, captured, replays = conversation(models, answer=answer, resident=resident, budget=budget, refresh=refresh)
    assert not moved
    assert min(captured) >= 3 and replays > 5 * sum(captured)


@pytest.mark.parametrize("refresh", ["auto", "round"])
@pytest.mark.parametrize("resident", [1e-4, None])
@pytest.mark.slow(keep=("0.0001-auto",))
def test_what_drafts_stays_over_turns_of_one_run_and_is_captured_once(models, resident, refresh):
    moved, captured, replays = conversation(models, in_one_run=True, resident=resident, budget=64, refresh=refresh)
    assert not moved
    assert captured[0] >= 3 and sum(captured[1:]) <= captured[0] and replays > 5 * sum(captured)


def test_what_drafts_does_not_stay_where_a_prompt_is_read_in_its_memory(models):
    """A retrieval cache that takes more than a prefill: both together are not planned."""
    moved, captured, _ = conversation(models, in_one_run=True, resident=1e-4, budget=1024)
    assert moved == {"retrieval cache", "draft's cache", "a captured pass"}
    assert min(captured) >= 3


def test_what_moves_and_what_is_captured_anew_is_noticed(models, monkeypatch):
    """Of a full cache without room for the next turn, and of a retrieval cache whose tail is too short."""
    moved, _, _ = conversation(models, room=0, budget=1024)
    assert moved == {"full cache"}
    made_larger("_tail", lambda _: 4)(monkeypatch, RetrievalCache)
    moved, _, _ = conversation(models, turns=1, budget=64)
    assert moved == {"retrieval cache in turn 0", "a captured pass"}


@pytest.mark.parametrize("resident", [None, 0.0])
def test_attention_mass_of_the_longest_draft_over_a_shared_text_is_planned(models, resident):
    """Of who goes on in a cache that begins with another's tokens, when nobody else runs: its own tokens are fewer than
    those that lengths follow from."""
    given: Any = {"device": "cpu", "dtype": "float32", "resident": resident, "system": System(limits=ledger.LIMITS)}
    engine = Engine.load(models / "target", models / "draft", **given)
    text = random_tokens(1400, seed=3)
    question = [*text[:1280], *random_tokens(60, seed=4)]
    for _ in engine.batch([Request(prompt, Sampling(0.0), 4, ignore_eos=True) for prompt in (text, question)]):
        pass
    run = engine.stream([*question, *random_tokens(30, seed=5)], Sampling(0.0), 4, ignore_eos=True)
    for _ in run:
        opened = run.sequence.active
        assert opened.full.prefix and engine._running
        assert engine._running.tiers[0].control.longest_draft < opened.plan.mass_rows


def left_out(part):
    """An owner that does not say that it holds these."""

    def plant(monkeypatch, kind):
        held = kind.held
        monkeypatch.setattr(kind, "held", lambda self: (one for one in held(self) if one[0] != part))

    return plant


def kept_behind(name):
    """A method whose call keeps a buffer on the device that nobody knows of."""

    def plant(monkeypatch, kind):
        method, kept = getattr(kind, name), []

        def and_keeps(self, *given, **more):
            kept.append(torch.zeros(8) + 1)
            return method(self, *given, **more)

        monkeypatch.setattr(kind, name, and_keeps)

    return plant


FAULTS = [
    (StreamedBlocks, left_out("ring")),
    (StreamedBlocks, left_out("open_stretches")),
    (FullCache, left_out("mass")),
    (RetrievalCache, left_out("retrieval")),
    (StreamingCache, left_out("draft_kv")),
    (StreamedBlocks, kept_behind("prepare")),
    (StreamedBlocks, kept_behind("_close_block")),
    (Ring, kept_behind("begin")),
    (RetrievalCache, kept_behind("refresh")),
    (RetrievalCache, kept_behind("_make_room")),
    (Tier, kept_behind("step")),
    (_CapturedPass, left_out("captured")),
    (Pieces, left_out("captured")),
]


def made_larger(name, by):
    """An owner that makes room for more than it is told."""

    def plant(monkeypatch, kind):
        make = kind.__init__

        def larger(self, *given, **named):
            make(self, *given, **named)
            setattr(self, name, by(getattr(self, name)))

        monkeypatch.setattr(kind, "__init__", larger)

    return plant


def given_more(**more):
    """An owner that is told to make room for more."""

    def plant(monkeypatch, kind):
        make = kind.__init__
        monkeypatch.setattr(kind, "__init__", lambda self, *given, **named: make(self, *given, **(named | more)))

    return plant


BEYOND_THE_PLAN = {
    "a tail that is too long": (RetrievalCache, made_larger("_tail", lambda tail: tail + 8)),
    "mass of more chunks": (RecentMass, made_larger("_max_chunks", lambda chunks: 2 * chunks + 1000)),
    "a draft's window that is too long": (StreamingCache, given_more(slack=SLACK + 1)),
    "a buffer of the ring too many": (Ring, made_larger("buffers", lambda buffers: [*buffers, buffers[0].clone()])),
}
"""What is held, but not planned."""

TELLING = 4, 3, 6, 1
"""Histories that are played first: each fault is noticed in one of them, within a second or so."""


@pytest.mark.parametrize("fault", BEYOND_THE_PLAN)
@pytest.mark.slow(keep=("a tail that is too long",))
def test_what_nobody_plans_is_noticed(models, monkeypatch, fault):
    kind, plant = BEYOND_THE_PLAN[fault]
    plant(monkeypatch, kind)
    with pytest.raises(ledger.Uncounted, match="planned"):
        for seed in dict.fromkeys((*TELLING, *range(8))):
            ledger.play(models, seed)


@pytest.mark.parametrize("fault", range(len(FAULTS)))
@pytest.mark.slow(keep=("0", "8"))
def test_what_nobody_counts_is_noticed(models, monkeypatch, fault):
    kind, plant = FAULTS[fault]
    plant(monkeypatch, kind)
    with pytest.raises(ledger.Uncounted):
        for seed in dict.fromkeys((*TELLING, *range(1, 30))):
            ledger.play(models, seed)


def test_a_closed_run_holds_nothing_and_keeps_its_json(models):
    simulator = Simulator()
    system = simulated_system(simulator, limits=ledger.LIMITS)
    settings: Any = {"dtype": "float32", "budget": 64, "system": system}
    with as_on_a_gpu(), simulator:
        engine = Engine.load(models / "target", models / "draft", device="cpu", **settings)
        counted = ledger.Ledger(engine, simulator)
        run = engine.stream(random_tokens(90), Sampling(0.0), 40, ignore_eos=True)
        for _ in range(3):
            next(run)
            counted.check("in a run")
        before = run.stats()
        run.close()
        counted.check("with a closed run")
        assert "retrieval" not in bytes_by_part(engine.held())
        for _ in engine.stream(random_tokens(40), Sampling(0.0), 4):
            counted.check("beside a closed run")
        counted.check("with a closed run that the caller still has")
    after = run.stats()
    assert {**after, "memory": None} == {**before, "memory": None}
    assert run.statistics.token_ids == after["token_ids"] and run.warnings == []


def test_a_draft_that_takes_more_than_the_target_is_planned(tmp_path):
    """As that of several ranks may, each of which has only a part of the target: while the draft reads the end of the
    text, and the retrieval cache is not there yet."""
    models = ledger.save_models(tmp_path)
    save_llama(models / "draft", seed=9, num_hidden_layers=1, hidden_size=32, intermediate_size=2048)
    simulator = Simulator()
    settings: Any = {"dtype": "float32", "budget": 2048, "block_length": 1, "draft_length": 1}
    settings["system"] = simulated_system(simulator)
    with as_on_a_gpu(), simulator:
        engine = Engine.load(models / "target", models / "draft", device="cpu", **settings)
        counted = ledger.Ledger(engine, simulator)
        for _ in engine.stream(random_tokens(500), Sampling(0.0), 4, ignore_eos=True):
            counted.check("in a run")
    assert counted.fullest > 0.8


def test_a_draft_that_reads_between_two_slices_of_another_prompt_is_planned(tmp_path):
    """The first sequence's caches are filled before its first round, when the second one's prompt is being read."""
    models = ledger.save_models(tmp_path)
    save_llama(models / "draft", seed=9, num_hidden_layers=1, hidden_size=32, intermediate_size=2048)
    simulator, taken = Simulator(), list[float]()
    settings: Any = {"dtype": "float32", "budget": 16, "resident": 0, "block_length": 1, "draft_length": 1}
    settings["system"] = simulated_system(simulator)
    with as_on_a_gpu(), simulator:
        engine = Engine.load(models / "target", models / "draft", device="cpu", **settings)
        counted = ledger.Ledger(engine, simulator)
        left = [random_tokens(length, seed=length) for length in (500, 3500)]

        def source(waits: bool) -> Request | None:
            return Request(left.pop(0), Sampling(0.0), 12, ignore_eos=True) if left else None

        run = engine.run(source, max_sequences=2, in_slices=True)
        for _ in run:
            counted.check("in a run")
            running, reading = ([one for one in run.live if one.state == state] for state in ("running", "reading"))
            if running and reading and not running[0].active.drafting_filled:
                free = run._setup.next_bytes(running, reading)
                before = simulator.live
                next(run)
                taken.append((simulator.peak - before) / free)
                assert running[0].active.drafting_filled
    assert counted.fullest > 0.8
    assert len(taken) == 1 and 0.8 < taken[0] <= 1, "what is to be free before that round"


def test_shares_of_attention_take_what_those_of_one_layer_need():
    """While an open stretch, which is longer than a block, comes behind one block more after another."""
    attention, block, stretch = BlockAttention(8, chunk_size=4), torch.zeros(2, 1, 16, 8), torch.zeros(2, 1, 32, 8)
    for closed in range(4):
        blocks = [*((16 * i, block) for i in range(closed)), (16 * closed, stretch)]
        for _layer in range(2):
            rows = QueryRows(torch.zeros(1, 2, 8), start=16 * closed + 3, window=1000, mass_rows=2)
            attention.one_by_one(rows, blocks)
    assert bytes_by_part(attention.held())["mass"] == 2 * (3 * 16 + 32) // 4 * 4


def test_of_many_rows_each_block_leaves_what_is_summed_alone():
    attention, block = BlockAttention(8, chunk_size=4), torch.zeros(2, 1, 16, 8)
    rows = QueryRows(torch.zeros(1, 300, 8), start=64, window=1000, mass_rows=2)
    _, _, parts = attention.one_by_one(rows, [(16 * i, block) for i in range(4)])
    assert [part.lse.untyped_storage().nbytes() for part in parts] == [2 * 4] * 4


def test_shares_of_layers_with_windows_are_planned_for_whole_blocks(models):
    """Which are longer than all of a short context, beside the shares of passes of several sequences together."""
    simulator = Simulator()
    settings: Any = {"dtype": "float32", "budget": 2048, "block_length": 1, "draft_length": 4}
    settings["system"] = simulated_system(simulator, limits=ledger.LIMITS)
    with as_on_a_gpu(), simulator:
        engine = Engine.load(models / "windows", models / "draft", device="cpu", **settings)
        counted = ledger.Ledger(engine, simulator)
        requests = [Request(random_tokens(90, seed=i), Sampling(0.0), 12, ignore_eos=True) for i in range(2)]
        for _ in engine.batch(requests):
            counted.check("in a batch")
    assert counted.checks


def test_a_long_prompt_takes_what_is_planned_in_layers_with_windows(models):
    """Scores of one block's keys, in float32, and rows that are normed before they are rotated."""
    simulator = Simulator()
    limits = replace(ledger.LIMITS, tiling=Tiling(1024, 256, 4096))  # more rows than the blocks of a window hold
    settings: Any = {"dtype": "float32", "budget": 64, "system": simulated_system(simulator, limits=limits)}
    with as_on_a_gpu(), simulator:
        engine = Engine.load(models / "windows", models / "draft", device="cpu", **settings)
        counted = ledger.Ledger(engine, simulator)
        for _ in engine.stream(random_tokens(3000), Sampling(0.0), 4, ignore_eos=True):
            counted.check("in an answer")
    assert 0.8 < counted.fullest <= 1


def test_what_the_device_refuses_is_not_there():
    """So there is room for less, as on a GPU, though the error has the tensor in its frames."""
    simulator = Simulator()
    with simulator:
        simulator.limit = simulator.live + 120
        with pytest.raises(torch.OutOfMemoryError) as refused:
            _ = torch.zeros(40) + 1
        assert refused.tb and simulator.live == 0
        assert torch.zeros(25).sum() == 0


def test_what_a_pool_has_lives_on_the_device_and_is_not_held_against_the_limit():
    """What leaves it is; what is freed, or goes to the host, is in neither count."""
    simulator = Simulator()
    with simulator:
        simulator.limit = 200
        outside = torch.ones(40)
        with simulator.in_pool():
            pooled = [torch.ones(100), torch.ones(30)]
            simulator.memory(torch.ones(250))  # for a moment
            simulator.borrow(2000)
        assert (simulator.live, simulator.taken, simulator.peak) == (680, 160, 2680)
        with pytest.raises(torch.OutOfMemoryError):
            torch.ones(20).add_(1)
        with pytest.raises(torch.OutOfMemoryError):
            simulator.borrow(50)
        del outside
        simulator.out_of_pool(pooled[1])
        assert (simulator.live, simulator.taken) == (520, 120)
        simulator.out_of_pool(pooled[1])  # where it is already
        with pytest.raises(torch.OutOfMemoryError):
            simulator.out_of_pool(pooled[0])
        assert (simulator.live, simulator.taken) == (520, 120), "what is refused stays in the pool"
        del pooled[1]
        assert (simulator.live, simulator.taken) == (400, 0)
        simulator.put(simulator.memory(pooled[0]), host=True)
        assert (simulator.live, simulator.taken, len(simulator.refused)) == (0, 0, 3)


def test_behind_a_pool_is_what_was_before_it():
    """Another pool, or none, though what ran in it failed."""
    simulator = Simulator()

    def pooled():
        before = simulator.pooled
        kept.append(torch.ones(10))
        simulator.memory(kept[-1])
        return simulator.pooled - before

    kept = list[torch.Tensor]()
    with simulator:
        assert pooled() == 0
        with simulator.in_pool():
            with simulator.in_pool():
                assert pooled() == 40
            assert pooled() == 40
            with pytest.raises(RuntimeError), simulator.in_pool():
                raise RuntimeError
            assert pooled() == 40
        assert pooled() == 0
        with pytest.raises(RuntimeError), simulator.in_pool():
            raise RuntimeError
        assert pooled() == 0
        assert (simulator.live, simulator.taken) == (240, 120)


@torch.inference_mode()  # in which PyTorch says of these that they give views
def test_copies_that_might_have_been_views_are_on_the_device():
    simulator = Simulator()
    with simulator:
        numbers = torch.zeros(4, 6) + 1
        before = simulator.live
        kept = [numbers.to(torch.float64), numbers.T.contiguous(), numbers.T.reshape(24)]
        assert simulator.live - before == sum(one.nbytes for one in kept)
        kept.append(numbers.view(24))
        assert simulator.live - before == sum(one.nbytes for one in kept[:3])


@pytest.mark.parametrize("allows", [0, 1000, 40_000])
def test_nothing_is_kept_of_a_prompt_that_memory_runs_out_for(models, allows):
    """Neither activations, by the error that came through them, nor the run, once who asked has dropped both."""
    simulator = Simulator()
    system = simulated_system(simulator, limits=ledger.LIMITS)
    with ledger.without_collection(), as_on_a_gpu(), simulator:
        settings: Any = {"dtype": "float32", "budget": 64, "system": system}
        engine = Engine.load(models / "target", models / "draft", device="cpu", **settings)
        counted = ledger.Ledger(engine, simulator)
        run = engine.stream(random_tokens(90), Sampling(0.0), 4)
        kept = weakref.ref(run)
        simulator.limit = simulator.live + allows
        with suppress(CapacityError):
            next(run)
        assert simulator.refused
        simulator.limit = math.inf
        counted.check("after a run that was refused memory")
        run.close()
        del run
        assert not kept()


def test_few_sets_of_sequences_are_captured(models):
    """As many as the plan's reserve counts, though drafts of several end in any order."""
    simulator, sequences = Simulator(), 3
    settings: Any = {"budget": 64, "block_length": 12, "draft_length": 4}
    settings["system"] = simulated_system(simulator, limits=ledger.LIMITS)
    engine = Engine.load(models / "target", models / "draft", device="cpu", **settings)
    requests = [Request(random_tokens(90), Sampling(0.9), 16, ignore_eos=True) for _ in range(sequences)]
    with as_on_a_gpu(), simulator:
        engine._capture = Recorder()
        batch, most = engine.batch(requests), 0
        for _ in batch:
            for tier in batch.tiers:
                joined = tier._joined.items()
                most = max(most, sum(len(members) for members, passes in joined if passes._captures._captured))
    assert sequences <= most <= JOINED * sequences


def test_sequences_that_looked_up_are_gone_with_their_batch(models):
    """Their tiers refer to one another: what they keep must not wait for the next garbage collection."""
    simulator = Simulator()
    draft, system = f"{models / 'draft'},lookup", simulated_system(simulator, limits=ledger.LIMITS)
    engine = Engine.load(models / "target", draft, device="cpu", dtype="float32", budget=64, system=system)
    with as_on_a_gpu(), simulator:
        batch = engine.batch([Request(random_tokens(90, seed=i), Sampling(0.0), 40, ignore_eos=True) for i in range(3)])
        for _ in range(20):
            next(batch)
        batch.close()
        del batch
        simulator.peak, counted = simulator.live, ledger.Ledger(engine, simulator)
        for _ in engine.stream(random_tokens(40), Sampling(0.0), 4):
            counted.check("in the next run")
        counted.check("after the next run")
