"""Saved contexts that many share: what one client, one text or one fault of the store does to others, over HTTP."""

import collections
import json
import os
import shutil
import time

import pytest
from command import TEXT, VOCABULARY, run_here, save_tokenizer
from tiny import save_llama

LONG = TEXT + "And then it rained for a while. " * 8
PROMPT = LONG * 8
Usage = collections.namedtuple("Usage", "total used free")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A store of one test, in a place whose name has a space."""
    place = tmp_path / "a home"
    monkeypatch.setenv("TRIFORCE_HOME", str(place))
    return place


def names(server):
    return [one["name"] for one in server.ask("GET", "/v1/contexts").json["data"]]


def read(capfd, home, model, name, text=LONG):
    """The operator reads a text."""
    home.mkdir(exist_ok=True)
    file = home / f"{name}.txt"
    file.write_text(text)
    outcome = run_here(capfd, "read", file, "--as", name, "--model", model, "--device", "cpu", "--dtype", "float32")
    assert outcome.code == 0, outcome.err


def says_no_place(reply, home, *others):
    assert str(home) not in reply.body.decode(), reply.body
    message = reply.json["error"]["message"]
    assert not any(str(place) in message for place in others) and " /" not in message and "'/" not in message, message


def test_a_prompt_is_saved_for_each_number_format(serving, lasting, home):
    for count, dtype in enumerate(("float32", "bfloat16"), 1):
        with serving(lasting, save_prompts=True, dtype=dtype) as server:
            assert server.complete(PROMPT).status == 200
            assert len(names(server)) == count and all(name.startswith("prompt-") for name in names(server))
            assert "warning" not in server.log


def test_no_upload_takes_the_name_of_a_prompt(serving, pair, home):
    with serving(pair) as server:
        for name in ("prompt-0123456789abcdef", "prompt-", "PROMPT-x"):
            reply = server.upload(name, LONG)
            assert reply.status == 400 and reply.json["error"]["param"] == "name"
            assert "'prompt-' are reserved" in reply.json["error"]["message"]
        assert names(server) == [] and server.upload("prompting", LONG).status == 201


def test_a_prompt_whose_context_is_damaged_is_answered_and_the_log_says_so(serving, lasting, home):
    with serving(lasting, save_prompts=True) as server:
        whole = server.complete(PROMPT).json["choices"]
        (name,) = names(server)
    (home / "contexts" / name / "manifest.json").write_bytes(b"{")
    with serving(lasting, save_prompts=True) as server:
        reply = server.complete(PROMPT)
        assert reply.status == 200 and reply.json["choices"] == whole
        server.wait_for_words("warning: the prompt is not saved: the manifest of the context 'prompt-")


def test_a_prompt_whose_keys_depend_on_its_length_is_answered_and_not_saved(serving, tmp_path, home):
    model = tmp_path / "dynamic"
    save_tokenizer(model)
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    save_llama(model, vocab_size=VOCABULARY, max_position_embeddings=1024, rope_parameters=rope)
    with serving((model, model), save_prompts=True) as server:
        assert server.complete(PROMPT).status == 200
        server.wait_for_words("warning: the prompt is not saved: ")
        assert names(server) == [] and "scales RoPE dynamically" in server.log
        assert server.upload("book", PROMPT).status == 507, "an upload is for nothing if it cannot be saved"


def test_what_clients_save_leaves_a_reserve_of_the_disk(serving, lasting, home, monkeypatch, capfd):
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(20 * 2**30, 19 * 2**30, 2**30))
    with serving(lasting, save_prompts=True) as server:
        reply = server.upload("book", LONG)
        assert reply.status == 507 and "1.0 GiB must stay free" in reply.json["error"]["message"].replace("1.00", "1.0")
        says_no_place(reply, home)
        assert server.complete(PROMPT).status == 200 and names(server) == []
        server.wait_for_words("warning: nothing is saved: ")
    read(capfd, home, lasting[0], "mine")
    assert (home / "contexts" / "mine" / "manifest.json").exists(), "the operator may fill the disk"


def test_the_reserve_is_looked_at_before_each_segment(serving, lasting, home, monkeypatch):
    """Others fill the disk while a text is read."""
    written = lambda: any((home / "contexts").glob("book/000000000-*"))  # noqa: E731
    free = lambda: 2**30 if written() else 19 * 2**30  # noqa: E731
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(20 * 2**30, 0, free()))
    with serving(lasting) as server:
        reply = server.upload("book", PROMPT * 10)  # two segments, and the beginning of a third
        assert reply.status == 507 and "must stay free" in reply.json["error"]["message"]
        assert written(), "the first segment had room"
        assert not any((home / "contexts").glob("book/000016384-*"))


def test_an_upload_removes_older_uploads_and_nothing_that_the_operator_read(serving, pair, home, monkeypatch, capfd):
    read(capfd, home, pair[0], "mine")
    shown = json.loads(run_here(capfd, "contexts", "show", "mine", "--json", "-").out)
    monkeypatch.setenv("TRIFORCE_CONTEXTS_MAX", str(int(2.5 * shown["disk_bytes"])))
    with serving(pair) as server:
        for name in ("one", "two"):
            assert server.upload(name, f"{name} {LONG}").status == 201
        assert names(server) == ["mine", "two"]
        refused = server.upload("long", "Much longer. " + LONG + LONG)
        assert refused.status == 507
        message = refused.json["error"]["message"]
        assert "that are not removed for a client" in message and "would exceed the quota" in message
        assert names(server) == ["mine", "two"], "nothing is removed for nothing"
        read(capfd, home, pair[0], "two", f"two {LONG}")  # there already: it is the operator's now
        assert server.upload("three", f"three {LONG}").status == 507
        assert server.upload("mine", LONG).json["read_tokens"] == 0
        assert names(server) == ["mine", "two"]


def test_what_a_client_adds_to_the_operators_context_is_the_operators(serving, pair, home, monkeypatch, capfd):
    read(capfd, home, pair[0], "mine", TEXT)
    with serving(pair) as server:
        assert server.upload("mine", LONG).status == 201
    shown = json.loads(run_here(capfd, "contexts", "show", "mine", "--json", "-").out)
    monkeypatch.setenv("TRIFORCE_CONTEXTS_MAX", str(int(1.5 * shown["disk_bytes"])))
    with serving(pair) as server:
        assert server.upload("other", f"other {LONG}").status == 507 and names(server) == ["mine"]


def test_others_are_answered_while_a_saved_text_is_verified(serving, lasting, home, tmp_path, monkeypatch):
    """Whoever uploads what is there waits for its checksums; nobody else does."""
    slow, preadv = tmp_path / "slow", os.preadv

    def slowly(descriptor, buffers, offset):
        if slow.exists() and sum(map(len, buffers)) > 2**14:
            time.sleep(0.15)
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", slowly)
    with serving(lasting) as server:
        assert server.upload("book", PROMPT).status == 201
        slow.touch()
        ended = {}

        def timed(what, call):
            reply = call()
            ended[what] = time.monotonic()
            return reply

        def later(call):
            time.sleep(0.2)
            return call()

        again, answer, other = server.at_once(
            lambda: timed("again", lambda: server.upload("book", PROMPT)),
            lambda: timed("answer", lambda: later(lambda: server.complete("x", max_tokens=2))),
            lambda: timed("other", lambda: later(lambda: server.upload("other", "Something else. " * 20))),
        )
        assert (again.status, again.json["read_tokens"]) == (201, 0)
        assert answer.status == 200 and other.status == 201
        assert max(ended["answer"], ended["other"]) < ended["again"], ended


def test_a_damaged_text_is_read_again_by_the_first_of_those_who_upload_it(serving, pair, home):
    with serving(pair) as server:
        assert server.upload("book", LONG).status == 201
    (segment,) = (home / "contexts" / "book").glob("*.safetensors")
    content = bytearray(segment.read_bytes())
    content[8192] ^= 4
    segment.write_bytes(content)
    with serving(pair) as server:
        replies = server.at_once(*[lambda: server.upload("book", LONG)] * 3)
        assert [reply.status for reply in replies] == [201] * 3
        assert sorted(reply.json["read_tokens"] > 0 for reply in replies) == [False, False, True]


def test_messages_name_no_place_of_the_machine(serving, pair, home, tmp_path, capfd):
    model = tmp_path / "my models" / "target"
    shutil.copytree(pair[0], model)
    store = home / "contexts"
    read(capfd, home, model, "mine")
    with serving((model, model)) as server:
        described = server.ask("GET", "/v1/contexts")
        assert [one["model"] for one in described.json["data"]] == ["target"]
        assert server.upload("ours", TEXT).json["model"] == "target"
        (store / "empty").mkdir()
        (store / "folder" / "manifest.json").mkdir(parents=True)
        (store / "file").write_text("x")
        for name in ("nothing", "empty", "folder", "file"):
            reply = server.complete(context=name)
            assert reply.status == 400, name
            says_no_place(reply, home, model)
        assert server.upload("file", LONG).status == 507
        says_no_place(server.upload("file", LONG), home, model)
        shutil.rmtree(store / ".locks")
        (store / ".locks").write_text("x")
        reply = server.upload("new", LONG)
        assert reply.status == 507 and "'new' cannot" not in reply.body.decode()
        says_no_place(reply, home, model)
