"""What the tests of captured passes share: plain PyTorch, which the recorder sees, a decoder, and pairs."""

import pytest
import torch
from recorder import PROMPT
from tiny import greedy_oracle, save_family, save_llama
from triforce.kernels.selection import use_kernels
from triforce.tp.decoder import Decoder


@pytest.fixture(autouse=True)
def plain_pytorch():
    """What a GPU would run: the recorder sees PyTorch's operations only, not the compiled kernels for CPUs; and top-p
    sorts, and noise is computed for all tokens, where a CPU first looks at sums."""
    with use_kernels(attention="plain", as_gpu=()):
        yield


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    save_llama(directory, num_hidden_layers=2, num_key_value_heads=2)
    return Decoder.load(directory, dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """For each family: a model's directory, a draft that is often right, and greedy tokens of transformers."""
    return Pairs(tmp_path_factory.mktemp("pairs"))


class Pairs(dict):
    """Made when they are first asked for."""

    def __init__(self, root):
        self.root = root

    def __missing__(self, name):
        model = save_family(self.root / name, name, seed=1)
        self[name] = self.root / name, self.root / name, greedy_oracle(model, PROMPT, 50)
        return self[name]
