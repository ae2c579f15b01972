"""Clients who do not read what they asked for: what waits for them is bounded, and others are answered meanwhile."""

import json
import time
from typing import Any

import psutil
import pytest
from served_within import serving_within

SMALL = {"send_buffer_bytes": 4096}
"""So that little is on the way, and what is not read waits in the server."""


def everything(connection, pause_s=0.0):
    """What comes until the connection ends, and whether its end is that of an answer."""
    found = b""
    while not found.endswith(b"\r\n0\r\n\r\n"):
        try:
            piece = connection.recv(2048)
        except ConnectionResetError:
            piece = b""
        if not piece:
            return found, False
        found += piece
        time.sleep(pause_s)
    return found, True


def events_of(raw):
    """Those of a stream, taken out of its chunks."""
    _, _, rest = raw.partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    found = [line.removeprefix(b"data: ") for line in body.split(b"\n\n") if line.startswith(b"data: ")]
    assert found[-1] == b"[DONE]"
    return [json.loads(one) for one in found[:-1]]


def close_to(found, wanted):
    """Whether two values of JSON are the same but for the last digits of numbers."""
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(close_to(found[name], one) for name, one in wanted.items())
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(close_to, found, wanted))
    return found == pytest.approx(wanted, abs=1e-4) if isinstance(wanted, float) else found == wanted


def values(server):
    lines = server.ask("GET", "/metrics").body.decode().splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))


def metric(server, name):
    return float(values(server)[f"triforce_{name}"])


def test_a_stream_that_is_read_late_brings_the_same_in_fewer_pieces(long_pair):
    with serving_within(long_pair, limits=SMALL) as server:
        fields: dict[str, Any] = {
            "logprobs": 2,
            "n": 2,
            "temperature": 1,
            "seed": 3,
            "timings_per_token": True,
            "max_tokens": 400,
        }
        with server.ask_unread(stream=True, **fields) as late:
            server.wait_for(lambda: metric(server, "generated_tokens_total") >= 800, seconds=60)
            raw, whole = everything(late)
        assert whole
        events = events_of(raw)
        fields["timings_per_token"] = False
        wanted = server.complete(**fields).json["choices"]
        for number in range(2):
            pieces = [one for event in events for one in event["choices"] if one["index"] == number]
            assert "".join(piece["text"] for piece in pieces) == wanted[number]["text"]
            described = [piece["logprobs"] for piece in pieces if piece["logprobs"]]
            for name, value in wanted[number]["logprobs"].items():
                found = [one for each in described for one in each[name]]
                assert close_to(found, value), name  # rows that were decoded beside others may round otherwise
            timed = [event for event in events if "timings" in event and event["choices"][0]["index"] == number]
            counts = [event["timings"]["predicted_n"] for event in timed]
            assert counts == sorted(counts)
        assert len(events) < 600, "they would be 800 and more"
        assert metric(server, "unread_total") == 0


def test_a_stream_is_broken_off_where_too_much_of_it_waits(long_pair):
    with serving_within(long_pair, limits=SMALL | {"unread_bytes": 2**16}) as server:
        alone = server.complete(max_tokens=20).json["choices"]
        with server.ask_unread(stream=True, max_tokens=8000, logprobs=1) as unread:
            server.wait_for(lambda: metric(server, "generated_tokens_total") > 100)
            assert server.complete(max_tokens=20).json["choices"] == alone
            server.wait_for(lambda: metric(server, "unread_total") == 1 and metric(server, "running_answers") == 0)
            assert metric(server, "generated_tokens_total") < 8000, "it goes on although nobody reads"
            _, whole = everything(unread)
            assert not whole
        server.wait_for(lambda: any('"unread": true' in line for line in server.log))
        assert server.complete(max_tokens=20).json["choices"] == alone


@pytest.mark.parametrize("stream", [True, False])
def test_a_connection_is_closed_whose_client_takes_nothing(long_pair, stream):
    with serving_within(long_pair, limits=SMALL | {"unread_s": 0.4}) as server:
        connections = len(psutil.Process().net_connections())
        with server.ask_unread(stream=stream, logprobs=5, max_tokens=400) as unread:
            server.wait_for(lambda: metric(server, "unread_total") == 1 and metric(server, "running_answers") == 0)
            server.wait_for(lambda: len(psutil.Process().net_connections()) <= connections + 1)
            _, whole = everything(unread)
            assert not whole
        assert server.complete().status == 200


def test_who_reads_slowly_is_waited_for(long_pair):
    with serving_within(long_pair, limits=SMALL | {"unread_s": 0.4}) as server:
        with server.ask_unread(stream=True, logprobs=1) as slow:
            raw, whole = everything(slow, pause_s=0.01)
        assert whole and events_of(raw)
        assert metric(server, "unread_total") == 0


def test_an_answer_that_is_not_streamed_is_refused_where_it_takes_too_much(long_pair):
    with serving_within(long_pair, limits={"whole_bytes": 2**14}) as server:
        reply = server.complete(max_tokens=900, logprobs=5)
        assert reply.status == 400 and reply.json["error"]["code"] == "answer_too_long"
        assert "stream" in reply.json["error"]["message"]
        server.wait_for(lambda: metric(server, "running_answers") == 0)
        assert server.complete(max_tokens=900, stream=True, logprobs=5).status == 200


def test_answers_that_are_not_streamed_count_with_their_client(long_pair):
    """One at a time fits, two do not; and nothing is left of them."""
    with serving_within(long_pair, limits={"client_held_bytes": 2**17}) as server:
        alone = lambda: server.complete(max_tokens=80, logprobs=1)  # noqa: E731
        refused = []
        for _ in range(3):
            replies = server.at_once(alone, alone)
            refused += [one for one in replies if one.status != 200]
            server.wait_for(lambda: metric(server, "running_answers") == 0)
            assert alone().status == 200
        assert refused
        assert {(one.status, one.json["error"]["code"]) for one in refused} == {(429, "too_much_held")}


@pytest.mark.slow
def test_an_answer_that_is_not_taken_counts_with_its_client(long_pair):
    with serving_within(long_pair, limits=SMALL | {"client_held_bytes": 12_000_000}) as server:
        ask = lambda: server.complete(max_tokens=600, logprobs=20)  # noqa: E731
        assert ask().status == 200
        with server.ask_unread(max_tokens=900, logprobs=20) as untaken:
            server.wait_for(lambda: metric(server, "generated_tokens_total") >= 1500)
            server.wait_for(lambda: metric(server, "running_answers") == 0)
            reply = ask()
            assert (reply.status, reply.json["error"]["code"]) == (429, "too_much_held")
            assert "stream" in reply.json["error"]["message"]
            while untaken.recv(2**16):
                pass
        server.wait_for(lambda: ask().status == 200)


def test_unread_streams_count_with_their_client(long_pair):
    """Each has 5.4 MB to say, most of which waits: one fits. Where several come to the limit, one of them is cut for
    each that does not fit."""
    asked = {"stream": True, "max_tokens": 500, "logprobs": 20}
    with serving_within(long_pair, limits=SMALL | {"client_held_bytes": 5_900_000}) as server:
        other, tokens = server.at("127.0.0.2"), 0

        def wait_for(unread, more):
            nonlocal tokens
            tokens += more
            server.wait_for(lambda: metric(server, "generated_tokens_total") >= tokens)
            server.wait_for(lambda: metric(server, "unread_total") == unread and metric(server, "running_answers") == 0)

        with server.ask_unread(**asked) as of_another, other.ask_unread(**asked) as first:
            wait_for(0, 1000)
            with other.ask_unread(**asked) as second, other.ask_unread(**asked) as third:
                wait_for(2, 0)
                read = other.complete(n=16, max_tokens=3, logprobs=20, stream=True)
                assert read.events[-1] == "[DONE]", "who reads is not cut for what else waits for him"
                assert [everything(one)[1] for one in (first, second, third)].count(True) == 1
                tokens = metric(server, "generated_tokens_total")
            with other.ask_unread(**asked) as last:
                wait_for(2, 500)
                reply = other.complete(max_tokens=2, user="x" * 4_000_000)
                assert reply.status == 200, "a stream makes room for a body"
                wait_for(3, 0)
                assert not everything(last)[1]
            assert everything(of_another)[1]


@pytest.mark.slow
def test_memory_does_not_grow_with_streams_that_nobody_reads(long_pair):
    """Each has 8 MiB and more to say."""
    with serving_within(long_pair) as server:
        server.at_once(*(lambda: server.complete(max_tokens=50, logprobs=20) for _ in range(2)))
        before = most = psutil.Process().memory_info().rss
        streams = [server.ask_unread(stream=True, max_tokens=4000, logprobs=20, prompt=f"It was {i}") for i in range(4)]
        server.wait_for(lambda: metric(server, "running_answers") == 4)
        end = time.monotonic() + 240
        while metric(server, "running_answers"):
            most = max(most, psutil.Process().memory_info().rss)
            assert time.monotonic() < end, "they never ended"
            time.sleep(0.1)
        for one in streams:
            one.close()
    assert most - before < 100 * 2**20, f"{(most - before) / 2**20:.0f} MiB more"
