"""The live display of one run: what it draws, in any size, where, and how often."""

import os
import pty
import re
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console
from triforce.cli.terminal.frame import Snapshot, draw
from triforce.cli.terminal.live import LiveDisplay
from triforce.cli.terminal.output import same_terminal
from triforce.cli.terminal.wrapping import WrappedText
from triforce.offload.statistics import Statistics

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


def test_no_display_where_stderr_is_no_terminal_or_a_dumb_one():
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        assert not LiveDisplay.possible(Console(file=nowhere))
        assert LiveDisplay.possible(Console(file=nowhere, force_terminal=True, _environ={"TERM": "xterm"}))
        assert not LiveDisplay.possible(Console(file=nowhere, force_terminal=True, _environ={"TERM": "dumb"}))


@pytest.mark.slow
def test_slow_drawing_makes_fewer_pictures_instead_of_slower_decoding(monkeypatch):
    document = {"settings": {"budget": 0}, "prompt_tokens": 1, "device": "cpu", "dtype": "float32"}
    order = SimpleNamespace(max_new_tokens=8)
    sequence: Any = SimpleNamespace(statistics=Statistics(), order=order, document=lambda *_: document)
    lengths = {"draft_length": 1, "block_length": 1}

    def draw_slowly():
        end = time.thread_time() + 0.03
        while time.thread_time() < end:
            pass

    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(file=nowhere, force_terminal=True, width=80, height=24)
        display = LiveDisplay(console, sequence, lambda: lengths, "a model")
        with display:
            monkeypatch.setattr(display._live, "refresh", draw_slowly)
            began = time.perf_counter()
            while not display.drawing_s or time.perf_counter() < began + 1.5:
                time.sleep(0.05)
            seconds, drawing_s = time.perf_counter() - began, display.drawing_s
    first = 0.031  # before it is known how long a picture takes
    assert drawing_s < first + 0.01 * seconds, f"{drawing_s / seconds:.1%} of the time went into drawing"
