"""Models of several families, with a draft, for sequences that are decoded together."""

from typing import Any

import pytest
from tiny import save_family, save_llama
from triforce.offload import Engine


class Models(dict):
    """For each family a model's directory, and transformers' model. Made when they are first asked for."""

    def __init__(self, root):
        self.root = root
        save_llama(root / "draft", seed=9, num_hidden_layers=1, hidden_size=32)

    def __missing__(self, family):
        model = save_family(self.root / family, family, seed=1, head_dim=32, hidden_size=64)
        self[family] = self.root / family, model
        return self[family]

    def __repr__(self):
        return "models"  # as Hypothesis shows what a test that fails was given

    def engine(self, family, **settings) -> Engine:
        given: dict[str, Any] = {"device": "cpu", "dtype": "float32", "budget": 64} | settings
        return Engine.load(self[family][0], self.root / "draft", **given)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return Models(tmp_path_factory.mktemp("models"))
