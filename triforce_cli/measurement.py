"""Code that `bench` and `compare` share: options, the model and text to measure, the order of runs, descriptions,
tables, and how results are written. A measurement is one JSON document, from which its table is made.

Nothing heavy is imported at the top: commands check their options first.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

from ..offload.settings import MOST_SEQUENCES, Settings
from ..offload.speculation.sampling import OFF
from ..tp.errors import UsageError
from ..tp.parallel.place import Place
from ..tp.weights.registry import find_pair
from .call import Call
from .options import CONTEXT, MEASURING, WITHOUT_TIERS, TextOptions, option
from .parameters import whole
from .terminal.output import JsonFile, result_console
from .terminal.stopping import Stop
from .terminal.streams import print_note

if TYPE_CHECKING:
    from rich.console import Console

    from ..tp.model.config import ModelConfig
    from ..tp.weights.tokenizer import Tokenizer
    from .session.source import Source

T = TypeVar("T")

QUESTION_TOKENS = 32
"""Tokens at the end of the prompt of each sequence of a batch that differ from those of the others."""

REPEAT = option(MEASURING, whole(1, "R"), "Number of runs of each kind; medians are shown.")

NEW_TOKENS = "Tokens of each answer. Every answer has exactly this length."
"""The help of `--max-new-tokens`."""


@dataclass(frozen=True, kw_only=True)
class MeasuringOptions(TextOptions):
    """The options that `bench` and `compare` share."""

    settings: Annotated[Settings, WITHOUT_TIERS] = Settings()  # noqa: RUF009 - frozen
    context: Annotated[str | None, CONTEXT] = None


def check_sequences(number: int) -> None:
    """Checks a number of sequences.

    Raises:
        UsageError: there are more sequences than can be decoded together.
    """
    if number > MOST_SEQUENCES:
        raise UsageError(f"--batch is {number}, but at most {MOST_SEQUENCES} sequences are decoded together; lower it")


def check_single_process(reason: str) -> None:
    """Checks that this process is not one of several ranks.

    Args:
        reason: the reason why there must be only one process, as the beginning of a message.

    Raises:
        UsageError: this process is one of several ranks.
    """
    place = Place.from_environment()
    if place and place.size > 1:
        raise UsageError(f"{reason}; start it without torchrun")


class Subject(NamedTuple):
    """The pair of models to measure, whose weights are not loaded yet, and the text to measure it with."""

    source: Source
    target: Path
    draft: Path | None
    """The directory of the draft; `target` is that of the target."""
    config: ModelConfig
    """That of the target; so is the tokenizer."""
    tokenizer: Tokenizer


@contextmanager
def subject_of(options: MeasuringOptions, call: Call) -> Iterator[Subject]:
    """Finds the models and the text to measure. Downloads them if necessary. Signals wait within the context.

    Raises:
        TriforceError: a model or the text does not exist, or target and draft do not fit together.
    """
    from .session.source import read_source

    source = read_source(options.prompt_file, options.prompt, print_note, options.context)
    directories = find_pair(options.model, options.wanted_draft, print_note)
    with call.with_pytorch():
        from .session.open import open_pair

        yield Subject(source, *directories, *open_pair(directories, None, options.settings.rope_scaling))


def questions_about(text: Sequence[int], count: int) -> list[list[int]]:
    """A question about one text for each of `count` sequences: `QUESTION_TOKENS` tokens from different places of it.

    Args:
        text: has more tokens than a question.
    """
    places = [i * (len(text) - QUESTION_TOKENS) // count for i in range(count)]
    return [list(text[place : place + QUESTION_TOKENS]) for place in places]


def in_turns(kinds: Sequence[T], repeats: int) -> Iterator[tuple[int, T]]:
    """Yields each kind of run once for each repeat, with the number of the repeat, from 0. The order rotates from one
    repeat to the next, so that no kind is always the first."""
    for repeat in range(repeats):
        first = repeat % len(kinds)
        for kind in (*kinds[first:], *kinds[:first]):
            yield repeat, kind


def spread(values: list[float]) -> dict[str, float]:
    from statistics import median

    return {"median": median(values), "min": min(values), "max": max(values)}


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first index at which two answers of one length differ; `None` if they are the same."""
    return next((index for index, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)


def provenance(kind: str, command: str) -> dict[str, Any]:
    """The head of a measurement's JSON: the kind of document, the version, the date (UTC) and the command."""
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    return {"kind": kind, "version": version("triforce-cli"), "date": date, "command": command}


def machine(device: str, device_name: str, world_size: int, threads: int) -> dict[str, Any]:
    """The machine of a measurement's JSON; each rank computes with `threads` threads."""
    import psutil
    import torch

    return {
        "device": device,
        "device_name": device_name,
        "world_size": world_size,
        "threads": threads,
        "cores": psutil.cpu_count(logical=True) or os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "device_memory_bytes": torch.cuda.get_device_properties(0).total_memory if device == "cuda" else None,
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def machine_in_words(machine: dict[str, Any]) -> str:
    """Describes the `machine` of a document."""
    ranks = machine["world_size"]
    if machine["device"] == "cpu":
        threads = f"{machine['threads']} thread{'s' if machine['threads'] > 1 else ''}"
        return f"{machine['device_name']}, " + (f"{ranks} ranks of {threads}" if ranks > 1 else threads)
    return f"{ranks} × {machine['device_name']}" if ranks > 1 else machine["device_name"]


def sampling_in_words(sampling: dict[str, Any]) -> str:
    """Describes the temperature, and the filters that are not off.

    Args:
        sampling: that of a document, see `Sampling.filters`. Documents of older versions have fewer filters.
    """
    if sampling["temperature"] == 0:
        return "greedy"
    words = [f"temperature {sampling['temperature']:g}"]
    filters = {name: value for name, value in sampling.items() if value != OFF.get(name, value)}
    words += [f"{name.replace('_', '-')} {value}" for name, value in filters.items()]
    return ", ".join(words)


@contextmanager
def written_after(
    document: Callable[[bool], dict[str, Any] | None],
    json_file: JsonFile,
    report: Callable[[Console, dict[str, Any]], None],
    *others: Callable[[dict[str, Any]], None],
) -> Iterator[None]:
    """Writes a measurement at the end of the context that measures. If it was interrupted or failed, the results before
    are written.

    Args:
        document: returns the JSON, and gets whether the measurement was interrupted; `None` if nothing was measured.
        report: prints the table: to stdout, or to stderr if the JSON goes to stdout.
        others: functions that write the results in other forms.
    """
    try:
        yield
    except (Stop, Exception):
        _publish(document(True), json_file, report, *others)
        raise
    _publish(document(False), json_file, report, *others)


def _publish(
    document: dict[str, Any] | None,
    json_file: JsonFile,
    report: Callable[[Console, dict[str, Any]], None],
    *others: Callable[[dict[str, Any]], None],
) -> None:
    """Writes each form even if another cannot be written. The table is last, because a reader that closes its pipe ends
    the process."""
    if document is None:
        return
    with ExitStack() as last_first:
        last_first.callback(report, result_console(json_file), document)
        for other in others:
            last_first.callback(other, document)
        last_first.callback(json_file.write, document)
