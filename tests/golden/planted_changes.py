"""Plants changes in a copy of the tree, one at a time, and says which entries of the golden corpus notice each:
`python tests/golden/planted_changes.py`. Exits 1 if one was not noticed. No part of the tests: it takes minutes.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

PACKAGES = {"cli": "triforce_cli", "offload": "offload", "tp": "tp", "kernels": "kernels"}
"""Installed packages below `triforce`, and their folders."""


@dataclass(frozen=True)
class Change:
    """Exact text that stands once in a file becomes another. Without text, a byte in the middle of the file does."""

    name: str
    where: str
    """`-k` of pytest: what should notice it, so that not all is compared each time."""
    file: str
    old: str = ""
    new: str = ""

    @contextmanager
    def planted(self, tree: Path) -> Iterator[None]:
        (path,) = tree.glob(self.file)
        before = path.read_bytes()
        path.write_bytes(self._changed(before))
        try:
            yield
        finally:
            path.write_bytes(before)

    def _changed(self, content: bytes) -> bytes:
        if not self.old:
            middle = len(content) // 2
            return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        assert content.count(self.old.encode()) == 1, f"{self.name}: {self.old!r} does not stand once in {self.file}"
        return content.replace(self.old.encode(), self.new.encode())


CHANGES = (
    Change(
        "a word of a message", "no-such", "tp/weights/registry.py", "neither a directory, nor", "not a directory, nor"
    ),
    Change(
        "a word of the help", "help", "triforce_cli/generate/options.py", "Answers to each question", "Replies to it"
    ),
    Change("an exit code", "bad-budget or two-prompts", "tp/errors.py", "    exit_code = 2", "    exit_code = 3"),
    Change(
        "an option's default",
        "generate or chat",
        "offload/speculation/sampling.py",
        "temperature: float = 0.6",
        "temperature: float = 0.7",
    ),
    Change(
        "a key of the JSON",
        "generate/json or chat",
        "offload/run_document.py",
        '"dtype": str(',
        '"number_format": str(',
    ),
    Change("a planned byte", "plan", "offload/limits.py", "python: int = 219", "python: int = 220"),
    Change("the noise of a seed", "texts and seeded", "offload/speculation/noise.py", "7F4A7C15", "7F4A7C17"),
    Change(
        "the noise of a second answer",
        "batch or several",
        "offload/speculation/noise.py",
        "+ sequence * _STEP",
        "+ (sequence + 1) * _STEP",
    ),
    Change(
        "acceptance off by one",
        "tiers",
        "offload/speculation/acceptance.py",
        "while accepted < len(tokens) and",
        "while accepted < len(tokens) - 1 and",
    ),
    Change(
        "which chunks are retrieved",
        "tiers",
        "kernels/chunks.py",
        "F.pad(mass[:, :-1], (1, 0))",
        "F.pad(mass[:, 1:], (0, 1))",
    ),
    Change(
        "what the draft sees",
        "tiers or mistral",
        "offload/caches/streaming.py",
        "SINKS, WINDOW = 16, 240",
        "SINKS, WINDOW = 16, 120",
    ),
    Change(
        "a sum over parts of the keys",
        "texts and (streamed or below or plain)",
        "kernels/partials.py",
        "total.mul_(old).add_(new)",
        "total.add_(new)",
    ),
    Change(
        "a window of attention",
        "mistral",
        "tp/model/families.py",
        'window = raw["sliding_window"]',
        'window = raw["sliding_window"] - 1',
    ),
    Change("a byte of a saved segment", "store", "tests/golden/recorded/store/raw/*.safetensors"),
    Change(
        "what of a context is restored",
        "store or restored",
        "offload/contexts/use.py",
        "full.rollback(wanted)",
        "full.rollback(wanted - 1 if wanted else 0)",
    ),
    Change(
        "a restored byte",
        "store or restored",
        "offload/contexts/segments/file.py",
        "self._read_raw(self.layout, layer, kv_head, halves)",
        "self._read_raw(self.layout, layer, kv_head, halves)\n            keys[0][3] ^= 64",
    ),
    Change("an HTTP status", "errors", "triforce_cli/serve/web/gate.py", "status=413", "status=400"),
    Change(
        "a field of a stream",
        "streamed",
        "triforce_cli/serve/web/streams.py",
        '"finish_reason": finish_reason}',
        '"finish": finish_reason}',
    ),
    Change("the end of a stream", "streamed", "triforce_cli/serve/web/streams.py", "data: [DONE]", "data: [END]"),
    Change("a header", "errors", "triforce_cli/serve/web/gate.py", '{"Cache-Control": "no-store", ', "{"),
    Change("a metric's name", "metrics", "triforce_cli/serve/answering/worker.py", "queue_length", "waiting"),
    Change(
        "what stands before a question",
        "chat",
        "triforce_cli/session/prompt.py",
        "Question: {question}\\nAnswer:",
        "Q: {question}\\nAnswer:",
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="changes whose names contain this")
    parser.add_argument("--all", action="store_true", help="compare all each time, not only where it should be noticed")
    given = parser.parse_args()
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        tree = copied(Path(folder))
        assert not (found := noticed(tree, "streamed or store or errors", Path(folder))), f"without a change: {found}"
        for change in CHANGES:
            if given.only not in change.name:
                continue
            with change.planted(tree):
                found = noticed(tree, "" if given.all else change.where, Path(folder))
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            print(f"{change.name}: {', '.join(found[:3]) + more if found else 'NOT NOTICED'}", flush=True)
            missed += [] if found else [change.name]
    print(f"{len(missed)} not noticed" if missed else "all were noticed")
    return 1 if missed else 0


def copied(folder: Path) -> Path:
    """A copy of the tree as it is, built kernels too, and a package `triforce` beside it that is that copy."""
    tree = folder / "tree"
    named = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    files = {ROOT / name for name in named.stdout.decode().split("\0") if name}
    for path in files | set(ROOT.glob("kernels/cpu/*.so")):
        if path.is_file():
            to = tree / path.relative_to(ROOT)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, to)
    (folder / "link" / "triforce").mkdir(parents=True)
    for name, place in PACKAGES.items():
        (folder / "link" / "triforce" / name).symlink_to(tree / place)
    return tree


def noticed(tree: Path, where: str, folder: Path) -> list[str]:
    """Entries that are not what was recorded."""
    command = [sys.executable, "-m", "pytest", "tests/golden", "--full", "-q", "-n", "2", "-p", "no:cacheprovider"]
    command += ["-k", where] if where else []
    place = {"PYTHONPATH": str(folder / "link"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=tree, env=os.environ | place, capture_output=True, text=True)
    assert done.returncode in (0, 1), f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return re.findall(r"^(?:FAILED|ERROR) \S+?\[(.+?)\]", done.stdout, re.MULTILINE)


if __name__ == "__main__":
    sys.exit(main())
