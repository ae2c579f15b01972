"""Requests for many answers beside others: all are answered, and nobody waits for all of them."""

import http.client
import json
import threading

import pytest
from command import TEXT, VOCABULARY, save_tokenizer
from tiny import save_llama

COMPLETION = "/v1/completions"


def metric(server, name):
    lines = server.ask("GET", "/metrics").body.decode().splitlines()
    return float(dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))[f"triforce_{name}"])


def ask_from(server, address, **fields):
    """An answer to somebody at another address."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60, source_address=(address, 0))
    connection.request("POST", COMPLETION, json.dumps({"prompt": "It was", "temperature": 0, **fields}))
    found = json.loads(connection.getresponse().read())
    connection.close()
    return found


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("address", ["127.0.0.2", "127.0.0.1"])
def test_a_request_for_many_answers_holds_nobody_out(serving, long_pair, address):
    many = {"prompt": TEXT, "n": 128, "temperature": 1, "seed": 7, "max_tokens": 12}
    with serving(long_pair, max_sequences=4) as server:
        alone = ask_from(server, address, max_tokens=8)["choices"]
        found = []
        thread = threading.Thread(target=lambda: found.append(server.complete(**many).json))
        thread.start()
        before = metric(server, "generated_tokens_total")
        server.wait_for(lambda: metric(server, "generated_tokens_total") > before)
        assert ask_from(server, address, max_tokens=8)["choices"] == alone
        written = metric(server, "generated_tokens_total") - before
        assert thread.is_alive() and written < 128 * 12 / 2, f"{written} tokens were written before its answer"
        thread.join(120)
        again, few = (server.complete(**many | {"n": n}).json for n in (128, 3))
        server.wait_for(lambda: metric(server, "queue_length") == metric(server, "running_answers") == 0)
    choices = found[0]["choices"]
    assert [one["index"] for one in choices] == list(range(128))
    assert choices == again["choices"] and choices[:3] == few["choices"]
    assert len({one["text"] for one in choices}) == 128
    assert found[0]["usage"]["completion_tokens"] == 128 * 12


@pytest.mark.slow(keep=("two keys",))
@pytest.mark.parametrize("keys", ["two keys", "one key"])
def test_who_has_another_key_waits_for_one_answer_and_not_for_all(serving, long_pair, tmp_path, keys):
    (tmp_path / "keys").write_text("a\nb\n" if keys == "two keys" else "a\n")
    body, done = {"prompt": "It was", "temperature": 0, "max_tokens": 60}, []

    def ask(key):
        assert server.ask("POST", COMPLETION, body, Authorization=f"Bearer {key}").status == 200
        done.append(key)

    def waiting():
        lines = server.ask("GET", "/metrics", Authorization="Bearer a").body.decode().splitlines()
        return float(dict(line.rsplit(" ", 1) for line in lines if line[0] != "#")["triforce_queue_length"])

    with serving(long_pair, api_key=f"@{tmp_path / 'keys'}", max_sequences=1) as server:
        threads = [threading.Thread(target=ask, args=("a",)) for _ in range(16)]
        for thread in threads:
            thread.start()
        server.wait_for(lambda: waiting() + len(done) >= 15)
        before, mine = len(done), "b" if keys == "two keys" else "a"
        assert server.ask("POST", COMPLETION, body, Authorization=f"Bearer {mine}").status == 200
        passed = len(done) - before
        for thread in threads:
            thread.join(60)
    assert len(done) == 16 and before < 8
    assert passed <= 4 if keys == "two keys" else passed >= 16 - before - 1, f"{passed} others were answered before"


def test_who_goes_away_takes_along_the_answers_that_wait(serving, long_pair):
    with serving(long_pair, max_sequences=2, max_queue=1) as server:
        connection = server.connect("POST", COMPLETION, {"prompt": "It was", "n": 128, "max_tokens": 4000})
        server.wait_for(lambda: metric(server, "running_answers") == 2 and metric(server, "queue_length") == 1)
        refused = server.complete()
        assert refused.status == 429, "a request of which answers wait is one that waits"
        connection.close()
        server.wait_for(lambda: metric(server, "running_answers") == metric(server, "queue_length") == 0)
        assert server.complete().status == 200


@pytest.mark.slow
def test_a_prompt_that_must_be_answered_alone_has_its_turn_beside_others(serving, tmp_path):
    """Of a model whose longer prompts are rotated otherwise (dynamic RoPE)."""
    save_tokenizer(tmp_path)
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    save_llama(tmp_path, vocab_size=VOCABULARY, max_position_embeddings=64, rope_parameters=rope, eos_token_id=None)
    with serving((tmp_path, tmp_path), max_sequences=4) as server:
        done, others = threading.Event(), [0]

        def ask_on():
            while not done.is_set():
                assert server.complete(max_tokens=12).status == 200
                others[0] += 1

        threads = [threading.Thread(target=ask_on) for _ in range(4)]
        for thread in threads:
            thread.start()
        server.wait_for(lambda: others[0] > 8)
        before = others[0]
        reply = server.complete("It was the best of times, " * 10, max_tokens=8)
        passed = others[0] - before
        done.set()
        for thread in threads:
            thread.join(60)
    assert reply.status == 200, reply
    assert reply.json["usage"]["prompt_tokens"] > 64, reply.json["usage"]
    assert passed < 40, f"{passed} others were answered before it"


@pytest.mark.slow
def test_requests_join_a_batch_however_many_it_has_had(serving, long_pair):
    with serving(long_pair, max_sequences=8) as server:
        body = {"prompt": "It was", "max_tokens": 8000, "stream": True, "temperature": 0}
        connection = server.connect("POST", COMPLETION, body)
        for _ in range(5):
            assert len(server.complete(n=128, max_tokens=1).json["choices"]) == 128
        assert server.complete().status == 200
        assert metric(server, "running_answers") == 1, "the first one is still written"
        connection.close()


def test_a_short_prompt_does_not_wait_until_a_long_text_is_read(serving, lasting, tmp_path, monkeypatch):
    monkeypatch.setenv("TRIFORCE_HOME", str(tmp_path))
    with serving(lasting) as server:
        alone = server.complete("It was", max_tokens=4).json["choices"]
        found = []
        thread = threading.Thread(target=lambda: found.append(server.upload("book", TEXT * 60)))
        thread.start()
        server.wait_for(lambda: metric(server, "running_answers") == 1)
        assert server.complete("It was", max_tokens=4).json["choices"] == alone
        assert thread.is_alive(), "the text is still being read"
        thread.join(120)
    assert found[0].status == 201 and found[0].json["read_tokens"] > 10_000
