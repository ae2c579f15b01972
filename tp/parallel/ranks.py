"""The processes (ranks) that share one model, and their communication: sums, gathers, and broadcasts from rank 0.

A process alone is a group of one, in which every call returns its argument. Larger groups use `torch.distributed`: Gloo
between CPUs, NCCL between GPUs. The processes are started by `launch` or by torchrun.

A rank waits for the others up to a time limit. It waits longer (`patiently`) for events that may take any time: the
next task of rank 0, and operations of a disk.
"""

from __future__ import annotations

import atexit
import functools
import math
import os
import re
import time
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import CapacityError, HangError, PeerError, TriforceError, UsageError
from .device_watch import DeviceWatch, hang_message
from .launch import usable_cores
from .place import Place
from .siblings import has_ended, siblings

T = TypeVar("T")

WAIT_LIMIT_S = 600.0
"""Seconds that a rank waits for the others inside a round or a slice of a prefill. Ranks do the same work, and differ
by seconds. Ten minutes are enough even for a machine that swaps. PyTorch has the same default, but only for NCCL."""

_PATIENCE = timedelta(days=365)
"""How long ranks wait for the next task of rank 0. A conversation or a server may be idle for days."""

_LOOK_AGAIN = timedelta(seconds=1)
"""How long a rank waits for the others before it looks whether they run."""

_GIVES_UP_AFTER_S = 4.0
"""How long a rank still waits after it has seen that another has ended. That one may have ended in order, having sent
all that is needed, while a third passes it on late."""

_STEP_IS_OVER = "Operation timed out"
"""A part of PyTorch's error message if a collective has not ended within the time for which it was waited."""

_PYTORCHS_THREADS = "pt_"
"""How the names of PyTorch's own threads for groups begin. Those of Gloo have other names, or none."""

_TIMED_OUT = "Timed out waiting"
"""A part of Gloo's error message when a rank has reached the time limit."""

_LOST = re.compile(r"\A\[\S*gloo/transport/|Application timeout caused pair closure|ncclRemoteError")
"""Matches error messages about a lost connection to another rank: those of Gloo when it reads or writes, which begin
with the place in its source (others begin with `[enforce fail`); those of Gloo after it has timed out once; and those
of NCCL."""


@dataclass
class Ranks:
    """A group of processes, seen from one of them.

    Calls raise `HangError` if the others do not take part within the time limit, and `PeerError` if one of them has
    ended. If a GPU does not finish a call within the time limit, the process ends with the exit code of `HangError`.
    """

    rank: int = 0
    size: int = 1
    """The number of ranks."""
    local_size: int = 1
    """The number of ranks on this machine, which share its memory."""
    collectives: Counter[str] = field(default_factory=Counter)
    """Collective calls so far, by kind, without those of replayed CUDA graphs."""
    _limited: dist.ProcessGroup | None = None
    _patient: dist.ProcessGroup | None = None
    _beside: dict[int, psutil.Process] = field(default_factory=dict)
    """The other ranks of this machine, by rank; empty if they are not known."""
    _watch: DeviceWatch | None = None
    on_device: bool = False
    """Whether a collective has worked on the memory of a GPU. If so, NCCL has buffers there."""

    @classmethod
    def join(cls, place: Place, device: torch.device, limit_s: float = WAIT_LIMIT_S) -> Ranks:
        """Joins the other ranks at `MASTER_ADDR:MASTER_PORT`, unless this process has joined them already.

        Args:
            place: that of this process.
            device: the device that computes.
            limit_s: the maximum number of seconds that a call waits for the others, unless it waits patiently.

        Raises:
            UsageError: `MASTER_ADDR` or `MASTER_PORT` is not set.
            TriforceError: the port is taken, or another rank did not join.
        """
        before = thread_ids()
        if not dist.is_initialized():
            missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
            if missing:
                raise UsageError(f"RANK is set, but {' and '.join(missing)} is not; start the ranks with torchrun")
            meeting_point = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            try:
                # PyTorch's time limit of 30 minutes applies to joining; in collectives, `limit_s` is shorter.
                group = f"group {_met[meeting_point]}"  # the store still has the addresses of earlier groups
                store = dist.PrefixStore(group, _store(meeting_point))  # pyright: ignore[reportPrivateImportUsage]
                dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size)
            except (RuntimeError, ValueError) as error:  # DistNetworkError and DistStoreError are RuntimeErrors
                raise TriforceError(_meeting_failure(place, meeting_point, error)) from error
            _met[meeting_point] += 1
            atexit.register(_leave)  # otherwise, Gloo's threads abort the process when it ends
        limited: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=limit_s))
        patient: Any = dist.new_group(backend="gloo", timeout=_PATIENCE)
        _yield_to_others(place.local_size, before)
        watch = DeviceWatch(place.rank, limit_s) if device.type == "cuda" else None
        found = siblings()  # if one is missing, the ranks have different parents
        beside = {rank: one for rank, one in found.items() if rank != place.rank and len(found) == place.local_size}
        ranks = cls(place.rank, place.size, place.local_size, Counter(), limited, patient, beside, watch)
        if watch:
            ranks.before_leaving(watch.stop)
        return ranks

    def sum(self, x: Tensor, kind: str = "all_reduce") -> Tensor:
        """Sums `x` over all ranks, in place, and returns `x`. The call is counted in `collectives` as `kind`."""
        if self.size > 1:
            group = self._group_of(x)
            self._call(kind, lambda: dist.all_reduce(x, group=group, async_op=not x.is_cuda), x.device)
        return x

    def least(self, numbers: list[int], *, patiently: bool = False) -> list[int]:
        """The minimum of each whole number over all ranks. `patiently`: see `share`."""
        if self.size == 1:
            return numbers
        found = torch.tensor(numbers, dtype=torch.int64)
        group = self._patient if patiently else self._limited
        self._call("all_reduce_least", lambda: dist.all_reduce(found, dist.ReduceOp.MIN, group=group, async_op=True))
        return found.tolist()

    def gather_columns(self, x: Tensor) -> Tensor:
        """The columns of `x` `[n, m]` of all ranks, in the order of ranks: `[n, size * m]`."""
        if self.size == 1:
            return x
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        group = self._group_of(x)
        self._call("all_gather", lambda: dist.all_gather(parts, x, group=group, async_op=not x.is_cuda), x.device)
        return torch.cat(parts, dim=-1)

    def share(self, value: T, *, patiently: bool = False) -> T:
        """Broadcasts the `value` of rank 0, and returns it.

        Args:
            value: any object that can be pickled; only that of rank 0 is used.
            patiently: whether ranks wait for one another for up to a year, instead of the time limit.
        """
        if self.size == 1:
            return value
        box: list[Any] = [value]
        options = {"group": self._patient if patiently else self._limited, "device": torch.device("cpu")}
        self._call("broadcast_object", lambda: dist.broadcast_object_list(box, src=0, **options))
        return box[0]

    def gather(self, value: T) -> list[T]:
        """The `value` of every rank, in the order of ranks. A value is any object that can be pickled. Ranks wait
        patiently."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        self._call("all_gather_object", lambda: dist.all_gather_object(found, value, group=self._patient))
        return found

    def failure(self, own: Exception | None) -> Exception | None:
        """Whether an action that every rank has tried must be undone, because it failed on some rank.

        Args:
            own: the error of this rank; `None` if it succeeded.

        Returns:
            `own`; or an error with the message of another rank, if only others failed; `None` if none failed.
        """
        if self.least([int(own is None)])[0]:
            return None
        reasons = self.gather(own and (isinstance(own, CapacityError), str(own)))
        rank, (of_memory, reason) = next((rank, reason) for rank, reason in enumerate(reasons) if reason)
        return own or (CapacityError if of_memory else TriforceError)(f"rank {rank}: {reason}")

    def share_numbers(self, numbers: list[int], room: int) -> list[int]:
        """Broadcasts the integers of rank 0, of which there are at most `room`, in one broadcast of fixed size, and
        returns them."""
        if self.size == 1:
            return numbers
        message = torch.zeros(room + 1, dtype=torch.int64)
        if self.rank == 0:
            message[0] = len(numbers)
            message[1 : len(numbers) + 1] = torch.tensor(numbers, dtype=torch.int64)
        self._call("broadcast", lambda: dist.broadcast(message, src=0, group=self._limited, async_op=True))
        return message[1 : int(message[0]) + 1].tolist()

    def before_leaving(self, act: Callable[[], None]) -> None:
        """Registers a bound method that is called before the group ends, by `leave` or with the process. It is not
        called if its object no longer exists."""
        _before_leaving[:] = [known for known in _before_leaving if known()]  # a run's objects end with it
        _before_leaving.append(weakref.WeakMethod(act))

    def leave(self) -> None:
        """Leaves the group. Every rank must call this method."""
        if self.size > 1:
            _leave()

    def note_replay(self, device: torch.device) -> None:
        """Notes that a captured pass, with all its collectives, was just submitted to `device`. Like a single
        collective, it must end within the time limit."""
        if device.type == "cuda":
            self._note("a captured pass", device)

    def _group_of(self, x: Tensor) -> dist.ProcessGroup | None:
        """The group for collectives on `x`. That of NCCL does not have this time limit; see `DeviceWatch`."""
        return None if x.is_cuda else self._limited

    def _call(self, kind: str, collective: Callable[[], dist.Work | None], device: torch.device | None = None) -> None:
        """Calls a collective on tensors of `device`, or of the host if `device` is not given.

        Args:
            kind: as what the call is counted.
            collective: starts the collective, and returns what can be waited for; `None` if nothing must be waited for.

        Raises:
            HangError: the other ranks did not join within the time limit.
            PeerError: another rank has ended.
            RuntimeError: any other error as PyTorch raises it, for example out of memory.
        """
        self.collectives[kind] += 1
        on_device = device is not None and device.type == "cuda"
        self.on_device |= on_device
        began = time.monotonic()
        try:
            with self._watch.call(kind) if self._watch and on_device else nullcontext():
                work = collective()
                if work:
                    self._wait(work)
        except RuntimeError as error:
            text = str(error)
            if _TIMED_OUT in text:
                raise HangError(hang_message(self.rank, time.monotonic() - began, kind)) from error
            if isinstance(error, (dist.DistNetworkError, dist.DistStoreError)) or _LOST.search(text):
                raise PeerError(f"rank {self.rank} lost the other ranks: one of them has ended ({error})") from error
            raise
        if device is not None and on_device:
            self._note(kind, device)

    def _wait(self, work: dist.Work) -> None:
        """Waits for a collective between CPUs. Gloo now and then misses that another rank has died, and waits until the
        time limit. So this method looks every `_LOOK_AGAIN` whether the other ranks of this machine still run. (Objects
        are exchanged by PyTorch's own functions, which do not look.) After a `PeerError`, a thread of PyTorch still
        waits for the collective. An interpreter that ends in order waits for that thread, at most until the time limit.

        Raises:
            PeerError: a rank of this machine has ended.
            RuntimeError: the collective failed.
        """
        ended: int | None = None
        gives_up_at = math.inf
        while True:
            try:
                work.wait(_LOOK_AGAIN)
                return
            except RuntimeError as error:
                if _STEP_IS_OVER not in str(error):
                    raise
            if work.is_completed():
                work.wait()  # raises its error, if it failed
                return
            if time.monotonic() >= gives_up_at:
                raise PeerError(f"rank {self.rank} lost the other ranks: one of them has ended (rank {ended})")
            if ended is None:
                ended = next((rank for rank, process in self._beside.items() if has_ended(process)), None)
                gives_up_at = math.inf if ended is None else time.monotonic() + _GIVES_UP_AFTER_S

    def _note(self, kind: str, device: torch.device) -> None:
        """Puts the work that was submitted to `device` so far under the time limit of the watch."""
        if self._watch and not torch.cuda.is_current_stream_capturing():
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._watch.note(kind, event)


ALONE = Ranks()
"""A group of one process."""

_met: Counter[str] = Counter()
"""How often this process has joined a group at an address and port. Ranks that share a model join equally often."""


@functools.cache
def _store(meeting_point: str) -> dist.Store:  # pyright: ignore[reportPrivateImportUsage]
    """The store through which the ranks at `meeting_point` (an address and a port) exchange their addresses.

    It lasts as long as the process. So does its port, if rank 0 listens on it instead of torchrun's agent. If every
    group had a new store, a rank could connect to that of the group before, which is about to end.
    """
    store, _, _ = next(iter(dist.rendezvous("env://")))  # pyright: ignore[reportPrivateImportUsage]
    return store


def thread_ids() -> set[int]:
    """The threads of this process; none on systems that do not list them."""
    with suppress(OSError):
        return {int(one.name) for one in Path("/proc/self/task").iterdir()}
    return set()


def _yield_to_others(local_size: int, before: set[int]) -> None:
    """Keeps Gloo's threads for connections from taking a core from a thread that runs. If that thread holds the lock of
    a connection, Gloo's thread asks for it again and again, and the other cannot release it meanwhile. With two ranks
    on two cores, a sum of 2 KB took 0.91 to 0.97 ms, and takes 0.21 to 0.23 ms with this policy (AMD EPYC, 2026-11-30).

    If the ranks compute with more threads than there are cores, the policy stays as it is: Gloo's threads would wait
    for threads that only wait for others.

    Args:
        local_size: the number of ranks on this machine.
        before: the threads of this process before it joined the group.
    """
    if torch.get_num_threads() * local_size > usable_cores():
        return
    for thread in thread_ids() - before:
        with suppress(OSError, AttributeError):  # it has ended; a sandbox that does not permit it; other systems
            name = Path(f"/proc/self/task/{thread}/comm").read_text().strip()
            if not name.startswith(_PYTORCHS_THREADS) and os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


_before_leaving: list[weakref.WeakMethod] = []


def _leave() -> None:
    while _before_leaving:
        act = _before_leaving.pop()()
        if act:
            act()
    if dist.is_initialized():
        dist.destroy_process_group()


def _meeting_failure(place: Place, meeting_point: str, error: Exception) -> str:
    if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
        return f"rank {place.rank} cannot listen on {meeting_point}: the port is taken; give another --master-port"
    reason = str(error).strip().splitlines()[0]
    return f"rank {place.rank} could not meet the other {place.size - 1} at {meeting_point}: {reason}"
