"""The processes (ranks) that share one model, and their communication: sums, gathers, and broadcasts from rank 0.

A process alone is a group of one, in which every call returns its argument. Larger groups use `torch.distributed`: Gloo
between CPUs, NCCL between GPUs. The processes are started by `launch` or by torchrun.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import PeerError, TriforceError, UsageError
from .place import Place

T = TypeVar("T")

_PATIENCE = timedelta(days=365)
"""How long ranks wait for what rank 0 begins next: people leave a conversation or a server alone for days."""


@dataclass
class Ranks:
    """A group of processes, seen from one of them."""

    rank: int = 0
    size: int = 1
    local_size: int = 1
    """Ranks on this machine, which share its memory."""
    collectives: Counter[str] = field(default_factory=Counter)
    """Collective calls so far, by kind, without those of replayed CUDA graphs."""
    _patient: dist.ProcessGroup | None = None

    @classmethod
    def join(cls, place: Place, device: torch.device) -> Ranks:
        """Joins the other ranks at `MASTER_ADDR:MASTER_PORT`, unless this process has joined them already.

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
                dist.init_process_group(backend, rank=place.rank, world_size=place.size)
            except (RuntimeError, ValueError) as error:  # DistNetworkError and DistStoreError are RuntimeErrors
                raise TriforceError(_meeting_failure(place, meeting_point, error)) from error
            atexit.register(_leave)  # an exit without leaving the group is aborted by Gloo's threads
        patient = dist.new_group(backend="gloo", timeout=_PATIENCE)
        return cls(place.rank, place.size, place.local_size, _patient=patient)  # pyright: ignore[reportArgumentType]

    def sum(self, x: Tensor, kind: str = "all_reduce") -> Tensor:
        """The sum of all ranks' `x`, in place; counted in `collectives` as `kind`."""
        if self.size > 1:
            self._call(kind, lambda: dist.all_reduce(x))
        return x

    def least(self, numbers: list[int]) -> list[int]:
        """Of each whole number the least that any rank gives."""
        if self.size == 1:
            return numbers
        found = torch.tensor(numbers, dtype=torch.int64)
        self._call("all_reduce_least", lambda: dist.all_reduce(found, dist.ReduceOp.MIN))
        return found.tolist()

    def gather_columns(self, x: Tensor) -> Tensor:
        """The columns of every rank's `x` `[n, m]` in the order of ranks, `[n, size * m]`."""
        if self.size == 1:
            return x
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._call("all_gather", lambda: dist.all_gather(parts, x))
        return torch.cat(parts, dim=-1)

    def share(self, value: T, *, patiently: bool = False) -> T:
        """Rank 0's `value`, which can be any object that can be pickled.

        Args: `patiently` is whether the others wait for it for up to a year, and not for minutes.
        """
        if self.size == 1:
            return value
        box: list[Any] = [value]
        options = {"group": self._patient if patiently else None, "device": torch.device("cpu")}
        self._call("broadcast_object", lambda: dist.broadcast_object_list(box, src=0, **options))
        return box[0]

    def everyones(self, value: T) -> list[T]:
        """Every rank's `value`, in the order of ranks; any objects that can be pickled."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        self._call("all_gather_object", lambda: dist.all_gather_object(found, value, group=self._patient))
        return found

    def share_numbers(self, numbers: list[int], room: int) -> list[int]:
        """Rank 0's integers, at most `room` of them, in one broadcast of fixed size."""
        if self.size == 1:
            return numbers
        message = torch.zeros(room + 1, dtype=torch.int64)
        if self.rank == 0:
            message[0] = len(numbers)
            message[1 : len(numbers) + 1] = torch.tensor(numbers, dtype=torch.int64)
        self._call("broadcast", lambda: dist.broadcast(message, src=0))
        return message[1 : int(message[0]) + 1].tolist()

    def before_leaving(self, act: Callable[[], None]) -> None:
        """Has a bound method called before the group ends, by `leave` or with the process, if its object is alive."""
        _before_leaving[:] = [known for known in _before_leaving if known()]  # a run's objects end with it
        _before_leaving.append(weakref.WeakMethod(act))

    def leave(self) -> None:
        """Leaves the group; every rank must call it."""
        if self.size > 1:
            _leave()

    def _call(self, kind: str, collective: Callable[[], object]) -> None:
        self.collectives[kind] += 1
        try:
            collective()
        except RuntimeError as error:
            raise PeerError(f"rank {self.rank} lost the other ranks: one of them has ended ({error})") from error


ALONE = Ranks()


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
