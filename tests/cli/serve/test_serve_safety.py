"""Who is answered, what a request may hold, and what nobody gets to see."""

import contextlib
import http.client
import json
import random
import shutil
import socket
import time

import psutil
import pytest
from command import TEXT
from served import embedding_calls

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def test_refusals_come_before_anything_else(serving):
    with serving(api_key="secret") as server:
        body = {"prompt": "It was", "max_tokens": 2}
        assert server.ask("POST", COMPLETION, body, Host="evil.example").status == 403
        assert server.ask("POST", COMPLETION, body, Origin="https://evil.example").status == 403
        missing = server.ask("POST", COMPLETION, body)
        assert missing.status == 401 and missing.json["error"]["code"] == "invalid_api_key"
        assert server.ask("POST", COMPLETION, body, Authorization="Bearer secret").status == 200
        assert server.ask("GET", "/metrics").status == 401 and server.ask("GET", "/health").status == 200
        assert "secret" not in server.log


def test_a_key_comes_from_a_file_without_its_line_end(serving, tmp_path):
    (tmp_path / "key").write_text("secret\n")
    with serving(api_key=f"@{tmp_path / 'key'}") as server:
        for given, status in (("Bearer secret", 200), ("Bearer secre", 401), ("Bearer secrett", 401), ("secret", 401)):
            assert server.ask("GET", "/v1/models", Authorization=given).status == status, given
        assert "secret" not in server.log


def test_a_file_may_have_several_keys(serving, tmp_path):
    (tmp_path / "keys").write_text("first\n\n second \nfirst\n")
    with serving(api_key=f"@{tmp_path / 'keys'}") as server:
        for given, status in (("first", 200), ("second", 200), ("third", 401), ("firstsecond", 401), ("", 401)):
            assert server.ask("GET", "/v1/models", Authorization=f"Bearer {given}").status == status, given
        assert "first" not in server.log and "second" not in server.log


def test_errors_have_the_types_that_clients_of_openai_know(serving):
    with serving(api_key="k") as server:
        key = {"Authorization": "Bearer k"}
        for reply, status, kind in (
            (server.ask("POST", COMPLETION, {}, **key), 400, "invalid_request_error"),
            (server.ask("POST", COMPLETION, {"prompt": "a", "model": "b"}, **key), 404, "invalid_request_error"),
            (server.ask("GET", "/nothing", **key), 404, "invalid_request_error"),
            (server.ask("GET", CHAT, **key), 405, "invalid_request_error"),
            (server.ask("GET", "/v1/models"), 401, "authentication_error"),
            (server.ask("GET", "/v1/models", Host="evil.example", **key), 403, "permission_error"),
        ):
            assert (reply.status, reply.json["error"]["type"]) == (status, kind)


def test_a_server_is_reached_by_the_names_that_it_is_told(serving):
    with serving(host="0.0.0.0", no_auth=True, allow_host="chat.example.org") as server:
        for name, status in (("chat.example.org", 200), ("10.0.0.1:8000", 200), ("evil.example", 403)):
            assert server.ask("GET", "/v1/models", Host=name).status == status, name


def test_a_long_body_is_refused(server):
    most = 2**22  # this model's positions are few
    for length, body in (
        (f"Content-Length: {most + 1}", b""),
        ("Transfer-Encoding: chunked", b"100000\r\n" + b"x" * 2**20 + b"\r\n"),
    ):
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            head = f"POST {COMPLETION} HTTP/1.1\r\nHost: localhost\r\n{length}\r\n\r\n"
            connection.sendall(head.encode())
            with contextlib.suppress(ConnectionError):  # it need not be read to its end
                for _ in range(5 if body else 0):
                    connection.sendall(body)
            response = http.client.HTTPResponse(connection)
            response.begin()
            assert response.status == 413 and json.loads(response.read())["error"]["code"] == "body_too_long"
    assert server.complete("x").status == 200


def test_who_sends_all_of_a_body_that_is_too_long_is_told(server):
    """As most clients do, which read nothing before; the connection would be reset."""
    for told in (server.complete("x" * 3 * 2**22), server.upload("long", "x" * 3 * 2**22)):
        assert told.status == 413 and told.json["error"]["code"] == "body_too_long"
    for told in server.at_once(*[lambda: server.complete("x" * 3 * 2**22)] * 8):
        assert told.status == 413


def test_who_asks_before_sending_a_body_that_is_too_long_is_not_asked_for_it(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        head = (
            f"POST {COMPLETION} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {2**23}\r\nExpect: 100-continue\r\n\r\n"
        )
        connection.sendall(head.encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


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
    assert '"route": "other"' in server.log and "passwd" not in server.log
    assert server.ask("HEAD", "/health").status == 200, "as GET"


MALFORMED = [
    *(b"", b"{", b"[]", b"null", b"1", b'"a"', b"\xff\xfe", b"{" * 50_000, b"[" * 200_000, b'{"prompt": 1e999}'),
    *(b'{"prompt": "a", "max_tokens": 1e400}', b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}"),
    *(b'{"prompt": "\\ud800"}', b'{"prompt": [1, 999999]}', b'{"prompt": [-1]}', b'{"prompt": {"a": 1}}'),
    *(b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "top_p": 0}', b'{"prompt": "a", "n": 1000}'),
    *(b'{"prompt": "a", "min_p": NaN}', b'{"prompt": "a", "min_p": 1.1}', b'{"prompt": "a", "min_p": true}'),
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
        *("prompt", "messages", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "n", "stream"),
        *("stream_options", "return_progress", "context", "tools", "logprobs", "user", "model", "other"),
    ]
    for _ in range(600):
        body = {"max_tokens": 2, "prompt": "a"} | {name: draw.choice(values) for name in draw.sample(names, 3)}
        reply = server.ask("POST", draw.choice((CHAT, COMPLETION)), body)
        assert reply.status in (200, 400, 404), (body, reply)
    server.wait_for(lambda: server.metric("running_answers") == 0)


def test_nothing_of_a_prompt_or_of_this_machine_is_in_logs_and_errors(server, pair):
    server.chat("A very special question")
    server.complete(TEXT, stream=True)
    reply = server.chat(context="a-very-special-name")
    assert reply.status == 400 and "the saved contexts" in reply.json["error"]["message"]
    for place in (pair[0], pair[0].parent, "contexts/"):
        assert str(place) not in reply.body.decode()
    log = server.log
    assert "special" not in log and "best of times" not in log
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    assert all({"time", "client", "method", "route", "status", "ms"} <= line.keys() for line in lines)


def test_what_a_prompt_was_made_of_is_not_kept_while_it_waits(process, lasting, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(lasting[0], model)
    (model / "chat_template.jinja").write_text("{% if wide %}{{ messages[0].content }}{% endif %}")
    wide = {"wide": {str(number): {} for number in range(100_000)}}
    fields = {"messages": [{"role": "user", "content": "Why?"}], "max_tokens": 1, "chat_template_kwargs": wide}
    slow = embedding_calls(lambda _: time.sleep(0.05))  # an answer that lasts, and takes no processor time for that
    server = process("--max-sequences", 1, models=(model, model), before=slow)
    with contextlib.ExitStack() as waiting:

        def wait(count):
            wanted = count + server.metric("queue_length")
            for _ in range(count):
                waiting.callback(server.connect("POST", CHAT, fields).close)
            server.wait_for(lambda: server.metric("queue_length") == wanted)
            time.sleep(3)  # what is free goes back to the system every two seconds
            return psutil.Process(server.fork.pid).memory_info().rss

        long = {"prompt": "It was", "max_tokens": 60_000, "stream": True}
        waiting.callback(server.connect("POST", COMPLETION, long).close)
        server.wait_for(lambda: server.metric("running_answers") == 1)
        before = wait(2)
        grown = wait(8) - before
        assert grown < 40 * 2**20, f"{grown / 2**20:.0f} MiB more"
