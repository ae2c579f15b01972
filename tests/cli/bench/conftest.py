"""What the tests of `bench` share."""

import pytest


@pytest.fixture
def small_buffers(monkeypatch):
    """Bandwidths are measured over little memory: here it matters that they are, not what they are."""
    from triforce.offload.transfer import bandwidth

    monkeypatch.setattr(bandwidth, "READ_BYTES", 2**24)
    monkeypatch.setattr(bandwidth, "COPY_BYTES", 2**22)
