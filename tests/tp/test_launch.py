"""The launcher of ranks: what it gives each of them."""

import os

import pytest
from triforce.tp.errors import TriforceError
from triforce.tp.parallel import launch


def test_cores_are_shared_where_the_system_tells_no_affinity(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert launch._environment({}, 4)["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize("fails", [{"exit_code": -9, "message": ""}, {"exit_code": 1, "message": "no disk"}])
def test_a_rank_that_the_launcher_had_to_kill_is_not_named_as_the_one_that_failed(fails):
    killed, failed = launch.Failure(0, -9, "", at=131), launch.Failure(1, **fails, at=100)
    with pytest.raises(TriforceError, match="rank 1"):
        launch._outcome([killed, failed])
