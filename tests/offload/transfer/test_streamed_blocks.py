"""What streamed blocks ask of the link (no memory of their own to send a block, and no block that no row sees), and how
they give what they hold to attention."""

from typing import Any

import pytest
import torch
from tiny import random_tokens, save_family
from triforce.offload.caches.full import FullCache
from triforce.offload.transfer.device_blocks import DeviceBlocks
from triforce.offload.transfer.link import LinkError, ThreadLink
from triforce.offload.transfer.placement import Placement
from triforce.offload.transfer.streamed_blocks import StreamedBlocks
from triforce.tp.decoder import Decoder

CPU = torch.device("cpu")
SIZE = 64


@pytest.fixture
def link():
    link = ThreadLink()
    yield link
    link.close()


@pytest.fixture(scope="module", params=["llama", "mistral-window"])
def decoder(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    save_family(directory, request.param)
    return Decoder.load(directory, dtype=torch.float32, device=CPU)


def cache_of(decoder, link, num_resident=0) -> Any:
    given = {"dtype": torch.float32, "device": CPU}
    if link is None:
        blocks = DeviceBlocks(decoder.part, **given, capacity=1400, block_size=SIZE)
    else:
        blocks = StreamedBlocks(decoder.part, link, Placement.streaming(1400, SIZE, num_resident, 4), **given)
    return FullCache(decoder.part, decoder.rope, blocks, chunk_size=4)


@pytest.mark.slow(keep=1)
def test_a_block_that_becomes_whole_leaves_through_the_rings_buffers(decoder, link, monkeypatch):
    cache, sources = cache_of(decoder, link), []
    store = link.store
    monkeypatch.setattr(link, "store", lambda source, target: sources.append(source) or store(source, target))
    tokens = torch.tensor(random_tokens(1300))
    for start in range(0, 1200, 50):  # never a prefill
        decoder.forward(tokens[start : start + 50], cache)
    buffers = {buffer.data_ptr() for buffer in cache.blocks._ring.buffers}
    assert len(sources) >= 3 * 1100 // SIZE
    assert {source.data_ptr() for source in sources} <= buffers


@pytest.mark.parametrize("num_resident", [0, 3])
@pytest.mark.slow(keep=1)
def test_a_pass_streams_the_blocks_that_its_rows_see_and_no_others(decoder, link, num_resident):
    cache, other = cache_of(decoder, link, num_resident), cache_of(decoder, None)
    tokens = torch.tensor(random_tokens(1200))
    for each in (cache, other):
        decoder.forward(tokens[:1100], each)
    block_bytes = SIZE * decoder.part.kv_bytes_per_token(torch.float32) // decoder.config.num_layers
    for start, stop in ((1100, 1105), (1105, 1106), (1106, 1170)):
        before = link.traffic()
        got, want = (decoder.forward(tokens[start:stop], each, num_logits=stop - start) for each in (cache, other))
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        whole, seen = start // SIZE, 0
        for layer in range(decoder.config.num_layers):
            window = decoder.config.sliding_window(layer) or start + 1
            seen += sum(1 for i in range(num_resident, whole) if (i + 1) * SIZE > start + 1 - window)
        assert link.traffic().since(before).bytes_in == seen * block_bytes
    windows = [decoder.config.sliding_window(layer) for layer in range(decoder.config.num_layers)]
    assert not any(windows) or seen < decoder.config.num_layers * (whole - num_resident)


def test_a_pass_that_is_broken_off_leaves_the_ring_to_blocks_that_leave(decoder, link):
    cache, other = cache_of(decoder, link), cache_of(decoder, None)
    tokens = torch.tensor(random_tokens(1200))
    for each in (cache, other):
        decoder.forward(tokens[:630], each)
    cache.blocks.prepare(630, 1)  # copies begin, and nobody takes them
    for start, stop in ((630, 700), (700, 705), (705, 790), (790, 795)):
        got, want = (decoder.forward(tokens[start:stop], each) for each in (cache, other))
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_a_pass_in_several_parts_attends_to_all_that_came_before_in_each(decoder, link):
    """Of fewer rows than the room behind an open block."""
    cache, other = cache_of(decoder, link), cache_of(decoder, None)
    tokens = torch.tensor(random_tokens(1300))
    for start, stop in ((0, 900), (900, 1250), (1250, 1255)):  # parts end at 1,024
        got, want = (decoder.forward(tokens[start:stop], each, num_logits=4) for each in (cache, other))
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_a_store_that_failed_is_the_error_of_the_next_pass(decoder, link):
    cache = cache_of(decoder, link)
    decoder.forward(torch.tensor(random_tokens(700)), cache)
    link.store(torch.zeros(4), torch.zeros(3))
    with pytest.raises(LinkError):
        decoder.forward(torch.tensor([1]), cache)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_resident", [0, 3])
def test_a_prefill_attends_to_all_that_came_before(decoder, link, num_resident, dtype):
    """In 16 bits in one piece, where a flash kernel starts once."""
    given = {"dtype": dtype, "device": CPU}
    placement = Placement.streaming(1400, SIZE, num_resident, 4)
    streamed: Any = StreamedBlocks(decoder.part, link, placement, **given)
    plain: Any = DeviceBlocks(decoder.part, **given, capacity=1400, block_size=SIZE)
    start = 0
    for stop in (520, 530, 1100, 1101):  # prefills, the second of which takes up what is there, and steps
        n = stop - start
        for blocks in (streamed, plain):
            blocks.prepare(start, n)
        for layer in range(decoder.config.num_layers):
            k, v = torch.randn(2, decoder.part.num_kv_heads, n, decoder.part.head_dim).to(dtype)
            found = []
            for blocks in (streamed, plain):
                blocks.append(layer, start, k, v)
                if n <= 512:  # a step, which leaves out what a window hides
                    list(blocks.pieces(layer, 0, stop))
                    continue
                pieces = [(position, piece.clone()) for position, piece in blocks.pieces(layer, 0, stop)]
                pieces.sort(key=lambda piece: piece[0])
                found.append(torch.cat([piece for _, piece in pieces], dim=2)[:, :, :stop])
                if blocks is streamed:
                    assert len(pieces) == (1 if dtype == torch.bfloat16 else -(-stop // SIZE))
            assert not found or torch.equal(*found)
        start = stop
