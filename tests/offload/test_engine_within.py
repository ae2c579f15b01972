"""An engine from within: lengths that adapt, and the cache that it keeps between runs."""

import json
import os

import pytest
from spmd import run_forks
from tiny import random_tokens, save_llama
from triforce.offload import ContextError, Engine, Sampling
from triforce.offload.speculation.drafting_pays import PROBE_EVERY
from triforce.offload.speculation.lengths import Acceptance, PassCost
from triforce.offload.system import System
from triforce.offload.transfer.link import MEASURED_BYTES, ThreadLink, Traffic
from triforce.offload.transfer.make import make_blocks
from triforce.offload.transfer.placement import block_size_for
from triforce.tp import CapacityError


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    save_llama(root / "target", seed=1)
    save_llama(root / "draft", seed=2, num_hidden_layers=1)
    return root / "target", root / "draft"


@pytest.mark.parametrize(("accepted", "shortest", "longest"), [(0, 0, 1), (995, 8, 8)])
def test_adapted_lengths_follow_acceptance(pair, accepted, shortest, longest):
    run = Engine.load(*pair, device="cpu").stream(random_tokens(200), Sampling(), 60)
    verify, retrieval, draft = (tier.control for tier in run.batch.tiers)
    for control in (verify, retrieval):
        control.acceptance = Acceptance(accepted=accepted, tested=1000)
    draft.cost = PassCost(retrieval.cost.base / 100, 0.0)
    verify.choose_lengths()
    assert shortest <= retrieval.draft_tokens <= longest
    assert (verify.draft_tokens <= 1) == (accepted == 0)


def test_an_engine_that_was_not_loaded_from_files_does_not_take_a_text_for_saved(pair):
    loaded = Engine.load(pair[0], "none", device="cpu")
    engine = Engine(loaded.target, None, loaded.settings)
    for read in (engine.read, engine.reading):
        with pytest.raises(ContextError, match="not loaded from files"):
            read(random_tokens(200), "book")


def test_a_tier_that_stopped_drafting_tries_again_at_times_without_a_clock(pair):
    run = Engine.load(*pair, device="cpu").stream(random_tokens(200), Sampling(seed=1), 60)
    verify, retrieval, draft = (tier.control for tier in run.batch.tiers)
    retrieval.adapts_to_time = False
    retrieval.acceptance = Acceptance(accepted=0, tested=1000)
    draft.cost = PassCost(retrieval.cost.base, 0.0)
    tries = []
    for _ in range(300):
        retrieval.counts.passes += 11  # passes of a round; not a divisor of the interval
        verify.choose_lengths()
        tries.append(retrieval.draft_tokens)
    assert set(tries) == {0, 1}
    assert sum(tries) == pytest.approx(300 * 11 / PROBE_EVERY, rel=0.3)


class MeasuredLink(ThreadLink):
    """A link that says it has carried so much, at so many bytes a second."""

    def __init__(self, carried, speed):
        super().__init__()
        self._said = Traffic(bytes_in=carried, busy_s=carried / speed)

    def traffic(self):
        return self._said


SLOW = 1e4
"""Bytes a second: what streams takes seconds, and nothing else does."""


def expected(model, carried, speed, **settings):
    """What a verification is expected to take once the prompt is read, what is streamed for it, and the tokens."""
    system = System(make_link=lambda device, gbps: MeasuredLink(carried, speed))
    engine = Engine.load(model, "none", device="cpu", dtype="float32", resident=0, budget=64, **settings, system=system)
    run = engine.stream(random_tokens(900), Sampling(temperature=0.0), 8, ignore_eos=True)
    tokens = list(next(run).tokens)
    found = run.batch.tiers[0].control.cost.seconds(1), engine.plan(908).streamed_per_pass
    for event in run:
        tokens += event.tokens
    engine.close()
    return *found, tokens


def test_a_run_starts_from_the_link_that_was_measured(pair):
    seconds, streamed, tokens = expected(pair[0], MEASURED_BYTES, SLOW)
    assert seconds == pytest.approx(streamed / SLOW) and streamed
    unmeasured, _, same = expected(pair[0], MEASURED_BYTES - 1, SLOW)
    assert unmeasured < seconds / 100 and same == tokens


def test_of_several_ranks_the_slowest_link_counts(pair):
    def call():
        speed = SLOW if os.environ["RANK"] == "1" else 4 * SLOW
        os.write(1, (json.dumps(expected(pair[0], MEASURED_BYTES, speed, gpus=2)) + "\n").encode())

    first, second = (json.loads(line) for line in run_forks(call, 2).splitlines() if line.startswith("["))
    assert first == second
    assert first[0] == pytest.approx(first[1] / SLOW)


def test_a_cache_grows_for_a_longer_run_and_keeps_what_is_shared(pair):
    engine = Engine.load(*pair, device="cpu", dtype="float32", budget=64)
    greedy = Sampling(temperature=0.0)
    short, long = random_tokens(90), random_tokens(1500)
    engine.generate(short, greedy, 10)
    small = engine._kept.caches[-1]
    grown = engine.generate(long, greedy, 10)
    assert engine._kept.caches[-1] is not small
    assert grown.stats["reused_tokens"] == 90
    assert engine._kept.caches[-1].blocks.block_size == block_size_for(1510, 8)
    fresh = Engine.load(*pair, device="cpu", dtype="float32", budget=64).generate(long, greedy, 10)
    assert grown.token_ids == fresh.token_ids
    engine.generate(random_tokens(50, seed=5), greedy, 10)
    assert engine._kept.caches[-1].capacity < 1500, "nothing is shared, so a short run gets a cache of its own size"


def test_a_cache_that_finds_no_memory_beside_the_one_before_takes_its_place(pair):
    greedy, made = Sampling(temperature=0.0), []

    def make_one(*given, **named):
        made.append(not engine._kept.caches)
        if engine._kept.caches:
            raise CapacityError("no memory is left beside it")
        return make_blocks(*given, **named)

    system = System(make_blocks=make_one)
    engine = Engine.load(*pair, device="cpu", dtype="float32", budget=64, system=system)
    engine.generate(random_tokens(90), greedy, 10)
    grown = engine.generate(random_tokens(1500), greedy, 10)
    assert made == [True, False, True] and grown.stats["reused_tokens"] == 0
    fresh = Engine.load(*pair, device="cpu", dtype="float32", budget=64).generate(random_tokens(1500), greedy, 10)
    assert grown.token_ids == fresh.token_ids


def test_room_for_more_keeps_a_cache_in_its_place(pair):
    prompt = random_tokens(300)
    tight, roomy = (Engine.load(*pair, device="cpu", dtype="float32", room=room) for room in (0, 2000))
    places = set()
    for length in range(20, 300, 40):
        found = [engine.generate(prompt[:length], Sampling(temperature=0.0), 8) for engine in (tight, roomy)]
        assert found[0].token_ids == found[1].token_ids
        places.add(id(roomy._kept.caches[-1]))
    cache = roomy._kept.caches[-1]
    assert len(places) == 1 and cache.capacity >= 300 + 8
    most = roomy.target.config.max_position_embeddings
    roomy.generate(random_tokens(most - 8, seed=2), Sampling(temperature=0.0), 8, reuse=0)
    cache = roomy._kept.caches[-1]
    assert cache.capacity < most + 64, "no more room than the model has positions"
