"""Saved contexts over HTTP: uploaded, listed, asked about, removed."""

import json

import pytest
from command import TEXT, undocumented

LONG = TEXT + "And then it rained for a while. " * 8


@pytest.fixture(autouse=True)
def none_before(server):
    """Contexts of one test alone."""
    for name in names(server):
        assert server.ask("DELETE", f"/v1/contexts/{name}").status == 200


def names(server):
    return [one["name"] for one in server.ask("GET", "/v1/contexts").json["data"]]


def test_an_uploaded_text_is_a_context_that_answers_start_from(server):
    made = server.upload("book", LONG)
    assert made.status == 201 and made.json["name"] == "book" and made.json["read_tokens"] == made.json["tokens"]
    assert names(server) == ["book"] and not undocumented(made.json, "serving.md", "contexts.md", "json.md")
    server.complete("x" * 200)  # another prompt takes the place of what was read
    reply = server.complete(" Then", context="book", max_tokens=6)
    assert reply.json["usage"]["prompt_tokens_details"]["cached_tokens"] >= made.json["tokens"] - 8
    whole = server.complete(LONG + " Then", max_tokens=6)
    assert reply.json["choices"][0]["text"] == whole.json["choices"][0]["text"]
    gone = server.ask("DELETE", "/v1/contexts/book")
    assert gone.json == {"name": "book", "deleted": True} and names(server) == []
    assert server.ask("DELETE", "/v1/contexts/book").status == 404
    assert server.complete("Then", context="book").status == 400


def test_what_is_saved_is_not_read_again_and_another_text_needs_another_name(server):
    server.upload("book", LONG)
    again = server.upload("book", LONG)
    assert again.status == 201 and again.json["read_tokens"] == 0
    other = server.upload("book", "Something else altogether. " * 20)
    assert other.status == 409 and other.json["error"]["param"] == "name"
    assert "/" not in other.json["error"]["message"], "no place on this machine"


def test_of_two_texts_that_want_one_name_at_once_the_second_is_told(server):
    texts = [LONG, "Something else altogether. " * 20]
    replies = server.at_once(*(lambda text=text: server.upload("book", text) for text in texts))
    assert sorted(reply.status for reply in replies) == [201, 409]
    assert next(reply for reply in replies if reply.status == 409).json["error"]["code"] == "context_exists"
    assert server.complete(" Then", context="book").status == 200


def test_reading_is_told_where_that_is_asked_for(server):
    reply = server.upload("book", LONG, return_progress="true")
    *progress, described, done = reply.events
    assert done == "[DONE]" and described["name"] == "book" and progress
    assert progress[-1]["prompt_progress"]["processed"] == progress[-1]["prompt_progress"]["total"]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("../book", LONG, "cannot be the name"),
        (".book", LONG, "cannot be the name"),
        ("a/b", LONG, "cannot be the name"),
        ("book", "", "empty"),
        ("book", "a\0b", "NUL"),
        ("book", LONG * 40, "1,024 positions"),
    ],
)
def test_what_cannot_be_a_context_is_refused(server, name, text, words):
    reply = server.upload(name, text)
    assert reply.status == 400 and words in reply.json["error"]["message"], reply
    assert names(server) == []


def test_both_fields_are_needed_and_no_others(server):
    bounded = "multipart/form-data; boundary=x"
    for body, kind in (
        (b"a=b", "application/x-www-form-urlencoded"),
        (b"x", "multipart/form-data"),
        (b"junk", bounded),
        (b"--x\r\nno header\r\n\r\n--x--", bounded),
        (b"{}", "text/x"),
    ):
        assert server.ask("POST", "/v1/contexts", body, Content_Type=kind).status == 400
    assert server.upload("book", LONG, path="/etc/passwd").status == 400


def test_answers_about_several_contexts_do_not_hinder_each_other(server):
    for name in ("one", "two"):
        server.upload(name, f"This is {name}. {LONG}")
    asked = [(" So", name) for name in ("one", "two", "one", "two", None, "one")]
    alone = [server.complete(prompt, context=name).json["choices"] for prompt, name in asked]
    calls = [lambda asked=one: server.complete(asked[0], context=asked[1]).json["choices"] for one in asked]
    assert server.at_once(*calls) == alone


def test_a_text_is_read_and_asked_about_while_another_answer_goes_on(serving, lasting, tmp_path, monkeypatch):
    monkeypatch.setenv("TRIFORCE_HOME", str(tmp_path))
    with serving(lasting) as server:
        read_and_ask_beside_an_answer(server)


def read_and_ask_beside_an_answer(server):
    server.upload("one", f"This is one. {LONG}")
    wanted = server.complete(" So", context="one", max_tokens=500).json["choices"][0]["text"]
    connection = server.connect(
        "POST",
        "/v1/completions",
        {"prompt": " So", "context": "one", "temperature": 0, "max_tokens": 500, "stream": True},
    )
    response = connection.getresponse()
    begun = response.read(40)
    assert server.upload("two", f"This is two. {LONG}").status == 201
    about = server.complete(" So", context="two", max_tokens=4)
    assert about.status == 200 and about.json["usage"]["prompt_tokens_details"]["cached_tokens"] > 200
    assert server.metric("running_answers") == 1, "the first answer is still being written"
    rest = begun + response.read()
    connection.close()
    events = [json.loads(line[6:]) for line in rest.split(b"\n\n") if line.startswith(b"data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == wanted


def test_the_same_text_sent_twice_at_once_is_read_once(server):
    replies = server.at_once(*[lambda: server.upload("book", LONG)] * 3)
    assert [reply.status for reply in replies] == [201] * 3
    assert min(reply.json["read_tokens"] for reply in replies) <= 16 and names(server) == ["book"]


def test_prompts_are_saved_only_where_that_was_asked_for(serving, lasting, tmp_path, monkeypatch):
    monkeypatch.setenv("TRIFORCE_HOME", str(tmp_path))
    text = LONG * 8
    with serving(lasting) as server:
        assert server.complete(text).json["usage"]["prompt_tokens"] > 1024
        assert names(server) == []
    with serving(lasting, save_prompts=True) as saving:
        saving.complete(LONG)
        assert names(saving) == [], "it is a short one"
        saving.complete(text)
        (name,) = names(saving)
        assert name.startswith("prompt-")
        saving.wait_for(lambda: saving.ask("GET", "/v1/contexts").json["data"][0]["complete"])
    with serving(lasting) as later:
        cached = later.complete(text).json["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached > 1000, "a new process starts from what was saved"
