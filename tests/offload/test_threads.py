"""The number of threads that decode follows what other processes leave: simulated machines, and a real run."""

import pytest
import torch
from tiny import random_tokens, save_llama
from triforce.offload import Engine, Sampling
from triforce.offload.threads import DecodingThreads, Usage
from triforce.tp import UsageError


class Machine:
    """Cores, and processes that take as much of them as they get; a round is 10 ms of work on each of two cores."""

    def __init__(self, cores, monkeypatch):
        self.cores, self.others, self.threads = cores, 0, cores
        self.now, self.idle_s = Usage(0.0, 0.0, 0), 0.0
        monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
        monkeypatch.setattr(torch, "set_num_threads", lambda number: setattr(self, "threads", number))

    def usage(self):
        return self.now

    def idle(self):
        return self.idle_s

    def round(self, chosen):
        with chosen.in_use():
            crowded = self.threads + self.others > self.cores
            got = self.threads * min(1.0, self.cores / (self.threads + self.others))
            seconds = 0.02 / self.threads * (8 if crowded and self.threads > 1 else 1)
            interrupts = round(100 * seconds) + 1 if crowded else 0
            self.idle_s += seconds * max(0, self.cores - self.threads - self.others)
            self.now = Usage(
                self.now.seconds + seconds, self.now.core_s + got * seconds, self.now.interrupts + interrupts
            )
        assert self.threads == self.cores, "between rounds all are there"
        return seconds


@pytest.mark.parametrize(("cores", "others", "want"), [(2, 0, 2), (2, 1, 1), (2, 2, 1), (16, 1, 15), (16, 8, 8)])
def test_there_are_as_many_threads_as_cores_that_others_leave(cores, others, want, monkeypatch):
    machine = Machine(cores, monkeypatch)
    chosen = DecodingThreads(True, machine.usage, lambda: cores, machine.idle)
    machine.others = others
    for _ in range(400):
        machine.round(chosen)
    assert chosen.number == want


def test_trials_cost_little_and_notice_that_the_cores_are_free_again(monkeypatch):
    machine = Machine(2, monkeypatch)
    chosen = DecodingThreads(True, machine.usage, lambda: 2, machine.idle)
    machine.others = 1
    took = [machine.round(chosen) for _ in range(5000)]
    assert not any(seconds > 0.02 for seconds in took[100:]), "more threads were tried although no core was free"
    assert "other programs took cores" in chosen.warnings[0]
    machine.others, free = 0, machine.now.seconds
    while chosen.number == 1:
        machine.round(chosen)
    assert machine.now.seconds - free < 2


def test_as_many_threads_come_back_as_cores_are_free(monkeypatch):
    machine = Machine(16, monkeypatch)
    chosen = DecodingThreads(True, machine.usage, lambda: 16, machine.idle)
    for machine.others, want in ((12, 4), (6, 10), (0, 16)):
        for _ in range(2000):
            machine.round(chosen)
        assert chosen.number == want


def test_waiting_for_a_link_is_no_reason_for_fewer_threads(monkeypatch):
    machine = Machine(2, monkeypatch)
    chosen = DecodingThreads(True, machine.usage)
    for i in range(100):
        with chosen.in_use():
            machine.now = Usage(0.2 * (i + 1), 0.05 * (i + 1), i)
    assert chosen.number == 2 and not chosen.warnings


def test_the_cores_that_rounds_do_not_use_are_not_taken_for_lost(monkeypatch):
    """Half of a round is one thread's, and threads of this process interrupt each other: fewer would be slower."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    set_to: list[int] = [16]
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    now, slower = Usage(0.0, 0.0, 0), 0
    chosen = DecodingThreads(True, lambda: now, lambda: 16)
    for _ in range(2000):
        with chosen.in_use():
            threads = set_to[-1]
            seconds = 0.005 + 0.005 * 16 / threads
            now = Usage(now.seconds + seconds, now.core_s + 0.005 + 0.08, now.interrupts + 1)
            slower += threads < 16
    assert slower < 20 and chosen.number == 16 and not chosen.warnings


def test_a_run_has_the_same_tokens_whatever_the_threads(tmp_path, monkeypatch):
    save_llama(tmp_path, seed=1)
    prompt = random_tokens(300, seed=3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    used = set()

    def alternate(chosen, *_):
        used.add(chosen.number)
        chosen.number = 3 - chosen.number

    monkeypatch.setattr(DecodingThreads, "_judge", alternate)
    texts = []
    for threads in (1, 2, None):
        engine = Engine.load(tmp_path, device="cpu", dtype="float32", threads=threads)
        run = engine.stream(prompt, Sampling(0.0), 20, ignore_eos=True)
        texts.append([token for event in run for token in event.tokens])
    assert texts[0] == texts[1] == texts[2]
    assert used == {1, 2}


def test_a_number_of_threads_below_one_is_refused(tmp_path):
    save_llama(tmp_path, seed=1)
    with pytest.raises(UsageError, match="threads is 0"):
        Engine.load(tmp_path, device="cpu", threads=0)
