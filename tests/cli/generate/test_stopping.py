"""Signals, and readers that go away: a run ends where it is, and what it has is kept."""

import json
import os
import signal
import subprocess
import time
from contextlib import suppress

import pytest
from command import TEXT, TRIFORCE, VOCABULARY, Running, save_tokenizer
from tiny import save_llama

pytest.importorskip("pyte", reason="pyte is not installed: pip install '.[test]'")

from terminals import Terminal


def start(*arguments, stdout=subprocess.PIPE):
    """`triforce` in a process that is still running; unbuffered, so that reading a byte takes no more from the pipe."""
    return subprocess.Popen(
        [*TRIFORCE, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=subprocess.PIPE,
        bufsize=0,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # these tests may themselves run under nohup
    )


ENDLESS = ("--prompt", "A", "--max-new-tokens", 1000, "--ignore-eos", "--tiers", 1)


def test_interrupted_prefill_has_statistics_and_json(tmp_path):
    model, path = tmp_path / "long", tmp_path / "run.json"
    save_tokenizer(model)
    save_llama(model, vocab_size=VOCABULARY, max_position_embeddings=65_536)
    (tmp_path / "text.txt").write_text(TEXT * 120)
    arguments = ("--model", model, "--prompt-file", tmp_path / "text.txt", "--device", "cpu", "--json", path)
    terminal = Terminal("generate", *arguments, columns=100)
    try:
        terminal.read_until(r"prefill of [\d,]+ tokens .* [1-9]\d?%")
        terminal.type("\x03")
        assert terminal.finish() == 130
    finally:
        terminal.close()
    document = json.loads(path.read_text())
    assert (document["finish_reason"], document["token_ids"], document["text"]) == ("interrupted", [], "")
    assert document["prompt_tokens"] > 10_000 and document["rounds"] == 0
    assert " 0 tokens, interrupted" in terminal.raw and terminal.raw.endswith("interrupted\r\n")


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=lambda value: str(value),
)
@pytest.mark.slow(keep=1)
def test_signal_keeps_text_statistics_and_json(pair, tmp_path, number, code):
    path = tmp_path / "run.json"
    with Running("generate", "--model", pair[0], *ENDLESS, "--json", path) as run:
        run.wait_until(lambda: run.out)
        run.signal(number)
        done = run.finish(60)
    assert done.code == code, done
    document = json.loads(path.read_text())
    assert document["finish_reason"] == "interrupted"
    assert 0 < document["new_tokens"] < 1000
    assert done.out == document["text"]
    assert "written" in done.err and "Traceback" not in done.err
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"], "the temporary file is gone"


@pytest.mark.slow
def test_signals_from_first_token_to_exit_take_nothing_away(pair, tmp_path):
    path = tmp_path / "run.json"
    run = start("generate", "--model", pair[0], *ENDLESS, "--json", path)
    assert run.stdout and run.stderr
    first = run.stdout.read(1)
    while run.poll() is None:  # a held key, through the writing of results and the exit of the interpreter
        run.send_signal(signal.SIGINT)
        time.sleep(0.003)
    out, errors = run.communicate(timeout=60)
    assert run.returncode == 130, errors
    assert (first + out).decode() == json.loads(path.read_text())["text"]
    assert b"written" in errors and errors.endswith(b"\ninterrupted\n"), errors
    assert b"Traceback" not in errors and b"Exception" not in errors, errors


def test_signal_while_loading_is_one_word(pair):
    run = start("generate", "--model", pair[0], "--prompt-file", "-")
    time.sleep(1.0)  # it waits for its prompt
    run.send_signal(signal.SIGINT)
    out, errors = run.communicate(timeout=60)
    assert (run.returncode, out, errors) == (130, b"", b"interrupted\n")


@pytest.mark.parametrize("delay", [0.6, 1.0, 1.5])
@pytest.mark.slow
def test_signal_is_never_lost_in_imports(pair, delay):
    run = start("generate", "--model", pair[0], *ENDLESS)
    time.sleep(delay)
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 130
    assert errors.endswith(b"interrupted\n") and b"Traceback" not in errors


@pytest.mark.slow
def test_reader_that_leaves_ends_the_run_quietly(pair):
    run = start("generate", "--model", pair[0], "--prompt", "A", "--max-new-tokens", 900, "--ignore-eos")
    assert run.stdout and run.stderr
    run.stdout.read(1)
    run.stdout.close()
    errors = run.stderr.read().decode()
    assert run.wait(60) == 141
    assert "interrupted" in errors and "Error" not in errors and "Exception" not in errors, errors


@pytest.mark.slow
def test_reader_of_messages_that_leaves_costs_neither_text_nor_json(pair, tmp_path):
    path = tmp_path / "run.json"
    run = start("generate", "--model", pair[0], "--prompt", "A", "--max-new-tokens", 9, "--ignore-eos", "--json", path)
    assert run.stdout and run.stderr
    run.stderr.close()
    out = run.stdout.read().decode()
    assert run.wait(60) == 0
    document = json.loads(path.read_text())
    assert document["new_tokens"] == 9 and out == document["text"]


@pytest.mark.slow
def test_full_pipe_does_not_hold_a_run_that_is_stopped_twice(pair):
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(1024))
    os.set_blocking(writing, True)
    run = start("generate", "--model", pair[0], *ENDLESS, "--json", "-", stdout=writing)
    assert run.stderr
    messages = b""
    while b"available\n" not in messages:
        messages += run.stderr.read(1)
    time.sleep(0.5)  # the run has begun
    run.send_signal(signal.SIGINT)
    time.sleep(1.5)  # longer than a held key takes to repeat itself
    assert run.poll() is None, "it waits for its reader"
    run.send_signal(signal.SIGINT)
    assert run.wait(20) == 130
    assert b"Traceback" not in run.stderr.read()
    os.close(reading)
    os.close(writing)


def test_message_that_nobody_reads_leaves_the_exit_code(tmp_path):
    run = start("generate", "--prompt-file", tmp_path / "nowhere.txt")
    assert run.stderr
    run.stderr.close()
    assert run.wait(60) == 1
