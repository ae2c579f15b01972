"""Packed contexts: what is saved packed is what would be saved raw, old contexts stay, and ranks share both."""

import ctypes
import json
import random

import pytest
import torch
import xxhash
from context_campaigns import power_cuts
from decoded import decoded_context
from held_kv import kv_digests, reused_kv
from profiles import profile_name
from spmd import run_jobs
from tiny import save_llama
from tiny_contexts import NAME, NEW_TOKENS, TEXT, assert_whole, store_at
from triforce.kernels import use_kernels
from triforce.kernels.cpu.library import loaded
from triforce.offload import ContextRequest, Engine, Sampling
from triforce.offload.contexts import manifest as manifests
from triforce.tp import UsageError

RECENT_ROWS = 8
"""Tokens of a prompt that are computed again where all of it was there."""

LONGER = [*TEXT, *TEXT[:90]]


def engine_on(tiny, root, pack, dtype="bfloat16", **settings):
    return Engine.load(tiny.model, "none", device="cpu", dtype=dtype, store=store_at(root), pack=pack, **settings)


def same_bits(one, other):
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(one, other, strict=True))


def restored(engine, tokens):
    """Keys and values of the first tokens of the cache that the last run used, by layer."""
    engine._kept.caches[-1].blocks.drain()
    blocks = engine._kept.caches[-1].blocks
    return [torch.cat(blocks.export(layer, 0, tokens)(), dim=2) for layer in range(engine.target.config.num_layers)]


@pytest.fixture(scope="module")
def places(tiny, tmp_path_factory):
    """Stores of the same text in bfloat16, raw and packed."""
    place = tmp_path_factory.mktemp("packed")
    for pack in ("off", "on"):
        engine_on(tiny, place / pack, pack).read(TEXT, NAME)
    return place


def test_packed_and_raw_are_the_same_keys_and_values(tiny, places):
    assert same_bits(decoded_context(places / "on" / NAME), decoded_context(places / "off" / NAME))
    raw, packed = (store_at(places / pack).load(NAME) for pack in ("off", "on"))
    assert raw.packed_segments == 0 and packed.packed_segments == len(packed.segments) == 3
    for pack in ("off", "on"):
        assert_whole(places / pack)
        engine = engine_on(tiny, places / pack, "auto")
        engine.generate(TEXT, Sampling(0.0), 1, contexts=ContextRequest(NAME))
        tokens = len(TEXT) - RECENT_ROWS
        want = [layer[:, :, :tokens].contiguous() for layer in decoded_context(places / pack / NAME)]
        assert same_bits(restored(engine, tokens), want)


@pytest.mark.parametrize("resident", [None, 0.0, 1e-4])
@pytest.mark.parametrize("stop", [64, 65, 128, 149])
def test_a_part_is_restored_to_wherever_it_lies(tiny, places, resident, stop):
    engine = engine_on(tiny, places / "on", "on", resident=resident, tiers=1)
    prompt = [*TEXT[:stop], *[5] * RECENT_ROWS]
    stats = engine.generate(prompt, Sampling(0.0), 1, contexts=ContextRequest(NAME)).stats
    assert stats["reused_tokens"] >= stop and not stats["warnings"]
    want = [layer[:, :, :stop].contiguous() for layer in decoded_context(places / "on" / NAME)]
    assert same_bits(restored(engine, stop), want)


@pytest.mark.parametrize(("first", "then"), [("off", "on"), ("on", "off")])
def test_a_context_that_grows_keeps_its_segments_as_they_are(tiny, tmp_path, first, then):
    engine_on(tiny, tmp_path, first).read(TEXT, NAME)
    before = decoded_context(tmp_path / NAME)
    grown = engine_on(tiny, tmp_path, then).read(LONGER, NAME)
    assert [segment.packed for segment in grown.segments] == [first == "on"] * 2 + [then == "on"] * 2
    assert_whole(tmp_path, LONGER)
    now = decoded_context(tmp_path / NAME)
    assert same_bits([layer[:, :, : len(TEXT)].contiguous() for layer in now], before)


def test_a_context_of_an_earlier_version_is_read(tiny, places, tmp_path):
    """Its manifest says format 1, and nothing of packing."""
    engine_on(tiny, tmp_path, "off").read(TEXT, NAME)
    path = tmp_path / NAME / "manifest.json"
    raw = json.loads(path.read_bytes())
    assert raw.pop("format") == 1 and raw.pop("checksum")
    for segment in raw["segments"]:
        del segment["packed"]
    described = {"format": 1, **raw}
    checksum = xxhash.xxh3_128_hexdigest(json.dumps(described, sort_keys=True).encode())
    path.write_text(json.dumps(described | {"checksum": checksum}))
    assert_whole(tmp_path)
    engine_on(tiny, tmp_path, "on").read(LONGER, NAME)
    assert json.loads(path.read_bytes())["format"] == 2 < manifests.VERSION
    assert_whole(tmp_path, LONGER)


def test_float32_is_saved_as_before_and_cannot_be_packed(tiny, tmp_path):
    engine_on(tiny, tmp_path, "auto", "float32").read(TEXT, NAME)
    assert json.loads((tmp_path / NAME / "manifest.json").read_bytes())["format"] == 1
    for dtype in ("float32", "float16"):
        with pytest.raises(UsageError, match=f"'on', but keys and values would be in {dtype}.*--pack auto"):
            engine_on(tiny, tmp_path, "on", dtype)
    with pytest.raises(UsageError, match="pack is 'maybe'; it is auto, on or off"):
        engine_on(tiny, tmp_path, "maybe")


@pytest.fixture
def no_library(monkeypatch):
    """The compiled kernels cannot be loaded, in any thread."""

    def refused(_):
        raise OSError("no such library")

    loaded.cache_clear()
    with monkeypatch.context() as patch, use_kernels(attention="plain", layers="plain"):
        patch.setattr(ctypes, "CDLL", refused)
        assert loaded() is None
        yield
    loaded.cache_clear()


@pytest.mark.usefixtures("no_library")
def test_without_compiled_kernels_nothing_is_packed_unless_asked_for_and_all_is_read(tiny, places, tmp_path):
    engine_on(tiny, tmp_path / "auto", "auto").read(TEXT, NAME)
    assert store_at(tmp_path / "auto").load(NAME).packed_segments == 0
    asked = engine_on(tiny, tmp_path / "on", "on")
    asked.read(TEXT, NAME)
    assert store_at(tmp_path / "on").load(NAME).packed_segments == 3
    engine = engine_on(tiny, places / "on", "auto")
    engine.generate(TEXT, Sampling(0.0), NEW_TOKENS, contexts=ContextRequest(NAME))
    tokens = len(TEXT) - RECENT_ROWS
    want = [layer[:, :, :tokens].contiguous() for layer in decoded_context(places / "on" / NAME)]
    assert same_bits(restored(engine, tokens), want)


def test_what_two_ranks_packed_one_reads_and_the_other_way_round(tmp_path):
    model = tmp_path / "gqa"
    save_llama(model, seed=1, num_hidden_layers=2, num_key_value_heads=2)
    one, two = tmp_path / "one", tmp_path / "two"
    alone = Engine.load(model, "none", device="cpu", dtype="bfloat16", store=store_at(one), pack="on")
    alone.read(TEXT, NAME)
    same = {"model": str(model), "draft": "none", "dtype": "bfloat16", "prompt": TEXT, "new_tokens": NEW_TOKENS}
    same |= {"context": NAME, "settings": {"pack": "on"}}
    jobs = [same | {"store": str(one)}, same | {"store": str(two), "read": NAME}]
    by_one, by_two = run_jobs(jobs, 2, reused_kv)
    tokens = len(TEXT) - RECENT_ROWS
    assert by_one[0]["kv"] | by_one[1]["kv"] == kv_digests(alone, tokens)
    assert [part.kv_heads for part in store_at(two).load(NAME).segments[0].parts] == [(0, 1), (1, 2)]
    assert store_at(two).load(NAME).packed_segments == 3
    reader = Engine.load(model, "none", device="cpu", dtype="bfloat16", store=store_at(two))
    result = reader.generate(TEXT, Sampling(0.0), NEW_TOKENS, contexts=ContextRequest(NAME))
    assert result.stats["reused_tokens"] == tokens and not result.stats["warnings"]
    assert by_two[0]["kv"] | by_two[1]["kv"] == kv_digests(reader, tokens)
    assert_whole(two)


@pytest.mark.slow
def test_packed_contexts_survive_power_cuts(tiny_packed, tmp_path):
    every = 1 if profile_name() == "campaign" else 29
    assert power_cuts(tiny_packed, tmp_path, 0, every).failed == 0


@pytest.mark.parametrize("seed", range(4))
def test_a_packed_context_is_whole_after_random_readings(tiny_packed, tmp_path, seed):
    rng = random.Random(seed)
    for stop in sorted(rng.sample(range(1, len(TEXT)), 4)):
        tiny_packed.read(tmp_path, TEXT[:stop])
        assert tiny_packed.ask(tmp_path) == "whole"
    tiny_packed.read(tmp_path)
    assert_whole(tmp_path)
