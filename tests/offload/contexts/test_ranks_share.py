"""A context that two ranks wrote, one reads, and the other way round: bit for bit the keys and values written."""

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, cast

import pytest
import torch
from held_kv import kv_digests, reused_kv
from hooked_disk import HookedDisk
from safetensors.torch import load_file
from spmd import run_jobs
from tiny import save_llama
from tiny_contexts import MARKER, NAME, NEW_TOKENS, TEXT, assert_whole, store_at
from triforce.offload import ContextRequest, ContextStore, Engine, Sampling
from triforce.offload.contexts.manifest import Manifest
from triforce.offload.contexts.saver import HeldHeads, SaveOrder
from triforce.offload.contexts.segments.contents import Shape
from triforce.offload.contexts.use import ContextUse
from triforce.tp.parallel.ranks import Ranks

RECENT_ROWS = 8
"""Tokens of a prompt that are computed again where all of it was there."""

SHAPES = {"mha": {}, "gqa": {"num_key_value_heads": 2}, "mqa": {"num_key_value_heads": 1}}
"""With two ranks: two KV heads to each, one, and one that both hold."""

REUSED = len(TEXT) - RECENT_ROWS


def ask_alone(model, root, read=False):
    """What one rank answers and holds."""
    engine = Engine.load(model, "none", device="cpu", dtype="float32", store=store_at(root))
    if read:
        engine.read(TEXT, NAME)
    result = engine.generate(TEXT, Sampling(0.0), NEW_TOKENS, contexts=ContextRequest(name=NAME))
    assert result.stats["reused_tokens"] == REUSED and result.stats["warnings"] == []
    return result.token_ids, kv_digests(engine, REUSED)


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory):
    """Of each shape: what one rank held that wrote and what two then held; what two held that wrote and one then; and
    the place of what two wrote. With the tokens they answered."""
    place = tmp_path_factory.mktemp("exchanged")
    for name, changes in SHAPES.items():
        save_llama(place / name, seed=1, num_hidden_layers=2, **changes)
    alone = {name: ask_alone(place / name, place / f"{name}-by-one", read=True) for name in SHAPES}
    same = {"draft": "none", "prompt": TEXT, "new_tokens": NEW_TOKENS, "context": NAME}
    jobs = []
    for name in SHAPES:
        jobs.append(same | {"model": str(place / name), "store": str(place / f"{name}-by-one")})
        jobs.append(same | {"model": str(place / name), "store": str(place / f"{name}-by-two"), "read": NAME})
    reports = iter(run_jobs(jobs, 2, reused_kv))
    found = {}
    for name in SHAPES:
        restored, written = (
            (ranks[0]["token_ids"], ranks[0]["kv"] | ranks[1]["kv"], ranks) for ranks in (next(reports), next(reports))
        )
        for *_, ranks in (restored, written):
            assert all(rank["reused_tokens"] == REUSED and not rank["warnings"] for rank in ranks)
            shared = ranks[0]["kv"].keys() & ranks[1]["kv"].keys()
            assert all(ranks[0]["kv"][head] == ranks[1]["kv"][head] for head in shared)
        root = place / f"{name}-by-two"
        found[name] = alone[name], restored[:2], written[:2], ask_alone(place / name, root), root
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_restored_is_what_was_written_whoever_wrote_it(exchanged, shape):
    by_one, by_one_then_two, by_two, by_two_then_one, root = exchanged[shape]
    assert by_one_then_two[1] == by_one[1]
    assert by_two_then_one[1] == by_two[1]
    assert by_one[0] == by_one_then_two[0] == by_two[0] == by_two_then_one[0]
    assert_whole(root)


@pytest.mark.parametrize(("shape", "parts"), [("mha", [(0, 2), (2, 4)]), ("gqa", [(0, 1), (1, 2)]), ("mqa", [(0, 1)])])
def test_each_rank_writes_its_heads_and_one_of_them_what_both_hold(exchanged, shape, parts):
    root = exchanged[shape][-1]
    for segment in store_at(root).load(NAME).segments:
        assert [part.kv_heads for part in segment.parts] == parts
        for part in segment.parts:
            heads = load_file(root / NAME / part.file)["layer.0"].shape[0]
            assert heads == part.kv_heads[1] - part.kv_heads[0]


class _ThreadRank:
    """One of two ranks that are threads of this process: what `ContextUse` needs of `Ranks`."""

    size = 2

    def __init__(self, rank, meeting, values):
        self.rank, self._meeting, self._values = rank, meeting, values

    def _gather(self, value):
        self._values[self.rank] = value
        self._meeting.wait(20)
        found = list(self._values)
        self._meeting.wait(20)
        return found

    def least(self, numbers, *, patiently=False):
        return [min(of_each) for of_each in zip(*self._gather(numbers), strict=True)]

    def share(self, value, *, patiently):
        assert patiently, "disks take any time"
        return self._gather(value)[0]


def waits_for(steps):
    for work in steps:
        wait([work], 0.01)  # another rank may have failed meanwhile


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("writes", [1, 3, 99])
def test_a_rank_that_cannot_write_holds_up_no_other(tmp_path, failing, writes):
    """After so many files that rank's disk is full: both ranks go on without saving, and both say so."""
    shape, tokens = Shape(1, 2, 8, "float32"), list(range(256))
    manifest = Manifest("model", "f" * 32, shape, len(tokens), 0.0, segment_tokens=64)
    order = SaveOrder(tmp_path / "book", manifest, tokens, "cafe", ((0, 1), (1, 2)))
    meeting, values = threading.Barrier(2), [None, None]

    class Cache:
        length = 0
        computed_with = staticmethod(lambda first, stop: (None,))

        states = None
        holds_segment = staticmethod(lambda first, stop: True)
        export = staticmethod(lambda layer, start, stop: lambda: [torch.zeros(2, 1, stop - start, 8)])

        class blocks:
            drain = staticmethod(lambda: None)

    def run(rank):
        left = [writes if rank == failing else 99]

        def hook(kind, path, *_):
            left[0] -= kind == "create" and path.name != MARKER
            if left[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        store = ContextStore(tmp_path, segment_tokens=64, disk=HookedDisk(hook))
        ranks = cast(Ranks, _ThreadRank(rank, meeting, values))
        use, cache = ContextUse(store, ranks, HeldHeads(rank, rank + 1, True), None, order), cast(Any, Cache())
        waits_for(use.begin(cache))
        for end in use.stops(0, len(tokens)):
            cache.length = end
            waits_for(use.save(cache))
        use.finish(together=True)
        return use.warnings

    with ThreadPoolExecutor(2) as pool:
        warnings = [one.result(60) for one in [pool.submit(run, rank) for rank in (0, 1)]]
    assert [bool(of_rank) for of_rank in warnings] == [writes < 99] * 2, warnings
    assert [wrong for _, wrong in ContextStore(tmp_path).verify("book") if wrong] == []
