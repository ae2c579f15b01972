"""The processes of the ranks that one launcher has started on this machine, seen from it or from one of them."""

from __future__ import annotations

import os
from contextlib import suppress

import psutil


def rank_processes(parent: psutil.Process) -> dict[int, psutil.Process]:
    """The ranks that `parent` has started and that run, by number."""
    found: dict[int, psutil.Process] = {}
    for child in parent.children():
        with suppress(psutil.Error, KeyError, ValueError):
            if not has_ended(child):
                found[int(child.environ()["RANK"])] = child
    return found


def has_ended(process: psutil.Process) -> bool:
    """Whether it runs no more, also where nobody has asked for its exit code yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


def siblings() -> dict[int, psutil.Process]:
    """The ranks beside this one, with this one; empty where no launcher has started it."""
    found: dict[int, psutil.Process] = {}
    with suppress(psutil.Error):
        found = rank_processes(psutil.Process(os.getppid()))
    return found if os.getpid() in {process.pid for process in found.values()} else {}
