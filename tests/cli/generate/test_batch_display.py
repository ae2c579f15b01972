"""The live display of a batch on a real terminal."""

import json

import pytest

pytest.importorskip("pyte", reason="pyte is not installed: pip install '.[test]'")

from terminals import Terminal

LONG = ("--prompt", "It was the best of times", "--max-new-tokens", 900, "--ignore-eos", "--tiers", 3)


def test_a_terminal_shows_the_sequences_and_then_their_answers(pair):
    target, draft = pair
    fixed = ("generate", "--model", target, "--draft", draft, "--device", "cpu", *LONG)
    terminal = Terminal(*fixed, "--ask", "Why?", "--ask", "How?", columns=40, rows=20)
    try:
        terminal.read_until(r"^│ +2 running +[1-9]")
        terminal.read_until("2 running")
        assert all(line[0] in "╭│╰" and line[-1] in "╮│╯" for line in terminal.screen.display)
        terminal.resize(90, 24)
        terminal.read_until(r"1 running .*Why\?")
        terminal.type("\x03")
        assert terminal.finish() == 130
        raw = terminal.raw
        assert raw.rindex("\x1b[?1049l") > raw.rindex("\x1b[?1049h"), "the alternate screen is left"
        after = raw[raw.rindex("\x1b[?1049l") :]
        assert after.index("--- Why?") < after.index("--- How?") < after.index("written")
        assert "interrupted" in after and "Traceback" not in raw
    finally:
        terminal.close()


def test_a_terminal_shows_the_requests_of_a_file_by_their_names(pair, tmp_path):
    body = {"prompt": "It was the best of times", "max_tokens": 900, "temperature": 0}
    lines = [{"custom_id": f"request-{n}", "body": body | ({"functions": [1]} if n == 2 else {})} for n in range(5)]
    (tmp_path / "requests.jsonl").write_text("\n".join(map(json.dumps, lines)))
    files = (tmp_path / "requests.jsonl", "-o", tmp_path / "answers.jsonl")
    fixed = ("--model", pair[0], "--draft", pair[1], "--device", "cpu", "--max-sequences", 2)
    terminal = Terminal("batch", *files, *fixed, columns=90, rows=20)
    try:
        terminal.read_until(r"running .* request-1")
        terminal.read_until(r"answers +2 running, \d+ waiting")
        terminal.type("\x03")
        assert terminal.finish() == 130
        raw = terminal.raw
        before, after = raw[: raw.index("\x1b[?1049h")], raw[raw.rindex("\x1b[?1049l") :]
        assert "line 3: functions would change the answer" in before
        assert "2 interrupted" in after and "Traceback" not in raw
    finally:
        terminal.close()


@pytest.mark.parametrize("live", [True, False])
def test_lines_take_the_place_of_a_live_display_where_that_is_asked_for(pair, tmp_path, live):
    (tmp_path / "requests.jsonl").write_text(json.dumps({"custom_id": "a", "body": {"prompt": "It was"}}) + "\n")
    files = (tmp_path / "requests.jsonl", "-o", tmp_path / "answers.jsonl")
    fixed = ("--model", pair[0], "--draft", "none", "--device", "cpu", "--max-new-tokens", 20)
    terminal = Terminal("batch", *files, *fixed, "--live" if live else "--no-live")
    try:
        assert terminal.finish() == 0
        assert ("\x1b[?1049h" in terminal.raw) == live and "1 of 1 requests" in terminal.raw
    finally:
        terminal.close()
