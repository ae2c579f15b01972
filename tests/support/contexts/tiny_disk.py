"""Disks so small that a context does not fit."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tiny_contexts import MARKER, NAME, NEW_TOKENS, QUESTION, SAMPLINGS, TEXT, TinyContexts, assert_whole, store_at
from triforce.offload import ContextError, ContextRequest


def check_full_disk(tiny: TinyContexts, root: Path) -> str:
    """Runs that save give their answer, `read` says what is wrong, the store stays whole, and with room the same read
    completes. Whether it fitted."""
    save = ContextRequest(save=NAME)
    result = tiny.on(root).generate(TEXT + QUESTION, SAMPLINGS[0], NEW_TOKENS, contexts=save)
    assert result.token_ids == tiny.want[0]
    fits = not result.stats["warnings"]
    if not fits:
        assert "space" in " ".join(result.stats["warnings"]) or "free" in " ".join(result.stats["warnings"])
        _check_whole(tiny, root)
    try:
        tiny.read(root)
        outcome = "fits"
    except ContextError as error:
        assert "No space left" in str(error) or "free" in str(error), error
        outcome = "does not fit"
    if fits:
        assert_whole(root, TEXT + QUESTION)
        return outcome
    _check_whole(tiny, root)
    assert {path.name for path in (root / NAME).glob(".*")} <= {MARKER}
    subprocess.run(["mount", "-o", "remount,size=16m", str(root.parent)], check=True)
    tiny.read(root)
    assert_whole(root)
    return outcome


def _check_whole(tiny: TinyContexts, root: Path) -> None:
    if (root / NAME / "manifest.json").exists():
        assert [wrong for _, wrong in store_at(root).verify(NAME) if wrong] == []
        assert tiny.ask(root) == "whole"
