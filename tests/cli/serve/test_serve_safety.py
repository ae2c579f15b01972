"""Who is answered, what a request may hold, and what nobody gets to see."""

import http.client
import json
import random
import socket

import pytest
from command import TEXT
from triforce.cli.serve.access import Access
from triforce.cli.serve.answering.fair_queue import FairQueue
from triforce.cli.serve.request import ServeRequest
from triforce.cli.serve.web import gate
from triforce.tp.errors import UsageError

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def access(**options):
    return Access.of(ServeRequest(**options))


def refused(found, **headers):
    error = found.refusal(CHAT, {name.replace("_", "-"): value for name, value in headers.items()})
    return error and error.status


def test_only_this_machine_is_answered_unless_a_key_or_no_auth_says_more():
    for host in ("127.0.0.1", "127.1.2.3", "localhost", "::1"):
        assert access(host=host).key is None
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        with pytest.raises(UsageError, match="--api-key"):
            access(host=host)
        assert access(host=host, no_auth=True).key is None
        assert access(host=host, api_key="k").key == b"k"
    with pytest.raises(UsageError, match="both given"):
        access(api_key="k", no_auth=True)
    for key in ("", "  ", "two words", "n\0", "ü"):
        with pytest.raises(UsageError, match="--api-key"):
            access(api_key=key)


def test_a_key_comes_from_a_file_without_its_line_end(tmp_path):
    (tmp_path / "key").write_text("secret\n")
    found = access(api_key=f"@{tmp_path / 'key'}")
    assert found.key == b"secret"
    assert refused(found, host="localhost", authorization="Bearer secret") is None
    for wrong in ("Bearer secre", "Bearer secrett", "Bearer", "Basic secret", "secret", "Bearer ü"):
        assert refused(found, host="localhost", authorization=wrong) == 401
    assert refused(found, host="localhost") == 401
    assert found.refusal("/health", {"host": "localhost"}) is None


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "10.0.0.1", "", "localhost@evil", "["])
def test_a_foreign_host_is_refused(host):
    assert refused(access(), host=host) == 403
    assert refused(access(), host=f"{host}:8000") == 403


def test_own_names_are_known_with_any_port():
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:80", "[::1]:9", "localhost."):
        assert refused(access(), host=host) is None, host
    wide = access(host="0.0.0.0", no_auth=True, allow_host=["chat.example.org"])
    assert refused(wide, host="10.0.0.1:8000") is refused(wide, host="chat.example.org") is None
    assert refused(wide, host="evil.example") == 403


def test_a_page_of_another_origin_is_refused():
    for origin in ("http://localhost:3000", "https://evil.example", "null", "http://localhost:8000.evil.example", ""):
        assert refused(access(), host="localhost:8000", origin=origin) == 403, origin
    assert refused(access(), host="localhost:8000", origin="http://localhost:8000") is None


def test_refusals_come_before_anything_else(serving):
    with serving(api_key="secret") as server:
        body = {"prompt": "It was", "max_tokens": 2}
        assert server.ask("POST", COMPLETION, body, Host="evil.example").status == 403
        assert server.ask("POST", COMPLETION, body, Origin="https://evil.example").status == 403
        missing = server.ask("POST", COMPLETION, body)
        assert missing.status == 401 and missing.json["error"]["code"] == "invalid_api_key"
        assert server.ask("POST", COMPLETION, body, Authorization="Bearer secret").status == 200
        assert server.ask("GET", "/metrics").status == 401 and server.ask("GET", "/health").status == 200
        assert "secret" not in "".join(server.log)


def test_a_long_body_is_refused(server, monkeypatch):
    monkeypatch.setattr(server.gate, "_most_bytes", 2000)
    assert server.complete("x" * 3000).status == 413
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("POST", COMPLETION, (b"x" * 1000 for _ in range(4)), encode_chunked=True)
    response = connection.getresponse()
    assert response.status == 413 and json.loads(response.read())["error"]["code"] == "body_too_long"
    connection.close()
    assert server.upload("a", "x" * 3000).status == 413
    assert server.complete("x").status == 200


def test_all_bodies_together_are_bounded(server, monkeypatch):
    monkeypatch.setattr(gate, "_MOST_HELD", 2000 / gate.MOST_BYTES)
    reply = server.complete("x" * 3000)
    assert reply.status == 503 and "retry-after" in reply.headers
    assert [server.complete(user="x" * 1500).status for _ in range(3)] == [200] * 3, "what is answered is not held"


def test_idle_connections_hinder_nobody(server):
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(300)]
    try:
        assert server.complete().status == 200
    finally:
        for one in idle:
            one.close()


def test_paths_and_methods_that_are_not_there_are_refused_in_the_same_form(server):
    for method, path, status in (
        ("GET", "/nothing", 404),
        ("GET", "/docs", 404),
        ("GET", "/openapi.json", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/contexts/..%2F..%2Fetc", 404),
        ("DELETE", "/v1/contexts/.locks", 400),
        ("GET", "/../../etc/passwd", 404),
    ):
        reply = server.ask(method, path)
        assert reply.status == status, (path, reply)
        assert set(reply.json["error"]) == {"message", "type", "param", "code"}
    assert '"route": "other"' in "".join(server.log) and "passwd" not in "".join(server.log)


MALFORMED = [
    *(b"", b"{", b"[]", b"null", b"1", b'"a"', b"\xff\xfe", b"{" * 50_000, b"[" * 200_000, b'{"prompt": 1e999}'),
    *(b'{"prompt": "a", "max_tokens": 1e400}', b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}"),
    *(b'{"prompt": "\\ud800"}', b'{"prompt": [1, 999999]}', b'{"prompt": [-1]}', b'{"prompt": {"a": 1}}'),
    *(b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "top_p": 0}', b'{"prompt": "a", "n": 1000}'),
    *(b'{"prompt": "a", "stop": [""]}', b'{"prompt": "a", "context": "/etc/passwd"}', b'{"prompt": "a", "file": "/x"}'),
]


@pytest.mark.parametrize("raw", MALFORMED, ids=lambda raw: raw[:20].decode("latin-1"))
def test_malformed_bodies_are_refused(server, raw):
    reply = server.ask("POST", COMPLETION, raw)
    assert 400 <= reply.status < 500, reply
    assert set(reply.json["error"]) == {"message", "type", "param", "code"} and b"Traceback" not in reply.body


@pytest.mark.slow
def test_bodies_made_at_random_are_answered_or_refused(server):
    draw = random.Random(1)
    values = [None, True, False, 0, 1, -1, 0.5, 1e300, 2**70, "", "a", "\ud800", [], [1], ["a"], {}, {"a": []}]
    names = [
        *("prompt", "messages", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "n", "stream", "model"),
        *("stream_options", "return_progress", "context", "tools", "logprobs", "user", "other"),
    ]
    for _ in range(600):
        body = {"max_tokens": 2, "prompt": "a"} | {name: draw.choice(values) for name in draw.sample(names, 3)}
        reply = server.ask("POST", draw.choice((CHAT, COMPLETION)), body)
        assert reply.status in (200, 400, 404), (body, reply)
    server.wait_for(lambda: server.worker.running == 0)


def test_nothing_of_a_prompt_or_of_this_machine_is_in_logs_and_errors(server, pair):
    server.chat("A very special question")
    server.complete(TEXT, stream=True)
    reply = server.chat(context="a-very-special-name")
    assert reply.status == 400 and "the saved contexts" in reply.json["error"]["message"]
    for place in (pair[0], pair[0].parent, server.server.service.store.root):
        assert str(place) not in reply.body.decode()
    log = "\n".join(server.log)
    assert "special" not in log and "best of times" not in log
    lines = [json.loads(line) for line in server.log if line.startswith("{")]
    assert all({"time", "client", "method", "route", "status", "ms"} <= line.keys() for line in lines)


def test_a_fault_here_is_answered_without_its_text(server, monkeypatch):
    def fail():
        raise ZeroDivisionError("nobody may see this")

    monkeypatch.setattr(server.server.service.store, "names", fail)
    reply = server.ask("GET", "/v1/contexts")
    assert reply.status == 500 and reply.json["error"]["code"] == "internal_error" and b"nobody" not in reply.body


class Piece:
    def __init__(self, client, name):
        self.client, self.name = client, name


def test_requests_are_answered_round_robin_over_clients():
    queue = FairQueue(10)
    for name in ("a1", "a2", "a3", "b1", "b2", "c1"):
        assert queue.put(Piece(name[0], name))
    popped = [queue.pop() for _ in range(6)]
    assert [piece and piece.name for piece in popped] == ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert queue.pop() is None and len(queue) == 0


def test_a_queue_is_bounded_and_what_cannot_begin_yet_keeps_its_place():
    queue = FairQueue(2)
    first, second = Piece("a", "first"), Piece("b", "second")
    assert queue.put(first) and queue.put(second) and not queue.put(Piece("a", "third"))
    assert queue.pop(lambda piece: piece is None) is None
    assert queue.pop(lambda piece: piece is second) is second
    assert queue.put(second) and queue.pop() is first
    assert queue.put(first)
    queue.remove(second)
    queue.remove(second)
    assert queue.close() == [first]
    assert queue.next() is None and not queue.put(second)


def test_the_most_that_a_body_may_have_holds_a_million_tokens():
    assert 4 * 2**20 < gate.MOST_BYTES < 2**27
