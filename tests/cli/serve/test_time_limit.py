"""Calls that take too long are interrupted, and nothing else is."""

import re
import sys
import threading
import time
from pathlib import Path

import pytest
from triforce.cli.serve.web.time_limit import TimeLimit, TimeUp


def endless():
    while True:
        pass


@pytest.fixture
def limit():
    found = TimeLimit(0.05)
    yield found
    found.close()


def test_a_call_that_never_ends_is_interrupted_each_time(limit):
    for _ in range(3):
        began = time.monotonic()
        with pytest.raises(TimeUp):
            limit.run(endless)
        assert 0.04 < time.monotonic() - began < 5
        assert limit.run(lambda: "soon") == "soon"


def test_calls_of_several_threads_have_their_own_time(limit):
    said = []

    def calls(call):
        for _ in range(5):
            try:
                said.append(limit.run(call))
            except TimeUp:
                said.append("up")
            time.sleep(0.06)  # were an exception to come late, it would come here

    threads = [threading.Thread(target=calls, args=(call,)) for call in (endless, lambda: "soon", endless)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert sorted(said) == ["soon"] * 5 + ["up"] * 10


def test_an_error_of_a_call_is_its_own(limit):
    with pytest.raises(ZeroDivisionError):
        limit.run(lambda: 1 / 0)
    time.sleep(0.1)  # nothing is watched any more


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how often a thread was waked")
def test_its_thread_is_not_waked_for_each_of_many_short_calls():
    before = set(threading.enumerate())
    limit = TimeLimit(10)
    (watching,) = set(threading.enumerate()) - before

    def times_waked():
        status = Path(f"/proc/self/task/{watching.native_id}/status").read_text()
        found = re.search(r"^voluntary_ctxt_switches:\s+(\d+)", status, re.MULTILINE)
        assert found
        return int(found[1])

    time.sleep(0.1)
    at_first = times_waked()
    for _ in range(100):
        limit.run(lambda: None)
        time.sleep(0.001)
    assert times_waked() - at_first < 10
    limit.close()


def test_a_closed_limit_ends_its_thread_and_runs_nothing():
    before = set(threading.enumerate())
    limit = TimeLimit(0.05)
    (watching,) = set(threading.enumerate()) - before
    limit.close()
    with pytest.raises(TimeUp):
        limit.run(endless)
    watching.join(60)
    assert not watching.is_alive()
