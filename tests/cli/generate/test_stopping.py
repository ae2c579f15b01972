"""Signals, and readers that go away: a run ends where it is, and what it has is kept."""

import json
import os
import signal
import subprocess
import time
from contextlib import suppress

import pytest
from command import TEXT, TRIFORCE, run_here
from triforce.cli.terminal import stopping
from triforce.cli.terminal.stopping import REPEAT_S, Signals, Stop
from triforce.tp.model.decoder import Decoder


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


@pytest.fixture
def clock(monkeypatch):
    """The time that signals are told, at will."""
    now = [1000.0]
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now[0])
    return now


def test_signal_that_is_held_waits_until_it_is_allowed():
    with Signals() as signals:
        signals.hold()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Stop) as raised:
            signals.allow()
    assert (raised.value.exit_code, raised.value.message) == (143, "terminated")


@pytest.mark.parametrize("held", [False, True])
def test_repeated_signal_interrupts_nothing_and_a_later_one_does(clock, held):
    with Signals() as signals:
        if held:
            signals.hold()
            signal.raise_signal(signal.SIGINT)
        else:
            with pytest.raises(Stop):
                signal.raise_signal(signal.SIGINT)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            clock[0] += 0.9 * REPEAT_S  # a key held down: each repeats the one before
            signal.raise_signal(number)
        clock[0] += 1.1 * REPEAT_S
        with pytest.raises(Stop) as raised:
            signal.raise_signal(signal.SIGINT)
        assert raised.value.exit_code == 130


def test_signal_whose_stop_was_swallowed_is_raised_again():
    with Signals() as signals:
        with pytest.raises(Stop):
            signal.raise_signal(signal.SIGINT)
        signals.hold()
        with pytest.raises(Stop):
            signals.allow()


def test_handlers_are_put_back_and_nohup_is_respected():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, hangup)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=lambda value: str(value),
)
@pytest.mark.slow(keep=1)
def test_signal_keeps_text_statistics_and_json(pair, tmp_path, number, code):
    path = tmp_path / "run.json"
    run = start("generate", "--model", pair[0], *ENDLESS, "--json", path)
    assert run.stdout and run.stderr
    first = run.stdout.read(1)
    run.send_signal(number)
    out, errors = run.communicate(timeout=60)
    assert run.returncode == code, errors
    document = json.loads(path.read_text())
    assert document["finish_reason"] == "interrupted"
    assert 0 < document["new_tokens"] < 1000
    assert (first + out).decode() == document["text"]
    assert b"written" in errors and b"Traceback" not in errors
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


def test_interrupted_prefill_has_statistics_and_json(pair, capfd, monkeypatch):
    slices = Decoder.slices

    def interrupted(self, tokens, *arguments, **options):
        if len(tokens) > 10:
            signal.raise_signal(signal.SIGINT)
        return slices(self, tokens, *arguments, **options)

    monkeypatch.setattr(Decoder, "slices", interrupted)
    outcome = run_here(capfd, "generate", "--model", pair[0], "--prompt", TEXT, "--json", "-")
    assert outcome.code == 130, outcome
    document = json.loads(outcome.out)
    assert (document["finish_reason"], document["token_ids"], document["text"]) == ("interrupted", [], "")
    assert document["prompt_tokens"] > 10 and document["rounds"] == 0
    assert "\nwritten   0 tokens, interrupted" in outcome.err and outcome.err.endswith("interrupted\n")


def test_failed_prefill_is_an_error_without_statistics(pair, capfd, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Decoder, "slices", fail)
    outcome = run_here(capfd, "generate", "--model", pair[0], "--prompt", TEXT, "--json", "-")
    assert (outcome.code, outcome.out) == (1, "")
    assert "out of memory" in outcome.err and "written" not in outcome.err


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
    time.sleep(1.5 * REPEAT_S)
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
