"""Chooses how many CPU threads decode: all, or fewer while other processes take the cores.

OpenMP's threads wait for one another at the end of every parallel region, and a token has hundreds of these regions. If
the system has given one thread's core to another process, all threads wait for milliseconds until it gets a core back.
With no more threads than free cores, no thread waits. Results do not depend on the number of threads.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import torch

from ..tp.parallel.launch import usable_cores

WINDOW = 0.05
"""The minimum time in seconds of the rounds that are judged together."""

LOST = 0.3
"""A number of cores. If threads were interrupted and used this many cores fewer than there are threads, they may have
lost cores. A core that is idle except for this share is free."""

INTERRUPTS = 40.0
"""Interrupts per second of all threads. The system itself causes fewer than these."""

GAIN = 0.95
"""Another number of threads is kept if a round takes at most this share of the time that it took before."""

FIRST_TRIAL, LAST_TRIAL = 1.0, 8.0
"""Seconds until another number is tried again: the first value and the maximum. Each trial that is not kept doubles
them. More threads are tried only if cores are free: beside a busy process, one round may take a second."""


@dataclass(frozen=True)
class Usage:
    """Readings of counters that only go up."""

    seconds: float
    """Wall-clock time."""
    core_s: float
    """CPU time in seconds, of all threads of this process."""
    interrupts: int
    """How often the system took a core from a thread that could have gone on."""

    @classmethod
    def now(cls) -> Usage:
        """The readings at this moment."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        return cls(time.perf_counter(), used.ru_utime + used.ru_stime, used.ru_nivcsw)

    def since(self, before: Usage) -> Usage:
        """The differences from the readings `before`."""
        return Usage(self.seconds - before.seconds, self.core_s - before.core_s, self.interrupts - before.interrupts)


def idle_core_s() -> float:
    """The total idle time in seconds so far, of the cores that this process may use."""
    cores = psutil.cpu_times(percpu=True)
    if hasattr(os, "sched_getaffinity"):
        usable = os.sched_getaffinity(0)
        cores = [core for number, core in enumerate(cores) if number in usable] or cores
    return sum(core.idle + getattr(core, "iowait", 0.0) for core in cores)


class DecodingThreads:
    """Chooses the number of threads from measurements of rounds. Sets PyTorch's number only within `in_use`."""

    def __init__(
        self,
        adapts: bool,
        usage: Callable[[], Usage] = Usage.now,
        cores: Callable[[], int] = usable_cores,
        idle: Callable[[], float] = idle_core_s,
    ) -> None:
        """Args:
        adapts: whether the number may change.
        usage: reads the clocks.
        cores: returns the number of cores that this process may use.
        idle: see `idle_core_s`.
        """
        self.most = torch.get_num_threads()
        """The maximum number of threads: PyTorch's number when decoding began."""
        self.number = self.most
        """The number of threads for the next round."""
        self._adapts = adapts and self.most > 1
        self._cores = max(cores(), self.most)
        self._usage, self._idle = usage, idle
        self._idle_at: tuple[float, float] | None = None  # wall-clock and idle seconds at the last reading
        self._window = Usage(0.0, 0.0, 0)  # the usage of the rounds in this window
        self._rounds = 0  # rounds in this window
        self._before: tuple[int, float] | None = None  # threads and seconds per round before the trial in progress
        self._trial_in = FIRST_TRIAL
        self._waited_s = LAST_TRIAL  # since the last trial
        self.seconds = self.seconds_with_fewer = 0.0
        """Seconds of all rounds so far, and of the rounds with fewer threads than the maximum."""

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """A context in which a round is computed with `number` threads."""
        if not self._adapts:
            yield
            return
        before = self._usage()
        try:
            torch.set_num_threads(self.number)
            yield
        finally:
            torch.set_num_threads(self.most)
        self._judge(self._usage().since(before))

    def _judge(self, took: Usage) -> None:
        self.seconds += took.seconds
        self._waited_s += took.seconds
        if self.number < self.most:
            self.seconds_with_fewer += took.seconds
        so_far = self._window
        self._window = Usage(
            so_far.seconds + took.seconds, so_far.core_s + took.core_s, so_far.interrupts + took.interrupts
        )
        self._rounds += 1
        if self._window.seconds >= WINDOW:
            self._choose(self._window, self._window.seconds / self._rounds)
            self._window, self._rounds = Usage(0.0, 0.0, 0), 0

    def _choose(self, window: Usage, round_s: float) -> None:
        """Chooses the number of threads for the next window, after a window with the current number."""
        if self._before:
            number, before_s = self._before
            self._before = None
            if round_s > GAIN * before_s:
                self.number = number
                self._trial_in = min(2 * self._trial_in, LAST_TRIAL)
                return
            self._trial_in = FIRST_TRIAL
            if self.number > number:  # it pays
                return
        waits = self._waited_s < self._trial_in
        used = window.core_s / window.seconds
        if self.number > 1 and used < self.number - LOST and window.interrupts > INTERRUPTS * window.seconds:
            if not waits or self.number < self.most:
                others = self.number * self._cores / max(used, 1e-9) - self.number  # if all threads got the same share
                self._try(max(1, min(self.number - 1, round(self._cores - others))), round_s)
        elif self.number < self.most:
            more = min(self.most, self.number + int(self._free_cores() + LOST))
            if more > self.number and not waits:
                self._try(more, round_s)

    def _free_cores(self) -> float:
        """The mean number of idle cores since the last call; 0 in the first call, and in the first after a trial."""
        now, before = (self._usage().seconds, self._idle()), self._idle_at
        self._idle_at = now
        return 0.0 if before is None else (now[1] - before[1]) / max(now[0] - before[0], 1e-9)

    def _try(self, number: int, round_s: float) -> None:
        self._idle_at = None
        self._before, self.number, self._waited_s = (self.number, round_s), number, 0.0

    @property
    def warnings(self) -> list[str]:
        """A warning if most of the time was decoded with fewer threads than the maximum."""
        if self.seconds_with_fewer <= self.seconds / 2:
            return []
        share = self.seconds_with_fewer / self.seconds
        return [f"other programs took cores: {share:.0%} of the time was decoded with fewer than {self.most} threads"]
