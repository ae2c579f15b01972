"""Texts that an answer ends before: bounded, so that one request's cost no memory and hold nobody up."""

import psutil
import pytest

LONG = "a text that no answer has " * 36


def test_more_or_longer_stops_than_the_bound_are_refused_by_name(server):
    for stop, words in (
        (["x"] * 17, "stop has 17 texts; it can have 16"),
        ("x" * 1025, "stop has a text of 1,025 bytes; it can have 1,024"),
        (["yes", "é" * 600], "stop has a text of 1,200 bytes"),
    ):
        refused = server.complete(stop=stop)
        assert refused.status == 400 and refused.json["error"]["param"] == "stop", refused
        assert words in refused.json["error"]["message"], refused


def test_stops_within_the_bound_change_no_text_that_has_none_of_them(server):
    plain = server.complete(max_tokens=30).json["choices"][0]
    given = [plain["text"][-n:] + LONG for n in range(1, 16)]  # the text ends with the beginning of each
    given.append("\0" * 1024)
    assert server.complete(max_tokens=30, stop=given).json["choices"][0]["text"] == plain["text"]


@pytest.mark.slow
def test_a_long_stop_takes_no_memory(process):
    running = process()
    running.complete()
    before = psutil.Process(running.fork.pid).memory_info().rss
    assert running.complete(stop="no answer has this" * 1200).status == 400  # 21.6 KB
    for _ in range(4):
        assert running.complete(stop=[f"{n}{LONG}"[:1024] for n in range(16)], n=4).status == 200
    grown = psutil.Process(running.fork.pid).memory_info().rss - before
    assert grown < 40 * 2**20, f"{grown / 2**20:.0f} MiB more"
