"""Many clients at once, some of whom go away: every request that stays is answered once, and nothing is left behind."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from serving.hostile_clients import KINDS
from serving.load import Load

HOSTILE_LOAD = Path(__file__).parents[3] / "examples" / "measure" / "serving" / "hostile_load.py"

COMPLETION = "/v1/completions"


def held_by(server, kind):
    """How many files or threads its process has."""
    return len(os.listdir(f"/proc/{server.fork.pid}/{kind}"))


@pytest.mark.slow
def test_nothing_is_lost_or_left_behind_among_many_clients(serving):
    with serving(max_sequences=4, max_queue=200) as server:
        server.complete()
        held = {kind: held_by(server, kind) for kind in ("fd", "task")}
        seeds = iter(range(96))
        wanted = {seed: server.complete(temperature=1, seed=seed, max_tokens=4 + seed % 9).json for seed in range(9)}
        wrong = []

        def client(draw):
            for seed in seeds:
                fields = {"prompt": "It was", "temperature": 1, "seed": seed % 9, "max_tokens": 4 + seed % 9}
                choice = draw.random()
                if choice < 0.2:
                    connection = server.connect("POST", COMPLETION, fields | {"max_tokens": 400, "stream": True})
                    if choice < 0.1:
                        connection.getresponse().read(30)
                    connection.close()
                elif choice < 0.3:
                    if server.ask("POST", COMPLETION, b'{"prompt": "a", "tools": [1]}').status != 400:
                        wrong.append(seed)
                else:
                    reply = server.ask("POST", COMPLETION, fields)
                    if reply.status != 200 or reply.json["choices"] != wanted[seed % 9]["choices"]:
                        wrong.append((seed, reply))

        server.at_once(*(lambda number=number: client(random.Random(number)) for number in range(8)))
        assert not wrong and next(seeds, None) is None
        server.wait_for(lambda: server.metric("running_answers") == server.metric("queue_length") == 0)
        for kind, count in held.items():  # and one for the connection that has asked
            server.wait_for(
                lambda kind=kind, count=count: len(os.listdir(f"/proc/{server.fork.pid}/{kind}")) <= count + 1
            )


def test_uploads_at_once_begin_no_threads(serving):
    with serving() as server:
        server.complete()
        threads = held_by(server, "task")
        text = "a" * 2**21  # more than is kept in memory on its way
        replies = server.at_once(*(lambda name=f"text-{number}": server.upload(name, text) for number in range(12)))
        assert {reply.status for reply in replies} == {400} and b"positions" in replies[0].body
        assert held_by(server, "task") <= threads


@pytest.mark.slow
def test_clients_of_all_kinds_get_one_answer_each_and_leave_nothing_behind(serving, tmp_path, monkeypatch):
    monkeypatch.setenv("TRIFORCE_HOME", str(tmp_path))
    with serving(max_new_tokens=8) as server:
        found = Load(server.port, clients=24, seconds=10, bodies=500, patience_s=120).run()
    assert found["failures"] == []
    assert {"answered", "gone", "read_slowly", "uploads_201"} <= set(found["counts"]), found["counts"]
    assert sum(count for name, count in found["counts"].items() if name.startswith("bodies_")) >= 500


@pytest.mark.slow
def test_beside_hostile_clients_every_honest_answer_comes_and_is_the_same(tmp_path):
    clients = "--minutes", "0.2", "--honest", "8", "--hostile", "20", "--bodies", "60", "--think", "1"
    command = sys.executable, "-P", HOSTILE_LOAD, *clients, "--json", tmp_path / "found"
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=500)
    found = json.loads((tmp_path / "found").read_text())
    honest = found["honest"]
    assert honest["answered"] == honest["asked"] >= 8 and honest["wrong"] == 0, done.stdout
    assert found["fuzzed_bodies"] == 60 and found["faults"]["count"] == 0, done.stdout
    assert found["hostile"].keys() == set(KINDS), "a kind of client did nothing"
    broken = [one["promise"] for one in found["promises"] if not one["kept"]]
    assert done.returncode == bool(broken), done.stderr
    assert all("grows" in one for one in broken), done.stdout  # memory still does in so short a time
    assert found["alive"] and found["exit_code"] == 143
    assert found["options"]["honest"] == 8 and found["machine"]["device_name"] in done.stdout


def test_a_request_with_more_answers_than_are_written_at_a_time_gets_all(serving):
    with serving(max_sequences=2) as server:
        choices = server.complete(n=5, temperature=1, seed=1, max_tokens=4).json["choices"]
        assert [one["index"] for one in choices] == [0, 1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["none", "lookup", "model"])
def test_of_64_clients_with_short_questions_about_one_text_each_gets_its_own_answer(serving, lasting, draft):
    """While others join, end and go away in every round."""
    options = {"max_sequences": 64, "max_queue": 200, "draft": lasting[1] if draft == "model" else draft}
    with serving(lasting, **options) as server:
        text = " ".join(f"It was {number}." for number in range(150))
        asked = [{"prompt": f"{text} Why {number}?", "max_tokens": 1 + number % 16} for number in range(12)]
        wanted = [server.complete(**one).json["choices"] for one in asked]
        wrong, answered, turns = [], [], iter(range(200))

        def client(draw):
            for turn in turns:
                number = turn % len(asked)
                if draw.random() < 0.2:
                    connection = server.connect("POST", COMPLETION, asked[number] | {"max_tokens": 400, "stream": True})
                    if draw.random() < 0.5:
                        connection.getresponse().read(30)
                    connection.close()
                    continue
                reply = server.complete(**asked[number])
                (answered if reply.status == 200 and reply.json["choices"] == wanted[number] else wrong).append(reply)

        server.at_once(*(lambda number=number: client(random.Random(number)) for number in range(64)))
        assert not wrong and next(turns, None) is None and len(answered) > 100
        server.wait_for(lambda: server.metric("running_answers") == server.metric("queue_length") == 0)
