"""Host memory that an engine takes in advance: texts do not depend on what it held, and nothing else is taken."""

import os
import tempfile

import psutil
import pytest
import torch
from forks import Fork
from spmd import run_forks
from tiny import random_tokens
from triforce.offload import Sampling
from triforce.offload.held import held_bytes
from triforce.offload.limits import Limits, ProcessMemory
from triforce.offload.system import System
from triforce.tp import CapacityError, pages

GREEDY = Sampling(temperature=0.0)
SIZE = 48 * 2**20
BOOK = random_tokens(1500, seed=3)
PROMPTS = [[*BOOK, *random_tokens(30, seed=4)], [*BOOK, *random_tokens(20, seed=5)], random_tokens(700, seed=6)]
SYSTEM = System(limits=Limits(process=ProcessMemory(0, 0, 0)))


def in_a_fork(call):
    """Calls it in a process of its own: what is reserved stays with a process."""
    with open(os.devnull, "rb") as nothing, tempfile.TemporaryFile("w+") as out:
        fork = Fork(call, (nothing.fileno(), out.fileno(), out.fileno()), os.environ)
        try:
            code = fork.wait(120)
        finally:
            fork.kill()
        out.seek(0)
        assert code == 0, out.read()


def reserving(models, family, size=SIZE, **settings):
    """An engine whose reserve has `size` bytes."""
    weights = held_bytes(models.engine(family, **settings).held())
    return models.engine(family, host_memory=(size + weights) / 2**30, system=SYSTEM, **settings)


def texts(engine):
    """Answers to new prompts, a second turn, and an answer after all of that was freed."""
    found = [engine.generate(prompt, GREEDY, 40, ignore_eos=True).token_ids for prompt in PROMPTS]
    turn = [*PROMPTS[0], *found[0], *random_tokens(9, seed=7)]
    found.append(engine.generate(turn, GREEDY, 300, ignore_eos=True).token_ids)
    return [*found, engine.generate(PROMPTS[1], GREEDY, 40, ignore_eos=True, reuse=0).token_ids]


@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16", "tiers": 2}], ids=["three tiers", "two, bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3.5"])
def test_texts_do_not_depend_on_what_the_memory_held_before(models, family, settings):
    wanted = texts(models.engine(family, **settings))

    def check():
        engine = reserving(models, family, **settings)
        assert abs(engine.reserve_memory() - SIZE) < 2**12 and pages._reserve
        pages._reserve._memory.fill_(255)  # not a number
        assert texts(engine) == wanted
        assert pages.free_reserve() < SIZE - 2**18
        del engine

    in_a_fork(check)


def test_all_that_a_run_may_take_is_in_it(models, monkeypatch):
    """Nothing else is available on this machine."""

    def check():
        process = psutil.Process()
        engine = reserving(models, "llama")
        before = process.memory_info().rss
        size = engine.reserve_memory()
        taken = process.memory_info().rss
        assert 0.95 * SIZE < taken - before < 1.1 * SIZE
        monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 0}))
        engine.generate(random_tokens(4000, seed=9), GREEDY, 8)
        taken = process.memory_info().rss  # with what passes compute
        for seed in range(8):
            engine.generate(random_tokens(4000, seed=seed), GREEDY, 8)
        assert pages.free_reserve() < 0.5 * size  # kept for next turns, until others need it
        assert process.memory_info().rss - taken < 2**23
        engine.generate(PROMPTS[0], GREEDY, 8, reuse=0)  # frees them
        other = pages.aligned_memory((pages.free_reserve() - 2**23,), torch.uint8)
        with pytest.raises(CapacityError, match=r"a context of 4,008 tokens needs .* of memory"):
            engine.generate(random_tokens(4000), GREEDY, 8)
        del other
        engine.generate(random_tokens(4000), GREEDY, 8)
        monkeypatch.undo()

    in_a_fork(check)


def test_what_needs_one_range_is_gathered_from_several(models):
    prompt = random_tokens(4000)
    wanted = models.engine("llama").generate(prompt, GREEDY, 8).token_ids

    def check():
        engine = reserving(models, "llama")
        engine.generate(prompt, GREEDY, 8)
        size = engine.reserve_memory()
        assert pages._reserve
        pages._reserve._memory.fill_(255)
        parts = [pages.aligned_memory((2**20,), torch.uint8) for _ in range(size // 2**20)]
        kept = parts[::2]
        del parts
        free, before = pages.free_reserve(), psutil.Process().memory_info().rss
        assert engine.generate(prompt, GREEDY, 8, reuse=0).token_ids == wanted
        used = free - pages.free_reserve()
        assert used > 3 * 2**22 and psutil.Process().memory_info().rss - before < 2**22
        assert len(kept) > 8  # until here

    in_a_fork(check)


def test_without_a_limit_nothing_is_reserved(models):
    assert models.engine("llama").reserve_memory() == 0 == pages.free_reserve()


def test_ranks_share_the_limit(models):
    directory = models["llama"][0]

    def check():
        from triforce.offload import Engine

        given = {"draft": "none", "device": "cpu", "dtype": "float32", "gpus": 2}
        weights = held_bytes(Engine.load(directory, **given).held())
        engine = Engine.load(directory, **given, host_memory=(SIZE + 2 * weights) / 2**30, system=SYSTEM)
        print("reserved", engine.reserve_memory())
        engine.close()

    printed = run_forks(check, 2)
    sizes = [int(line.split()[1]) for line in printed.splitlines() if line.startswith("reserved")]
    assert len(sizes) == 2 and all(abs(size - SIZE // 2) < 2**12 for size in sizes)
