"""Records the golden corpus, or a part of it, anew: `python tests/golden/record.py commands|http|texts|store`.

See README.md beside this file for when one may.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]

from golden_models import save_checkpoints  # noqa: E402
from golden_process import RECORDED, read_entries, versions, write_entries  # noqa: E402

VERSIONS = RECORDED / "versions.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("commands", "http", "texts", "store"))
    parser.add_argument("--only", help="entries whose names contain this; the others stay as they are")
    parser.add_argument("--level", default="avx2", help="of texts: none, avx2, avx512, avx512_bf16 or amx")
    given = parser.parse_args()
    os.environ.update(HF_HOME=tempfile.mkdtemp(), HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    with tempfile.TemporaryDirectory() as folder:
        models = save_checkpoints(Path(folder) / "models")
        RECORDERS[given.part](models, given)


def wanted(name: str, given: argparse.Namespace) -> bool:
    return given.only is None or given.only in name


def commands(models: Path, given: argparse.Namespace) -> None:
    from golden_commands import LAYOUT, SESSIONS, record

    play(SESSIONS, record, RECORDED / "commands", models, given)
    note_versions(commands=versions(*LAYOUT))


def http(models: Path, given: argparse.Namespace) -> None:
    from golden_http import SCENARIOS, record

    play(SCENARIOS, record, RECORDED / "http", models, given)


def texts(models: Path, given: argparse.Namespace) -> None:
    from golden_texts import ARITHMETIC, TEXTS, texts_of

    path = RECORDED / "texts" / f"{given.level}.txt"
    found = texts_of(given.level, models, [text.name for text in TEXTS if wanted(text.name, given)])
    old = read_entries(path)
    write_entries(path, {text.name: found.get(text.name) or old[text.name] for text in TEXTS})
    note_versions(**{f"texts/{given.level}": versions(*ARITHMETIC)})


def store(models: Path, given: argparse.Namespace) -> None:
    """What is said of the store; the store itself where all is recorded."""
    from golden_commands import record
    from golden_store import SESSIONS, STORE, write

    if given.only is None:
        with tempfile.TemporaryDirectory() as folder:
            write(models, Path(folder))
    play(SESSIONS, record, STORE.parent, models, given)


def play(
    entries: Sequence[Any], record: Callable[..., str], where: Path, models: Path, given: argparse.Namespace
) -> None:
    """Records entries, a file a group."""
    for group in dict.fromkeys(entry.group for entry in entries):
        path = where / f"{group}.txt"
        old, found = read_entries(path), dict[str, str]()
        for entry in entries:
            if entry.group == group and wanted(entry.name, given):
                print(entry.name, flush=True)
                with tempfile.TemporaryDirectory() as folder:
                    found[entry.name] = record(entry, models, Path(folder))
            elif entry.group == group:
                found[entry.name] = old[entry.name]
        write_entries(path, found)


def note_versions(**found: dict[str, str]) -> None:
    """What the corpus was recorded with, as far as it depends on it."""
    old = json.loads(VERSIONS.read_text(encoding="utf-8")) if VERSIONS.exists() else {}
    VERSIONS.write_text(json.dumps(old | found, indent=1, sort_keys=True) + "\n", encoding="utf-8")


RECORDERS = {"commands": commands, "http": http, "texts": texts, "store": store}

if __name__ == "__main__":
    main()
