"""`triforce bench`: everything that can be checked before PyTorch is imported."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from ...offload.settings import MOST_SEQUENCES
from ...tp.errors import TriforceError, UsageError
from ...tp.parallel.place import Place
from ...tp.weights.registry import find_pair
from ..call import Call
from ..options import SAMPLING_OPTIONS, changed
from .request import QUESTION_TOKENS, Asked

EPILOG = """[bold]Examples[/]

  This machine with the embedded pair and a built-in text, for a talk:
  [cyan]triforce bench --contexts 4096,16384,65536 --plot bench.png[/]

  A model and a text of yours, with every run in a file, which [bold]triforce plan --measured[/] can start from:
  [cyan]triforce bench --model DIR --draft DIR --prompt-file book.txt --json bench.json[/]

  Several questions about one text at a time:
  [cyan]triforce bench --batch 1,2,4,8 --contexts 32768 --plot batch.png[/]

  Two GPUs, greedy, all tiers:
  [cyan]triforce bench --model qwen3-8b --gpus 2 --contexts 8192,32768 --tiers 1,2,3 --temperature 0[/]

  Without the weights of a model: its steps on this GPU, and the speed that follows from them
  [cyan]triforce bench --shape yarn-llama-2-7b-128k --contexts 32768,131072 --assume-acceptance 0.95[/]
"""

PICTURES = (".png", ".svg", ".pdf")

_OF_RUNS = (
    *("prompt", "prompt_file", "model", "max_new_tokens", "repeat", "batch"),
    *("refresh", "exact", "early_end", *SAMPLING_OPTIONS),
)
"""Options that have no meaning for a shape."""


def bench(request: Asked, call: Call) -> None:
    """Measures this machine: the time between tokens at several context lengths, with and without speculation.

    For each length the prompt is read once; then every number of tiers writes an answer, one after another, several
    times, on the same engine, weights and cache. [bold]Ctrl-C[/] stops; what was measured by then is shown and written.
    """
    from ..ranks import starts_or_follows
    from ..session.source import read_source
    from ..terminal.output import JsonFile, ResultFile
    from ..terminal.streams import tell

    request = replace(request, settings=replace(request.settings, tiers=request.tiers[-1]))
    if request.shape is None:
        _check_runs(request)
    else:
        _check_shape(request)
    if request.plot is not None:
        _check_plot(request.plot)
    if request.shape is None and starts_or_follows(request, call):
        return
    with JsonFile.prepare(request.json) as json_file, ResultFile.prepare(request.plot, "--plot") as plot_file:
        files = (json_file, plot_file)
        if request.shape is not None:
            with call.signals.held(release=False):
                from ...tp.devices import set_threads
                from .shape import run as run_shape

                set_threads(request.settings.threads)
                run_shape(replace(request, model=request.shape), files, call)
            return
        source = read_source(request.prompt_file, request.prompt, tell, request.context)
        directories = find_pair(request.model, request.wanted_draft, tell)
        with call.signals.held(release=False):  # importing PyTorch may swallow what a signal raises
            from .run import run

            run(request, source, directories, files, call)


def _check_runs(request: Asked) -> None:
    """Raises:
    UsageError: options of a shape, or no room for a prompt.
    """
    if request.assume_acceptance is not None:
        raise UsageError("--assume-acceptance is for --shape; a run measures its acceptance")
    if request.batch and request.batch[-1] > MOST_SEQUENCES:
        raise UsageError(
            f"--batch has {request.batch[-1]}, but at most {MOST_SEQUENCES} sequences are decoded together; lower it"
        )
    if request.batch and request.contexts and request.contexts[0] <= request.max_new_tokens + QUESTION_TOKENS:
        raise UsageError(
            f"--contexts has {request.contexts[0]:,}, prompt and answer together, which has no room for a question of "
            f"{QUESTION_TOKENS} tokens and --max-new-tokens {request.max_new_tokens:,}; raise one or lower the other"
        )
    if request.contexts and request.contexts[0] <= request.max_new_tokens:
        raise UsageError(
            f"--contexts has {request.contexts[0]:,}, prompt and answer together, but --max-new-tokens is "
            f"{request.max_new_tokens:,}; raise the one or lower the other"
        )


def _check_shape(request: Asked) -> None:
    """Raises:
    UsageError: options were given that a shape has no use for.
    """
    useless = next((name for name in changed(request) if name in _OF_RUNS), None)
    if useless:
        raise UsageError(
            f"--{useless.replace('_', '-')} and --shape are both given; a shape has random weights and writes no text, "
            "only its steps are timed: leave one out"
        )
    if {2, 3} <= set(request.tiers):
        raise UsageError("--tiers has 2 and 3, but --shape measures the steps of one of them, beside 1; give one")
    if request.gpus > 1:
        raise UsageError(f"--gpus is {request.gpus}, but --shape measures one device; leave it out")
    place = Place.from_environment()
    if place and place.size > 1:
        raise UsageError("--shape measures one device; start it without torchrun")


def _check_plot(path: Path) -> None:
    """Raises:
    UsageError: a kind of picture that is not drawn.
    TriforceError: matplotlib is not installed.
    """
    if path.suffix.lower() not in PICTURES:
        raise UsageError(f"--plot is {str(path)!r}; its name ends with {', '.join(PICTURES)}")
    if find_spec("matplotlib") is None:
        raise TriforceError("--plot needs matplotlib, which is not installed: pip install 'triforce-cli[plot]'")
