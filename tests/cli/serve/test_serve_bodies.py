"""Bodies that stall, pile up or take long to become prompts, and connections that ask nothing, hold up nobody else:
over HTTP, with lowered limits."""

import contextlib
import http.client
import json
import platform
import select
import shutil
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from served import CHAT, COMPLETION
from served_within import serving_within

HEAD = f"POST {COMPLETION} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n".encode()
OTHER = "127.0.0.2"


def begin(server, sent, address=OTHER):
    """A connection whose client has sent this and then nothing."""
    connection = socket.create_connection(("127.0.0.1", server.port), 60, source_address=(address, 0))
    connection.sendall(sent)
    return connection


def answer(connection):
    """What a connection is told, which is closed then."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    found = response.status, json.loads(response.read())["error"]["code"]
    assert connection.recv(1) == b""
    connection.close()
    return found


def answered(connections):
    """Those of which an answer has come."""
    return select.select([one.sock for one in connections], [], [], 0)[0]


@pytest.fixture(scope="module")
def looping(pair, tmp_path_factory):
    """A model whose chat template takes time with the square of a message's length."""
    directory = tmp_path_factory.mktemp("looping") / "target"
    shutil.copytree(pair[0], directory)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config["chat_template"] = (
        "{% set text = messages[0].content %}{% for a in text %}{% for b in text %}{% endfor %}{% endfor %}{{ text }}"
    )
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory, directory


def test_a_body_that_does_not_come_is_given_up(pair):
    with serving_within(pair, limits={"body_s": 0.5}) as server:
        stalled = begin(server, HEAD + b"{")
        assert server.complete().status == 200
        assert answer(stalled) == (408, "body_too_slow")


def test_a_long_body_has_the_time_that_its_bytes_take(pair):
    with serving_within(pair, limits={"body_s": 0.3, "body_rate": 1000}) as server:
        body = json.dumps({"prompt": "It was", "max_tokens": 1, "user": "x" * 3000}).encode()
        connection = begin(server, HEAD.replace(b"100000", str(len(body)).encode()) + body[:2000])
        time.sleep(1.0)
        connection.sendall(body[2000:])
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert response.status == 200
        connection.close()


def test_bodies_of_one_client_hold_up_no_other(pair):
    limits = {"held_bytes": 40_000, "client_held_bytes": 10_000}
    with serving_within(pair, limits=limits) as server:
        stalled = [begin(server, HEAD + b" " * 4000) for _ in range(16)]
        told = [answer(connection) for connection in stalled[2:]]  # two are within what one client may hold
        assert told == [(429, "too_much_held")] * 14
        assert server.complete(user="x" * 8000).status == 200
        assert server.at(OTHER).complete(user="x" * 8000).status == 429
        for connection in stalled[:2]:
            connection.close()
        server.wait_for(lambda: server.at(OTHER).complete(user="x" * 8000).status == 200)


def test_a_body_is_not_held_while_its_answer_is_written(long_pair):
    with serving_within(long_pair, limits={"held_bytes": 5000}) as server:
        body = {"prompt": "It was", "max_tokens": 4000, "stream": True, "user": "x" * 3000}
        connection = server.connect("POST", COMPLETION, body)
        response = connection.getresponse()
        assert server.complete(user="x" * 3000).status == 200 and not response.closed
        connection.close()


def test_an_uploads_body_is_not_held_while_its_text_is_read(lasting, monkeypatch, tmp_path):
    monkeypatch.setenv("TRIFORCE_HOME", str(tmp_path))
    text = "It was the best of times. " * 5000
    with serving_within(lasting, limits={"client_held_bytes": 1.5 * len(text)}) as server:
        upload = server.connect_to_upload("book", text)
        server.wait_for(lambda: server.worker.running == 1)
        assert server.complete(user="x" * len(text)).status == 200
        assert server.worker.running == 1, "it is to be read meanwhile"
        upload.close()


def test_no_more_than_so_many_bodies_wait_for_their_prompts(looping):
    with serving_within(looping, limits={"render_s": 2.0}, max_queue=2) as server:
        body = {"messages": [{"role": "user", "content": "x" * 40_000}]}
        asked = [server.at(OTHER).connect("POST", CHAT, body) for _ in range(6)]
        answers = [connection.getresponse() for connection in asked]
        told = [(one.status, json.loads(one.read())["error"]["code"]) for one in answers]
        assert set(told) == {(400, "template_too_slow"), (429, "queue_full")}
        assert told.count((429, "queue_full")) in (3, 4), "two waited, and one was in work, perhaps before others came"
        assert server.chat("Why?").status == 200


def test_a_template_has_limited_time_and_other_clients_go_on(looping):
    with serving_within(looping, limits={"render_s": 2.0, "long_bytes": 50_000}) as server:
        endless = [server.at(OTHER).connect("POST", CHAT, {"messages": [{"role": "user", "content": "x" * 60_000}]})]
        assert server.chat("Why?").status == 200
        assert not answered(endless), "it waited for the template of a long text"
        endless += [
            server.at(OTHER).connect("POST", CHAT, {"messages": [{"role": "user", "content": "x" * 40_000}]})
            for _ in range(3)
        ]
        assert server.chat("Why?").status == 200
        assert len(answered(endless[1:])) <= 2, "it waited for more than the one in work and one that came before"
        for connection in endless:
            response = connection.getresponse()
            assert (response.status, json.loads(response.read())["error"]["code"]) == (400, "template_too_slow")


def test_who_has_gone_is_not_waited_for(looping):
    with serving_within(looping, limits={"render_s": 1.0}) as server:
        body = {"messages": [{"role": "user", "content": "x" * 40_000}]}
        left = [server.connect("POST", CHAT, body) for _ in range(6)]
        time.sleep(0.3)  # they have arrived
        for connection in left:
            connection.close()
        began = time.monotonic()
        assert server.chat("Why?").status == 200
        assert time.monotonic() - began < 2.5, "at most the one that was in work"


def test_a_body_of_many_small_parts_is_refused_before_it_takes_memory(pair):
    with serving_within(pair, limits={"parts": 1000}) as server:
        reply = server.ask("POST", COMPLETION, b'{"prompt": [' + b"[]," * 2000 + b"[]]}")
        assert (reply.status, reply.json["error"]["code"]) == (413, "too_many_parts")
        assert server.complete("[{" * 60, user="[" * 5000).status == 200, "brackets in texts are none"


def test_a_text_that_must_be_too_long_is_not_encoded_whole(pair):
    with serving_within(pair) as server:
        for reply in (server.complete("It was " * 500_000), server.upload("long", "It was " * 500_000)):
            assert reply.status == 400 and "has more than" in reply.json["error"]["message"], reply.body
            assert reply.json["error"]["code"] == "context_length_exceeded"


def test_in_a_full_queue_the_client_with_most_requests_makes_room(lasting):
    with serving_within(lasting, max_sequences=1, max_queue=3) as server:
        long = {"prompt": "It was", "max_tokens": 60_000, "stream": True}
        busy = [server.at(OTHER).connect("POST", COMPLETION, long)]
        server.wait_for(lambda: server.metric("running_answers") == 1)
        for waiting in (1, 2, 3):
            busy.append(server.at(OTHER).connect("POST", COMPLETION, {**long, "stream": False}))
            server.wait_for(lambda waiting=waiting: server.metric("queue_length") == waiting)
        assert server.at(OTHER).complete().status == 429
        honest = server.connect("POST", COMPLETION, {"prompt": "It was", "max_tokens": 1})
        refused = busy[3].getresponse()
        assert refused.status == 429 and json.loads(refused.read())["error"]["code"] == "queue_full"
        for connection in busy:
            connection.close()
        assert honest.getresponse().status == 200


def test_connections_that_ask_nothing_are_closed(pair):
    with serving_within(pair, limits={"idle_s": 0.5}) as server:
        silent, slow = begin(server, b""), begin(server, HEAD[:40])
        kept = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        for _ in range(4):
            kept.request("GET", "/health")
            assert kept.getresponse().read()
            time.sleep(0.2)
        assert silent.recv(1) == slow.recv(1) == b""


def test_of_too_many_connections_idle_ones_of_one_client_are_closed(pair):
    with serving_within(pair, limits={"connections": 20}) as server:
        mine = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        mine.request("GET", "/health")
        mine.getresponse().read()
        others = [begin(server, b"") for _ in range(60)]
        mine.request("GET", "/health")
        assert mine.getresponse().status == 200
        others[-1].setblocking(False)
        with contextlib.suppress(BlockingIOError):
            assert others[-1].recv(1), "the newest are open"
        with contextlib.suppress(ConnectionResetError):
            assert others[0].recv(1) == b"", "the oldest are not"
        for connection in others:
            connection.close()


def test_prompts_of_one_request_are_bounded_together(pair):
    with serving_within(pair) as server:
        prompt = [5] * 400
        assert server.complete([prompt] * 2, max_tokens=1).status == 200
        reply = server.complete([prompt] * 128, max_tokens=1)
        assert (reply.status, reply.json["error"]["param"]) == (400, "prompt")
        assert "several requests" in reply.json["error"]["message"]


def test_connections_without_a_whole_request_make_room_for_others(pair):
    with serving_within(pair, limits={"connections": 10}) as server:
        waiting = [begin(server, HEAD) for _ in range(30)]
        assert server.complete().status == 200
        for connection in waiting:
            connection.close()


@pytest.mark.parametrize("address", ["127.0.0.1", OTHER])
def test_connections_that_are_not_read_make_room_for_others(long_pair, address):
    """They ask for answers that do not fit on the way, so that none of them is idle. Also for others of the same
    address: those of users behind a proxy."""
    with serving_within(long_pair, limits={"connections": 8, "send_buffer_bytes": 2**12}) as server:
        unread = [server.at(OTHER).ask_unread(max_tokens=400, logprobs=12, stream=True) for _ in range(8)]
        server.wait_for(lambda: server.worker.running)
        server.wait_for(lambda: server.worker.running == len(server.worker.queue) == 0)
        assert server.log == ["ready"], "all of them are open"
        asked = [
            server.at(address).connect("POST", COMPLETION, {"prompt": "It was", "max_tokens": 9}) for _ in range(3)
        ]
        assert [connection.getresponse().status for connection in asked] == [200] * 3
        server.wait_for(lambda: sum('"unread": true' in line for line in server.log) >= 3)
        for connection in unread:
            connection.close()


def test_an_answer_that_is_not_taken_is_dropped_though_its_connection_asks_nothing_more(pair):
    limits = {"unread_s": 1.5, "idle_s": 0.4, "send_buffer_bytes": 2**12}
    with serving_within(pair, limits=limits) as server:
        connection = socket.create_connection(("127.0.0.1", server.port), 60)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
        body = json.dumps({"prompt": "It was", "n": 4, "max_tokens": 100, "logprobs": 20, "ignore_eos": False})
        connection.sendall(HEAD.replace(b"100000", str(len(body)).encode()) + body.encode())
        server.wait_for(lambda: server.metric("unread_total") == 1)
        connection.close()


def test_a_body_of_very_many_values_or_fields_is_refused(pair):
    with serving_within(pair, limits={"parts": 1000}) as server:
        fields = ",".join(f'"{number}":1' for number in range(2000))
        for body in (f'{{"prompt": "A", "metadata": {{{fields}}}}}', f'{{"prompt": [{"-9," * 10_000}1]}}'):
            reply = server.ask("POST", COMPLETION, body.encode())
            assert (reply.status, reply.json["error"]["code"]) == (413, "too_many_parts")
        assert server.complete("It was, " * 50, user=": , " * 3000).status == 200, "signs in texts are none"


def test_a_text_without_end_in_a_body_of_very_many_values_holds_up_nobody(pair):
    with serving_within(pair, limits={"parts": 1000}) as server:
        began = time.monotonic()
        for end in (b"", b"\\"):
            raw = b"[" * 2000 + b'"' + b'\\"' * 10**6 + end
            reply = server.ask("POST", "/v1/completions", raw)
            assert (reply.status, reply.json["error"]["code"]) == (413, "too_many_parts")
        assert time.monotonic() - began < 20


def test_many_control_tokens_in_a_text_hold_up_nobody(pair):
    with serving_within(pair) as server:
        for reply in (server.complete("<s>" * 500_000), server.upload("long", "<s>" * 500_000)):
            assert reply.status == 400 and reply.json["error"]["code"] == "context_length_exceeded", reply.body


def test_who_waits_for_a_prompt_is_told_when_the_server_stops(looping):
    with serving_within(looping, limits={"render_s": 3.0}) as server:
        body = {"messages": [{"role": "user", "content": "x" * 40_000}]}
        waiting = [server.connect("POST", CHAT, body) for _ in range(3)]
        time.sleep(0.3)  # they have arrived
    for connection in waiting:
        response = connection.getresponse()
        assert (response.status, json.loads(response.read())["error"]["code"]) == (503, "stopping")


def test_long_bodies_that_stall_take_no_memory(process):
    running, most = process(), 2**22
    memory = psutil.Process(running.fork.pid).memory_info
    assert running.complete().status == 200
    before = memory().rss
    stalled = [begin(running, HEAD.replace(b"100000", str(most).encode()) + b" " * (most - 1)) for _ in range(24)]
    time.sleep(1.0)  # they are read
    assert running.complete().status == 200
    grown = memory().rss - before
    assert grown < 24 * most / 3, f"{grown / 2**20:.0f} MiB more"
    for connection in stalled:
        connection.close()


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps other memory")
def test_long_bodies_take_memory_one_at_a_time_and_it_goes_back_to_the_system_soon(process):
    """Texts of many clients at a time, in pieces small enough that the C library keeps them."""
    running = process()
    words = " ".join(f"word{number % 997}" for number in range(200_000))  # 1.5 MB, too many tokens
    memory = psutil.Process(running.fork.pid).memory_info

    def most_of(clients, bodies):
        """What bodies of so many clients at a time take at most."""
        before = most = memory().rss
        with ThreadPoolExecutor(clients) as several:
            asked = [several.submit(running.complete, prompt=[words] * 2) for _ in range(bodies)]
            while not all(one.done() for one in asked):
                most = max(most, memory().rss)
                time.sleep(0.02)
            assert {one.result().status for one in asked} <= {400, 503}
        return before, most - before

    most_of(1, 2)  # what is loaded with the first ones stays
    _, alone = most_of(1, 6)
    before, together = most_of(12, 36)
    assert together < alone + 20 * 2**20, f"{together / 2**20:.0f} MiB, {alone / 2**20:.0f} one after another"
    until = time.monotonic() + 20
    while memory().rss - before > 0.3 * alone:
        assert time.monotonic() < until, f"{(memory().rss - before) / 2**20:.0f} of {alone / 2**20:.0f} MiB are kept"
        time.sleep(0.1)
