"""The live display on a real terminal, which it must leave as it found it."""

import json
import os
import re
import time
from typing import Any

import pytest
from command import TRIFORCE

pexpect = pytest.importorskip("pexpect", reason="pexpect is not installed: pip install '.[test]'")
pyte = pytest.importorskip("pyte", reason="pyte is not installed: pip install '.[test]'")

import terminals  # noqa: E402


class Terminal:
    """`triforce generate`, in a process that begins and ends as a user's, on a pseudo-terminal, and its screen."""

    def __init__(self, pair, *arguments, columns=80, rows=24):
        target, draft = pair
        self.screen = pyte.HistoryScreen(columns, rows, history=1000)
        self._stream = pyte.Stream(self.screen)
        self.raw = ""
        environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR", "CI")}
        self._child = pexpect.spawn(
            TRIFORCE[0],
            [*TRIFORCE[1:], "generate", "--model", str(target), "--draft", str(draft), *map(str, arguments)],
            dimensions=(rows, columns),
            encoding="utf-8",
            codec_errors="replace",
            env=environment | {"OMP_NUM_THREADS": "1", "TERM": "xterm-256color"},
            timeout=60,
        )

    def read_until(self, pattern, seconds=60.0):
        """Feeds the screen until it shows `pattern`."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._take()
            if re.search(pattern, "\n".join(self.screen.display)):
                return
        raise AssertionError(f"{pattern!r} never came:\n" + "\n".join(self.screen.display))

    def resize(self, columns, rows):
        self.screen.resize(rows, columns)
        self._child.setwinsize(rows, columns)

    def interrupt(self):
        self._child.sendintr()

    def hang_up(self):
        """Closes the terminal: the command gets SIGHUP, and nothing more can be written."""
        terminal: Any = self._child  # its stubs leave `ptyproc` out
        terminal.ptyproc.fileobj.close()

    def wait(self):
        """The exit code, without reading."""
        return self._child.wait()

    def finish(self):
        """Reads to the end; the exit code."""
        while self._take():
            pass
        self._child.close()
        return self._child.exitstatus

    def _take(self):
        try:
            new = self._child.read_nonblocking(65536, timeout=0.2)
        except pexpect.TIMEOUT:
            return True
        except pexpect.EOF:
            return False
        self.raw += new
        self._stream.feed(new)
        return True


LONG = ("--prompt", "It was the best of times", "--max-new-tokens", 990, "--ignore-eos", "--tiers", 3)


def test_display_resize_and_interrupt_on_a_terminal(pair, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = terminals.Terminal("generate", "--model", pair[0], "--draft", pair[1], *LONG)
    terminal.read_until("tokens/round")
    terminal.read_until("a round .*[▓░▒]")
    shown = terminal.screen.display
    assert shown[0].startswith("╭─ triforce · target") and shown[0].endswith("╮")
    assert shown[-1].startswith("╰─ Ctrl-C") and shown[-1].endswith("╯")
    assert all(line[0] in "╭│╰" and line[-1] in "╮│╯" for line in shown), shown
    terminal.resize(110, 30)
    terminal.read_until("╭─ triforce .{96,}╮")
    assert terminal.screen.cursor.hidden
    terminal.type("\x03")
    assert terminal.finish() == 130
    raw = terminal.raw
    assert raw.rindex("\x1b[?1049l") > raw.rindex("\x1b[?1049h"), "the alternate screen is left"
    assert raw.rindex("\x1b[?25h") > raw.rindex("\x1b[?25l"), "the cursor is shown again"
    after = raw[raw.rindex("\x1b[?1049l") :]
    assert "tokens, interrupted; seed" in after and "TBT" in after and "Traceback" not in raw
    text = after[: after.index("written")]
    assert len(re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]|\s", "", text)) > 10, "the text so far is kept"


@pytest.mark.slow
def test_interrupts_in_a_row_leave_the_terminal_and_the_statistics(pair):
    terminal = Terminal(pair, *LONG)
    terminal.read_until("tokens/round")
    for _ in range(3):
        terminal.interrupt()
        time.sleep(0.02)
    assert terminal.finish() == 130
    raw = terminal.raw
    assert raw.rindex("\x1b[?1049l") > raw.rindex("\x1b[?1049h"), "the alternate screen is left"
    assert raw.rindex("\x1b[?25h") > raw.rindex("\x1b[?25l"), "the cursor is shown again"
    assert "tokens, interrupted; seed" in raw and "Traceback" not in raw and "Exception" not in raw


@pytest.mark.slow
def test_closed_terminal_keeps_text_and_json(pair, tmp_path):
    terminal = Terminal(pair, *LONG, "--json", tmp_path / "run.json")
    terminal.read_until("tokens/round")
    terminal.hang_up()
    assert terminal.wait() == 129
    document = json.loads((tmp_path / "run.json").read_text())
    assert document["finish_reason"] == "interrupted" and document["text"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"], "the temporary file is gone"


@pytest.mark.slow
def test_no_live_streams_plain_text(pair):
    terminal = Terminal(pair, *LONG[:2], "--max-new-tokens", 20, "--ignore-eos", "--no-live")
    assert terminal.finish() == 0
    assert "\x1b[?1049h" not in terminal.raw
    assert "20 tokens, to the length asked for" in terminal.raw
