"""Host memory that an engine takes in advance: texts do not depend on what it held, and nothing else is taken."""

import ctypes
import gc
import os
import tempfile
from types import SimpleNamespace

import psutil
import pytest
import torch
from forks import Fork, resident
from spmd import run_forks
from tiny import random_tokens
from triforce.offload import Engine, Sampling
from triforce.offload.limits import LIMITS, Limits, ProcessMemory
from triforce.offload.system import System
from triforce.tp import CapacityError, pages
from triforce.tp.pages import HUGE_PAGE
from triforce.tp.rope import rope_bytes

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


def reserving(models, family, **settings):
    """An engine whose reserve has `SIZE` bytes."""
    size = SIZE + beside_reserve(models.engine(family, system=SYSTEM, **settings)) + 2**12
    return models.engine(family, host_memory=size / 2**30, system=SYSTEM, **settings)


def beside_reserve(engine):
    """The bytes of weights, and of RoPE's tables of all positions, with some more in the last block of a cache."""
    config = engine.target.config
    return engine.plan(100).weights + rope_bytes(config, config.max_position_embeddings + LIMITS.largest_block)


def texts(engine):
    """Answers to new prompts, a second turn, and an answer after all of that was freed."""
    found = [engine.generate(prompt, GREEDY, 40, ignore_eos=True).token_ids for prompt in PROMPTS]
    turn = [*PROMPTS[0], *found[0], *random_tokens(9, seed=7)]
    found.append(engine.generate(turn, GREEDY, 300, ignore_eos=True).token_ids)
    return [*found, engine.generate(PROMPTS[1], GREEDY, 40, ignore_eos=True, reuse=0).token_ids]


SETTINGS = {
    "three tiers": {},
    "two, bfloat16": {"dtype": "bfloat16", "tiers": 2},
    "streamed": {"resident": 0.0, "link_gbps": 50.0},
    "packed": {"resident": 0.0, "dtype": "bfloat16", "pack": "on"},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3.5"])
def test_texts_do_not_depend_on_what_the_memory_held_before(models, family, settings):
    wanted = texts(models.engine(family, **settings))

    def check():
        engine = reserving(models, family, **settings)
        assert engine.reserve_memory() == SIZE and pages._reserve
        pages._reserve._memory.fill_(255)  # not a number
        assert texts(engine) == wanted
        assert pages.free_reserve() < SIZE - 2**18 or (family != "llama" and "pack" in settings)

    in_a_fork(check)


def test_all_that_a_run_may_take_is_in_it(models, monkeypatch):
    """Little else is available on this machine: what passes take."""

    libc = ctypes.CDLL(None)

    def check():
        engine = reserving(models, "llama")
        engine.target.rope.reserve(1)  # what is run for the first time is read into memory
        gc.collect()  # else what loading has left might go meanwhile
        libc.malloc_trim(0)  # likewise, what tests before have left of the heap
        before = resident()
        size = engine.reserve_memory()
        taken = resident()
        assert 0.95 * SIZE < taken - before < 1.1 * SIZE
        system = SimpleNamespace(available=2**25)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: system)
        for seed in range(8):
            engine.generate(random_tokens(4000, seed=seed), GREEDY, 8)
            found = [one for part, one in engine._kept.held() if part == "resident_kv"]
            assert found and pages._reserve and all(map(pages._reserve.has, found))
        assert pages.free_reserve() < 0.5 * size  # kept for next turns, until others need it
        system.available = 2**21  # passes cannot take what is free in the reserve
        with pytest.raises(CapacityError, match=r"a context of 4,008 tokens needs .* of memory"):
            engine.generate(random_tokens(4000), GREEDY, 8, reuse=0)
        system.available = 2**25
        engine.generate(random_tokens(4000), GREEDY, 8)
        monkeypatch.undo()

    in_a_fork(check)


def test_what_needs_one_range_is_exchanged_for_several(models):
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
        free = pages.free_reserve()
        assert engine.generate(prompt, GREEDY, 8, reuse=0).token_ids == wanted
        used = free - pages.free_reserve()
        assert used > 3 * 2**22 and len(pages._reserve._exchanged) == 3  # one for each layer
        assert len(kept) > 8  # until here

    in_a_fork(check)


@pytest.mark.parametrize("chunk_size", [8, 24])
def test_tables_of_all_positions_are_computed_at_once(models, chunk_size):
    """Blocks of whole chunks of 24 end beyond the last position."""

    def check():
        engine = reserving(models, "llama", chunk_size=chunk_size)
        assert engine.reserve_memory() == SIZE
        before = [table.data_ptr() for _, table in engine.target.rope.held()]
        engine.generate(random_tokens(4000), GREEDY, 96)
        assert [table.data_ptr() for _, table in engine.target.rope.held()] == before
        held = [table for model in (engine.target, engine.draft) for _, table in model.rope.held()]
        assert engine.plan(100).rope == engine.plan(4000).rope == sum(table.nbytes for table in held)

    in_a_fork(check)


SMALL = 7 * 2**19
"""Bytes that a limit leaves beside the weights, of which tables of all positions take more than an eighth."""


def test_tables_that_would_take_too_much_of_the_limit_are_for_as_many_tokens_as_fit(models):
    def check():
        engine = models.engine("llama", system=SYSTEM)
        limit = engine.plan(100).weights + SMALL
        engine = models.engine("llama", host_memory=limit / 2**30, system=SYSTEM)
        config = engine.target.config
        most = config.max_position_embeddings
        assert 8 * rope_bytes(config, most) > SMALL
        assert engine.reserve_memory() > 0
        (positions,) = {len(table) for _, table in engine.target.rope.held()}
        fitting = SMALL // (config.kv_bytes_per_token(torch.float32) + rope_bytes(config, 1))
        assert positions == fitting + LIMITS.largest_block < most + LIMITS.largest_block

    in_a_fork(check)


def test_without_a_limit_nothing_is_reserved(models):
    assert models.engine("llama").reserve_memory() == 0 == pages.free_reserve()


def test_memory_is_reserved_once(models):
    def check():
        reserving(models, "llama").reserve_memory()
        with pytest.raises(RuntimeError, match="once"):
            reserving(models, "llama").reserve_memory()

    in_a_fork(check)


NEEDED = 2**22
"""A run needs more than so much memory besides its caches."""


@pytest.mark.parametrize("beside", [0, SIZE // 4])
def test_what_is_not_available_is_not_reserved(models, monkeypatch, beside):
    """A sixteenth, what a run takes besides, and what the caller will take are left."""

    def check():
        engine = reserving(models, "llama")
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=SIZE))
        assert SIZE / 2 - beside < engine.reserve_memory(beside) < SIZE * 15 / 16 - NEEDED - beside

    in_a_fork(check)


def test_where_little_is_available_nothing_is_reserved(models, monkeypatch):
    engine = reserving(models, "llama")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**20))
    assert engine.reserve_memory() == 0 == pages.free_reserve()


def run_two_ranks(models, monkeypatch, limit, available):
    """The bytes that each of two ranks reserves, and the bytes of the reserve that are available afterwards.

    Args: `limit` is that of both in bytes, and `available` what the system has, by rank.
    """
    directory = models["llama"][0]

    def check():
        given = {"draft": "none", "device": "cpu", "dtype": "float32", "gpus": 2}
        engine = Engine.load(directory, **given, host_memory=limit / 2**30, system=SYSTEM)
        system = SimpleNamespace(available=available[engine.target.ranks.rank])
        monkeypatch.setattr(psutil, "virtual_memory", lambda: system)
        size = engine.reserve_memory()
        print("reserved", size, pages.available_memory(2) - system.available // 2)
        engine.close()

    lines = run_forks(check, 2).splitlines()
    return [[int(word) for word in line.split()[1:]] for line in lines if line.startswith("reserved")]


def test_ranks_share_the_limit(models, monkeypatch):
    engine = models.engine("llama")
    found = run_two_ranks(models, monkeypatch, SIZE + 2 * beside_reserve(engine), [2**40, 2**40])
    assert len(found) == 2 and found[0] == found[1] and found[0][0] == found[0][1]
    assert SIZE // 2 - HUGE_PAGE <= found[0][0] < SIZE // 2 + 2 * engine.plan(100).weights


def test_ranks_share_what_the_system_has(models, monkeypatch):
    found = run_two_ranks(models, monkeypatch, 20 * SIZE, [4 * SIZE, 2 * SIZE])
    assert len(found) == 2 and found[0] == found[1] and found[0][0] == found[0][1]
    assert SIZE / 2 < found[0][0] < SIZE * 15 / 16 - NEEDED
