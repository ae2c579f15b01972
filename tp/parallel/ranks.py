"""The processes (ranks) that share one model, and their communication: sums, gathers, and broadcasts from rank 0.

A process alone is a group of one, in which every call returns its argument. Larger groups use `torch.distributed`: Gloo
between CPUs, NCCL between GPUs. The processes are started by `launch` or by torchrun.

A rank waits for the others no longer than a time limit, except for what may take any time (`patiently`): what rank 0
begins next, and what a disk does.
"""

from __future__ import annotations

import atexit
import functools
import os
import re
import time
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import CapacityError, HangError, PeerError, TriforceError, UsageError
from .device_watch import DeviceWatch, hang_message
from .place import Place

T = TypeVar("T")

WAIT_LIMIT_S = 600.0
"""Seconds that a rank waits for the others inside a round or a slice of a prefill. Ranks compute the same and differ by
seconds; ten minutes also bear a machine that swaps, and are PyTorch's default for NCCL alone."""

_PATIENCE = timedelta(days=365)
"""How long ranks wait for what rank 0 begins next: people leave a conversation or a server alone for days."""

_TIMED_OUT = "Timed out waiting"
"""What Gloo's error says where a rank has waited for the others as long as it may."""

_LOST = re.compile(r"\A\[\S*gloo/transport/|Application timeout caused pair closure|ncclRemoteError")
"""What errors say where the connection to another rank is gone: Gloo's of reading and writing, whose text begins with
the place in its source (others begin with `[enforce fail`); Gloo's after it has timed out once; NCCL's."""


@dataclass
class Ranks:
    """A group of processes, seen from one of them."""

    rank: int = 0
    size: int = 1
    local_size: int = 1
    """Ranks on this machine, which share its memory."""
    collectives: Counter[str] = field(default_factory=Counter)
    """Collective calls so far, by kind, without those of replayed CUDA graphs."""
    _limited: dist.ProcessGroup | None = None
    _patient: dist.ProcessGroup | None = None
    _watch: DeviceWatch | None = None
    on_device: bool = False
    """Whether a collective has worked on a GPU's memory: NCCL has buffers there since then."""

    @classmethod
    def join(cls, place: Place, device: torch.device, limit_s: float = WAIT_LIMIT_S) -> Ranks:
        """Joins the other ranks at `MASTER_ADDR:MASTER_PORT`, unless this process has joined them already.

        Args: `limit_s` is how many seconds a call waits for the others at most, unless it waits patiently.

        Raises:
            UsageError: the environment does not give address and port.
            TriforceError: the port is taken, or another rank did not join.
        """
        if not dist.is_initialized():
            missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
            if missing:
                raise UsageError(f"RANK is set, but {' and '.join(missing)} is not; start the ranks with torchrun")
            meeting_point = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            try:
                # PyTorch's time limit for these two, 30 minutes, is for the meeting; in collectives ours comes first.
                group = f"group {_met[meeting_point]}"  # the store still has the addresses of those before
                store = dist.PrefixStore(group, _store(meeting_point))  # pyright: ignore[reportPrivateImportUsage]
                dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size)
            except (RuntimeError, ValueError) as error:  # DistNetworkError and DistStoreError are RuntimeErrors
                raise TriforceError(_meeting_failure(place, meeting_point, error)) from error
            _met[meeting_point] += 1
            atexit.register(_leave)  # an exit without leaving the group is aborted by Gloo's threads
        limited: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=limit_s))
        patient: Any = dist.new_group(backend="gloo", timeout=_PATIENCE)
        watch = DeviceWatch(place.rank, limit_s) if device.type == "cuda" else None
        ranks = cls(place.rank, place.size, place.local_size, Counter(), limited, patient, watch)
        if watch:
            ranks.before_leaving(watch.stop)
        return ranks

    def sum(self, x: Tensor, kind: str = "all_reduce") -> Tensor:
        """The sum of all ranks' `x`, in place; counted in `collectives` as `kind`."""
        if self.size > 1:
            self._call(kind, lambda: dist.all_reduce(x, group=self._group_of(x)), x.device)
        return x

    def least(self, numbers: list[int], *, patiently: bool = False) -> list[int]:
        """Of each whole number the least that any rank gives. `patiently`: see `share`."""
        if self.size == 1:
            return numbers
        found = torch.tensor(numbers, dtype=torch.int64)
        group = self._patient if patiently else self._limited
        self._call("all_reduce_least", lambda: dist.all_reduce(found, dist.ReduceOp.MIN, group=group))
        return found.tolist()

    def gather_columns(self, x: Tensor) -> Tensor:
        """The columns of every rank's `x` `[n, m]` in the order of ranks, `[n, size * m]`."""
        if self.size == 1:
            return x
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._call("all_gather", lambda: dist.all_gather(parts, x, group=self._group_of(x)), x.device)
        return torch.cat(parts, dim=-1)

    def share(self, value: T, *, patiently: bool = False) -> T:
        """Rank 0's `value`, which can be any object that can be pickled.

        Args: `patiently` is whether ranks wait for one another for up to a year, and not up to the time limit.
        """
        if self.size == 1:
            return value
        box: list[Any] = [value]
        options = {"group": self._patient if patiently else self._limited, "device": torch.device("cpu")}
        self._call("broadcast_object", lambda: dist.broadcast_object_list(box, src=0, **options))
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Every rank's `value`, in the order of ranks; any objects that can be pickled. Ranks wait patiently."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        self._call("all_gather_object", lambda: dist.all_gather_object(found, value, group=self._patient))
        return found

    def failure(self, own: Exception | None) -> Exception | None:
        """Why something that every rank has tried is to be undone: this rank's `own` failure, or what another says of
        its own; `None` where none failed."""
        if self.least([int(own is None)])[0]:
            return None
        reasons = self.gather(own and (isinstance(own, CapacityError), str(own)))
        rank, (of_memory, reason) = next((rank, reason) for rank, reason in enumerate(reasons) if reason)
        return own or (CapacityError if of_memory else TriforceError)(f"rank {rank}: {reason}")

    def share_numbers(self, numbers: list[int], room: int) -> list[int]:
        """Rank 0's integers, at most `room` of them, in one broadcast of fixed size."""
        if self.size == 1:
            return numbers
        message = torch.zeros(room + 1, dtype=torch.int64)
        if self.rank == 0:
            message[0] = len(numbers)
            message[1 : len(numbers) + 1] = torch.tensor(numbers, dtype=torch.int64)
        self._call("broadcast", lambda: dist.broadcast(message, src=0, group=self._limited))
        return message[1 : int(message[0]) + 1].tolist()

    def before_leaving(self, act: Callable[[], None]) -> None:
        """Has a bound method called before the group ends, by `leave` or with the process, if its object is alive."""
        _before_leaving[:] = [known for known in _before_leaving if known()]  # a run's objects end with it
        _before_leaving.append(weakref.WeakMethod(act))

    def leave(self) -> None:
        """Leaves the group; every rank must call it."""
        if self.size > 1:
            _leave()

    def note_replay(self, device: torch.device) -> None:
        """Is told that a captured pass, with all its collectives, was just given to `device`, which has it within the
        time limit like a single collective."""
        if device.type == "cuda":
            self._note("a captured pass", device)

    def _group_of(self, x: Tensor) -> dist.ProcessGroup | None:
        """The group that works on `x`: NCCL's has no time limit of ours, see `DeviceWatch`."""
        return None if x.is_cuda else self._limited

    def _call(self, kind: str, collective: Callable[[], object], device: torch.device | None = None) -> None:
        """Calls a collective, which works on tensors of `device`, or on the host.

        Raises:
            HangError: the other ranks did not come within the time limit.
            PeerError: another rank has ended.
            RuntimeError: anything else, such as memory that ran out, as PyTorch raises it.
        """
        self.collectives[kind] += 1
        on_device = device is not None and device.type == "cuda"
        self.on_device |= on_device
        began = time.monotonic()
        try:
            with self._watch.call(kind) if self._watch and on_device else nullcontext():
                collective()
        except RuntimeError as error:
            text = str(error)
            if _TIMED_OUT in text:
                raise HangError(hang_message(self.rank, time.monotonic() - began, kind)) from error
            if isinstance(error, (dist.DistNetworkError, dist.DistStoreError)) or _LOST.search(text):
                raise PeerError(f"rank {self.rank} lost the other ranks: one of them has ended ({error})") from error
            raise
        if device is not None and on_device:
            self._note(kind, device)

    def _note(self, kind: str, device: torch.device) -> None:
        """Has the watch see to it that `device` finishes what it was given so far."""
        if self._watch and not torch.cuda.is_current_stream_capturing():
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._watch.note(kind, event)


ALONE = Ranks()

_met: Counter[str] = Counter()
"""How often this process has met others at an address and port. Ranks that share a model meet equally often."""


@functools.cache
def _store(meeting_point: str) -> dist.Store:  # pyright: ignore[reportPrivateImportUsage]
    """What the ranks that meet at `meeting_point`, an address and a port, tell one another their addresses by.

    It lasts as long as the process, and with it the port, where rank 0 listens at it and not the agent of torchrun.
    Were there a new one for each group, a rank could meet the one of the group before, which is about to go.
    """
    store, _, _ = next(iter(dist.rendezvous("env://")))  # pyright: ignore[reportPrivateImportUsage]
    return store


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
