"""What tests of `triforce compare` share: a small job, its table, and a library that misbehaves."""

from __future__ import annotations

from pathlib import Path

TOKENS = 24
"""Of each answer."""

PROMPT_TOKENS = 120

MISBEHAVIOUR = {
    "raises": """raise ZeroDivisionError("the other one's bug\\nof two lines")""",
    "exits": """print("a library's last words", flush=True); import os; os._exit(3)""",
    "is killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "needs too much": "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**28,) * 2); bytearray(2**30)",
    "hangs": """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(__file__).with_name("child").write_text(str(child.pid))
time.sleep(600)
""",
}
"""What a library does when it is imported."""


def save_deepspeed(folder: Path, doing: str) -> Path:
    """Writes a package `deepspeed` that does this, and what else is needed of it; to be put on Python's path."""
    for name, content in (("deepspeed", MISBEHAVIOUR[doing]), ("accelerate", "")):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(content + "\n", encoding="utf-8")
    return folder


def rows_of(outcome):
    """The table's lines by the system's name."""
    lines = outcome.out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("system"))
    end = next(i for i in range(start, len(lines)) if not lines[i].strip())
    return lines[start + 1 : end]
