"""`triforce compare`: everything that can be checked before PyTorch is imported."""

from __future__ import annotations

from dataclasses import replace

from ...offload.settings import MOST_SEQUENCES
from ...tp.errors import TriforceError, UsageError
from ...tp.parallel.place import Place
from ...tp.weights.registry import find_pair
from ..call import Call
from .baselines.catalogue import BASELINES, Entry
from .request import DEFAULT, Asked

EPILOG = """[bold]Examples[/]

  This engine against itself without speculation, and against transformers:
  [cyan]triforce compare[/]

  A book, in float32, where greedy texts must be the same:
  [cyan]triforce compare --prompt-file book.txt --dtype float32 --baseline transformers[/]

  The first 8,192 tokens of it, with every run in a file:
  [cyan]triforce compare --prompt-file book.txt --prompt-tokens 8192 --json runs.json[/]

  Eight questions about it, answered together:
  [cyan]triforce compare --prompt-file book.txt --batch 8 --baseline transformers --baseline transformers-prefix[/]
"""


def compare(request: Asked, call: Call) -> None:
    """Measures this engine and others with the same weights, the same prompt and the same sampling.

    Each run is a process of its own, with one warm-up, in an order that rotates; one system is in memory at a time.
    [bold]Ctrl-C[/] stops; what was measured by then is shown. Exits 1 if there is nothing to compare.
    """
    from ..session.source import read_ask, read_source
    from ..terminal.output import JsonFile
    from ..terminal.streams import tell

    names = dict.fromkeys(request.baseline or DEFAULT)
    for name in names:
        if name not in BASELINES:
            raise UsageError(f"--baseline is {name!r}; it is one of {', '.join(BASELINES)}")
    chosen = [BASELINES[name] for name in names]
    _check_batch(request, chosen)
    place = Place.from_environment()
    if place and place.size > 1:
        raise UsageError("compare runs every system in one process; start it without torchrun")
    request = replace(request, ask=read_ask(request.ask, tell))
    if all(entry.missing() for entry in chosen):
        raise TriforceError("; ".join(f"{entry.name} is {entry.missing()}" for entry in chosen))
    with JsonFile.prepare(request.json) as json_file:
        source = read_source(request.prompt_file, request.prompt, tell, request.context)
        directories = find_pair(request.model, request.draft, tell)
        with call.signals.held(release=False):  # importing PyTorch may swallow what a signal raises
            from .run import run

            run(request, chosen, source, directories, json_file, call)


def _check_batch(request: Asked, chosen: list[Entry]) -> None:
    """Raises:
    UsageError: what has no meaning with `--batch`, or none without it.
    """
    if request.batch is None:
        for entry in chosen:
            if entry.needs_batch:
                raise UsageError(f"--baseline {entry.name} is for sequences that begin alike; give --batch N too")
        return
    if request.batch > MOST_SEQUENCES:
        raise UsageError(
            f"--batch is {request.batch}, but at most {MOST_SEQUENCES} sequences are decoded together; lower it"
        )
    if request.ask is not None:
        raise UsageError("--ask and --batch are both given, but --batch gives each sequence its own question; give one")
    if request.audit:
        raise UsageError("--audit and --batch are both given, but one answer alone can be audited; leave one out")
