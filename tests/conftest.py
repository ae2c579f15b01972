"""One thread for tiny models: handing a hundred numbers to a second core costs more than it saves."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when it is first imported


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):  # keywords have the names of folders too
            item.add_marker(pytest.mark.skip(reason="PyTorch sees no CUDA device here"))


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    """Directories of a tiny target and its draft, with a tokenizer."""
    from command import save_pair

    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def small_buffers(monkeypatch):
    """Bandwidths are measured over little memory: here it matters that they are, not what they are."""
    from triforce.offload.transfer import bandwidth

    monkeypatch.setattr(bandwidth, "READ_BYTES", 2**24)
    monkeypatch.setattr(bandwidth, "COPY_BYTES", 2**22)
