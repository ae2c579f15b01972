"""A batch from within: passes that serve all sequences, and memory that is given back."""

import gc
import itertools
import weakref
from contextlib import suppress

import psutil
import pytest
from cuda_simulator import Simulator
from profiles import profile_name
from simulated_gpu import as_on_a_gpu, simulated_system
from tiny import greedy_oracle, random_tokens
from triforce.offload import Request, Sampling
from triforce.offload.held import held_bytes
from triforce.offload.system import System
from triforce.offload.transfer.make import make_blocks
from triforce.tp import CapacityError
from triforce.tp.decoder import Decoder

TAIL_ROWS = 1024
"""Behind the last whole 4,096 tokens of a prompt, what prompts share is a multiple of these (docs/exactness.md)."""

GREEDY = Sampling(temperature=0.0)

BOOK = random_tokens(2 * TAIL_ROWS + 300, seed=3)
"""What prompts begin with."""


def test_a_pass_serves_all_sequences(models, monkeypatch):
    """Weights are read once a step, whatever the number of sequences."""
    calls: list[tuple[bool, int]] = []
    forward = Decoder.forward

    def counted(self, token_ids, cache, **options):
        calls.append((self.config.num_layers == 1, token_ids.shape[0]))
        return forward(self, token_ids, cache, **options)

    monkeypatch.setattr(Decoder, "forward", counted)
    settings = {"draft_length": 2, "block_length": 3}
    engine = models.engine("llama", **settings)
    requests = [Request([*BOOK[:300], i], GREEDY, 12, ignore_eos=True) for i in range(5)]
    batch = engine.batch(requests)
    for _ in range(5):
        next(batch)
    calls.clear()
    rounds = [next(batch) for _ in range(5)]
    assert sorted(index for index, _ in rounds) == list(range(5))
    verifications = [rows for small, rows in calls if not small and rows >= 5 * 4]
    assert len(verifications) == 1 and verifications[0] == 5 * 4
    batch.close()


@pytest.mark.slow
def test_sequences_that_leave_give_back_what_they_held(models):
    """Blocks and descriptors return to where they were."""
    import os

    from triforce.offload.caches.full import FullCache

    def alive() -> int:
        gc.collect()
        return sum(isinstance(thing, FullCache) for thing in gc.get_objects())

    engine = models.engine("llama")
    batch = engine.batch([Request(BOOK, GREEDY, 400, ignore_eos=True)])
    next(batch)
    before, files = alive(), len(os.listdir("/proc/self/fd"))
    for i in range(30):
        batch.add(Request([*BOOK, i], Sampling(1.0, seed=i), 1 + i % 5))
        next(batch)
        if i % 7 == 3:
            batch.end(i)
    while any(sequence.state != "ended" for sequence in batch.sequences[1:]):
        next(batch)
    assert len(batch.sequences) == 31
    engine._kept.forget_all()  # what others may go on from as long as memory allows
    assert alive() == before
    assert len(os.listdir("/proc/self/fd")) <= files + 1
    rest = list(itertools.islice(batch, 3))
    assert {index for index, _ in rest} == {0}
    batch.close()


@pytest.mark.slow
def test_sequences_that_join_and_leave_give_locked_memory_back(models):
    """500 in a campaign."""
    prompt, simulator = BOOK[:300], Simulator()
    want = greedy_oracle(models["llama"][1], prompt, 14)
    settings = {"resident": 0, "block_length": 2, "draft_length": 1}
    engine = models.engine("llama", **settings, system=simulated_system(simulator))
    with as_on_a_gpu(), simulator:
        for _ in range(50 if profile_name() == "campaign" else 1):
            batch = engine.batch([Request(prompt, GREEDY, 300, ignore_eos=True)])
            next(batch)
            before, most = sum(simulator.locked.values()), 0
            for i in range(10):
                index = batch.add(Request(prompt[i:] + prompt[:40], GREEDY, 1 + i % 3, ignore_eos=True))
                while index >= len(batch.sequences) or batch.sequences[index].state != "ended":
                    next(batch)
                    most = max(most, sum(simulator.locked.values()))
                assert batch.sequences[index].error is None
            engine._kept.forget_all()  # what others may go on from as long as memory allows
            assert sum(simulator.locked.values()) == before < most
            text = batch.sequences[0].statistics.token_ids
            assert text[: len(want)] == want[: len(text)]
            batch.close()


def test_who_waits_for_memory_gets_what_the_first_one_leaves(models, monkeypatch):
    from types import SimpleNamespace

    engine = models.engine("llama", tiers=1)
    sizes = [engine.plan(1100), engine.plan(1100)]
    room = (sizes[0].kv + sizes[0].working) * 5 // 4
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=room - held()))

    def held():
        return sum(held_bytes(cache.blocks.held()) for cache in engine._kept.caches)

    prompts = [random_tokens(1080, seed=i) for i in range(3)]
    batch = engine.batch([Request(prompt, GREEDY, 8, ignore_eos=True) for prompt in prompts])
    waited = set()
    for _ in batch:
        waited |= {i for i, sequence in enumerate(batch.sequences) if (sequence.waits_for or "").startswith("memory")}
    assert waited == {1, 2}, "each in its turn"
    assert [sequence.error for sequence in batch.sequences] == [None] * 3
    for prompt, sequence in zip(prompts, batch.sequences, strict=True):
        assert sequence.statistics.token_ids == greedy_oracle(models["llama"][1], prompt, 8)


@pytest.mark.usefixtures("uncollected")
def test_a_batch_in_which_one_waited_for_memory_is_gone_when_the_next_run_begins(models):
    """Its caches would be on the device until the next garbage collection."""
    refused = [False, True]

    def make_once_refused(*given, **named):
        if refused and refused.pop(0):
            raise CapacityError("none is left")
        return make_blocks(*given, **named)

    engine = models.engine("llama", system=System(make_blocks=make_once_refused))
    batch = engine.batch([Request(random_tokens(90, seed=i), GREEDY, 4, ignore_eos=True) for i in range(2)])
    gone = weakref.ref(batch)
    waited = {index for _ in batch for index, one in enumerate(batch.sequences) if one.waits_for}
    assert waited == {1} and batch.sequences[1].error is None
    del batch
    engine.generate(random_tokens(40), GREEDY, 1)
    assert gone() is None


class Local:
    """Stands for what the caller of an engine holds, such as the run before."""


@pytest.mark.usefixtures("uncollected")
def test_a_refusal_that_was_caught_holds_nothing_of_who_caught_it(models):
    def refuse(*given, **named):
        raise CapacityError("none is left")

    def ask(engine):
        held = Local()
        with suppress(CapacityError):
            engine.generate(random_tokens(40), GREEDY, 1)
        return weakref.ref(held)

    assert ask(models.engine("llama", system=System(make_blocks=refuse)))() is None
