"""With the compiled kernels a row's bits depend on nothing but the row, wherever its keys and values live."""

import pytest
import torch
from tiny import random_tokens, save_llama
from triforce.kernels import Level, cpu_level
from triforce.offload.caches.full import FullCache
from triforce.offload.transfer.link import ThreadLink
from triforce.offload.transfer.placement import Placement
from triforce.offload.transfer.streamed_blocks import StreamedBlocks
from triforce.tp.decoder import Decoder

pytestmark = pytest.mark.skipif(
    cpu_level() < Level.AVX512_BF16, reason="the compiled kernels are not installed, or not for this CPU"
)

PROMPT = random_tokens(700, seed=3)


@pytest.mark.parametrize("streamed", [False, True])
def test_rows_verified_together_are_those_decoded_alone(tmp_path, streamed):
    save_llama(tmp_path, seed=1, num_key_value_heads=2, head_dim=64)
    decoder = Decoder.load(tmp_path, dtype=torch.bfloat16, device=torch.device("cpu"))
    given = {"dtype": torch.bfloat16, "device": decoder.device}
    tokens = torch.tensor(PROMPT + random_tokens(60, seed=5))

    def make() -> FullCache:
        if not streamed:
            return FullCache.on_device(decoder.part, decoder.rope, **given, capacity=900, chunk_size=8)
        blocks = StreamedBlocks(decoder.part, ThreadLink(), Placement.streaming(900, 64, 1, 8), **given)
        return FullCache(decoder.part, decoder.rope, blocks, chunk_size=8)

    together, alone = make(), make()
    for cache in (together, alone):
        decoder.forward(tokens[:700], cache)
    position = 700
    for n in (1, 2, 13, 32):
        got = decoder.forward(tokens[position : position + n], together, num_logits=n)
        want = torch.cat([decoder.forward(tokens[i : i + 1], alone) for i in range(position, position + n)])
        assert torch.equal(got, want), f"{n} rows together differ from each alone"
        position += n
