"""How the golden corpus runs the program: as a fork of this process, which has PyTorch already, in an environment and a
folder of its own, so that what it says depends on neither the machine's user nor on who started the tests."""

from __future__ import annotations

import difflib
import functools
import importlib
import os
import pkgutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from forks import Fork

HERE = Path(__file__).parent
RECORDED = HERE / "recorded"

WIDTH = 120
"""Columns of the terminal that help and tables are laid out for."""

LEVEL = "avx2"
"""Of the compiled kernels where commands, HTTP and the store are compared, or what a lesser machine has: from dot
products of bfloat16 on, runs say that they are exact, and choose other lengths."""

_KEPT = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "TMPDIR", "VIRTUAL_ENV")
"""Of the environment; all else is as `environment` has it."""


def environment(**more: str) -> dict[str, str]:
    """What the program sees. Folders are relative to the one that it runs in, so that paths in messages are short and
    the same everywhere."""
    from triforce.kernels import Level, cpu_level  # PyTorch takes its number of threads from the environment first

    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    return kept | {
        "TRIFORCE_CPU_LEVEL": min(cpu_level(), Level[LEVEL.upper()]).name.lower(),
        "HOME": ".",
        "TRIFORCE_HOME": "home",
        "HF_HOME": "hub",
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": str(WIDTH),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "TZ": "UTC",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "NO_PROXY": "127.0.0.1,localhost",
        **more,
    }


@functools.cache
def imported() -> None:
    """Imports the whole program, which every fork then has. One thread, as a fork of a process that has computed with
    two waits for a thread that it has not."""
    import torch
    import triforce.cli
    import triforce.offload

    torch.set_num_threads(1)
    for package in (triforce.cli, triforce.offload):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                with suppress(ImportError):  # of what is optional and not installed
                    importlib.import_module(module.name)


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


def command(arguments: list[str], anew: str | None = None) -> Callable[[], None]:
    """What a fork calls to be `triforce` with these arguments; the package `anew` it imports again, as that reads the
    environment only then."""

    def call() -> None:
        from triforce.cli.app import main

        # What this process has found out before is of its own environment, which asked for another level.
        for module in [
            module for name, module in sys.modules.items() if name.startswith(("triforce.kernels", "triforce.offload"))
        ]:
            for found in list(vars(module).values()):
                if hasattr(found, "cache_clear"):
                    found.cache_clear()
        for name in [name for name in sys.modules if anew and f"{name}.".startswith(f"{anew}.")]:
            del sys.modules[name]
        sys.argv = ["triforce", *arguments]
        main()

    return call


def run(arguments: list[str], folder: Path, stdin: str = "", anew: str | None = None, **more: str) -> Outcome:
    """Runs the command in a fork of this process, in `folder`."""
    imported()
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(stdin.encode())
        given.seek(0)
        streams = given.fileno(), out.fileno(), err.fileno()
        fork = Fork(command(arguments, anew), streams, environment(**more), folder=folder)
        try:
            code = fork.wait(300)
        finally:
            fork.kill()
        for file in (out, err):
            file.seek(0)
        return Outcome(code, out.read().decode(), err.read().decode())


HEAD = "=== "
"""Begins the line with an entry's name in a file of several."""


def read_entries(path: Path) -> dict[str, str]:
    """The entries of a recorded file, by name."""
    if not path.exists():
        return {}
    parts = f"\n{path.read_text(encoding='utf-8')}".split(f"\n{HEAD}")[1:]
    return {name: text for name, _, text in (part.partition("\n") for part in parts)}


def write_entries(path: Path, entries: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    assert not any(line.startswith(HEAD) for text in entries.values() for line in text.splitlines())
    # The last newline of each stands before the next head, so that nothing is lost between the two functions.
    path.write_text("\n".join(f"{HEAD}{name}\n{text}" for name, text in entries.items()), encoding="utf-8")


def versions(*packages: str) -> dict[str, str]:
    """Of packages that what is recorded depends on."""
    return {name: version(name) for name in packages}


def difference(name: str, want: str, found: str) -> str:
    """What to say of a text that is not as it was recorded; empty where it is."""
    if want == found:
        return ""
    lines = difflib.unified_diff(want.splitlines(), found.splitlines(), "recorded", "now", lineterm="", n=3)
    return f"{name} is not what was recorded (see tests/golden/README.md):\n" + "\n".join(lines)
