"""`triforce chat` without a terminal: a question a line, answers on stdout, everything else on stderr."""

import io
import json
import signal
import sys

import pytest
from command import TEXT, Outcome, Running, check_refusal, run_command, run_here, undocumented, without_weights
from templates import CALLING, THINKING, saying, with_added, with_template


@pytest.fixture
def chat(pair, capfd, monkeypatch, tmp_path):
    """Runs the command with lines on its standard input."""
    monkeypatch.setenv("TRIFORCE_HOME", str(tmp_path / "home"))

    def talk(lines: str | bytes, *arguments, model=pair[0], new=8, expect=0) -> Outcome:
        stdin = io.TextIOWrapper(io.BytesIO(lines.encode() if isinstance(lines, str) else lines))
        monkeypatch.setattr(sys, "stdin", stdin)
        fixed = ("--model", model, "--draft", "none", "--device", "cpu", "--dtype", "float32", "--max-new-tokens", new)
        outcome = run_here(capfd, "chat", *fixed, *arguments)
        assert outcome.code == expect, outcome.err
        return outcome

    return talk


def turns_of(outcome: Outcome) -> list[dict]:
    return json.loads(outcome.out)


def test_each_line_is_a_question_and_only_new_tokens_are_read(chat, tmp_path):
    said = chat("Why?\n\nAnd how was it?\n", "--seed", 3)
    assert len(said.out.splitlines()) >= 2 and "plain text (Question: … Answer: …)" in said.err
    turns = turns_of(chat("Why?\n\nAnd how was it?\n", "--seed", 3, "--json", "-"))
    assert said.out == "".join(f"{turn['text']}\n" for turn in turns), "the same seed gives the same conversation"
    first, second = turns
    assert [turn["question"] for turn in turns] == ["Why?", "And how was it?"]
    assert first["seed"] == 3 != second["seed"]
    assert second["reused_tokens"] == first["prompt_tokens"] + first["new_tokens"] - 1
    assert not undocumented(turns, "json.md", "chat.md")


def test_no_question_is_no_error(chat):
    assert chat("").out == "" and chat("\n  \n", "--json", "-").out == "[]\n"


def test_a_text_is_read_once_and_talked_about(chat, pair, capfd, tmp_path):
    (tmp_path / "book.txt").write_text(TEXT)
    fresh = turns_of(chat("Why?\nHow?\n", "--prompt-file", tmp_path / "book.txt", "--seed", 1, "--json", "-"))
    assert fresh[0]["reused_tokens"] == 0 and fresh[0]["prompt_tokens"] > 200 < fresh[1]["reused_tokens"]
    read = ("read", tmp_path / "book.txt", "--model", pair[0], "--device", "cpu", "--dtype", "float32")
    assert run_here(capfd, *read).code == 0
    for where in (("--context", "book"), ("--prompt-file", tmp_path / "book.txt")):
        saved = chat("Why?\nHow?\n", *where, "--seed", 1, "--json", "-")
        assert "starts from the saved context book" in saved.err
        for turn, other in zip(turns_of(saved), fresh, strict=True):
            assert turn["token_ids"] == other["token_ids"] and turn["reused_tokens"] > 200


def test_commands_are_obeyed(chat):
    said = chat("Why?\n/stats\nHow?\n/undo\n/retry\n/save talk\n/contexts\n/help\n/quit\nnever asked\n", "--seed", 1)
    for part in ("TBT", "took back: How?", "saved ", "--context 'talk'", "/retry     answers", "Ctrl-D leaves"):
        assert part in said.err, part
    assert "talk" in said.err[said.err.index("name") :]
    turns = turns_of(chat("Why?\nHow?\n/undo\n/retry\n/quit\nnever asked\n", "--seed", 1, "--json", "-"))
    assert [turn["question"] for turn in turns] == ["Why?"] and turns[0]["seed"] not in (1, None)
    later = turns_of(chat("How?\n", "--context", "talk", "--json", "-"))
    assert later[0]["context"] == "talk" and later[0]["reused_tokens"] >= turns[0]["prompt_tokens"]


def test_a_saved_conversation_is_asked_one_more_question(chat, pair, capfd, tmp_path):
    model = with_template(pair[0], tmp_path)
    (first,) = turns_of(chat("Why?\n/save talk\n", "--system", "Be brief.", "--json", "-", "--seed", 1, model=model))
    (second,) = turns_of(chat("How?\n", "--context", "talk", "--json", "-", "--seed", 2, model=model))
    ask = ("--context", "talk", "--ask", "How?", "--seed", 2, "--json", "-", "--max-new-tokens", 8)
    fixed = ("--model", model, "--draft", "none", "--device", "cpu", "--dtype", "float32")
    asked = json.loads(run_here(capfd, "generate", *fixed, *ask).out)
    assert asked["token_ids"] == second["token_ids"] and asked["prompt_tokens"] == second["prompt_tokens"]
    assert asked["reused_tokens"] == second["reused_tokens"] == first["prompt_tokens"] + first["new_tokens"]
    shown = run_here(capfd, "contexts", "show", "talk")
    assert "a conversation, which a question continues" in shown.out


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("/nope\n", "error: there is no command /nope; there are: /help, /undo"),
        ("/undo\n", "error: there is no turn yet"),
        ("/stats\n", "error: there is no answer yet"),
        ("/save\n", "error: /save needs a name"),
        ("/save x\n", "error: there is nothing to save yet"),
        ("Why?\n/save ../x\n", "error: '../x' cannot be the name of a context"),
        ("/undo twice\n", "error: /undo takes no argument, but 'twice' is given"),
        (b"\xff?\n", "error: line 1 of standard input is not UTF-8"),
        ("why " * 600 + "\n", "error: the text, the system message and the question have"),
    ],
)
def test_what_fails_is_said_and_the_next_question_is_answered(chat, lines, message):
    lines = lines if isinstance(lines, bytes) else lines.encode()
    said = chat(lines + b"Why?\n", "--temperature", 0, expect=1)
    assert message in said.err and said.out and "Traceback" not in said.err
    assert said.out.endswith(chat("Why?\n", "--temperature", 0).out) or b"save" in lines


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--context", "x", "--prompt-file", "y"), 2, ("--context and --prompt-file are both given",)),
        (("--context", "x", "--system", "y"), 2, ("--context and --system are both given",)),
        (("--prompt-file", "-"), 2, ("--prompt-file is -", "give a file")),
        (("--context", "nope"), 1, ("there is no context 'nope'",)),
        (("--system", "Be brief."), 2, ("--system is given, but there is no chat template here",)),
        (("--prompt-file", "nope.txt"), 1, ("--prompt-file nope.txt does not exist",)),
    ],
)
def test_impossible_requests_are_refused(chat, arguments, code, words):
    check_refusal(chat("Why?\n", *arguments, expect=code), code, *words)


def test_a_text_that_leaves_no_room_is_refused_before_weights_load(chat, pair, tmp_path):
    (tmp_path / "long.txt").write_text(TEXT * 20)
    refused = chat("Why?\n", "--prompt-file", tmp_path / "long.txt", model=without_weights(pair[0], tmp_path), expect=1)
    check_refusal(refused, 1, "the model has 1,024 positions")


def test_trim_says_what_it_drops(chat):
    lines = "".join(f"{number}: what {'is it ' * 60}?\n" for number in range(5))
    refused = chat(lines, "--json", "-", expect=1)
    assert "--trim" in refused.err and 0 < len(turns_of(refused)) < 5
    trimmed = chat(lines, "--trim", "--json", "-")
    assert "dropped, to make room: 0: what is it" in trimmed.err
    assert "turns were dropped: " in trimmed.err and len(turns_of(trimmed)) == 5


def test_a_template_that_rewrites_what_was_said_is_reported(chat, pair, tmp_path):
    rewriting = THINKING.replace("split('</think>')[-1]", "upper() + '.'")
    model = with_template(pair[0], tmp_path, rewriting)
    said = chat("Why?\nHow?\n", "--system", "Be brief.", model=model)
    assert "the chat template changes earlier turns: " in said.err and "tokens are prefilled again" in said.err
    assert "plain text" not in said.err


def test_an_output_that_is_no_terminal_gets_the_text_as_the_model_writes_it(chat, pair, tmp_path):
    model = with_template(pair[0], tmp_path, CALLING)
    (plain,) = turns_of(chat("Why?\n", "--seed", 1, "--json", "-", model=model, new=4))
    written = ("<think>", "Hm, so.", "</think>", "<tool_call>it rose</tool_call>")
    model = with_added(model, tmp_path, dict(zip(plain["token_ids"], written, strict=True)))
    assert chat("Why?\n", "--seed", 1, model=model, new=4).out == "".join(written) + "\n"


@pytest.fixture
def asking(chat, pair, tmp_path):
    """A model that asks itself a question after a few tokens of its answer, and the words before that."""
    (turn,) = turns_of(chat("Why?\n", "--temperature", 0, "--json", "-", new=40))
    token_ids = turn["token_ids"]
    at = next(n for n in range(4, 40) if token_ids[n] not in token_ids[:n])
    return saying(pair[0], tmp_path, token_ids[at], "\nQuestion:"), at


def test_an_answer_ends_where_the_model_asks_itself(chat, asking):
    model, length = asking
    (turn,) = turns_of(chat("Why?\n", "--temperature", 0, "--json", "-", model=model, new=40))
    assert turn["finish_reason"] == "stop" and "Question" not in turn["text"]
    assert length <= turn["new_tokens"] < 40


def test_an_interrupt_keeps_what_was_written(pair, tmp_path):
    fixed = ("--model", pair[0], "--draft", "none", "--device", "cpu", "--dtype", "float32", "--max-new-tokens", 900)
    path = tmp_path / "turns.json"
    with Running("chat", *fixed, "--json", path, stdin=b"Why?\nHow?\n", TRIFORCE_HOME=str(tmp_path / "home")) as run:
        run.wait_until(lambda: run.out)
        run.signal(signal.SIGINT)
        outcome = run.finish()
    assert outcome.code == 130 and outcome.err.endswith("interrupted\n"), outcome
    (turn,) = json.loads(path.read_text())
    assert turn["finish_reason"] == "interrupted" and 0 < turn["new_tokens"] < 900
    assert outcome.out.strip() == turn["text"].strip()


@pytest.mark.slow
def test_several_ranks_talk_alike_and_end_answers_early_together(chat, asking, tmp_path):
    lines, (model, _) = "Why?\nHow?\n/save talk\n/retry\nWhere?\n", asking
    options = ("--temperature", 0, "--tiers", 2, "--json", "-")
    fixed = ("--model", model, "--draft", "none", "--device", "cpu", "--dtype", "float32", "--max-new-tokens", 40)
    together = run_command("chat", *fixed, *options, "--gpus", 2, stdin=lines.encode(), TRIFORCE_HOME=str(tmp_path))
    assert together.code == 0, together
    alone = turns_of(chat(lines, *options, model=model, new=40))
    assert [turn["text"] for turn in turns_of(together)] == [turn["text"] for turn in alone]
    assert alone[0]["finish_reason"] == "stop"
