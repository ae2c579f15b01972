"""Processes that are killed while they read a text into a context."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

from hooked_disk import HookedDisk
from tiny_contexts import NAME, SEGMENT, TEXT, TinyContexts, assert_whole, store_at
from triforce.offload import ContextError


def check_killed(tiny: TinyContexts, root: Path, rng: random.Random) -> str:
    """Kills such a process once to three times, each from whatever the last one left. Every following start completes:
    what is saved is whole, and after a read of the text all is there and nothing else. Tokens saved at the kills."""
    saved = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        saved.append(_killed(tiny, root, rng))
        if (root / NAME / "manifest.json").exists():
            assert [wrong for _, wrong in store_at(root).verify(NAME) if wrong] == []
            assert tiny.ask(root) == "whole"
    assert saved == sorted(saved), f"tokens were lost: {saved}"
    tiny.read(root)
    assert_whole(root)
    assert tiny.ask(root, which=1) == "whole"
    return f"with {saved[-1]} tokens saved"


def _killed(tiny: TinyContexts, root: Path, rng: random.Random) -> int:
    """Kills a reader at a random moment; the tokens that are saved then."""
    seed, moment = rng.randrange(10**9), rng.uniform(0, 0.6)
    reader = os.fork()
    if not reader:
        try:
            _read_slowly(tiny, root, random.Random(seed))
        finally:
            os._exit(0)
    time.sleep(moment)
    os.kill(reader, signal.SIGKILL)
    os.waitpid(reader, 0)
    try:
        saved = store_at(root).load(NAME).saved
    except ContextError:
        saved = 0
    assert saved % SEGMENT == 0 or saved in (100, len(TEXT))
    return saved


def _read_slowly(tiny: TinyContexts, root: Path, rng: random.Random) -> None:
    """Reads a part of the text, if nothing is there yet, and then all of it, waiting a moment before each call."""
    slow = rng.choice(["create", "sync", "rename", "sync_directory", "remove", None])

    def wait(kind: str, *_: object) -> None:
        time.sleep(rng.uniform(0, 0.06 if kind == slow else 0.004))

    if not root.exists():
        tiny.read(root, TEXT[:100], disk=HookedDisk(wait))
    tiny.read(root, disk=HookedDisk(wait))
