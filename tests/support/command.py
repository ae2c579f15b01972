"""What tests of the command line share: ways to run it, and a tiny pair of models with a tokenizer."""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

import pytest
from forks import Fork
from tiny import save_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from triforce import cli
from triforce.cli.app import run

VOCABULARY = 320
CONTEXT = 1024

TRIFORCE = (sys.executable, "-P", "-m", "triforce.cli")
"""The command. `-P`: the folder that tests run in must not be where packages such as `kernels` are found."""

TEXT = "It was the best of times, it was the worst of times; naïve – “quoted”, déjà vu, 北京, and 🙂.\n\n" * 8


def first_on_path(*folders: Path) -> str:
    """`PYTHONPATH` with these first; an empty part would be the folder that tests run in, with `kernels`."""
    return os.pathsep.join(filter(None, [*map(str, folders), os.environ.get("PYTHONPATH")]))


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


def run_command(*arguments: object, stdin: bytes | None = None, **environment: str) -> Outcome:
    """Runs `triforce` as a user does, in a process of its own."""
    done = subprocess.run(
        [*TRIFORCE, *map(str, arguments)],
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"} | environment,
    )
    return Outcome(done.returncode, done.stdout.decode(), done.stderr.decode())


def run_here(capfd, *arguments: object) -> Outcome:
    """Runs `triforce` within this process, which has PyTorch already: the same code in a tenth of the time."""
    capfd.readouterr()
    code = run([str(argument) for argument in arguments])
    out, err = capfd.readouterr()
    return Outcome(code, out, err)


@functools.cache
def import_here(command: str) -> None:
    """Imports what a command consists of, if it has a folder of its own: once, and not in each fork."""
    place = Path(cli.__file__).parent / command
    for module in pkgutil.iter_modules([str(place)]):
        importlib.import_module(f"{cli.__name__}.{command}.{module.name}")


def triforce(*arguments: object, anew: str | None = None) -> Callable[[], None]:
    """What a fork calls to be the command; the package `anew` it imports again."""
    if anew is None and arguments:
        import_here(str(arguments[0]))

    def call() -> None:
        for name in [name for name in sys.modules if anew and f"{name}.".startswith(f"{anew}.")]:
            del sys.modules[name]
        sys.argv = ["triforce", *map(str, arguments)]
        importlib.import_module("triforce.cli.app").main()

    return call


def fork_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on `python -m MODULE` is a fork, wherever this process starts it: what `compare` measures runs in
    processes of its own."""
    started = subprocess.Popen

    def start(command: Any, *arguments: Any, **options: Any) -> Any:
        if [*command][:3] != [sys.executable, "-P", "-m"] or arguments or options.get("stdin") != subprocess.DEVNULL:
            return started(command, *arguments, **options)
        module, *words = map(str, command[3:])

        def call() -> None:
            sys.argv = ["", *words]
            runpy.run_module(module, run_name="__main__", alter_sys=True)

        out = options["stdout"].fileno()
        streams = nothing.fileno(), out, out if options["stderr"] == subprocess.STDOUT else options["stderr"].fileno()
        return Fork(call, streams, options["env"], new_session=options["start_new_session"])

    nothing = open(os.devnull, "rb")  # noqa: SIM115 (as long as the process)
    monkeypatch.setattr(subprocess, "Popen", start)


class Running:
    """`triforce` in a fork of this process, as long as this block: what it has printed so far can be looked at."""

    def __init__(self, *arguments: object, stdin: bytes = b"", anew: str | None = None, **environment: str) -> None:
        """Args:
        anew: see `run_fork`.
        """
        self._given, self._out, self._err = (tempfile.TemporaryFile() for _ in range(3))  # noqa: SIM115
        self._given.write(stdin)
        self._given.seek(0)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **environment}
        streams = self._given.fileno(), self._out.fileno(), self._err.fileno()
        self._fork = Fork(triforce(*arguments, anew=anew), streams, environment)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._fork.kill()
        for file in (self._given, self._out, self._err):
            file.close()

    @property
    def out(self) -> str:
        return self._content(self._out)

    @property
    def err(self) -> str:
        return self._content(self._err)

    def wait_until(self, seen: Callable[[], object], seconds: float = 60.0) -> None:
        """Waits until `seen()` is true, while it runs."""
        end = time.monotonic() + seconds
        while not seen():
            assert self._fork.ended() is None, f"it ended before: {self.out}{self.err}"
            assert time.monotonic() < end, f"that did not come within {seconds:.0f} s: {self.out}{self.err}"
            time.sleep(0.005)

    def signal(self, number: int) -> None:
        os.kill(self._fork.pid, number)

    def finish(self, seconds: float = 120.0) -> Outcome:
        """Waits for its end.

        Raises:
            subprocess.TimeoutExpired: it runs after so many seconds.
        """
        code = self._fork.wait(seconds)
        return Outcome(code, self.out, self.err)

    def _content(self, file: IO[bytes]) -> str:
        return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")


def run_fork(*arguments: object, stdin: bytes = b"", anew: str | None = None, **environment: str) -> Outcome:
    """Runs `triforce` in a process of its own, as `run_command` does, but in a fork of this one.

    Args:
        anew: a package that it imports again, as it reads the environment only then.
    """
    with Running(*arguments, stdin=stdin, anew=anew, **environment) as running:
        return running.finish()


def check_refusal(outcome: Outcome, code: int, *words: str) -> None:
    """One message on stderr with all of `words`, nothing on stdout, the right exit code, no traceback."""
    assert outcome.code == code, outcome
    assert outcome.out == "", outcome
    assert "Traceback" not in outcome.err, outcome
    messages = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert len(messages) == 1, outcome
    for word in words:
        assert word in messages[0], f"{word!r} is not in {messages[0]!r}"


def undocumented(document: Any, *pages: str, but: str = "") -> set[str]:
    """Keys of a JSON document that no table in these pages of docs/ names; what is under `but` is not looked at."""
    docs = Path(__file__).parents[2] / "docs"
    rows = [line for page in pages for line in (docs / page).read_text(encoding="utf-8").splitlines() if "|" in line]
    named = {word for row in rows for word in re.findall(r"\w+", row.split("|")[1])}

    def keys(value: Any) -> Iterator[str]:
        for name, inner in value.items() if isinstance(value, dict) else ():
            yield name
            yield from keys(inner) if name != but else ()
        for inner in value if isinstance(value, list) else ():
            yield from keys(inner)

    return set(keys(document)) - named


def save_tokenizer(directory: Path, corpus: str = TEXT) -> None:
    """Writes a byte-level tokenizer with `VOCABULARY` tokens, trained on `corpus`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([corpus], trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}', encoding="utf-8"
    )


def without_weights(model: Path, folder: Path) -> Path:
    """A copy of a model whose weights are gone: a command that does not end before it loads them says so."""
    copy = folder / f"{model.name}-without-weights"
    shutil.copytree(model, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    return copy


def save_pair(directory: Path) -> tuple[Path, Path]:
    """Writes a target and a draft with one vocabulary, and returns where."""
    target, draft = directory / "target", directory / "draft"
    shape = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT}
    for place, seed, layers in ((target, 0, 2), (draft, 1, 1)):
        save_tokenizer(place)
        save_llama(place, seed=seed, num_hidden_layers=layers, **shape)
    return target, draft
