"""The live display: what it draws, in any size; and a real terminal, which it must leave as it found it."""

import json
import os
import pty
import re
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from command import TRIFORCE
from rich.cells import cell_len
from rich.console import Console
from triforce.cli.generate.run import same_terminal
from triforce.cli.terminal.frame import Snapshot, draw
from triforce.cli.terminal.live import LiveDisplay
from triforce.cli.terminal.wrapping import WrappedText
from triforce.offload import Generation
from triforce.offload.statistics import Statistics

pexpect = pytest.importorskip("pexpect", reason="pexpect is not installed: pip install '.[test]'")
pyte = pytest.importorskip("pyte", reason="pyte is not installed: pip install '.[test]'")

SNAPSHOT = Snapshot(
    title="triforce · embedded · 13,000 tokens read · cpu bfloat16",
    new_tokens=120,
    max_new_tokens=256,
    context_tokens=13_120,
    elapsed_s=3.2,
    tbt_now_s=0.0112,
    tbt_mean_s=0.0123,
    tbt_p95_s=0.0301,
    tbt_history_s=tuple(0.01 + 0.001 * (i % 13) for i in range(300)),
    tokens_per_s=81.3,
    tokens_per_round=9.7,
    accepted_draft=0.61,
    accepted_retrieval=0.94,
    draft_length=4,
    block_length=12,
    budget=1024,
    time_s={"draft": 0.3, "retrieval": 0.9, "verify": 1.6, "refresh": 0.1, "other": 0.1},
    bytes_read=3_210_000_000,
    gb_per_s=20.1,
    process_bytes=700 * 2**20,
    available_bytes=20 * 2**30,
)

LABELS = ("TBT", "now 11.2", "mean 12.3", "p95 30.1", "81.3 tokens/s", "draft 61%", "retrieval 94%", "9.7 tokens/round",
          "draft 4", "block 12", "budget 1,024", "a round", "verify", "3.21 GB", "20.1 GB/s", "memory", "20.68 GiB",
          "▅", "Ctrl-C")  # fmt: skip


def picture(snapshot, text, width, height):
    return ["".join(segment.text for segment in line) for line in draw(snapshot, text, width, height)]


@pytest.fixture
def text():
    wrapped = WrappedText()
    for number in range(400):
        wrapped.add(f"word{number} ")
    return wrapped


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (143, 40), (144, 40), (200, 50)])
def test_everything_is_shown_in_usual_sizes(text, width, height):
    lines = picture(SNAPSHOT, text, width, height)
    assert [cell_len(line) for line in lines] == [width] * height
    for label in LABELS:
        assert any(label in line for line in lines), (label, lines)
    assert any("word399" in line for line in lines)


def test_it_says_where_nothing_is_drafted(text):
    for width in (80, 200):
        shown = "\n".join(picture(replace(SNAPSHOT, block_length=0), text, width, 40))
        assert "no draft: plain decoding is faster now" in shown
        plain = "\n".join(picture(replace(SNAPSHOT, block_length=0, draft_length=0, budget=0), text, width, 40))
        assert "draft 0" in plain and "faster" not in plain, "nothing was to be drafted"


def test_every_size_gives_a_picture_of_that_size(text):
    for width in (1, 2, 10, 19, 20, 21, 40, 79, 81, 119, 150, 300):
        for height in (1, 2, 3, 4, 5, 8, 13, 24, 60):
            for snapshot in (SNAPSHOT, replace(SNAPSHOT, tbt_history_s=(), time_s={}, accepted_draft=None, budget=0)):
                lines = picture(snapshot, text, width, height)
                assert [cell_len(line) for line in lines] == [width] * height, (width, height)


def test_parts_of_a_round_fill_the_bar():
    for snapshot in (SNAPSHOT, replace(SNAPSHOT, time_s={"draft": 1.0, "retrieval": 1.0, "verify": 1.0})):
        bar = next(line for line in picture(snapshot, WrappedText(), 80, 24) if "a round" in line)
        assert len(re.findall("[░▒▓█·]", bar)) == 66


@pytest.mark.parametrize("width", [1, 7, 30, 80])
def test_text_wraps_the_same_however_it_comes(width):
    whole = "One two  three, naïve 北京北京北京 🙂 averyveryverylongword\n\n  another paragraph\tof it \x1b[2J\n" * 5
    at_once, piecemeal = WrappedText(), WrappedText()
    at_once.add(whole)
    for letter in whole:
        piecemeal.add(letter)
        piecemeal.last_lines(width, 3)
    lines = at_once.last_lines(width, 10_000)
    assert piecemeal.last_lines(width, 10_000) == lines
    assert max(cell_len(line) for line in lines) <= max(width, 2)  # a wide character needs two cells
    assert not any("\x1b" in line for line in lines)
    assert "".join("".join(lines).split()) == "".join(whole.replace("\x1b", "�").split())
    wider = WrappedText()
    wider.add(whole)
    assert at_once.last_lines(width + 5, 4) == wider.last_lines(width + 5, 10_000)[-4:], "a new width wraps all again"


class Terminal:
    """`triforce generate` on a pseudo-terminal, and what its screen shows."""

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


def test_display_resize_and_interrupt_on_a_terminal(pair):
    terminal = Terminal(pair, *LONG)
    terminal.read_until("tokens/round")
    terminal.read_until("a round .*[▓░▒]")
    shown = terminal.screen.display
    assert shown[0].startswith("╭─ triforce · target") and shown[0].endswith("╮")
    assert shown[-1].startswith("╰─ Ctrl-C") and shown[-1].endswith("╯")
    assert all(line[0] in "╭│╰" and line[-1] in "╮│╯" for line in shown), shown
    terminal.resize(110, 30)
    terminal.read_until("╭─ triforce .{96,}╮")
    assert terminal.screen.cursor.hidden
    terminal.interrupt()
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


def test_one_terminal_is_known_without_its_name(monkeypatch):
    def no_name(descriptor):
        raise OSError(2, "No such file or directory")

    monkeypatch.setattr(os, "ttyname", no_name)
    terminals = [pty.openpty(), pty.openpty()]
    streams = [open(os.dup(terminals[i][1]), "w", encoding="utf-8") for i in (0, 0, 1)]  # noqa: SIM115
    try:
        assert same_terminal(streams[0], streams[1])
        assert not same_terminal(streams[0], streams[2])
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            assert not same_terminal(streams[0], nowhere)
    finally:
        for stream in streams:
            stream.close()
        for descriptor in (*terminals[0], *terminals[1]):
            os.close(descriptor)


@pytest.mark.slow
def test_no_live_streams_plain_text(pair):
    terminal = Terminal(pair, *LONG[:2], "--max-new-tokens", 20, "--ignore-eos", "--no-live")
    assert terminal.finish() == 0
    assert "\x1b[?1049h" not in terminal.raw
    assert "20 tokens, to the length asked for" in terminal.raw


def test_no_display_where_stderr_is_no_terminal_or_a_dumb_one():
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        assert not LiveDisplay.possible(Console(file=nowhere))
        assert LiveDisplay.possible(Console(file=nowhere, force_terminal=True, _environ={"TERM": "xterm"}))
        assert not LiveDisplay.possible(Console(file=nowhere, force_terminal=True, _environ={"TERM": "dumb"}))


@pytest.mark.slow
def test_slow_drawing_makes_fewer_pictures_instead_of_slower_decoding(monkeypatch):
    run = SimpleNamespace(
        statistics=Statistics(),
        lengths={"draft_length": 1, "block_length": 1},
        stats=lambda: {"settings": {"budget": 0}, "prompt_tokens": 1, "device": "cpu", "dtype": "float32"},
    )

    def draw_slowly():
        end = time.thread_time() + 0.03
        while time.thread_time() < end:
            pass

    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(file=nowhere, force_terminal=True, width=80, height=24)
        display = LiveDisplay(console, cast(Generation, run), "a model", 8)
        with display:
            monkeypatch.setattr(display._live, "refresh", draw_slowly)
            began = time.perf_counter()
            while not display.drawing_s or time.perf_counter() < began + 1.5:
                time.sleep(0.05)
            seconds, drawing_s = time.perf_counter() - began, display.drawing_s
    first = 0.031  # before it is known how long a picture takes
    assert drawing_s < first + 0.01 * seconds, f"{drawing_s / seconds:.1%} of the time went into drawing"
