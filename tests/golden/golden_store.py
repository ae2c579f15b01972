"""The saved store of the golden corpus: two contexts that an earlier version wrote, and what is asked about them.

Every later version must list, check, restore and answer from them as they are, so the store itself is recorded anew
only where its format is given up on purpose.
"""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

from golden_commands import BOOK, Session
from golden_models import CHECKPOINTS
from golden_process import RECORDED, run

STORE = RECORDED / "store"

CONTEXTS = {"raw": ("float32", "off", BOOK[:160]), "packed": ("bfloat16", "on", BOOK[:330])}
"""By name: dtype, `--pack`, and the text."""

DAMAGED_BYTE = 0.5
"""Where in the last file of a context a bit is flipped, as a share of its length: among keys and values."""


def write(models: Path, folder: Path) -> None:
    """Writes the store anew, with the program as it is."""
    shutil.rmtree(STORE, ignore_errors=True)
    for name in CHECKPOINTS:
        (folder / name).symlink_to(models / name)
    for name, (dtype, pack, text) in CONTEXTS.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
        line = f"read {name}.txt --model small --device cpu --dtype {dtype} --pack {pack} --raw"
        outcome = run(shlex.split(line), folder)
        assert outcome.code == 0, outcome
        shutil.copytree(folder / "home" / "contexts" / name, STORE / name)


def copy(folder: Path) -> None:
    """Puts the store where the program looks for it."""
    for name in CONTEXTS:
        shutil.copytree(STORE / name, folder / "home" / "contexts" / name)


def copy_damaged(folder: Path) -> None:
    """The same, with a bit flipped in each context."""
    copy(folder)
    for name in CONTEXTS:
        path = max((folder / "home" / "contexts" / name).glob("*.safetensors"))
        content = bytearray(path.read_bytes())
        content[int(len(content) * DAMAGED_BYTE)] ^= 1
        path.write_bytes(content)


def _asked(context: str, dtype: str, more: str) -> str:
    model = f"--model small --draft none --device cpu --dtype {dtype}"
    return f"generate {model} --context {context} --ask 'From where?' --max-new-tokens 6 {more} --json -"


SPECULATING = "--budget 32 --block-length 4 --refresh round"

SESSIONS = (
    Session("store/list", ("contexts list", "contexts list --json -"), prepare=copy),
    *(
        Session(
            f"store/{name}",
            (
                f"contexts show {name} --json -",
                f"contexts verify {name}",
                _asked(name, dtype, "--temperature 0 --seed 1 --tiers 1"),
                _asked(name, dtype, f"--temperature 0 --seed 1 {SPECULATING}"),
                _asked(name, dtype, "--temperature 0.8 --seed 5 --tiers 1"),
                f"read {name}.txt --as {name} --model small --device cpu --dtype {dtype} --pack {pack} --raw --json -",
            ),
            prepare=copy,
            files={f"{name}.txt": text},
        )
        for name, (dtype, pack, text) in CONTEXTS.items()
    ),
    Session(
        "store/damaged",
        (
            "contexts verify raw",
            "contexts verify packed --json -",
            _asked("raw", "float32", "--temperature 0 --seed 1 --tiers 1"),
            "contexts list",
        ),
        prepare=copy_damaged,
    ),
)
