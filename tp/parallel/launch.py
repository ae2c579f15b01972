"""Starts ranks on this machine, and makes sure that they end together.

PyTorch's elastic launcher starts the ranks, finds a free port on loopback, watches the ranks and stops all of them when
one fails. In addition, `Guard` in each rank ends the rank when its launcher is gone, or when a signal does not end it.
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
"""Seconds until a rank is ended by force. For rank 0, which still writes statistics, they count from the second of two
signals; see `Guard`. For other ranks, they count from the end of rank 0."""

_CHECK_S = 0.5
"""Seconds between a rank's checks whether its launcher is alive."""


_FOLLOW_UPS = (PeerError.exit_code, -signal.SIGTERM, 128 + signal.SIGTERM)
"""Exit codes of ranks that ended because another rank had ended."""


_ENDING_S = 10
"""A rank that was killed so many seconds after the first failure, or later, was killed by the launcher. After a
failure, the launcher waits 30 seconds for the others to end."""


@dataclass(frozen=True)
class Failure:
    """How a rank failed."""

    rank: int
    exit_code: int
    """Negative: the number of the signal that killed the rank."""
    message: str
    """The error message; may be empty."""
    at: int
    """When the rank recorded its error, or else when the launcher noticed its end; in seconds since 1970."""


def launch(command: Sequence[str], ranks: int, ready: Callable[[], None]) -> int:
    """Runs `command` in `ranks` processes that share stdin, stdout and stderr, and waits for them. Signals are passed
    on only to rank 0, which ends the others when it is ready.

    Args:
        command: the program and its arguments.
        ranks: the number of processes.
        ready: called after the launcher is imported, before any process is started.

    Returns:
        0; or the exit code of rank 0, if it failed and has printed its error; or 128 plus the number of the signal that
        ended the run.

    Raises:
        TriforceError: another rank failed; or rank 0 was killed by a signal, or waited for the others until the time
            limit. It has the message of the first failure, and is a `UsageError` if that was a `UsageError`.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    ready()
    os.environ.update(_environment(os.environ, ranks))
    logging.disable(logging.CRITICAL)  # the launcher's messages about processes are replaced by messages about ranks
    # Releases of PyTorch without this field handle all signals, even SIGHUP under nohup.
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
        failures = [
            Failure(rank, failure.exitcode, _recorded(failure), failure.timestamp)
            for rank, failure in error.failures.items()
        ]
        failures = _of_ranks(failures)
        code = rank_0.stopped_by_signal(failures)
        return _outcome(failures) if code is None else code
    except SignalException as stopped:
        return 128 + stopped.sigval
    finally:
        logging.disable(logging.NOTSET)
    return 0


def _handled_signals() -> list[signal.Signals]:
    """The signals that end a run, except those that this process ignores, as under `nohup`."""
    ends = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    return [number for number in ends if signal.getsignal(number) != signal.SIG_IGN]


class _RankZero:
    """Within this context, signals to this process are passed on to rank 0. If there is no rank 0, they end the
    launcher."""

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
        """128 plus the number of the signal that ended the ranks; `None` if a rank failed."""
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
    """Environment variables for ranks on one machine, except those that the user has set."""
    wanted = {
        "OMP_NUM_THREADS": str(max(1, usable_cores() // ranks)),  # otherwise every rank would use all cores
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback:
        wanted["GLOO_SOCKET_IFNAME"] = loopback  # the host's name may not resolve
    return {name: value for name, value in wanted.items() if name not in given}


def usable_cores() -> int:
    """The number of cores that this process may use; on systems that do not report it (macOS), all cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _recorded(failure: object) -> str:
    """The error message that a rank recorded, without the name of the class in which `record` wraps errors."""
    data = getattr(failure, "error_file_data", {})
    message = data.get("message", "") if isinstance(data, dict) else ""
    text = str(message.get("message", "") if isinstance(message, dict) else message)
    return text.removeprefix(f"{_Plain.__name__}: ")


def _of_ranks(failures: list[Failure]) -> list[Failure]:
    """The failures without those of ranks that the launcher killed because they did not end after the first one."""
    began = min(f.at for f in failures)
    return [f for f in failures if f.exit_code != -signal.SIGKILL or f.at < began + _ENDING_S]


def _outcome(failures: list[Failure]) -> int:
    """The exit code of a run with these failures, if rank 0 has printed the error; otherwise raises the error of the
    first failure."""
    hung = HangError.exit_code
    own = [f for f in failures if f.exit_code not in _FOLLOW_UPS]
    own.sort(key=lambda f: (f.exit_code == hung, f.rank))  # others may hang because they wait for a rank that failed
    first = own[0] if own else min(failures, key=lambda f: (f.at, f.rank))
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
    """Writes `error` to the file that the launcher reads. Returns whether there is a launcher."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return False
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

    if isinstance(error, TriforceError):
        error = _Plain(error)
    ErrorHandler().record_exception(error)
    return True


def must_not_finalize() -> bool:
    """Whether the interpreter must not be finalized when this process ends.

    True if this process is in a group of ranks, or has started ranks. Then threads of PyTorch may still run, and
    finalizing would sometimes abort the process. Does not import PyTorch.
    """
    distributed = sys.modules.get("torch.distributed")
    is_initialized = getattr(distributed, "is_initialized", None)  # missing while the module is being imported
    joined = is_initialized is not None and is_initialized()
    return joined or "torch.distributed.launcher.api" in sys.modules


class _Plain(Exception):
    """An error that a user can act on, without the name of its class."""


class Guard:
    """A thread that ends this process by force if it would outlive its run. This is needed because Python's signal
    handlers do not always run during a collective.

    The first SIGTERM, SIGINT or SIGHUP is left to its handler. If another signal comes before the first has been dealt
    with, the process is ended `RANK_0_GRACE_S` seconds after that second signal. When the parent process is gone, this
    process is ended at once.
    """

    def __init__(self, repeat_s: float, *, dealt_with: Callable[[], int] = lambda: 0, follows: bool = False) -> None:
        """Starts the thread. Must be called in the main thread, after signal handlers are installed: signals without a
        handler are not noticed.

        Args:
            repeat_s: a signal that comes within this number of seconds after another counts as the same signal.
            dealt_with: returns how many signals have been handled so far without ending this process.
            follows: whether this process is also ended `GRACE_S` seconds after the end of rank 0, which is on this
                machine.
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
