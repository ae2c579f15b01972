"""Streaming from within: blocks, the ring and what they hold, at the speed of the link, once."""

import gc
import math
import time
import weakref
from typing import Any

import pytest
import torch
from tiny import greedy_oracle, random_tokens, save_llama
from triforce.offload import Engine, Sampling
from triforce.offload.caches.full import FullCache
from triforce.offload.caches.retrieval import RetrievalCache
from triforce.offload.caches.synthetic import fill_with_zeros
from triforce.offload.transfer.device_blocks import DeviceBlocks
from triforce.offload.transfer.host_blocks import Ring
from triforce.offload.transfer.link import LinkError, ThreadLink
from triforce.offload.transfer.link import _Copy as CopyOfThread
from triforce.offload.transfer.placement import Placement
from triforce.offload.transfer.streamed_blocks import StreamedBlocks
from triforce.tp.decoder import Decoder

PROMPT = random_tokens(900, seed=3)

NEW_TOKENS = 40

GIB = 2**30


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A target's directory, a draft's, and greedy tokens according to transformers."""
    root = tmp_path_factory.mktemp("models")
    save_llama(root / "draft", seed=9, num_hidden_layers=1, hidden_size=32)
    model = save_llama(root / "target", seed=1, num_key_value_heads=2)
    return root / "target", root / "draft", greedy_oracle(model, PROMPT, NEW_TOKENS)


def load(models, **settings):
    return Engine.load(models[0], models[1], device="cpu", dtype="float32", **settings)


def blocks_of(engine) -> Any:
    """The blocks of an engine's cache, with what only tests may see."""
    return engine._kept.caches[-1].blocks


def block_bytes(engine):
    """Bytes of one block of one layer."""
    blocks = blocks_of(engine)
    return blocks.block_size * engine.target.part.kv_bytes_per_token(torch.float32) // engine.target.config.num_layers


@pytest.fixture(scope="module")
def blocks_and_bytes(models):
    """Blocks of a layer in a cache for `PROMPT`, and bytes of one."""
    probe = load(models, resident=0)
    probe.generate(PROMPT, Sampling(temperature=0.0), 1)
    return blocks_of(probe).capacity // blocks_of(probe).block_size, block_bytes(probe)


@pytest.mark.parametrize("tiers", [1, 2, 3])
@pytest.mark.parametrize("resident_blocks", [0, 1, 2])
@pytest.mark.slow(keep=("0-3", "1-2", "2-1"))
def test_streamed_tokens_equal_transformers(models, blocks_and_bytes, tiers, resident_blocks):
    num_blocks, bytes_of_one = blocks_and_bytes
    resident = resident_blocks * bytes_of_one * 3 / GIB
    engine = load(models, resident=resident, tiers=tiers, budget=64, refresh="round")
    result = engine.generate(PROMPT, Sampling(temperature=0.0), NEW_TOKENS)
    assert result.token_ids == models[2]
    assert isinstance(blocks_of(engine), StreamedBlocks)
    assert blocks_of(engine).num_resident == resident_blocks < num_blocks
    assert result.stats["link"]["bytes_streamed"] > 0


@pytest.mark.parametrize("refresh", ["round", "never", 2])
@pytest.mark.slow(keep=("round",))
def test_a_round_streams_each_block_once_and_nothing_for_the_refresh(models, refresh):
    engine = load(models, resident=0, budget=64, refresh=refresh)
    run = engine.stream(PROMPT, Sampling(temperature=0.0), NEW_TOKENS)
    run.batch.tiers[0].control.may_skip_retrieval = None  # no rest, after which chunks are read anew
    next(run)
    blocks = blocks_of(engine)
    whole_blocks = len(PROMPT) // blocks.block_size
    num_rounds = 0
    for _ in run:
        num_rounds += 1
        assert (len(PROMPT) + NEW_TOKENS) // blocks.block_size == whole_blocks, "the expectation assumes no new block"
        streamed = run.stats()["link"]["bytes_streamed"]
        assert streamed == num_rounds * whole_blocks * block_bytes(engine) * engine.target.config.num_layers
    assert num_rounds > 3


def test_a_run_that_was_replaced_but_is_still_held_copies_no_chunks_any_more(models):
    engine = load(models, resident=0, budget=64, refresh="round")
    first = engine.stream(PROMPT, Sampling(temperature=0.0), NEW_TOKENS)
    for _ in range(3):
        next(first)
    retrieval = first.sequence.active.retrieval
    assert retrieval is not None and retrieval.collector() is not None
    kept = [keys.clone() for keys, _ in retrieval._buffers]
    engine.generate(PROMPT + random_tokens(4, seed=5), Sampling(temperature=0.0), 8, tiers=1)
    (full,) = engine._kept.caches
    assert full is retrieval.source and full.collector is None
    assert all(torch.equal(keys, old) for (keys, _), old in zip(retrieval._buffers, kept, strict=True))


def test_no_buffer_leaves_twice_at_a_time_after_a_prefill_that_was_broken_off(models, monkeypatch):
    engine = load(models, resident=0, tiers=1)
    want = engine.generate(PROMPT, Sampling(temperature=0.0), 8).token_ids
    send, broken = Ring.send, []

    def interrupted(*_):
        raise KeyboardInterrupt

    def checked(ring, *arguments):
        with monkeypatch.context() as patch:
            if len(ring._leaving) == len(ring.buffers) and not broken:  # it waits for the first one
                broken.append(ring)
                patch.setattr(CopyOfThread, "wait", interrupted)
            send(ring, *arguments)
        leaving = [buffer.data_ptr() for buffer, _ in ring._leaving]
        assert len(set(leaving)) == len(leaving)

    monkeypatch.setattr(Ring, "send", checked)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(random_tokens(3 * len(PROMPT), seed=77), Sampling(temperature=0.0), 8)  # a layer fills the ring
    assert broken and engine.generate(PROMPT, Sampling(temperature=0.0), 8).token_ids == want


def test_prompt_leaves_the_device_once(models):
    engine = load(models, resident=0, tiers=1)
    engine.generate(PROMPT, Sampling(temperature=0.0), 1)
    blocks = blocks_of(engine)
    blocks._link.wait_for_stores()
    traffic = blocks.traffic()
    whole_blocks = len(PROMPT) // blocks.block_size
    assert traffic.bytes_out == whole_blocks * block_bytes(engine) * engine.target.config.num_layers
    assert traffic.bytes_in == 0


def test_the_workspace_of_a_prefill_is_gone_when_the_retrieval_cache_comes(models, monkeypatch):
    engine, found = load(models, resident=0, budget=64), []
    refresh = RetrievalCache.refresh
    monkeypatch.setattr(
        RetrievalCache,
        "refresh",
        lambda cache, **how: found.append(cache.source.blocks._workspace) or refresh(cache, **how),
    )
    run = engine.stream(PROMPT, Sampling(temperature=0.0), NEW_TOKENS)
    next(run)
    assert found == []
    next(run)  # before whose round it comes
    assert found and set(found) == {None}


@pytest.mark.parametrize("reuse", [0, None])
@pytest.mark.parametrize("resident", [0, None])
@pytest.mark.slow(keep=1)
def test_a_cache_that_is_not_wanted_any_more_is_gone_before_the_next_is_made(models, monkeypatch, resident, reuse):
    settings = {"resident": resident, "budget": 64, "refresh": "round"}
    plan = load(models, **settings).plan(2420)
    engine = load(models, **settings, host_memory=(plan.host_total + 2**16) / GIB)  # not for both
    engine.generate(
        [*PROMPT, *random_tokens(110, seed=4)], Sampling(temperature=0.0), 40
    )  # a block is closed meanwhile
    blocks = blocks_of(engine)
    memory = [host.blocks for host in blocks._host] if resident == 0 else blocks._layers
    dropped = [weakref.ref(engine._kept.caches[-1]), *(weakref.ref(part.untyped_storage()) for part in memory)]
    del memory, blocks
    assert all(part() is not None for part in dropped)
    make, found = engine._kept._make, []

    def noted(*given, **more):
        found.append([old() for old in dropped])
        return make(*given, **more)

    monkeypatch.setattr(engine._kept, "_make", noted)
    gc.disable()
    try:
        engine.generate(random_tokens(2400, seed=8), Sampling(temperature=0.0), 20, reuse=reuse)
        assert found == [[None] * len(dropped)]
    finally:
        gc.enable()


@pytest.fixture
def decoder(models):
    return Decoder.load(models[0], dtype=torch.float32, device=torch.device("cpu"))


def cache_of(decoder, link, block_size, num_resident, capacity=1400):
    given = {"dtype": torch.float32, "device": torch.device("cpu")}
    if link is None:
        blocks = DeviceBlocks(decoder.part, **given, capacity=capacity, block_size=block_size)
    else:
        blocks = StreamedBlocks(decoder.part, link, Placement.streaming(capacity, block_size, num_resident, 4), **given)
    return FullCache(decoder.part, decoder.rope, blocks, chunk_size=4)


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("steps", [[(600, 0), (5, 3), (64, 2), (70, 69), (9, 0), (600, 0), (1, 0)], [(3, 0)] * 40])
@pytest.mark.parametrize(("block_size", "num_resident"), [(64, 0), (64, 3), (128, 1)])
def test_any_steps_and_rollbacks_equal_those_of_a_cache_on_the_device(decoder, steps, block_size, num_resident):
    link = ThreadLink()
    streamed, all_on_device = cache_of(decoder, link, block_size, num_resident), cache_of(decoder, None, block_size, 0)
    tokens = torch.tensor(random_tokens(2000, seed=8))
    for n, undone in steps:
        rows = tokens[all_on_device.length : all_on_device.length + n]
        got, want = (decoder.forward(rows, cache, num_logits=min(n, 4)) for cache in (streamed, all_on_device))
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(streamed.recent_mass(1), all_on_device.recent_mass(1), atol=1e-5, rtol=1e-3)
        for cache in (streamed, all_on_device):
            cache.rollback(cache.length - undone)
    for length in (200, 70, 3):  # far back, where the open stretch does not reach
        if length < all_on_device.length:
            for cache in (streamed, all_on_device):
                cache.rollback(length)
            rows = tokens[length : length + 6]
            got, want = (decoder.forward(rows, cache, num_logits=6) for cache in (streamed, all_on_device))
            torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    link.close()


@pytest.mark.alone
@pytest.mark.slow
def test_verification_takes_as_long_as_its_bytes_on_the_link(tmp_path):
    """A model whose computation is smaller than its transfers: many key/value heads, hardly any weights. The least time
    of up to 12 passes: what else the machine does comes on top of the floor, never off it."""
    shape = {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64, "hidden_size": 32}
    save_llama(tmp_path, num_hidden_layers=4, intermediate_size=16, max_position_embeddings=40000, **shape)
    decoder = Decoder.load(tmp_path, dtype=torch.float32, device=torch.device("cpu"))
    bytes_per_s = 0.25e9  # a pass of 2 s, of which a slow machine's overhead is a small part
    link = ThreadLink(bytes_per_s)
    cache: Any = cache_of(decoder, link, block_size=2048, num_resident=0, capacity=8 * 2048)
    fill_with_zeros(cache, 7 * 2048)
    link.wait_for_stores()
    ring = cache.blocks._ring
    ring_bytes = sum(buffer.numel() * buffer.element_size() for buffer in ring.buffers)
    rows = torch.tensor([1, 2, 3, 4, 5])
    floor = 4 * 7 * 2048 * 2 * 16 * 64 * 4 / bytes_per_s
    seconds = []
    while len(seconds) < 12 and min(seconds, default=math.inf) > 1.05 * floor:
        before = link.traffic()
        began = time.perf_counter()
        decoder.forward(rows, cache)
        seconds.append(time.perf_counter() - began)
        assert link.traffic().since(before).bytes_in == floor * bytes_per_s
        cache.rollback(7 * 2048)
    assert floor <= min(seconds) <= 1.05 * floor, f"{min(seconds):.3f} s for a floor of {floor:.3f} s"
    assert len(ring.buffers) == 3
    assert ring_bytes == 3 * 2048 * 2 * 16 * 64 * 4
    link.close()


def test_failing_copy_is_the_error_of_the_run(models):
    engine = load(models, resident=0)
    run = engine.stream(PROMPT, Sampling(temperature=0.0), NEW_TOKENS)
    next(run)
    next(run)  # the retrieval cache is there
    blocks = blocks_of(engine)
    blocks._link.wait_for_stores()
    blocks._host[1].blocks = blocks._host[1].blocks[..., :-1]  # what cannot be copied to a block
    with pytest.raises(LinkError, match="KV cache"):
        list(run)
