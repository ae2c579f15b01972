"""What of a KV cache exceeds host memory is on a disk: the same tokens, clear errors, and nothing left behind."""

import json
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from spmd import run_jobs
from tiny import greedy_oracle, random_tokens, save_llama
from triforce.kernels.packing import packs_fast
from triforce.offload import Engine, Request, Sampling
from triforce.offload.limits import Limits, ProcessMemory
from triforce.offload.planning.memory import plan_here
from triforce.offload.system import System
from triforce.offload.transfer.staged.block_file import DiskError, DiskSpace
from triforce.tp import CapacityError, UsageError

PROMPT = random_tokens(1700, seed=3)
NEW_TOKENS = 24
GREEDY = Sampling(temperature=0.0)
GIB = 2**30
ROOM = 1.45e6 / GIB
"""In which one block of each layer is resident."""


SMALL = System(limits=Limits(process=ProcessMemory(0, 0, 0), largest_block=256, disk_buffers=8))
"""Where the tiny models' cache is what counts."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A target's directory, a draft's, greedy tokens according to transformers, and transformers' model."""
    root = tmp_path_factory.mktemp("models")
    save_llama(root / "draft", seed=9, num_hidden_layers=1, hidden_size=32)
    model = save_llama(root / "target", seed=1, num_hidden_layers=8, max_position_embeddings=4096)
    return root / "target", root / "draft", greedy_oracle(model, PROMPT, NEW_TOKENS), model


@pytest.fixture(scope="module")
def wide_models(tmp_path_factory):
    """The same with heads that the compiled kernels compute, which give the same bits wherever blocks are."""
    root = tmp_path_factory.mktemp("wide")
    save_llama(root / "draft", seed=9, num_hidden_layers=1, hidden_size=32, head_dim=32)
    save_llama(root / "target", seed=1, num_hidden_layers=8, max_position_embeddings=4096, head_dim=32)
    return root / "target", root / "draft"


def load(models, **settings) -> Any:
    settings = {"dtype": "float32", "budget": 64, "block_length": 6, "system": SMALL} | settings
    return Engine.load(models[0], models[1], device="cpu", **settings)


def least(models, **settings):
    """The GiB that a run needs at least, with all of its cache on a disk but for the newest tokens."""
    engine = load(models, **settings)
    request = engine._models.request(len(PROMPT) + NEW_TOKENS, answer=NEW_TOKENS)
    request = replace(request, settings=replace(request.settings, host_memory=0.0))
    plan = plan_here(request, engine.target.device, free_disk=lambda: GIB)
    assert not plan.fits and not plan.resident_kv
    return plan.host_total / GIB


@pytest.fixture(scope="module")
def little(models):
    """GiB of memory in which a seventh of the cache has room."""
    return least(models) + ROOM


def unrested(engine, new_tokens=NEW_TOKENS):
    """A run whose retrieval caches are kept up in every round, and not read anew after a rest."""
    run = engine.stream(PROMPT, GREEDY, new_tokens)
    run.batch.tiers[0].control.may_skip_retrieval = None
    list(run)
    return run


@pytest.mark.parametrize("tiers", [1, 2, 3])
@pytest.mark.slow(keep=2)
def test_tokens_from_a_disk_equal_those_of_transformers(models, tiers):
    engine = load(models, host_memory=least(models, tiers=tiers) + ROOM, tiers=tiers, refresh="round")
    stats = unrested(engine).stats()
    assert stats["token_ids"] == models[2]
    on_disk, resident = stats["settings"]["disk_bytes"], stats["settings"]["resident_bytes"]
    assert on_disk > 3 * resident > 0
    rounds = stats["rounds"]
    assert stats["disk"]["bytes_read"] == rounds * (stats["disk"]["bytes_read"] // rounds) > 0
    assert stats["disk"]["gb_per_s"] > 0 and stats["link"]["bytes_streamed"] == 0


@pytest.mark.parametrize("options", [{"resident": 0}, {"resident": 0, "link_gbps": 50.0}, {"dtype": "bfloat16"}])
@pytest.mark.slow(keep=1)
def test_host_memory_disk_and_a_link_together_give_the_same_tokens(models, wide_models, options):
    """With blocks in memory that stream over a link, and blocks on a disk that do so after they were read."""
    models = wide_models if "dtype" in options else models
    want = unrested(load(models, **{**options, "link_gbps": None, "resident": None})).statistics.token_ids
    for pack in ("off", "on", "auto") if "dtype" in options else ("off",):
        given = options | {"pack": pack}
        room = 2 * ROOM if "resident" in options else ROOM  # the last block is not full, and does not stream
        found = load(models, **given, host_memory=least(models, **given) + room)
        got = unrested(found).stats()
        assert got["token_ids"] == want
        packed = {"off": False, "on": True, "auto": packs_fast(torch.device("cpu"))}[pack]
        assert got["settings"]["disk_bytes"] and got["settings"]["packed"] == packed
        if pack == "off":  # blocks that do not pack are in memory
            assert bool(got["link"]["bytes_streamed"]) == ("resident" in options)


def test_follow_ups_longer_ones_too_find_their_book_on_the_disk(models, little):
    engine = load(models, host_memory=little)
    first = engine.generate(PROMPT, GREEDY, NEW_TOKENS)
    for question in (random_tokens(20, seed=5), random_tokens(350, seed=6)):
        prompt = PROMPT + first.token_ids[:18] + question
        again = engine.generate(prompt, GREEDY, NEW_TOKENS // 2)
        assert again.token_ids == greedy_oracle(models[3], prompt, NEW_TOKENS // 2)
        assert again.stats["settings"]["disk_bytes"]
        if len(question) == 20:
            assert again.stats["reused_tokens"] >= len(PROMPT)


def test_a_saved_context_goes_to_the_disk_and_comes_from_there(models, little, monkeypatch, tmp_path):
    monkeypatch.setenv("TRIFORCE_HOME", str(tmp_path / "home"))
    engine = load(models, host_memory=little)
    engine.read(PROMPT, "book")
    again = load(models, host_memory=little, context="book")
    stats = again.generate([*PROMPT, 5, 6, 7], GREEDY, NEW_TOKENS).stats
    assert stats["token_ids"] == greedy_oracle(models[3], [*PROMPT, 5, 6, 7], NEW_TOKENS)
    assert stats["context"] == "book" and stats["reused_tokens"] > 500 and stats["settings"]["disk_bytes"]
    names = sorted(entry.name for entry in (tmp_path / "home" / "contexts").iterdir())
    assert "book" in names and all(name.startswith(".") or name == "book" for name in names)


def test_several_sequences_share_what_is_on_the_disk(models, little):
    questions = [random_tokens(n, seed=n) for n in (9, 60, 20)]
    engine = load(models, host_memory=little)
    batch = engine.batch([Request(PROMPT + question, GREEDY, 12, ignore_eos=True) for question in questions])
    list(batch)
    assert batch.stats()["disk"]["bytes_read"] > 0
    for sequence, question in zip(batch.sequences, questions, strict=True):
        assert sequence.statistics.token_ids == greedy_oracle(models[3], PROMPT + question, 12)


def test_too_little_memory_is_an_error_that_says_how_much_is_enough(models):
    enough = least(models)
    with pytest.raises(CapacityError, match=r"on disk\), but --host-memory leaves it .*give --host-memory .* or more"):
        load(models, host_memory=enough / 2).generate(PROMPT, GREEDY, 4)
    with pytest.raises(CapacityError, match=r"--host-memory leaves it 0\.0 MiB; give --host-memory .* or more"):
        load(models, host_memory=0.0).generate(PROMPT, GREEDY, 4)
    with pytest.raises(UsageError, match="host-memory is -1"):
        load(models, host_memory=-1.0)


def test_a_disk_without_room_is_an_error_that_says_so(models, little, monkeypatch):
    engine = load(models, host_memory=little)
    monkeypatch.setattr(engine._kept.disk, "free_bytes", lambda: 1000)
    with pytest.raises(CapacityError, match=r"of disk space .*exceeds host memory"):
        engine.generate(PROMPT, GREEDY, 4)


def test_what_was_written_before_a_disk_failed_is_kept_and_the_engine_can_go_on(models, little, monkeypatch):
    engine = load(models, host_memory=little, block_length=2)
    run = engine.stream(PROMPT, GREEDY, NEW_TOKENS)
    tokens = next(run).tokens + next(run).tokens

    def fail(*_):
        raise OSError(5, os.strerror(5))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        with pytest.raises(DiskError, match="Input/output error"):
            list(run)
    assert run.statistics.token_ids[: len(tokens)] == tokens == models[2][: len(tokens)]
    assert engine.generate(PROMPT, GREEDY, NEW_TOKENS).token_ids == models[2]


def test_a_slow_disk_is_mentioned(models, little):
    engine = load(models, host_memory=little)
    assert not engine.generate(PROMPT, GREEDY, 9).stats["warnings"]
    engine = load(models, host_memory=little)
    engine._kept.disk = DiskSpace(engine._kept.disk.folder, slow=1e15, known_after=1)
    stats = engine.generate(PROMPT, GREEDY, 9).stats
    (warning,) = stats["warnings"]
    assert "MB/s" in warning and "each GiB" in warning and json.dumps(stats)


@pytest.mark.slow
def test_two_ranks_share_memory_and_disk(models):
    settings = {"budget": 64, "resident": 0.0, "host_memory": 0.7, "system": SMALL}
    job = {"model": str(models[0]), "draft": str(models[1]), "prompt": PROMPT, "new_tokens": NEW_TOKENS}
    (reports,) = run_jobs([job | {"settings": settings}], 2)
    assert [report["token_ids"] for report in reports] == [models[2]] * 2


def test_memory_that_suffices_leaves_the_disk_alone(models):
    stats = load(models, host_memory=8.0).generate(PROMPT, GREEDY, NEW_TOKENS).stats
    assert stats["settings"]["disk_bytes"] == stats["disk"]["bytes_read"] == 0 and stats["disk"]["gb_per_s"] is None
    assert torch.get_num_threads() >= 1
