"""Blocks that stream packed are those that would stream raw, bit for bit, in three quarters of the bytes."""

import random
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from oracles import kv_block
from tiny import random_tokens, save_llama
from tiny_caches import SIZE, Twin, Twins, bits
from triforce.kernels.packing import pack
from triforce.offload import Engine, Request, Sampling
from triforce.offload.transfer.host_blocks import Overflow, PackedBlocks, RawBlocks
from triforce.offload.transfer.host_memory import HostMemory
from triforce.offload.transfer.link import ThreadLink
from triforce.offload.transfer.placement import block_slot
from triforce.tp.decoder import Decoder
from triforce.tp.errors import CapacityError
from triforce.tp.model.config import ModelConfig

CPU = torch.device("cpu")


@pytest.fixture
def link():
    link = ThreadLink()
    yield link
    link.close()


@pytest.fixture(scope="module")
def part(tmp_path_factory) -> ModelConfig:
    directory = tmp_path_factory.mktemp("model")
    save_llama(directory, num_key_value_heads=2, num_hidden_layers=2)
    return Decoder.load(directory, dtype=torch.bfloat16, device=CPU).part


@pytest.mark.parametrize("kind", ["normal", "some zeros", "any bits"])
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.slow(keep=9)
def test_packed_blocks_are_the_raw_ones_whatever_is_done_with_them(part, link, kind, seed):
    chance = random.Random(seed)
    made = (Twin(packed=True), Twin(packed=True, together=chance.choice([2, 3, 8])), Twin())
    twins = Twins(part, link, chance.choice([0, 1, 3]), kind, seed, made)
    for _ in range(14):
        twins.step()
    for blocks in twins.all:
        blocks.drain()
    for packed in twins.all[:2]:
        held = sum(len(host._raw) for host in packed._host)
        assert held + len(packed._overflow._free) == packed._overflow.blocks, "memory that is not used any more is kept"
        assert kind != "normal" or not packed._overflow.blocks


@pytest.mark.parametrize("kind", ["normal", "any bits"])
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.slow(keep=4)
def test_blocks_that_leave_the_device_are_those_that_stay(part, link, kind, seed):
    made = (Twin(spare=9), Twin(packed=True, together=4, spare=2), Twin())
    twins = Twins(part, link, random.Random(seed).choice([1, 3, 8]), kind, seed, made)
    for _ in range(20):
        twins.step()
    twins.add(60)


def test_a_block_that_does_not_pack_stays_on_the_device_if_there_is_no_memory_for_it(part, link, monkeypatch):
    twins = Twins(part, link, 3, "any bits", 1, (Twin(packed=True, spare=2), Twin()))
    twins.add(5 * SIZE)
    packed, _ = twins.all
    spare = packed.footprint.spare
    with monkeypatch.context() as full:
        full.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=0))
        assert packed.offload(1) == 0 and packed.footprint.spare == spare
    twins.same(lambda blocks: [torch.cat(blocks.export(1, 0, twins.length)(), dim=2)])
    twins.add(30)
    assert packed.offload(1) == spare // 2
    twins.add(30)


@pytest.mark.parametrize("resident", [0, 3])
def test_packed_blocks_cross_the_link_in_three_quarters_of_the_bytes(part, link, resident):
    twins = Twins(part, link, resident, "normal", 1)
    twins.add(1300)
    crossed = []
    for blocks in twins.all:
        before = link.traffic()
        blocks.prepare(1300, 1)
        for layer in range(part.num_layers):
            blocks.append(layer, 1300, *twins.kv[:, layer, :, 1300:1301])
            list(blocks.pieces(layer, 0, 1301))
        crossed.append(link.traffic().since(before).bytes_in)
    away = (1300 // SIZE - resident) * part.num_layers
    slot = block_slot(part.num_kv_heads, SIZE, part.head_dim).slot_bytes
    assert crossed == [away * slot, away * SIZE * part.kv_bytes_per_token(torch.bfloat16) // part.num_layers]
    assert crossed[0] < 0.775 * crossed[1]
    host = [twins.all[0]._host[0]._slots.nbytes, twins.all[1]._host[0].blocks.nbytes]
    assert host[0] < 0.775 * host[1]


@pytest.mark.parametrize("kind", ["normal", "any bits"])
def test_packed_blocks_cross_the_link_several_at_once_unless_one_does_not_pack(part, link, kind):
    twins = Twins(part, link, 1, kind, 1, (Twin(packed=True, together=4),))
    twins.add(11 * SIZE)  # ten of each layer are not on the device
    (blocks,) = twins.all
    blocks.prepare(twins.length, 1)
    blocks.append(0, twins.length, *twins.kv[:, 0, :, twins.length : twins.length + 1])
    pieces = [(at, piece.shape[2]) for at, piece in blocks.pieces(0, 0, twins.length + 1)]
    streamed = [SIZE * count for count in ((4, 4, 2) if kind == "normal" else (1,) * 10)]
    lengths = [SIZE, *streamed, blocks._open[0].shape[2]]
    assert pieces == list(zip(accumulate([0, *lengths[:-1]]), lengths, strict=True))


def test_no_copy_crosses_from_one_piece_of_locked_memory_to_the_next(part, link):
    """Which pieces may be: whole multiples of `MOST_TOGETHER` blocks."""
    slots = link.host_memory((20, block_slot(2, 64, 16).slot_bytes), torch.uint8)
    shape = (2, 2, 64, 16)
    host = PackedBlocks(slots, Overflow(HostMemory(link), shape, torch.bfloat16), shape)
    assert [host.together(index, 4) for index in range(20 - 4)] == [min(4, 8 - index % 8) for index in range(20 - 4)]
    crosses = host.at(8, 4)
    assert isinstance(crosses, torch.Tensor)
    assert crosses.data_ptr() == slots[8].data_ptr() and crosses.shape == slots[8:12].shape


def test_a_block_that_does_not_pack_takes_memory_only_as_long_as_it_is_there(link):
    shape = (2, 2, 64, 16)
    overflow = Overflow(HostMemory(link), shape, torch.bfloat16)
    slots = link.host_memory((3, block_slot(2, 64, 16).slot_bytes), torch.uint8)
    host, buffer = PackedBlocks(slots, overflow, shape), torch.zeros(shape, dtype=torch.bfloat16)
    fits, odd = kv_block("normal", shape, 1), kv_block("any bits", shape, 2)
    for index, block in ((0, odd), (1, fits), (0, fits), (2, odd), (2, odd), (0, odd)):
        source, target = host.leave(index, block, buffer)
        assert isinstance(target, torch.Tensor)
        target.copy_(source)
        assert torch.equal(bits(host.read(index, index + 1)[0]), bits(block))
        crosses = host.at(index)
        assert isinstance(crosses, torch.Tensor)
        assert crosses.dtype == (torch.bfloat16 if block is odd else torch.uint8)
    assert overflow.blocks == 2 and not overflow._free


def test_no_memory_for_a_block_that_does_not_pack_is_said(link, monkeypatch):
    class Nothing:
        available = 0

    monkeypatch.setattr(psutil, "virtual_memory", Nothing)
    with pytest.raises(CapacityError, match=r"1 blocks of the KV cache cannot be packed.*--pack off"):
        Overflow(HostMemory(link), (2, 2, 64, 16), torch.bfloat16).take()


def test_what_is_gathered_from_packed_blocks_is_what_is_gathered_from_raw_ones(link):
    shape = (2, 3, 128, 32)
    blocks = torch.stack([kv_block(kind, shape, 3) for kind in ("normal", "any bits", "some zeros", "far below")])
    raw = RawBlocks(blocks)
    packed = PackedBlocks(link.host_memory((4, block_slot(3, 128, 32).slot_bytes), torch.uint8),
                          Overflow(HostMemory(link), shape, torch.bfloat16), shape)  # fmt: skip
    packed.write(blocks)
    assert pack(blocks.flatten(1, 2))[1].tolist()[:2] == [True, False]
    for chunk_size in (1, 8, 24, 64, 128):
        chunks = torch.randint(4 * 128 // chunk_size, (3, 50), generator=torch.Generator().manual_seed(chunk_size))
        if 128 % chunk_size == 0:
            got, want = (one.gather(chunks, chunk_size) for one in (packed, raw))
            assert torch.equal(bits(got), bits(want))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    save_llama(root / "draft", seed=9, num_hidden_layers=1, hidden_size=32)
    save_llama(root / "target", seed=1, num_key_value_heads=2, head_dim=32)
    return root / "target", root / "draft"


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.slow(keep=3)
def test_a_run_that_streams_packed_writes_the_tokens_of_one_that_streams_raw(models, seed):
    rng = random.Random(seed)
    settings = {
        "tiers": rng.choice([1, 2, 3]),
        "budget": rng.choice([32, 128]),
        "chunk_size": rng.choice([1, 8, 16]),
        "block_length": rng.choice([1, 6, 30]),
        "draft_length": rng.choice([1, 4]),
        "refresh": rng.choice(["round", 3, "never"]),
        "resident": rng.choice([0, 0, 1e-4]),
    }
    sampling = rng.choice([Sampling(0.0), Sampling(rng.choice([0.7, 1.1]), 0.95, 0, seed)])
    text = random_tokens(rng.choice([300, 800, 1500, 2600]), seed=seed)
    questions = [random_tokens(rng.choice([3, 40, 600]), seed=seed + 1), random_tokens(20, seed=seed + 2)]
    found = []
    for pack_it in ("on", "off"):
        engine = Engine.load(*models, device="cpu", dtype="bfloat16", pack=pack_it, **settings)
        runs = [engine.generate(text + question, sampling, 40, ignore_eos=True).stats for question in questions]
        found.append([(run["token_ids"], run["reused_tokens"], run["acceptance"]) for run in runs])
        streamed = runs[-1]["link"]["bytes_streamed"]
        found[-1].append(streamed)
    assert found[0][:-1] == found[1][:-1]
    assert found[0][-1] <= 0.775 * found[1][-1] or not found[1][-1]


@pytest.mark.parametrize("tiers", [1, 2, 3])
@pytest.mark.slow(keep=1)
def test_sequences_that_share_a_text_share_its_packed_blocks(models, tiers):
    text, found = random_tokens(1900, seed=4), []
    requests = [Request(text + random_tokens(n, seed=n), Sampling(0.0), 24, ignore_eos=True) for n in (9, 60, 700)]
    for pack_it in ("on", "off"):
        settings: Any = {"tiers": tiers, "resident": 0, "budget": 128, "block_length": 6, "draft_length": 2}
        engine = Engine.load(*models, device="cpu", dtype="bfloat16", pack=pack_it, refresh="round", **settings)
        batch = engine.batch(requests)
        list(batch)
        statistics = [sequence.statistics for sequence in batch.sequences]
        found.append([one.token_ids for one in statistics])
        assert batch.document(1)["settings"]["packed"] == (pack_it == "on")
        batch.close()
    assert found[0] == found[1] and all(len(tokens) == 24 for tokens in found[0])
