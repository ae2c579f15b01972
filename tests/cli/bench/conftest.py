"""Benches of tiny models."""

import psutil
import pytest


@pytest.fixture(autouse=True)
def little_memory(monkeypatch):
    """Bandwidth is measured over a quarter of what is free: here it matters that it is, not what it is."""
    whole = psutil.virtual_memory
    monkeypatch.setattr(psutil, "virtual_memory", lambda: whole()._replace(available=2**30))
