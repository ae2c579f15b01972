"""The processes of the ranks that one launcher has started on this machine, seen from the launcher or from a rank."""

from __future__ import annotations

import os
from contextlib import suppress

import psutil


def rank_processes(parent: psutil.Process) -> dict[int, psutil.Process]:
    """The running ranks that `parent` has started, by rank."""
    found: dict[int, psutil.Process] = {}
    for child in parent.children():
        with suppress(psutil.Error, KeyError, ValueError):
            if not has_ended(child):
                found[int(child.environ()["RANK"])] = child
    return found


def has_ended(process: psutil.Process) -> bool:
    """Whether the process has ended. True even if its parent has not read its exit code yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


def siblings() -> dict[int, psutil.Process]:
    """The ranks that were started together with this process, including it, by rank. Empty if no launcher has started
    it."""
    found: dict[int, psutil.Process] = {}
    with suppress(psutil.Error):
        found = rank_processes(psutil.Process(os.getppid()))
    return found if os.getpid() in {process.pid for process in found.values()} else {}
