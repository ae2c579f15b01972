"""With the compiled kernels a row's bits depend on nothing but the row: in bfloat16, too, a text is the same however
many tokens, up to 31, are proposed and verified at a time."""

import pytest
import torch
from tiny import random_tokens, save_llama
from triforce.kernels import Level, cpu_level
from triforce.offload import Engine, Sampling

pytestmark = pytest.mark.skipif(
    cpu_level() < Level.AVX512_BF16, reason="the compiled kernels are not installed, or not for this CPU"
)

GREEDY = Sampling(temperature=0.0)
PROMPT = random_tokens(700, seed=3)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    save_llama(root / "draft", seed=9, num_hidden_layers=1, hidden_size=32, head_dim=32)
    save_llama(root / "target", seed=1, num_key_value_heads=2, head_dim=64)
    return root / "target", root / "draft"


@pytest.fixture(scope="module", params=[None, 0.0])
def resident(request):
    return request.param


@pytest.fixture(scope="module")
def token_by_token(pair, resident):
    torch.set_num_threads(1)
    engine = Engine.load(*pair, device="cpu", dtype="bfloat16", tiers=1, resident=resident)
    return engine.generate(PROMPT, GREEDY, 200).token_ids


@pytest.mark.parametrize(
    ("draft_length", "block_length", "budget"), [(1, 3, 64), (4, 12, 64), (None, None, 64), (8, 31, 1024)]
)
def test_bfloat16_text_is_the_one_decoded_token_by_token(
    pair, token_by_token, draft_length, block_length, budget, resident
):
    """With a budget of 1024 the retrieval cache holds all of the text, and tokens of all rows of a block are accepted;
    with 64 nearly all are rejected."""
    engine = Engine.load(
        *pair,
        device="cpu",
        dtype="bfloat16",
        budget=budget,
        draft_length=draft_length,
        block_length=block_length,
        resident=resident,
    )
    assert engine.generate(PROMPT, GREEDY, 200).token_ids == token_by_token
