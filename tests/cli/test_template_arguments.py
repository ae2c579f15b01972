"""Variables that the chat template is given: `--template-arg` of every command that asks, `chat_template_kwargs` of
bodies. What comes of them is counted by transformers."""

import io
import json
import sys

import pytest
from command import check_refusal, run_here
from templates import TEMPLATE, with_template
from transformers import AutoTokenizer

ASKS = TEMPLATE.replace(
    "<assistant>{%", "<assistant>{% if think is defined and not think %}(no thought){% endif %}{%"
).replace("{% for m", "{{ today }}{% for m", 1)
"""Asks for `think` before the answer, and for `today` before all."""


@pytest.fixture(scope="module")
def model(pair, tmp_path_factory):
    return with_template(pair[0], tmp_path_factory.mktemp("asks"), ASKS)


@pytest.fixture
def run(model, capfd, tmp_path, monkeypatch):
    """A command with the model."""
    monkeypatch.setenv("TRIFORCE_HOME", str(tmp_path / "home"))

    def call(command, *arguments, model=model, stdin=""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        return run_here(capfd, command, "--model", model, "--device", "cpu", "--dtype", "float32", *arguments)

    return call


@pytest.fixture
def tokens(model):
    """How many tokens a question has by the template with these variables."""
    oracle = AutoTokenizer.from_pretrained(model)

    def count(question, **arguments):
        messages = [{"role": "user", "content": question}]
        return len(oracle.apply_chat_template(messages, add_generation_prompt=True, **arguments)["input_ids"])

    assert count("Why?") < count("Why?", think=False) < count("Why?", think=False, today="5 May")
    return count


GIVEN = ("--template-arg", "think=false", "--template-arg", "today=5 May")


def test_every_command_that_asks_gives_the_template_its_variables(run, tokens, tmp_path):
    short = ("--draft", "none", "--max-new-tokens", 2, "--json", "-")
    wanted = tokens("Why?", think=False, today="5 May")
    (tmp_path / "asked.jsonl").write_text(
        json.dumps({"custom_id": "a", "body": {"messages": [{"role": "user", "content": "Why?"}]}})
    )
    chat = json.loads(run("chat", *short, *GIVEN, stdin="Why?\n").out)
    batch = json.loads(run("batch", tmp_path / "asked.jsonl", "-o", tmp_path / "answers.jsonl", *short, *GIVEN).out)
    assert (chat[0]["prompt_tokens"], batch["prompt_tokens"]) == (wanted, wanted)
    for more in ((), ("-n", 2)):
        written = json.loads(run("generate", "--prompt", "A text.", "--ask", "Why?", *short, *GIVEN, *more).out)
        found = written["sequences"][0] if more else written
        assert found["prompt_tokens"] == tokens("A text.\n\nWhy?", think=False, today="5 May")


def test_a_text_is_read_as_the_template_begins_with_its_variables(run, tmp_path):
    (tmp_path / "book.txt").write_text("A text.")
    plain = json.loads(run("read", tmp_path / "book.txt", "--as", "plain", "--json", "-").out)["tokens"]
    read = ("read", tmp_path / "book.txt", "--as", "dated", "--json", "-", *GIVEN)
    assert json.loads(run(*read).out)["tokens"] > plain


def test_a_body_has_variables_of_its_own_beside_those_of_the_option(run, tokens, tmp_path):
    asked = {"all": {"think": False, "today": "5 May"}, "one": {"think": False}, "other": {"think": True}}
    asked |= {"wrong": {"thnik": False}, "no object": 5, "half": {"today": "\ud83d"}, "reserved": {"tokenize": True}}
    lines = [
        json.dumps({"custom_id": name, "body": {"messages": [{"role": "user", "content": "Why?"}], "max_tokens": 1,
                                               "chat_template_kwargs": given}})
        for name, given in asked.items()
    ]  # fmt: skip
    (tmp_path / "asked.jsonl").write_text("\n".join(lines))
    options = ("-o", tmp_path / "answers.jsonl", "--draft", "none", "--template-arg", "today=5 May")
    assert run("batch", tmp_path / "asked.jsonl", *options).code == 1
    answered = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    found = {line["custom_id"]: line["response"]["body"] for line in answered}
    counts = {name: found[name]["usage"]["prompt_tokens"] for name in ("all", "one", "other")}
    wanted = tokens("Why?", think=False, today="5 May")
    assert counts == {"all": wanted, "one": wanted, "other": tokens("Why?", today="5 May")}
    for name, words in (
        ("wrong", "has thnik, but the model's chat template asks for think, today"),
        ("reserved", "has tokenize, but"),
        ("no object", "is 5; it must be an object"),
        ("half", "half a character"),
    ):
        error = found[name]["error"]
        assert error["param"] == "chat_template_kwargs" and words in error["message"], error


def test_variables_without_a_template_for_them_are_refused_by_name(run, pair, tmp_path):
    ask = ("generate", "--prompt", "A text.", "--ask", "Why?")
    check_refusal(run(*ask, *GIVEN, model=pair[0]), 2, "--template-arg", "no chat template")
    check_refusal(run(*ask, "--template-arg", "thnik=1"), 2, "--template-arg has thnik", "think, today")
    check_refusal(run(*ask, "--template-arg", "think"), 2, "--template-arg", "KEY=VALUE")
    body = {"messages": [{"role": "user", "content": "Why?"}], "chat_template_kwargs": {"think": True}}
    (tmp_path / "asked.jsonl").write_text(json.dumps({"custom_id": "a", "body": body}))
    run("batch", tmp_path / "asked.jsonl", "-o", tmp_path / "answers.jsonl", "--draft", "none", model=pair[0])
    (error,) = (json.loads(line)["response"]["body"]["error"] for line in (tmp_path / "answers.jsonl").open())
    assert error["param"] == "chat_template_kwargs" and "no chat template" in error["message"]


def test_variables_that_nothing_asks_for_are_not_passed_over_in_silence(run, tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("It was the best of times.")
    refused = run("read", book, "--raw", *GIVEN)
    check_refusal(refused, 2, "--raw", "--template-arg")
    short = ("--draft", "none", "--max-new-tokens", 2, *GIVEN)
    assert "--template-arg changes nothing here" in run("generate", "--prompt-file", book, *short).err
    assert run("read", book, "--raw", "--as", "raw").code == 0
    asked = run("generate", "--context", "raw", "--ask", "Why?", *short)
    assert "--template-arg changes nothing here" in asked.err and "without a chat template" in asked.err
    assert "changes nothing here" in run("chat", "--context", "raw", *short, stdin="Why?\n").err
    assert "changes nothing" not in run("generate", "--prompt-file", book, "--ask", "Why?", *short).err
