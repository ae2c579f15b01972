"""How many CPU threads decode: all, or fewer while other processes take the cores.

OpenMP's threads wait for one another at the end of every parallel region, of which a token has hundreds. Where the
system has given one thread's core to another process, all wait for milliseconds until it gets one back; with no more
threads than free cores nobody waits. Results do not depend on the number.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

WINDOW = 0.05
"""Seconds that are judged together, at least."""

LOST = 0.3
"""Cores: where all threads together were on so many fewer than they are, and were interrupted, others took them."""

INTERRUPTS = 40.0
"""A second, of all threads: fewer are the system's own."""

FIRST_TRIAL, LAST_TRIAL = 1.0, 8.0
"""Seconds until all threads are tried again, at first, and at most, as each trial that fails doubles them."""


@dataclass(frozen=True)
class Usage:
    """Readings of clocks that only go up."""

    seconds: float
    """Of the clock on the wall."""
    core_s: float
    """On cores, of all threads of this process."""
    interrupts: int
    """How often the system took a core from a thread that could have gone on."""

    @classmethod
    def now(cls) -> Usage:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return cls(time.perf_counter(), used.ru_utime + used.ru_stime, used.ru_nivcsw)

    def since(self, before: Usage) -> Usage:
        return Usage(self.seconds - before.seconds, self.core_s - before.core_s, self.interrupts - before.interrupts)


class DecodingThreads:
    """Chooses the number of threads from how rounds went, and sets PyTorch's within `in_use` alone."""

    def __init__(self, adapts: bool, usage: Callable[[], Usage] = Usage.now) -> None:
        """Args:
        adapts: whether the number may change.
        usage: reads the clocks.
        """
        self.most = torch.get_num_threads()
        """When decoding began: as many as there are."""
        self.number = self.most
        """To decode with now."""
        self._adapts = adapts and self.most > 1
        self._usage = usage
        self._window = Usage(0.0, 0.0, 0)  # what the rounds of this window took
        self._trial_in = FIRST_TRIAL  # seconds from one failed trial to the next
        self._fewer_s = 0.0  # since the last trial
        self.seconds = self.seconds_with_fewer = 0.0
        """Of all rounds so far, and of those with fewer threads than all."""

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within, a round is computed, with `number` threads."""
        if not self._adapts:
            yield
            return
        before = self._usage()
        torch.set_num_threads(self.number)
        try:
            yield
        finally:
            torch.set_num_threads(self.most)
        self._judge(self._usage().since(before))

    def _judge(self, took: Usage) -> None:
        self.seconds += took.seconds
        if self.number < self.most:
            self.seconds_with_fewer += took.seconds
            self._fewer_s += took.seconds
        so_far = self._window
        self._window = Usage(
            so_far.seconds + took.seconds, so_far.core_s + took.core_s, so_far.interrupts + took.interrupts
        )
        if self._window.seconds < WINDOW:
            return
        window, self._window = self._window, Usage(0.0, 0.0, 0)
        cores = window.core_s / window.seconds
        if cores < self.number - LOST and window.interrupts > INTERRUPTS * window.seconds:
            if self.number == self.most:
                self._trial_in = min(2 * self._trial_in, LAST_TRIAL)
            self.number, self._fewer_s = max(1, min(self.number - 1, int(cores))), 0.0
        elif self.number == self.most:
            self._trial_in = FIRST_TRIAL
        elif self._fewer_s >= self._trial_in:
            self.number = self.most

    @property
    def warnings(self) -> list[str]:
        """What there is to say of a run that had to do with fewer threads for most of its time."""
        if self.seconds_with_fewer <= self.seconds / 2:
            return []
        share = self.seconds_with_fewer / self.seconds
        return [f"other programs took cores: {share:.0%} of the time was decoded with fewer than {self.most} threads"]
