"""`triforce chat` at a terminal: typing, pasting, Ctrl-C and Ctrl-D; and the terminal is left as it was found."""

import json
import os
import re
import signal
import termios
import time

import pytest

pytest.importorskip("pyte", reason="pyte is not installed: pip install '.[test]'")

from templates import CALLING, with_added, with_template
from terminals import Terminal

ANSWERED = r"^> {}\?[ \n]*\n(?=\S)(?!TBT|\d+ of )"
"""Behind a question, something that is not the status line."""

READY = r"^> *\n\s*^(TBT [\d.]+ ms.* · )?[\d,]+ of 1,024 tokens"
"""An empty prompt with the status line. What is typed earlier is read too, but as a line by the terminal."""

SIZES = pytest.mark.parametrize(("columns", "rows"), [(80, 24), (200, 50)])


@pytest.fixture
def terminal(pair, tmp_path, monkeypatch):
    """Starts a chat, and waits until it asks."""
    monkeypatch.setenv("TRIFORCE_HOME", str(tmp_path / "home"))
    opened = []
    model = with_template(pair[0], tmp_path)

    def open_(*arguments, model=model, columns=80, rows=24, new=12):
        fixed = ("chat", "--model", model, "--draft", "none", "--device", "cpu", "--dtype", "float32")
        fixed = (*fixed, "--max-new-tokens", new, "--seed", 1)
        opened.append(Terminal(*fixed, *arguments, columns=columns, rows=rows))
        opened[-1].read_until(READY)
        return opened[-1]

    yield open_
    for one in opened:
        one.close()


@SIZES
@pytest.mark.slow(keep=("80-24",))
def test_questions_are_typed_and_answered(terminal, tmp_path, columns, rows):
    chat = terminal("--json", tmp_path / "turns.json", columns=columns, rows=rows)
    chat.type("Why?\r")
    chat.read_until(rf"> Why(.|\n)*{READY}")
    chat.type("one\\\rtwo\x1b\rthree\r")  # a backslash, and Alt-Enter
    chat.read_until(rf"^  three(.|\n)*{READY}")
    chat.type("/st")
    chat.read_until("/stats")
    chat.type("\x03")  # clears the line
    chat.read_until(READY)
    chat.type("\x04")
    assert chat.finish() == 0
    turns = json.loads((tmp_path / "turns.json").read_text())
    assert [turn["question"] for turn in turns] == ["Why?", "one\ntwo\nthree"]
    assert "Traceback" not in chat.raw and chat.raw.rfind("\x1b[?2004l") > chat.raw.rfind("\x1b[?2004h")


@SIZES
@pytest.mark.slow(keep=("80-24",))
def test_two_thousand_pasted_lines_are_one_message(terminal, tmp_path, columns, rows):
    chat = terminal("--json", tmp_path / "turns.json", columns=columns, rows=rows)
    chat.paste("\n".join(map(str, range(2000))))
    chat.read_until(r"^ *1999 *$")
    chat.type("\r")
    chat.read_until(r"error: the text, the system message and the question have \d,\d{3} tokens")
    chat.read_until(READY)
    chat.paste("Why?\r\nAnd how?")
    chat.type("\r")
    chat.read_until(rf"And how(.|\n)*{READY}")
    chat.type("/quit\r")
    assert chat.finish() == 0, "a question that failed is no failure of a conversation"
    (turn,) = json.loads((tmp_path / "turns.json").read_text())
    assert turn["question"] == "Why?\nAnd how?"


@SIZES
@pytest.mark.slow(keep=("80-24",))
def test_ctrl_c_ends_an_answer_and_keeps_it(terminal, tmp_path, columns, rows):
    chat = terminal("--json", tmp_path / "turns.json", columns=columns, rows=rows, new=980)
    chat.type("Why?\r")
    chat.read_until(ANSWERED.format("Why"))
    chat.type("\x03")
    chat.read_until(READY)
    chat.type("/undo\r")
    chat.read_until(rf"took back: Why\?\s+{READY}")
    chat.type("How?\r")
    chat.read_until(ANSWERED.format("How"))
    chat.type("\x03")
    chat.read_until(READY)
    chat.type("\x04")
    assert chat.finish() == 0
    (turn,) = json.loads((tmp_path / "turns.json").read_text())
    assert turn["question"] == "How?" and turn["finish_reason"] == "interrupted" and 0 < turn["new_tokens"] < 980
    assert turn["seed"] == 1, "what was taken back leaves no trace"
    # What is no character yet is shown when it has become one, or not at all. Control characters are never shown.
    text, written = (re.sub(r"[\s\ufffd\x00-\x1f\x7f-\x9f]", "", part) for part in (turn["text"], chat.written))
    assert text in written


def test_ctrl_c_drops_what_was_typed_and_nothing_that_the_terminal_has_not_taken_yet(terminal):
    chat = terminal(new=980)
    assert not chat.local_mode & termios.NOFLSH
    chat.type("Why?\r")
    chat.read_until(ANSWERED.format("Why"))
    assert chat.local_mode & termios.NOFLSH
    chat.type("stop it\r\x03")
    time.sleep(0.1)
    chat.type("How?\r")  # before the round ends, perhaps
    chat.read_until(ANSWERED.format("How"))
    assert "stop it" not in chat.written, "what was typed before Ctrl-C is dropped"
    chat.type("\x03")
    chat.read_until(READY)
    assert not chat.local_mode & termios.NOFLSH


@pytest.mark.slow
def test_a_signal_ends_a_waiting_chat_and_leaves_the_terminal(terminal, tmp_path):
    chat = terminal("--json", tmp_path / "turns.json")
    chat.type("Why?\r")
    chat.read_until(rf"> Why(.|\n)*{READY}")
    chat.resize(60, 12)
    chat.type("half a quest")
    chat.read_until("half a quest")
    os.kill(chat._fork.pid, signal.SIGTERM)
    assert chat.finish() == 143
    assert chat.raw.rfind("\x1b[?2004l") > chat.raw.rfind("\x1b[?2004h") and "terminated" in chat.raw
    assert len(json.loads((tmp_path / "turns.json").read_text())) == 1


@pytest.mark.parametrize("resident", ["auto", 0], ids=["resident", "streamed"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.slow
def test_what_ctrl_c_leaves_is_not_read_again(terminal, tmp_path, ranks, resident):
    fixed = ("--gpus", ranks, "--tiers", 2, "--resident", resident)
    chat = terminal("--json", tmp_path / "turns.json", *fixed, new=400)
    for question in ("Why", "How"):
        chat.type(f"{question}?\r")
        chat.read_until(ANSWERED.format(question))
        chat.type("\x03")
        chat.read_until(rf"{ANSWERED.format(question)}(.|\n)*{READY}")
        time.sleep(1.2)  # what follows a signal sooner is the same one
    if ranks > 1:
        time.sleep(8)  # nobody ends a process that has dealt with its signals
    chat.type("\x04")
    assert chat.finish() == 0
    turns = json.loads((tmp_path / "turns.json").read_text())
    assert [turn["finish_reason"] for turn in turns] == ["interrupted"] * 2 and turns[0]["world_size"] == ranks
    assert turns[1]["reused_tokens"] == turns[0]["prompt_tokens"] + turns[0]["new_tokens"] - 1


WRITTEN = ("<think>", "Hm, so.", "</think>", "It rose. ", "<tool_call>", '{"name": "look", "arguments": {"at": "sea"}}')


@pytest.mark.parametrize("control", [False, True], ids=["texts", "control tokens"])
def test_reasoning_is_dim_and_a_call_a_line_and_both_are_kept_as_they_were_written(terminal, pair, tmp_path, control):
    """The marks around them are texts, or control tokens."""
    written = (*WRITTEN, "</tool_call>")
    marks = {one for one in written if one.startswith("<")} if control else set()
    template = with_template(pair[0], tmp_path / "calling", CALLING)
    chat = terminal("--json", tmp_path / "turns.json", model=template, new=len(written))
    chat.type("Why?\r")
    chat.read_until(rf"> Why(.|\n)*{READY}")
    chat.type("\x04")
    chat.finish()
    (plain,) = json.loads((tmp_path / "turns.json").read_text())
    assert len(set(plain["token_ids"])) == len(written), "each of them can be told"
    added = dict(zip(plain["token_ids"], written, strict=True))
    model = with_added(template, tmp_path, added, marks)
    chat = terminal("--json", tmp_path / "turns.json", model=model, new=len(written))
    chat.type("Why?\r")
    chat.read_until(rf'^Hm, so.\n\nIt rose.\ncall: look {{"at": "sea"}}\n{READY}')
    assert "\x1b[2mHm, so.\x1b[22m" in chat.raw and "think" not in chat.raw
    chat.type("How?\r")
    chat.read_until(rf"> How(.|\n)*{READY}")
    chat.type("\x04")
    assert chat.finish() == 0
    first, second = json.loads((tmp_path / "turns.json").read_text())
    assert first["token_ids"] == plain["token_ids"] and first["prompt_tokens"] == plain["prompt_tokens"]
    assert first["text"] == "".join(one for one in written if one not in marks)
    assert second["reused_tokens"] == first["prompt_tokens"] + len(written) - 1, "nothing is read again"
