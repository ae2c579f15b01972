"""Starts ranks on this machine, and makes sure that they end together.

PyTorch's elastic launcher starts them, finds a free port on loopback, watches them and stops all when one fails. In
addition `Guard`, in each rank, ends the rank when its launcher is gone, or when it does not end on a signal.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, Self

import psutil

from ..errors import HangError, PeerError, TriforceError, UsageError
from .siblings import has_ended, rank_processes, siblings

RANK_0_GRACE_S, GRACE_S = 6.0, 2.0
"""Seconds to ending by force: of rank 0, which still writes statistics, from a signal that is to end it at once; of
others from the end of rank 0."""

_CHECK_S = 0.5
"""Seconds between a rank's checks whether its launcher is alive."""


_FOLLOW_UPS = (PeerError.exit_code, -signal.SIGTERM, 128 + signal.SIGTERM)
"""Exit codes of ranks that have ended because another one did."""


@dataclass(frozen=True)
class Failure:
    """How a rank failed: its exit code (negative: the signal that killed it), and its error message or an empty one."""

    rank: int
    exit_code: int
    message: str


def launch(command: Sequence[str], ranks: int, ready: Callable[[], None]) -> int:
    """Runs `command` in `ranks` processes that share stdin, stdout and stderr, and waits for them. Signals are passed
    on to rank 0 alone, which ends the others in its own time.

    Args: `ready` is called when the launcher is imported, before any process is started.

    Returns:
        0; or the exit code of rank 0, if it failed and has printed why; or 128 plus the number of the signal that ended
        the run.

    Raises:
        TriforceError: another rank failed; with the message of the first failure, and a `UsageError` if that was one.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    ready()
    os.environ.update(_environment(os.environ, ranks))
    logging.disable(logging.CRITICAL)  # the launcher's messages are about processes; ours, about ranks, replace them
    # Releases without this field handle all signals, also SIGHUP under nohup.
    fields = {field.name for field in dataclasses.fields(LaunchConfig)}
    rank_0 = _RankZero()
    handled: dict[str, Any] = {"signals_to_handle": "SIGQUIT"} if "signals_to_handle" in fields else {}
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="triforce",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        **handled,
    )
    try:
        with rank_0:
            elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        failures = [Failure(rank, failure.exitcode, _recorded(failure)) for rank, failure in error.failures.items()]
        code = rank_0.stopped_by_signal(failures)
        return _outcome(failures) if code is None else code
    except SignalException as stopped:
        return 128 + stopped.sigval
    finally:
        logging.disable(logging.NOTSET)
    return 0


def _handled_signals() -> list[signal.Signals]:
    """The signals that end a run, but for those that this process ignores, as under `nohup`."""
    ends = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    return [number for number in ends if signal.getsignal(number) != signal.SIG_IGN]


class _RankZero:
    """Within this block signals to this process are passed on to rank 0, or end the launcher where there is none."""

    def __init__(self) -> None:
        self._passed_on: int | None = None  # the first one
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in _handled_signals():
            if number != signal.SIGQUIT:
                self._before[number] = signal.signal(number, self._pass_on)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def stopped_by_signal(self, failures: Sequence[Failure]) -> int | None:
        """128 plus the number of the signal that ended the ranks; `None` if one of them failed."""
        if any(failure.rank and failure.exit_code not in _FOLLOW_UPS for failure in failures):
            return None
        code = next((failure.exit_code for failure in failures if failure.rank == 0), None)
        if self._passed_on is not None and code in (None, PeerError.exit_code, -self._passed_on):
            return 128 + self._passed_on
        return code if code is not None and code - 128 in self._before else None

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        from torch.distributed.elastic.multiprocessing.api import SignalException

        process = rank_processes(psutil.Process()).get(0)
        if process is None:
            raise SignalException("there is no rank 0", signal.Signals(number))
        with suppress(psutil.Error):
            process.send_signal(number)
            self._passed_on = self._passed_on or number


def _environment(given: Mapping[str, str], ranks: int) -> dict[str, str]:
    """Environment variables for ranks on one machine, but for those that the user has set."""
    wanted = {
        "OMP_NUM_THREADS": str(max(1, usable_cores() // ranks)),  # otherwise every rank would use all cores
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback:
        wanted["GLOO_SOCKET_IFNAME"] = loopback  # the host's name may not resolve
    return {name: value for name, value in wanted.items() if name not in given}


def usable_cores() -> int:
    """Cores that this process may use; on systems that do not tell (macOS), all cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _recorded(failure: object) -> str:
    """The error message that a rank recorded, without the name of the class that `record` wraps errors in."""
    data = getattr(failure, "error_file_data", {})
    message = data.get("message", "") if isinstance(data, dict) else ""
    text = str(message.get("message", "") if isinstance(message, dict) else message)
    return text.removeprefix(f"{_Plain.__name__}: ")


def _outcome(failures: list[Failure]) -> int:
    """The exit code of a run with these failures; raises the first failure's error where rank 0 has not printed it."""
    hung = HangError.exit_code
    own = [f for f in failures if f.exit_code not in _FOLLOW_UPS]
    own.sort(key=lambda f: (f.exit_code == hung, f.rank))  # a rank that failed has others wait for it
    first = own[0] if own else failures[0]
    if own and first.rank == 0 and first.exit_code > 0 and first.exit_code != hung:
        return first.exit_code
    if first.exit_code > 0:
        kind = UsageError if first.exit_code == UsageError.exit_code else TriforceError
        message = first.message or f"ended with exit code {first.exit_code}"
        raise kind(message if message.startswith(f"rank {first.rank} ") else f"rank {first.rank}: {message}")
    name = signal.Signals(-first.exit_code).name
    out_of_memory = "; the system does so when memory runs out" if name == "SIGKILL" else ""
    raise TriforceError(f"rank {first.rank} was killed by {name}{out_of_memory}; all other ranks were ended")


def record(error: BaseException) -> bool:
    """Writes `error` to the file that the launcher reads; returns whether there is a launcher."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return False
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

    if isinstance(error, TriforceError):
        error = _Plain(error)
    ErrorHandler().record_exception(error)
    return True


def must_not_finalize() -> bool:
    """Whether the interpreter must not be taken apart at the end: this process is a member of a group of ranks, or has
    started ranks, and threads of PyTorch may then still run, over which it would abort now and then. Does not import
    PyTorch."""
    distributed = sys.modules.get("torch.distributed")
    is_initialized = getattr(distributed, "is_initialized", None)  # missing while the module is being imported
    joined = is_initialized is not None and is_initialized()
    return joined or "torch.distributed.launcher.api" in sys.modules


class _Plain(Exception):
    """An error that a user can act on, without the name of its class."""


class Guard:
    """Ends this process by force when it would outlive its run: Python's signal handlers do not run during a blocked
    collective.

    A first SIGTERM, SIGINT or SIGHUP is left to its handler. It ends the process `RANK_0_GRACE_S` seconds after a later
    one that comes before the first was dealt with, whose handler still runs, and at once when the parent process is
    gone. It watches from a thread until the process ends.
    """

    def __init__(self, repeat_s: float, *, dealt_with: Callable[[], int] = lambda: 0, follows: bool = False) -> None:
        """Must be called in the main thread, after signal handlers are installed: other signals are not noticed.

        Args:
            repeat_s: seconds from a signal within which another one is the same.
            dealt_with: how often a signal was dealt with, after which this process went on.
            follows: whether it ends the process `GRACE_S` seconds after rank 0 as well, which is on this machine.
        """
        self._repeat_s, self._dealt_with = repeat_s, dealt_with
        others = siblings() if follows else {}
        self._rank_0 = others.get(0)
        self._rank_0_ended = bool(others) and self._rank_0 is None
        self._parent = os.getppid()
        self._signals, self._sender = socket.socketpair()  # the interpreter sends the number of each signal
        self._sender.setblocking(False)
        signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="guard", daemon=True).start()

    def _watch(self) -> None:
        ends_at = last = math.inf
        code, dealt_with = 1, 0
        while time.monotonic() < ends_at:
            received, _, _ = select.select([self._signals], [], [], _CHECK_S)
            for number in self._signals.recv(64) if received else b"":
                if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                    now, dealt_with_before, dealt_with = time.monotonic(), dealt_with, self._dealt_with()
                    if dealt_with != dealt_with_before:
                        last = math.inf
                    if now - last >= self._repeat_s and ends_at == math.inf:
                        ends_at, code = now + RANK_0_GRACE_S, 128 + number
                    last = now
            if os.getppid() != self._parent:
                break
            if ends_at == math.inf and (self._rank_0_ended or (self._rank_0 is not None and has_ended(self._rank_0))):
                ends_at, code = time.monotonic() + GRACE_S, PeerError.exit_code
        sys.stderr.flush()
        os._exit(code)
