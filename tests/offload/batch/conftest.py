"""Models of several families, with a draft, for sequences that are decoded together."""

import gc
from typing import Any

import pytest
from quantised import FORMATS, save_quantised
from tiny import save_family, save_llama
from triforce.offload import Engine


class Models(dict):
    """For each family a model's directory, and transformers' model. Made when they are first asked for. A format may
    follow the family's name, behind a blank: then matrices are stored so."""

    def __init__(self, root):
        self.root = root
        save_llama(root / "draft", seed=9, num_hidden_layers=1, hidden_size=32)

    def __missing__(self, name):
        family, _, form = name.partition(" ")
        directory, kind = self.root / name, {"seed": 1, "head_dim": 32, "hidden_size": 64}
        if form:
            model = save_quantised(directory, FORMATS[form], family, **kind)
        else:
            model = save_family(directory, family, **kind)
        self[name] = directory, model
        return self[name]

    def __repr__(self):
        return "models"  # as Hypothesis shows what a test that fails was given

    def engine(self, family, **settings) -> Engine:
        given: dict[str, Any] = {"device": "cpu", "dtype": "float32", "budget": 64} | settings
        return Engine.load(self[family][0], self.root / "draft", **given)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def uncollected():
    """What refers to itself is not freed."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
