"""What signals do to the code that they reach: they wait, are raised, or are a repetition."""

import signal

import pytest
from triforce.cli.terminal.stopping import REPEAT_S, Signals, Stop


def test_signal_that_is_delayed_waits_until_it_is_released():
    with Signals() as signals:
        signals.delay()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Stop) as raised:
            signals.release()
    assert (raised.value.exit_code, raised.value.message) == (143, "terminated")


@pytest.mark.parametrize("delayed", [False, True])
def test_repeated_signal_interrupts_nothing_and_a_later_one_does(delayed):
    now = 1000.0
    with Signals(clock=lambda: now) as signals:
        if delayed:
            signals.delay()
            signal.raise_signal(signal.SIGINT)
        else:
            with pytest.raises(Stop):
                signal.raise_signal(signal.SIGINT)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            now += 0.9 * REPEAT_S  # a key held down: each repeats the one before
            signal.raise_signal(number)
        now += 1.1 * REPEAT_S
        with pytest.raises(Stop) as raised:
            signal.raise_signal(signal.SIGINT)
        assert raised.value.exit_code == 130


def test_signal_whose_stop_was_swallowed_is_raised_again():
    with Signals() as signals:
        with pytest.raises(Stop):
            signal.raise_signal(signal.SIGINT)
        signals.delay()
        with pytest.raises(Stop):
            signals.release()


def test_handlers_are_put_back_and_nohup_is_respected():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, hangup)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
