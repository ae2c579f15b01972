"""A process of its own that has PyTorch from the start: a fork of this one."""

from __future__ import annotations

import faulthandler
import gc
import math
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]


def meeting(ranks: int) -> tuple[TCPStore, dict[str, str]]:
    """Where `ranks` processes meet, and the environment that tells them: a store of this process, as torchrun's agent
    has one, that must last as long as they run.

    A port that was free a moment ago, for rank 0 to listen at, could be another process's by then.
    """
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store, {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(ranks),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def resident() -> int:
    """Bytes of memory that this process takes, without mapped files, which the system may drop at any time. Other files
    in /proc have estimates."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) * 1024


class Fork:
    """A process of its own that has PyTorch from the start, as it is a fork of this one: what `subprocess.Popen` is to
    a command, without the seconds in which an interpreter starts and imports. Everything else is as it is there: the
    environment, standard streams, signals, session, exit code, and whatever a process does to itself.
    """

    def __init__(
        self,
        call: Callable[[], object],
        streams: tuple[int, int, int],
        environment: Mapping[str, str],
        *,
        folder: str | Path = ".",
        new_session: bool = False,
    ) -> None:
        """Args:
        call: what the process does; it may end it with `sys.exit`, or return its exit code.
        streams: descriptors of its stdin, stdout and stderr.
        folder: its working directory.
        """
        self.returncode: int | None = None
        # What is garbage of this process stays so in the fork. The threads that such an object, a store for instance,
        # would wait for in its destructor are not there, and others may have their places.
        collects = gc.isenabled()
        gc.disable()
        try:
            self.pid = os.fork()
            if not self.pid:
                gc.freeze()
        finally:
            if collects:
                gc.enable()
        if self.pid:
            return
        code: object = 1
        try:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            if new_session:
                os.setsid()
            # Copies first, as one of the descriptors may be among those that are replaced.
            for target, source in enumerate([os.dup(stream) for stream in streams]):
                os.dup2(source, target)
                os.close(source)
            faulthandler.register(signal.SIGUSR1, file=2)
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(environment)
            sys.stdin, sys.stdout, sys.stderr = (
                open(number, mode, buffering, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
                for number, mode, buffering, errors in (
                    (0, "r", -1, "strict"),
                    (1, "w", -1, "strict"),
                    (2, "w", 1, "backslashreplace"),
                )
            )
            torch = sys.modules.get("torch")
            if torch is not None and "OMP_NUM_THREADS" in environment:
                # Read when PyTorch is imported. And a fork makes the pool of threads anew at the first call, which two
                # threads must not do at the same time.
                torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
            code = call()
        except SystemExit as end:
            code = end.code
            if isinstance(code, str):
                print(code, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                try:
                    stream.flush()
                except (OSError, ValueError):
                    code = code or 120  # as the interpreter does
            os._exit(code if isinstance(code, int) else 0 if code is None else 1)

    def wait(self, timeout: float = math.inf) -> int:
        """Its exit code, below 0 if a signal ended it.

        Raises:
            subprocess.TimeoutExpired: it runs after `timeout` seconds.
        """
        end = time.monotonic() + timeout
        while (code := self.ended()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("fork", timeout)
            time.sleep(0.005)
        return code

    def ended(self) -> int | None:
        """Its exit code if it has ended."""
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def say_where(self) -> None:
        """Has it write to its stderr where its threads are, and waits a moment for that."""
        if self.ended() is None:
            os.kill(self.pid, signal.SIGUSR1)
            time.sleep(0.5)

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait(60)
