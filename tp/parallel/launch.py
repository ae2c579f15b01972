"""Starting ranks on this machine, and seeing to it that they end together.

torch's elastic launcher starts them, finds a free port on loopback, watches them and stops all when one fails. What it
cannot do for a rank is done here: `Guard` ends a rank whose launcher is gone, or that does not end when told to.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import PeerError, TriforceError, UsageError

RANK_0_GRACE_S, GRACE_S = 6.0, 2.0
"""Seconds from being told to end to ending by force: rank 0 has statistics to write, the others serve it until then."""

_LOOK_S = 0.5
"""How often a rank looks whether its launcher still lives."""


@dataclass(frozen=True)
class Failure:
    """How a rank ended: its exit code (negative: the signal that killed it) and what it recorded, if anything."""

    rank: int
    exit_code: int
    message: str


def launch(command: Sequence[str], ranks: int, ready: Callable[[], None]) -> int:
    """Runs `command` as so many ranks that share stdin, stdout and stderr, and waits for them.

    Args: `ready` is called when all is imported and nothing is started.

    Returns:
        0; rank 0's own exit code, where it failed by itself and has said why; 128 and the signal that ended all.

    Raises:
        TriforceError: another rank failed; the first failure, in its words (`UsageError` if that is what it was).
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    ready()
    os.environ.update(_environment(os.environ, ranks))
    logging.disable(logging.CRITICAL)  # the launcher's own words, about processes; ours are about ranks
    # A release that has no such field hears all signals, SIGHUP under nohup among them.
    fields = {field.name for field in dataclasses.fields(LaunchConfig)}
    heard: dict[str, Any] = {"signals_to_handle": ",".join(_heard())} if "signals_to_handle" in fields else {}
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
        **heard,
    )
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        return _outcome(
            [Failure(rank, failure.exitcode, _recorded(failure)) for rank, failure in error.failures.items()]
        )
    except SignalException as stopped:
        return 128 + stopped.sigval
    finally:
        logging.disable(logging.NOTSET)
    return 0


def _heard() -> list[str]:
    """The signals that end a run: not those that this process was started to ignore (`nohup`)."""
    ends = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    return [number.name for number in ends if signal.getsignal(number) != signal.SIG_IGN]


def _environment(given: Mapping[str, str], ranks: int) -> dict[str, str]:
    """What ranks on one machine need to know and the user has not said."""
    wanted = {
        "OMP_NUM_THREADS": str(max(1, _cores() // ranks)),  # all cores for each would fight
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback:
        wanted["GLOO_SOCKET_IFNAME"] = loopback  # a host's own name need not resolve
    return {name: value for name, value in wanted.items() if name not in given}


def _cores() -> int:
    """Cores that this process may use; where the system does not say (macOS), those there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _recorded(failure: object) -> str:
    """What a rank recorded of its error, without the class that everything here has."""
    data = getattr(failure, "error_file_data", {})
    message = data.get("message", "") if isinstance(data, dict) else ""
    text = str(message.get("message", "") if isinstance(message, dict) else message)
    return text.removeprefix(f"{_Plain.__name__}: ")


def _outcome(failures: list[Failure]) -> int:
    """The exit code of a run whose ranks failed so, or the error that began it."""
    follow_ups = (PeerError.exit_code, -signal.SIGTERM, 128 + signal.SIGTERM)  # lost its peers, or was told to end
    own = sorted((f for f in failures if f.exit_code not in follow_ups), key=lambda f: f.rank)
    first = own[0] if own else failures[0]
    if own and first.rank == 0 and first.exit_code > 0:
        return first.exit_code
    if first.exit_code > 0:
        kind = UsageError if first.exit_code == UsageError.exit_code else TriforceError
        raise kind(f"rank {first.rank}: {first.message or f'ended with exit code {first.exit_code}'}")
    name = signal.Signals(-first.exit_code).name
    out_of_memory = "; the system does so when memory runs out" if name == "SIGKILL" else ""
    raise TriforceError(f"rank {first.rank} was killed by {name}{out_of_memory}; all other ranks were ended")


def record(error: BaseException) -> bool:
    """Leaves `error` where the launcher finds it; whether there is a launcher."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return False
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

    if isinstance(error, TriforceError):
        error = _Plain(error)
    ErrorHandler().record_exception(error)
    return True


def still_joined() -> bool:
    """Whether this process is in a group of ranks that it has not left; PyTorch is not imported to find out."""
    distributed = sys.modules.get("torch.distributed")
    is_initialized = getattr(distributed, "is_initialized", None)  # not there yet while it is imported
    return is_initialized is not None and is_initialized()


class _Plain(Exception):
    pass


class Guard:
    """Ends this process by force where it would outlive its run: a blocked collective hears no signal handler.

    It ends `grace` seconds after SIGTERM, SIGINT or SIGHUP (whose handlers, if any, still run), and at once when the
    process that started it is gone. It watches from a thread until the process ends.
    """

    def __init__(self, grace: float) -> None:
        """To be made in the main thread, after signal handlers are installed: only a handled signal is noticed."""
        self._grace = grace
        self._parent = os.getppid()
        self._ear, mouth = socket.socketpair()
        mouth.setblocking(False)
        signal.set_wakeup_fd(mouth.fileno(), warn_on_full_buffer=False)
        self._mouth = mouth
        threading.Thread(target=self._watch, name="guard", daemon=True).start()

    def _watch(self) -> None:
        ends_at = float("inf")
        code = 1
        while time.monotonic() < ends_at:
            heard, _, _ = select.select([self._ear], [], [], _LOOK_S)
            for number in self._ear.recv(64) if heard else b"":
                if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) and ends_at == float("inf"):
                    ends_at, code = time.monotonic() + self._grace, 128 + number
            if os.getppid() != self._parent:
                break
        sys.stderr.flush()
        os._exit(code)
