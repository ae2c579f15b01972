"""What tests of `triforce compare` share: a small job and its table, and systems that misbehave.

A worker loads this as a baseline's module.
"""

import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

TOKENS = 24
"""Of each answer."""

PROMPT_TOKENS = 120

WITH_STRANGE_SYSTEMS = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
"""`PYTHONPATH`; an empty part would be the folder that tests run in, with packages such as `kernels`."""

FLIPPED_AT = 5
"""The token that `flips` gets wrong, of a batch that of its second sequence and those after it."""


def rows_of(outcome):
    """The table's lines by the system's name."""
    lines = outcome.out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("system"))
    end = next(i for i in range(start, len(lines)) if not lines[i].strip())
    return lines[start + 1 : end]


def load(job):
    return {
        "raises": Raises,
        "exits": Exits,
        "is killed": Killed,
        "needs too much": NeedsTooMuch,
        "hangs": Hangs,
        "stops early": StopsEarly,
        "flips": Flips,
    }[job.system](job)


class Raises:
    ran = ""

    def __init__(self, job):
        self.job = job

    def generate(self, prompt_ids, max_new_tokens) -> Any:
        raise ZeroDivisionError("the other one's bug\nof two lines")


class Exits(Raises):
    def generate(self, prompt_ids, max_new_tokens):
        print("a library's last words", flush=True)
        os._exit(3)


class Killed(Raises):
    def generate(self, prompt_ids, max_new_tokens):
        os.kill(os.getpid(), signal.SIGKILL)


class NeedsTooMuch(Raises):
    def generate(self, prompt_ids, max_new_tokens):
        resource.setrlimit(resource.RLIMIT_AS, (2**28, 2**28))
        return bytearray(2**30)


class Hangs(Raises):
    def generate(self, prompt_ids, max_new_tokens):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(f"child {child.pid}", flush=True)
        time.sleep(600)


class Flips(Raises):
    """Transformers, with one token changed."""

    def __init__(self, job):
        from triforce.cli.compare.baselines.transformers_baseline import Transformers

        self.system = Transformers(job)
        self.ran = self.system.ran

    def generate(self, prompt_ids, max_new_tokens):
        return flipped(self.system.generate(prompt_ids, max_new_tokens), [FLIPPED_AT])

    def generate_batch(self, text, questions, max_new_tokens):
        timed = self.system.generate_batch(text, questions, max_new_tokens)
        return flipped(timed, range(max_new_tokens + FLIPPED_AT, len(timed.token_ids), max_new_tokens))


def flipped(timed, places):
    tokens = list(timed.token_ids)
    for place in places:
        tokens[place] = (tokens[place] + 1) % 320
    return replace(timed, token_ids=tokens)


class StopsEarly(Flips):
    def generate(self, prompt_ids, max_new_tokens):
        return self.system.generate(prompt_ids, max_new_tokens - 1)
