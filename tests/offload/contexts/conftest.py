"""A tiny model with contexts that are saved, for all tests of them."""

import shutil

import pytest
from tiny_contexts import TEXT, TinyContexts, save_tiny_model


@pytest.fixture(scope="package")
def tiny(tmp_path_factory):
    return TinyContexts(save_tiny_model(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture(scope="package")
def tiny_packed(tiny):
    """The same in bfloat16, with contexts that are packed."""
    return TinyContexts(tiny.model, packed=True)


@pytest.fixture(scope="package")
def saved(tiny, tmp_path_factory):
    """A store with the context `book`."""
    root = tmp_path_factory.mktemp("saved") / "contexts"
    tiny.read(root, TEXT)
    return root


@pytest.fixture
def root(saved, tmp_path):
    """A copy of that store."""
    return shutil.copytree(saved, tmp_path / "contexts")
