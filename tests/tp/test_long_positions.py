"""RoPE a million positions on: the tables are transformers' bit for bit, and so are the logits within 1e-4."""

from pathlib import Path

import pytest
import torch
from tiny import random_tokens, save_family
from torch import Tensor
from transformers import AutoModelForCausalLM
from triforce.offload.caches.full import FullCache
from triforce.tp.decoder import Decoder
from triforce.tp.rope import Rope

CPU = torch.device("cpu")
FIRST = 1_048_500 - 32
"""The first of 64 positions."""

LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 130.0, "original_max_position_embeddings": 8192}
MODELS = {  # factors are no powers of two, by which no order of operations would matter
    "lwm": ("llama", {"rope_type": "default", "rope_theta": 5e7}),
    "gradient": ("llama-tied", {"rope_type": "default", "rope_theta": 3580165449.0}),
    "qwen2": ("qwen2", {"rope_type": "default", "rope_theta": 1e7}),
    "qwen3-yarn": ("qwen3", YARN | {"rope_theta": 1e6}),
    "mistral": ("mistral", {"rope_type": "default", "rope_theta": 1e6}),
    "yarn": ("llama", YARN | {"rope_theta": 5e5}),
    "yarn-untruncated": ("llama", YARN | {"rope_theta": 5e5, "beta_fast": 4.0, "truncate": False, "mscale": 0.7}),
    "llama3": ("llama", {"rope_type": "llama3", "rope_theta": 5e5, "factor": 11.0} | LLAMA_3),
    "linear": ("llama", {"rope_type": "linear", "rope_theta": 1e4, "factor": 64.0}),
    "dynamic": ("llama", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0}),
}


class RopeFrom:
    """A rope for a cache whose first token has the position `FIRST`."""

    def __init__(self, rope: Rope) -> None:
        self._rope = rope

    def reserve(self, positions: int) -> None:
        self._rope.reserve(FIRST + positions)

    def rotate(self, layer: int, x: Tensor, start: int) -> Tensor:
        return self._rope.rotate(layer, x, FIRST + start)


def save(directory: Path, name: str) -> None:
    family, rope = MODELS[name]
    positions = 16384 if rope["rope_type"] in ("linear", "dynamic") else 2**20
    save_family(directory, family, head_dim=32, max_position_embeddings=positions, rope_parameters=rope)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow(keep=("gradient", "yarn", "llama3", "dynamic"))
@torch.inference_mode()
def test_logits_a_million_positions_on_equal_transformers(tmp_path, name):
    save(tmp_path, name)
    tokens = torch.tensor([random_tokens(64)])
    positions = torch.arange(FIRST, FIRST + 64).unsqueeze(0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    want = model(tokens, position_ids=positions, use_cache=False).logits[0]
    decoder = Decoder.load(tmp_path, dtype=torch.float32, device=CPU)
    decoder.rope.begin(FIRST + 64)
    rope: Rope = RopeFrom(decoder.rope)  # pyright: ignore[reportAssignmentType]
    cache = FullCache.on_device(decoder.config, rope, dtype=torch.float32, device=CPU, capacity=64)
    got = decoder.forward(tokens[0], cache, num_logits=64)
    error = (got - want).abs().max()
    assert error < 1e-4, f"logits differ by {error}"
    # RoPE depends on differences of positions alone, but for the rounding of angles, which is what is tested here.
    nearby = model(tokens, position_ids=positions - FIRST, use_cache=False).logits[0]
    assert name == "dynamic" or (nearby - want).abs().max() > 1e-3


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow(keep=("gradient", "yarn", "yarn-untruncated", "llama3", "linear", "dynamic"))
@torch.inference_mode()
def test_the_table_is_that_of_transformers_bit_for_bit(tmp_path, name):
    save(tmp_path, name)
    stop = 2**20 + 1000
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    decoder = Decoder.load(tmp_path, dtype=torch.float32, device=CPU)
    decoder.rope.begin(stop)
    decoder.rope.reserve(stop)
    some = torch.cat((torch.arange(300), torch.arange(65500, 65600), torch.arange(FIRST, stop)))
    cos, sin = model.model.rotary_emb(torch.zeros(1), some.unsqueeze(0))
    got_cos, got_sin = decoder.rope.rows(0, stop)
    got_sin = torch.cat((-got_sin[some, :16], got_sin[some, 16:]), dim=1)
    assert torch.equal(got_cos[some], cos[0]) and torch.equal(got_sin, sin[0])
