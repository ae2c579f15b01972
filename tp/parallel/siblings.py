"""The processes of the ranks that one launcher has started on this machine, seen from the launcher or from a rank."""

from __future__ import annotations

import os
from contextlib import suppress

import psutil

_GROUP = "MASTER_ADDR", "MASTER_PORT"


def rank_processes(parent: psutil.Process, beside: psutil.Process | None = None) -> dict[int, psutil.Process]:
    """The running ranks that `parent` has started, by rank. If `beside` is given: only those of its group."""
    group = [beside.environ().get(name) for name in _GROUP] if beside else None
    found: dict[int, psutil.Process] = {}
    for child in parent.children():
        with suppress(psutil.Error, OSError, KeyError, ValueError):
            given = child.environ()
            if not has_ended(child) and group in (None, [given.get(name) for name in _GROUP]):
                found[int(given["RANK"])] = child
    return found


def has_ended(process: psutil.Process) -> bool:
    """Whether the process has ended. True even if its parent has not read its exit code yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    except (psutil.Error, OSError):  # it is not known
        return False


def siblings() -> dict[int, psutil.Process]:
    """The ranks that were started together with this process, including it, by rank. Empty if no launcher has started
    it."""
    found: dict[int, psutil.Process] = {}
    with suppress(psutil.Error, OSError):
        found = rank_processes(psutil.Process(os.getppid()), psutil.Process())
    return found if os.getpid() in {process.pid for process in found.values()} else {}
