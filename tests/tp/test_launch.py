"""The launcher of ranks: what it gives each of them."""

import os

from triforce.tp.parallel import launch


def test_cores_are_shared_where_the_system_tells_no_affinity(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert launch._environment({}, 4)["OMP_NUM_THREADS"] == "3"
