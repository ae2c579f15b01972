"""Captured passes are gone when an engine closes or a process ends, whoever still holds a run: NCCL waits for them."""

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from recorder import PROMPT, Recorder, recorded_engine
from tiny import random_tokens
from tiny_caches import retrieval_cache
from triforce.offload import Sampling
from triforce.offload.graphs.cuda import CudaCapture
from triforce.offload.graphs.passes import Graphs, Passes
from triforce.tp.parallel import ranks as ranks_module
from triforce.tp.parallel.ranks import Ranks


class Careless(Recorder):
    """Leaves its captured functions to whoever holds them."""

    def clear(self):
        pass


def started(engine):
    run = engine.stream(PROMPT, Sampling(temperature=0.0), 60)
    for _ in range(6):
        next(run)
    return run


@pytest.mark.parametrize("kind", [Recorder, Careless])
@pytest.mark.slow(keep=("Careless",))
def test_close_leaves_no_captured_pass_alive_whoever_holds_the_run(pairs, kind):
    engine, _ = recorded_engine(pairs["llama"])
    engine._capture = recorder = kind()
    run = started(engine)
    assert recorder.alive >= 2
    engine.close()
    gc.collect()
    assert recorder.alive == 0
    assert len(recorder._tapes) == 0
    assert len(run.statistics.token_ids) > 6, "what it found is still there"


@pytest.mark.slow
def test_another_run_leaves_no_captured_pass_of_the_one_before(pairs):
    engine, recorder = recorded_engine(pairs["llama"])
    runs = [started(engine)]
    before = recorder.pieces
    runs.append(started(engine))
    gc.collect()
    assert recorder.pieces > before
    assert len(recorder._tapes) <= recorder.pieces - before


def test_passes_run_as_they_come_once_they_are_cleared(decoder):
    graphs = Graphs(recorder := Recorder())
    passes, plain = Passes(decoder, retrieval_cache(decoder), graphs), Passes(decoder, retrieval_cache(decoder))
    for step, token in enumerate(torch.tensor(random_tokens(6)).split(1)):
        if step == 4:
            graphs.clear()
        assert torch.allclose(passes.forward(token), plain.forward(token), atol=1e-5)
    assert recorder.counts == {"warm_ups": 1, "captures": 1, "replays": 3}
    assert graphs.failure is None


class Pair(Ranks):
    """Two ranks that agree."""

    def sum(self, x, kind="all_reduce"):
        return x


@pytest.mark.parametrize("end", [ranks_module._leave, Pair(0, 2).leave], ids=["at exit", "leave"])
def test_captured_passes_are_gone_before_the_group_ends(decoder, monkeypatch, end):
    recorder, ranks, alive = Recorder(), Pair(0, 2), []
    passes = Passes(decoder, retrieval_cache(decoder), Graphs(recorder, ranks))
    for token in torch.tensor(random_tokens(3)).split(1):
        passes.forward(token)
    assert recorder.alive == 1
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: alive.append(recorder.alive))
    end()
    assert alive == [0]


def test_what_waits_for_a_group_to_end_is_not_kept_alive_by_that():
    graphs = Graphs(Recorder(), Pair(0, 2))
    there = weakref.ref(graphs)
    del graphs
    gc.collect()
    assert there() is None
    ranks_module._leave()


class FakeGraph:
    def __init__(self):
        self.resets = 0

    def reset(self):
        self.resets += 1
        if self.resets == 1 and self.fails:
            raise RuntimeError("no such pool")

    fails = False


def test_graphs_that_broke_are_reset_too(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    good, broken, released = FakeGraph(), FakeGraph(), FakeGraph()
    released.fails = True
    capture: Any = CudaCapture.__new__(CudaCapture)
    capture._device, capture._graphs = torch.device("cuda"), weakref.WeakSet([good])
    monkeypatch.setattr(CudaCapture, "_broken", [released, broken])
    capture.clear()
    assert (good.resets, broken.resets, released.resets) == (1, 1, 1)


def test_what_is_done_before_ranks_part_does_not_grow_by_a_run():
    before = len(ranks_module._before_leaving)
    for _ in range(20):
        Graphs(Recorder(), Ranks(0, 2, 2))
    assert len(ranks_module._before_leaving) <= before + 1
