"""Blocks on a disk, and in memory that is not page-locked, in a simulator: threads run when it likes, and it sees what
they read and write."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from cuda_simulator import Simulator
from simulated_operations import simulator_off
from triforce.offload.transfer.host import Host
from triforce.offload.transfer.staged.block_file import BlockFile, DiskSpace
from triforce.tp.pages import aligned_memory


class Job:
    """A future that runs when somebody waits for it, or before, by chance."""

    def __init__(self, pool: Pool, work: Callable[[], Any]) -> None:
        self._pool, self._work = pool, work
        self._state, self._result, self._error = "waits", None, None

    def run(self) -> None:
        if self._state != "waits":
            return
        self._state = "runs"
        self._pool.waiting.remove(self)
        try:
            self._result = self._work()
        except Exception as error:
            self._error = error
        self._state, self._work = "done", _nothing

    def cancel(self) -> bool:
        if self._state == "waits" and self._pool.chance.random() < 0.5:
            self._pool.waiting.remove(self)
            self._state, self._error, self._work = "done", CancelledError(), _nothing
            return True
        return False

    def done(self) -> bool:
        self._pool.wander()
        return self._state == "done"

    def exception(self) -> Exception | None:
        self.run()
        return self._error

    def result(self) -> Any:
        self.run()
        if self._error:
            raise self._error
        return self._result


def _nothing() -> None:
    """What is left of work that is done: it holds no memory."""


class Pool:
    """Threads that take turns: jobs run in any order, each as a whole."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.waiting: list[Job] = []

    def submit(self, work: Callable[..., Any], *given: Any) -> Job:
        self.waiting.append(job := Job(self, lambda: work(*given)))
        self.wander()
        return job

    def map(self, work: Callable[[Any], Any], values: Any) -> Iterator[Any]:
        return map(work, values)

    def wander(self) -> None:
        while self.waiting and self.chance.random() < 0.4:
            self.chance.choice(self.waiting).run()


def staged(simulator: Simulator, chance: random.Random, host: Host) -> Host:
    """`host` with threads that are a `Pool`, and memory that the simulator knows to be the host's."""

    def on_host(shape: Any, dtype: torch.dtype) -> torch.Tensor:
        with simulator_off(), torch.inference_mode():
            memory = host.memory(shape, dtype)
        if memory.numel():
            simulator.put(simulator.memory(memory), True)
        return memory

    return replace(host, memory=on_host, make_pool=lambda: Pool(chance))


class SeenDisk(DiskSpace):
    """A disk of which the simulator sees what is done to memory."""

    def __init__(self, folder: Path, host: Host, simulator: Simulator) -> None:
        super().__init__(folder, host)
        self.simulator = simulator

    def new_file(self, num_slots: int, slot_bytes: int) -> BlockFile:
        return SeenFile(self, num_slots, slot_bytes)


class SeenFile(BlockFile):
    """A file of such a disk."""

    def __init__(self, space: SeenDisk, num_slots: int, slot_bytes: int) -> None:
        super().__init__(space, num_slots, slot_bytes)
        self._simulator = space.simulator

    def _whole(self, move: Callable[..., int], memory: torch.Tensor, start: int, what: str) -> None:
        simulator = self._simulator
        with simulator_off(), torch.inference_mode():
            through = aligned_memory(memory.shape, torch.uint8)
        simulator.put(simulator.memory(through), True)
        if what == "writing":
            through.copy_(memory)
        with simulator_off(), torch.inference_mode():
            super()._whole(move, through, start, what)
        if what == "reading":
            memory.copy_(through)
