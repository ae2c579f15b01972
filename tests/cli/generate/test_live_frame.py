"""The live display of a run: what it draws, in any size, where, and how often."""

import io
import os
import pty
import re
import time
from dataclasses import replace

import pytest
import torch
from rich.cells import cell_len
from rich.console import Console
from triforce.cli.terminal.live import LiveDisplay
from triforce.cli.terminal.live_picture import AnswerRow, Figures, Snapshot, draw
from triforce.cli.terminal.output import same_terminal
from triforce.cli.terminal.wrapping import WrappedText
from triforce.offload import Round
from triforce.offload.statistics import Statistics

STATISTICS = Statistics(
    prompt_tokens=13_000,
    token_ids=[0] * 120,
    token_s=[0.0123] * 119,
    decode_s=0.0123 * 119,
    rounds=12,
    draft_tested=100,
    draft_accepted=61,
    retrieval_tested=100,
    retrieval_accepted=94,
    draft_s=0.15,
    retrieval_s=0.45,
    verify_s=0.7637,
    refresh_s=0.05,
    kv_read_bytes=3_210_000_000,
    kv_read_s=0.1597,
)


def snapshot(text, statistics=STATISTICS, budget=1024, **changed):
    given = {
        "title": "triforce · embedded · 13,000 tokens read · cpu bfloat16",
        "rows": (AnswerRow("", "running", 256, statistics, budget=budget),),
        "text": text,
        "elapsed_s": 3.2,
        "tbt_now_s": 0.0112,
        "tbt_p95_s": 0.0301,
        "tbt_history_s": tuple(0.01 + 0.001 * (i % 13) for i in range(300)),
        "draft_length": 4,
        "block_length": 12,
        "process_bytes": 700 * 2**20,
        "available_bytes": 20 * 2**30,
    }
    return Snapshot(**given | changed)


LABELS = ("TBT", "now 11.2", "mean 12.3", "p95 30.1", "81.3 tokens/s", "draft 61%", "retrieval 94%", "9.9 tokens/round",
          "draft 4", "block 12", "budget 1,024", "a round", "verify", "3.21 GB", "20.1 GB/s", "memory", "20.68 GiB",
          "▅", "Ctrl-C")  # fmt: skip


def picture(snapshot, width, height):
    return ["".join(segment.text for segment in line) for line in draw(snapshot, width, height)]


@pytest.fixture
def text():
    wrapped = WrappedText()
    for number in range(400):
        wrapped.add(f"word{number} ")
    return wrapped


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (143, 40), (144, 40), (200, 50)])
def test_everything_is_shown_in_usual_sizes(text, width, height):
    lines = picture(snapshot(text), width, height)
    assert [cell_len(line) for line in lines] == [width] * height
    for label in LABELS:
        assert any(label in line for line in lines), (label, lines)
    assert any("word399" in line for line in lines)


def test_it_says_where_nothing_is_drafted(text):
    for width in (80, 200):
        shown = "\n".join(picture(snapshot(text, block_length=0), width, 40))
        assert "no draft: plain decoding is faster now" in shown
        plain = "\n".join(picture(snapshot(text, block_length=0, draft_length=0, budget=0), width, 40))
        assert "draft 0" in plain and "faster" not in plain, "nothing was to be drafted"


def test_every_size_gives_a_picture_of_that_size(text):
    for width in (1, 2, 10, 19, 20, 21, 40, 79, 81, 119, 150, 300):
        for height in (1, 2, 3, 4, 5, 8, 13, 24, 60):
            for shown in (snapshot(text), snapshot(text, Statistics(), tbt_history_s=(), budget=0)):
                lines = picture(shown, width, height)
                assert [cell_len(line) for line in lines] == [width] * height, (width, height)


def test_parts_of_a_round_fill_the_bar():
    for statistics in (STATISTICS, Statistics(decode_s=3.0, draft_s=1.0, retrieval_s=1.0, verify_s=1.0)):
        shown = picture(snapshot(WrappedText(), statistics), 80, 24)
        bar = next(line for line in shown if "a round" in line)
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


def written(tokens, tbt_s, accepted):
    return Statistics(
        token_ids=[0] * tokens,
        token_s=[tbt_s] * (tokens - 1),
        decode_s=tbt_s * (tokens - 1),
        rounds=tokens // 4,
        verify_s=tbt_s,
        retrieval_tested=100,
        retrieval_accepted=accepted,
        kv_read_bytes=10**9,
        kv_read_s=0.05,
    )


ROWS = (
    AnswerRow("Who is Levin?", "ended", 256, written(40, 0.0123, 94)),
    AnswerRow("Where does he live, and with whom?\nSay it briefly.", "running", 256, written(17, 0.0131, 90)),
    AnswerRow("北京北京 \x1b[2J", "reading", 256, read=0.43),
    AnswerRow("Why?", "failed", 256, note="the prompt has 9,000 tokens"),
    AnswerRow("How?", "waiting", 256, note="memory: 1.2 GiB more are needed"),
)
NAMES = ("Who is", "Where does")
WRITING = replace(ROWS[0], text="A landowner.\n"), replace(ROWS[1], text="At 北京, " * 40 + "all summer\nlong.")


def several(rows=ROWS, **changed):
    return snapshot(None, **{"rows": rows, "elapsed_s": 2.0, "done": 3, "to_come": 90} | changed)


@pytest.mark.parametrize(("width", "height"), [(40, 24), (80, 24), (144, 40)])
def test_state_tokens_tbt_and_acceptance_of_each_answer_are_shown(width, height):
    lines = picture(several(), width, height)
    assert [cell_len(line) for line in lines] == [width] * height
    shown = "\n".join(lines)
    for words in ("running +17", "ended +40", "prefill +43%", "failed +0", "waiting +0", "13.1 +90%", "12.3 +94%"):
        assert re.search(words.replace(" +", "[^\n]* "), shown), words
    for words in ("28.5 tokens/s", "draft 4  block 12", "1 prefill", "memory: 1.2 GiB", "Ctrl-C", "now 11.2  mean 12.5",
                  "retrieval 92%", "verify"):  # fmt: skip
        assert words in shown, words
    both = "\n".join(picture(several(to_come=0, rows=ROWS[:2]), width, height))
    assert "KV read   20.0 GB/s" in both and "memory" in both
    assert "\x1b" not in shown
    if width >= 80:
        for words in ("Who is Levin?", "17/256", "Why?: the prompt has", "1 prefill, 1 running, 91 waiting, 1 failed"):
            assert words in shown, words


def test_every_size_gives_a_list_of_that_size():
    for width in (1, 2, 10, 19, 20, 21, 39, 40, 41, 67, 68, 80, 200):
        for height in (1, 2, 3, 4, 5, 8, 13, 24, 60):
            for shown in (several(), several(ROWS * 30), several(WRITING), several((), elapsed_s=0.0)):
                lines = picture(shown, width, height)
                assert [cell_len(line) for line in lines] == [width] * height, (width, height)


def display_of(rows, **given):
    console = Console(file=io.StringIO(), force_terminal=True, width=100, height=30)
    lengths = {"draft_length": 1, "block_length": 1}
    return LiveDisplay(console, "a model", lambda: rows, lambda: lengths, device=torch.device("cpu"), **given)


def round_of(tokens, seconds, index=1):
    return Round(index, [0] * tokens, seconds, proposed=0, accepted=0, refreshed=False)


def test_figures_of_one_answer_are_of_all_its_tokens():
    display = display_of([AnswerRow("", "running", 9)], single=True)
    display.note("a", round_of(1, 5.0, index=0))
    for tokens, seconds in ((1, 0.9), (9, 0.9), (4, 0.8)):
        display.note(" word", round_of(tokens, seconds))
    shown = display.snapshot()
    assert shown.tbt_p95_s == 0.9 and shown.tbt_history_s == (0.9, 0.1, 0.2), "the prefill is no round"
    assert shown.tbt_now_s == pytest.approx(1.7 / 13), "of rounds that take a second together"
    assert shown.text and shown.text.last_lines(20, 1) == ["a word word word"]


def test_figures_of_several_answers_stay_when_some_leave():
    rows, others = list(ROWS[:2]), [0, Figures(), 0]
    display = display_of(rows, others=lambda: tuple(others))
    for seconds in (0.6, 0.4, 0.6, 0.4):  # two rounds of two answers
        display.note("ignored", round_of(2, seconds))
    both = display.snapshot()
    assert both.text is None and both.figures.new_tokens == 57
    assert both.tbt_p95_s == 0.3 and both.tbt_now_s == 0.25
    rows.pop(0)
    others[:2] = 1, Figures.of(ROWS[0].statistics)
    left = display.snapshot()
    assert left.figures == both.figures and left.done == 1


def test_what_an_answer_has_so_far_stands_beside_its_name():
    for width in (100, 144):
        answered, running = (
            next(line for line in picture(several(WRITING), width, 24) if words in line) for words in NAMES
        )
        assert "Who is Levin? A landowner." in answered
        assert re.search("Where does he.* ….*all summer long. │", running)


def test_answers_at_work_keep_their_lines_where_there_are_too_few():
    rows = [*ROWS[:1]] * 40 + [ROWS[1]] + [ROWS[4]] * 40 + [ROWS[2]]
    lines = picture(several(rows), 80, 16)
    shown = "\n".join(lines)
    assert "41 running" in shown and "82 prefill" in shown and re.search(r"and \d+ more", shown)


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
    rows, lengths = [AnswerRow("", "running", 8)], {"draft_length": 1, "block_length": 1}

    def draw_slowly():
        end = time.thread_time() + 0.03
        while time.thread_time() < end:
            pass

    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(file=nowhere, force_terminal=True, width=80, height=24)
        display = LiveDisplay(
            console, "a model", lambda: rows, lambda: lengths, single=True, device=torch.device("cpu")
        )
        with display:
            monkeypatch.setattr(display._live, "refresh", draw_slowly)
            began = time.perf_counter()
            while not display.drawing_s or time.perf_counter() < began + 1.5:
                time.sleep(0.05)
            seconds, drawing_s = time.perf_counter() - began, display.drawing_s
    first = 0.031  # before it is known how long a picture takes
    assert drawing_s < first + 0.01 * seconds, f"{drawing_s / seconds:.1%} of the time went into drawing"
