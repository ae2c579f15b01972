"""A first question, or a text to go on from, has the same tokens and the same answer whichever command it is put to."""

import json
import re

import pytest
from command import CONTEXT, TEXT, VOCABULARY, run_here
from mtp import Head
from served import CHAT, COMPLETION, Process
from templates import with_template
from tiny import save_family

QUESTION = "Why was it so?"
SAMPLED = {"temperature": 0.7, "top_p": 0.95, "seed": 5}
TOKENS = 12
END = 1
"""The token at the end of a sequence."""


@pytest.fixture(params=["plain", "template", "hybrid"], scope="module")
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def model(kind, pair, tmp_path_factory):
    """The target of the tiny pair; the same with a chat template; and a model with linear attention and a head that
    predicts further tokens."""
    if kind == "plain":
        return pair[0]
    chatty = with_template(pair[0], tmp_path_factory.mktemp("chatty"))
    if kind == "hybrid":
        sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "eos_token_id": END}
        Head(save_family(chatty, "qwen3.5-moe", seed=1, **sizes), seed=2).save(chatty)
    return chatty


@pytest.fixture(scope="module")
def draft(kind):
    return "mtp" if kind == "hybrid" else "none"


@pytest.fixture(scope="module")
def server(model, draft, tmp_path_factory):
    forks = []
    folder = tmp_path_factory.mktemp("server")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIFORCE_HOME", str(folder))
        found = Process((model, model), folder / "log", forks, "--draft", draft)
    yield found
    for fork in forks:
        fork.kill()


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def asked(model, draft, capfd, tmp_path, monkeypatch):
    """Runs a command and returns the JSON it writes: `asked("generate", ...)`."""
    monkeypatch.setenv("TRIFORCE_HOME", str(tmp_path / "home"))
    path = tmp_path / "answer.json"
    sampling = [f"--{name.replace('_', '-')}={value}" for name, value in SAMPLED.items()]
    fixed = ("--model", model, "--draft", draft, "--device", "cpu", "--dtype", "float32", *sampling)

    def ask(command, *options):
        given = ("--max-new-tokens", TOKENS, "--json", path, *options)
        outcome = run_here(capfd, command, *given, *fixed)
        assert outcome.code == 0, outcome.err
        return json.loads(path.read_text())

    return ask


def batch(asked, tmp_path, url, **body):
    """The text that `triforce batch` answers a body with."""
    requests, answers = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    requests.write_text(json.dumps({"custom_id": "1", "method": "POST", "url": url, "body": body}))
    document = asked("batch", requests, "-o", answers)
    (line,) = answers.read_text().splitlines()
    return document["prompt_tokens"], json.loads(line)["response"]["body"]["choices"][0]


def test_a_question_about_a_text_is_the_same_in_all_commands(asked, book, server, tmp_path, monkeypatch):
    parts = [{"type": "text", "text": TEXT}, {"type": "text", "text": QUESTION}]
    message = {"messages": [{"role": "user", "content": parts}]}
    generated = asked("generate", "--prompt-file", book, "--ask", QUESTION)
    assert generated["new_tokens"] > 0 and generated["text"]
    (tmp_path / "questions").write_text(QUESTION + "\n")
    with open(tmp_path / "questions", encoding="utf-8") as questions:
        monkeypatch.setattr("sys.stdin", questions)
        (turn,) = asked("chat", "--prompt-file", book)
    prompt_tokens, choice = batch(asked, tmp_path, CHAT, **message)
    reply = server.ask("POST", CHAT, {**message, **SAMPLED, "max_tokens": TOKENS}).json
    assert turn["token_ids"] == generated["token_ids"] and turn["text"] == generated["text"]
    counted = {generated["prompt_tokens"], turn["prompt_tokens"], prompt_tokens, reply["usage"]["prompt_tokens"]}
    assert len(counted) == 1, counted
    assert choice["message"]["content"] == reply["choices"][0]["message"]["content"] == generated["text"]
    assert choice["finish_reason"] == reply["choices"][0]["finish_reason"]


def test_a_question_about_a_saved_context_is_the_same_as_about_its_text(asked, book, model, capfd):
    read = ("read", book, "--model", model, "--device", "cpu", "--dtype", "float32")
    generated = asked("generate", "--prompt-file", book, "--ask", QUESTION)
    assert run_here(capfd, *read).code == 0
    again = asked("generate", "--context", "book", "--ask", QUESTION)
    assert again["prompt_tokens"] == generated["prompt_tokens"]
    assert again["token_ids"] == generated["token_ids"] and again["text"] == generated["text"]


def test_answers_about_a_context_over_http_are_those_about_its_text(asked, book, server):
    """Asked at once, with several choices and streamed."""
    generated = asked("generate", "--prompt-file", book, "--ask", QUESTION)
    assert server.upload("book", TEXT).status == 201
    body = {"messages": [{"role": "user", "content": QUESTION}], "context": "book", **SAMPLED, "max_tokens": TOKENS}
    calls = [lambda more=more: server.ask("POST", CHAT, body | more) for more in ({}, {"n": 3}, {"stream": True})]
    one, several, streamed = server.at_once(*calls)
    assert one.json["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
    *events, end = streamed.events
    parts = [part["delta"].get("content") for event in events for part in event["choices"]]
    assert end == "[DONE]"
    for text in (one.json["choices"][0]["message"]["content"], several.json["choices"][0]["message"]["content"]):
        assert text == generated["text"]
    assert "".join(filter(None, parts)) == generated["text"]


def test_a_continuation_is_the_same_in_all_commands(asked, book, server, tmp_path):
    generated = asked("generate", "--prompt-file", book)
    prompt_tokens, choice = batch(asked, tmp_path, COMPLETION, prompt=TEXT)
    reply = server.ask("POST", COMPLETION, {"prompt": TEXT, **SAMPLED, "max_tokens": TOKENS}).json
    assert choice["text"] == reply["choices"][0]["text"] == generated["text"]
    assert prompt_tokens == reply["usage"]["prompt_tokens"] == generated["prompt_tokens"]


def test_a_question_without_a_template_ends_before_the_next_one(asked, book):
    """As it is put: Question: ... Answer: ...; a continuation never does."""
    several = asked("generate", "--prompt-file", book, "--ask", QUESTION, "-n", 2, "--ignore-eos")
    one = asked("generate", "--prompt-file", book, "--ask", QUESTION, "--ignore-eos")
    assert several["sequences"][0]["token_ids"] == one["token_ids"]
    assert several["sequences"][0]["text"] == one["text"]


@pytest.mark.parametrize("kind", ["hybrid"], indirect=True)
def test_a_conversation_and_an_answer_in_a_form_are_the_same_whatever_drafts(model, book, capfd, monkeypatch):
    """And wherever keys and values live; of a conversation that is saved, too."""
    sampled = [f"--{name.replace('_', '-')}={value}" for name, value in SAMPLED.items()]
    fixed = ("--model", model, "--device", "cpu", "--dtype", "float32", "--max-new-tokens", 24, *sampled)
    (book.parent / "questions").write_text(f"{QUESTION}\nAnd then?\n/undo\nWho?\n/save talk\nWhen?\n")
    talks, forms, again = [], [], []
    for draft, resident in (("none", "auto"), ("mtp", 0), ("mtp,lookup", "auto")):
        monkeypatch.setenv("TRIFORCE_HOME", str(book.parent / draft))
        given = (*fixed, "--draft", draft, "--resident", resident)
        with open(book.parent / "questions", encoding="utf-8") as questions:
            monkeypatch.setattr("sys.stdin", questions)
            talks.append(run_here(capfd, "chat", "--prompt-file", book, *given))
        again.append(run_here(capfd, "generate", "--context", "talk", "--ask", "Why?", *given))
        forms.append(run_here(capfd, "generate", "--prompt", "It was", "--regex", "[a-z]{3,9}( [0-9]+){2}", *given))
    for outcomes in (talks, again, forms):
        assert {outcome.code for outcome in outcomes} == {0}, outcomes
        assert len({outcome.out for outcome in outcomes}) == 1, [outcome.out for outcome in outcomes]
    assert re.fullmatch("[a-z]{3,9}( [0-9]+){1,2}", forms[0].out.strip()), forms[0].out
