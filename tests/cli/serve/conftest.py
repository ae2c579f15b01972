"""Servers with the tiny pair, on free ports."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from command import VOCABULARY, Fork, save_tokenizer
from served import Process, flags
from tiny import save_llama


@pytest.fixture
def process(pair: tuple[Path, Path], tmp_path: Path) -> Iterator[Any]:
    """Starts one: `process("--grace", 1, ranks=2)`."""
    forks: list[Fork] = []
    yield lambda *options, models=pair, **more: Process(models, tmp_path / "log", forks, *options, **more)
    for fork in forks:
        fork.kill()


@pytest.fixture(scope="module")
def server(pair, tmp_path_factory) -> Iterator[Process]:
    """One for all tests of a file, with saved contexts of its own."""
    folder, forks = tmp_path_factory.mktemp("server"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIFORCE_HOME", str(folder))
        found = Process(pair, folder / "log", forks)
    yield found
    for fork in forks:
        fork.kill()


@pytest.fixture
def serving(pair, tmp_path_factory):
    """Makes further ones: `with serving(max_queue=1) as server`."""

    @contextmanager
    def make(models: tuple[Path, Path] = pair, account: int | None = None, **options: Any) -> Iterator[Process]:
        forks: list[Fork] = []
        try:
            yield Process(models, tmp_path_factory.mktemp("serving") / "log", forks, *flags(options), account=account)
        finally:
            for fork in forks:
                fork.kill()

    return make


@pytest.fixture(scope="session")
def lasting(tmp_path_factory):
    """A model whose answers and prompts may be so long that they last for minutes."""
    directory = tmp_path_factory.mktemp("lasting") / "target"
    save_tokenizer(directory)
    save_llama(directory, vocab_size=VOCABULARY, max_position_embeddings=65_536, eos_token_id=None)
    return directory, directory


@pytest.fixture(scope="session")
def long_pair(tmp_path_factory):
    """A model that writes long answers."""
    directory = tmp_path_factory.mktemp("long") / "target"
    save_tokenizer(directory)
    save_llama(directory, num_hidden_layers=1, vocab_size=VOCABULARY, max_position_embeddings=8192, eos_token_id=None)
    return directory, directory
