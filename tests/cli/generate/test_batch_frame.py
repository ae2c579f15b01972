"""The picture of a batch that is decoded: a line a sequence, in any size."""

import re
from dataclasses import replace

import pytest
from rich.cells import cell_len
from triforce.cli.terminal.batch_frame import BatchSnapshot, SequenceRow, draw_batch

ROWS = (
    SequenceRow("Who is Levin?", "ended", 40, 256, 0.0123, 0.94),
    SequenceRow("Where does he live, and with whom?\nSay it briefly.", "running", 17, 256, 0.0131, 0.9),
    SequenceRow("北京北京 \x1b[2J", "reading", 0, 256, read=0.43),
    SequenceRow("Why?", "failed", 0, 256, note="the prompt has 9,000 tokens"),
    SequenceRow("How?", "waiting", 0, 256, note="memory: 1.2 GiB more are needed"),
)
SNAPSHOT = BatchSnapshot(
    title="triforce · embedded · 5 answers · cpu",
    rows=ROWS,
    elapsed_s=2.0,
    new_tokens=57,
    draft_length=4,
    block_length=12,
    process_bytes=700 * 2**20,
    available_bytes=20 * 2**30,
    done=3,
    to_come=90,
)
NAMES = ("Who is", "Where does")
WRITING = replace(
    SNAPSHOT,
    rows=(replace(ROWS[0], text="A landowner.\n"), replace(ROWS[1], text="At 北京, " * 40 + "all summer\nlong.")),
)


def picture(snapshot, width, height):
    return ["".join(segment.text for segment in line) for line in draw_batch(snapshot, width, height)]


@pytest.mark.parametrize(("width", "height"), [(40, 24), (80, 24), (144, 40)])
def test_state_tokens_tbt_and_acceptance_of_each_sequence_are_shown(width, height):
    lines = picture(SNAPSHOT, width, height)
    assert [cell_len(line) for line in lines] == [width] * height
    shown = "\n".join(lines)
    for words in ("running +17", "ended +40", "reading +43%", "failed +0", "waiting +0", "13.1 +90%", "12.3 +94%"):
        assert re.search(words.replace(" +", "[^\n]* "), shown), words
    for words in ("28.5 tokens/s", "draft 4  block 12", "1 reading", "memory: 1.2 GiB", "Ctrl-C"):
        assert words in shown, words
    assert "\x1b" not in shown
    if width >= 80:
        for words in ("Who is Levin?", "17/256", "Why?: the prompt has", "1 reading, 1 running, 91 waiting, 1 failed"):
            assert words in shown, words


def test_every_size_gives_a_picture_of_that_size():
    many = replace(SNAPSHOT, rows=ROWS * 30)
    for width in (1, 2, 10, 19, 20, 21, 39, 40, 41, 67, 68, 80, 200):
        for height in (1, 2, 3, 4, 5, 8, 13, 24, 60):
            for snapshot in (SNAPSHOT, many, WRITING, replace(SNAPSHOT, rows=(), elapsed_s=0.0)):
                lines = picture(snapshot, width, height)
                assert [cell_len(line) for line in lines] == [width] * height, (width, height)


def test_what_a_sequence_has_written_stands_beside_its_name():
    for width in (100, 144):
        answered, written = (next(line for line in picture(WRITING, width, 24) if words in line) for words in NAMES)
        assert "Who is Levin? A landowner." in answered
        assert re.search("Where does he.* ….*all summer long. │", written)


def test_sequences_at_work_keep_their_lines_where_there_are_too_few():
    rows = [*ROWS[:1]] * 40 + [ROWS[1]] + [ROWS[4]] * 40 + [ROWS[2]]
    lines = picture(replace(SNAPSHOT, rows=rows), 80, 16)
    shown = "\n".join(lines)
    assert "41 running" in shown and "82 reading" in shown and re.search(r"and \d+ more", shown)
