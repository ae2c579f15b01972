"""`triforce bench`: its options, the checks before PyTorch is imported, and the measurement up to its results."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, cast

from ...tp.errors import CapacityError, TriforceError, UsageError
from ..call import Call
from ..measurement import (
    NEW_TOKENS,
    QUESTION_TOKENS,
    REPEAT,
    MeasuringOptions,
    Subject,
    check_sequences,
    check_single_process,
    subject_of,
    written_after,
)
from ..options import MEASURING, OUTPUT, SAMPLING_OPTIONS, changed, new_tokens, option
from ..parameters import CHANCES, FILE, Kind, Numbers, whole_numbers
from ..terminal.output import JsonFile, ResultFile
from ..terminal.streams import BestEffortStream, print_note

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...offload import Engine
    from ...tp.model.config import ModelConfig
    from .measure import ContextRuns

EPILOG = """[bold]Examples[/]

  This machine with the embedded pair and a built-in text, with a plot for a talk:
  [cyan]triforce bench --contexts 4096,16384,65536 --plot bench.png[/]

  A model and a text of yours, with every run in a file, which [bold]triforce plan --measured[/] can use:
  [cyan]triforce bench --model DIR --draft DIR --prompt-file book.txt --json bench.json[/]

  Several questions about one text, decoded together:
  [cyan]triforce bench --batch 1,2,4,8 --contexts 32768 --plot batch.png[/]

  Two GPUs, greedy, all tiers:
  [cyan]triforce bench --model qwen3-8b --gpus 2 --contexts 8192,32768 --tiers 1,2,3 --temperature 0[/]

  Without the weights of a model: the times of its steps on this GPU, and the speed that follows from them:
  [cyan]triforce bench --shape yarn-llama-2-7b-128k --contexts 32768,131072 --assume-acceptance 0.95[/]
"""

AUTO_CONTEXTS = (4096, 16384, 65536)

PICTURES = (".png", ".svg", ".pdf")

_OPTIONS_OF_RUNS = (
    *("prompt", "prompt_file", "model", "max_new_tokens", "repeat", "batch"),
    *("refresh", "exact", "early_end", *SAMPLING_OPTIONS),
)
"""Options that have no meaning for a shape."""


@dataclass(frozen=True, kw_only=True)
class BenchOptions(MeasuringOptions):
    """The options of `triforce bench`."""

    contexts: Annotated[
        Numbers | None,
        option(
            MEASURING,
            whole_numbers(2, auto=True),
            "Context lengths to measure, in tokens of prompt and answer together. auto is "
            f"{', '.join(f'{n:,}' for n in AUTO_CONTEXTS)}; lengths that the model cannot hold, or that are not longer "
            "than --max-new-tokens, are left out.",
        ),
    ] = None
    """Ascending; `None`: those of `AUTO_CONTEXTS` for which the model has enough positions."""
    tiers: Annotated[
        Numbers,
        option(
            MEASURING,
            whole_numbers(1, 3),
            "What to measure. 1: plain decoding; 2: speculation without the small model; 3: with it.",
        ),
    ] = Numbers((1, 3))  # noqa: RUF009 - a tuple
    """Ascending."""
    batch: Annotated[
        Numbers | None,
        option(
            MEASURING,
            whole_numbers(1),
            "Numbers of sequences to decode together, such as 1,2,4,8. All have the same text; each has its own "
            "question. Measures tokens per second.",
        ),
    ] = None
    """Ascending; `None`: only runs of one sequence are measured."""
    repeat: Annotated[int, REPEAT] = 3
    shape: Annotated[
        str | None,
        option(
            MEASURING,
            Kind("NAME"),
            "Instead of a model: the shape of a preset, or of a directory with config.json. Its steps are measured "
            "with random weights and synthetic keys and values. Times that depend on acceptance are modelled.",
        ),
    ] = None
    assume_acceptance: Annotated[
        Numbers | None,
        option(
            MEASURING,
            CHANCES,
            "With --shape: assumed acceptance rates (accepted ÷ tested). A: of tokens drafted on the retrieval cache. "
            "B: of tokens drafted by the small model. Default: 0.9,0.67.",
        ),
    ] = None
    max_new_tokens: Annotated[int, new_tokens(2, NEW_TOKENS)] = 128
    plot: Annotated[
        Path | None,
        option(OUTPUT, FILE, "Draw a plot to this file (.png, .svg, .pdf); needs the extra [bold]plot[/]."),
    ] = None


def bench(options: BenchOptions, call: Call) -> None:
    """Measures the time between tokens on this machine, at several context lengths, with and without speculation.

    For each length, the prompt is prefilled once. Then an answer is written with each number of tiers in turn.
    This is repeated several times, with the same engine, weights and KV cache.
    [bold]Ctrl-C[/] stops; the results so far are shown and written.
    """
    from ..ranks import starts_or_follows

    options = replace(options, settings=replace(options.settings, tiers=options.tiers[-1]))
    if options.shape is None:
        _check_runs(options)
    else:
        _check_shape(options)
    if options.plot is not None:
        _check_plot(options.plot)
    if options.shape is None and starts_or_follows(options, call):
        return
    with JsonFile.prepare(options.json) as json_file, ResultFile.prepare(options.plot, "--plot") as plot_file:
        if options.shape is None:
            with subject_of(options, call) as subject:
                _measure_runs(options, subject, json_file, plot_file, call)
        else:
            with call.with_pytorch():
                _measure_shape(options, options.shape, json_file, plot_file, call)


def _check_runs(options: BenchOptions) -> None:
    """Checks the options for runs.

    Raises:
        UsageError: there are options for a shape, too many sequences, or there is no room for a prompt.
    """
    if options.assume_acceptance is not None:
        raise UsageError("--assume-acceptance is for --shape; a run measures its acceptance")
    if options.batch:
        check_sequences(options.batch[-1])
    if options.batch and options.contexts and options.contexts[0] <= options.max_new_tokens + QUESTION_TOKENS:
        raise UsageError(
            f"--contexts has {options.contexts[0]:,} (prompt and answer together), which has no room for a question of "
            f"{QUESTION_TOKENS} tokens and --max-new-tokens {options.max_new_tokens:,}; raise --contexts, or lower "
            "--max-new-tokens"
        )
    if options.contexts and options.contexts[0] <= options.max_new_tokens:
        raise UsageError(
            f"--contexts has {options.contexts[0]:,} (prompt and answer together), but --max-new-tokens is "
            f"{options.max_new_tokens:,}; raise --contexts, or lower --max-new-tokens"
        )


def _check_shape(options: BenchOptions) -> None:
    """Checks the options for a shape.

    Raises:
        UsageError: there are options that have no meaning for a shape, or with which a shape cannot be measured.
    """
    unused = next((name for name in changed(options) if name in _OPTIONS_OF_RUNS), None)
    if unused:
        raise UsageError(
            f"--{unused.replace('_', '-')} and --shape are both given, but --shape only times steps with random "
            "weights, and writes no text; leave one out"
        )
    if {2, 3} <= set(options.tiers):
        raise UsageError("--tiers has 2 and 3, but --shape measures only one of them, beside 1; give one of them")
    if options.gpus > 1:
        raise UsageError(f"--gpus is {options.gpus}, but --shape measures one device; leave it out")
    check_single_process("--shape measures one device")


def _check_plot(path: Path) -> None:
    """Checks that the picture can be drawn.

    Raises:
        UsageError: this kind of picture is not supported.
        TriforceError: matplotlib is not installed.
    """
    if path.suffix.lower() not in PICTURES:
        raise UsageError(f"--plot is {str(path)!r}; the name must end with one of {', '.join(PICTURES)}")
    if find_spec("matplotlib") is None:
        raise TriforceError("--plot needs matplotlib, which is not installed: pip install 'triforce-cli[plot]'")


def _written_after(
    document: Callable[[bool], dict[str, Any] | None], json_file: JsonFile, plot_file: ResultFile
) -> AbstractContextManager[None]:
    """See `written_after`. Also draws the picture, if it is wanted."""
    from .report import report

    def draw(document: dict[str, Any]) -> None:
        from .plot import draw

        plot_file.write_bytes(draw(document, plot_file.kind))

    return written_after(document, json_file, report, *([draw] if plot_file.wanted else []))


def _measure_runs(
    options: BenchOptions, subject: Subject, json_file: JsonFile, plot_file: ResultFile, call: Call
) -> None:
    """Measures runs of an engine.

    Raises:
        TriforceError: the measurement is not possible.
        Stop: this was interrupted; the measurements so far are written.
    """
    from rich.console import Console

    from ..session.open import load_engine
    from ..session.prompt import long_prompt
    from ..terminal.stopping import step
    from .measure import machine_bandwidth, measure, steps
    from .progress import Display
    from .report import as_document, head_of_document

    answer_tokens = options.max_new_tokens
    contexts = _contexts(options, subject.config, answer_tokens + (QUESTION_TOKENS if options.batch else 0))
    prompt = long_prompt(subject.source, subject.tokenizer, subject.config, contexts[-1] - answer_tokens)
    with call.signals.interruptible():
        engine = load_engine(options, contexts[-1])
        tiers = _tiers(options, engine)
        bandwidth = machine_bandwidth(engine.target, options.settings)
        head = head_of_document(options, call.command, engine.target, engine.draft is not None, bandwidth)
    head |= {
        "sampling": asdict(options.sampling),
        "new_tokens": answer_tokens,
        "repeats": options.repeat,
        "batches": list(options.batch) if options.batch else None,
        "prompt": {
            "name": prompt.name,
            "text_tokens": prompt.text_tokens,
            "repeated": prompt.text_tokens < len(prompt.token_ids),
        },
    }
    console = Console(file=cast(IO[str], BestEffortStream(sys.stderr)), highlight=False)
    order = steps(contexts, tiers, options.repeat, options.batch or (None,))
    results: list[ContextRuns] = []

    def document(interrupted: bool) -> dict[str, Any] | None:
        measured = [at for at in results if at.runs]
        return as_document(head, measured, interrupted) if measured else None

    with _written_after(document, json_file, plot_file), Display(console, order, answer_tokens) as display:
        measure(
            engine,
            prompt.token_ids,
            order,
            options.sampling,
            answer_tokens,
            results=results,
            observer=display,
            advance=partial(step, signals=call.signals),
            saved=options.context,
        )
    engine.finish()
    engine.close()


def _measure_shape(options: BenchOptions, shape: str, json_file: JsonFile, plot_file: ResultFile, call: Call) -> None:
    """Measures steps of a model of which only the shape is available.

    Raises:
        TriforceError: the measurement is not possible.
        Stop: this was interrupted; the measurements so far are written.
    """
    from statistics import median

    from ...offload.planning.cost_model import Assumptions
    from ...offload.shape_steps import ShapeSteps
    from ...tp.devices import resolve_device, resolve_dtype, set_threads
    from ...tp.weights.registry import published_cache
    from ..plan.planning import shapes
    from .measure import machine_bandwidth
    from .report import as_document, head_of_document
    from .shape import context_document, shape_document

    set_threads(options.settings.threads)
    options = replace(options, model=shape)
    target, draft = shapes(shape, options.wanted_draft, options.settings.rope_scaling)
    tiers = tuple(sorted({min(count, 3 if draft else 2) for count in options.tiers}))
    settings = replace(options.settings, tiers=tiers[-1]).with_defaults(published_cache(shape, 1))
    contexts = _contexts(options, target, 0)
    device, dtype = resolve_device(options.device), resolve_dtype(options.dtype, target)
    assumed = Assumptions(*(options.assume_acceptance or ()))
    print_note(f"making random weights of the shape of {shape} ...")
    with call.signals.interruptible():
        small = draft if tiers[-1] == 3 else None
        steps = ShapeSteps(target, small, settings, dtype=dtype, device=device, context=contexts[-1])
        bandwidth = machine_bandwidth(steps.target, settings)
        head = head_of_document(options, call.command, steps.target, steps.draft is not None, bandwidth)
    results: list[dict[str, Any]] = []

    def document(interrupted: bool) -> dict[str, Any] | None:
        whole = as_document(head, [], interrupted) | {"shape": shape_document(steps, assumed), "contexts": results}
        return whole if results else None

    with _written_after(document, json_file, plot_file):
        for context in contexts:
            print_note(f"{context:,} tokens: steps ...")
            with call.signals.interruptible():
                times = steps.at(context, assumed)
            results.append(context_document(times, tiers, assumed, head))
            print_note(f"{context:,} tokens: a pass over all of them takes {1e3 * median(times.plain):.1f} ms")


def _contexts(options: BenchOptions, config: ModelConfig, new_tokens: int) -> tuple[int, ...]:
    """The lengths to measure, ascending.

    Args:
        new_tokens: how many tokens of a context are not its text.

    Raises:
        CapacityError: a length exceeds the model's positions.
        UsageError: all default lengths exceed the model's positions.
    """
    if options.contexts is None:
        fitting = tuple(n for n in AUTO_CONTEXTS if new_tokens < n <= config.max_position_embeddings)
        if not fitting:
            lengths = ", ".join(f"{length:,}" for length in AUTO_CONTEXTS)
            beside = f", and {new_tokens:,} tokens of each are not text" if new_tokens else ""
            remedy = "give the lengths to measure with --contexts" + (
                ", or lower --max-new-tokens" if new_tokens else ""
            )
            raise UsageError(
                f"none of the default lengths ({lengths}) can be measured: {config.name} has "
                f"{config.max_position_embeddings:,} positions{config.positions_note}{beside}; {remedy}"
            )
        return fitting
    if options.contexts[-1] > config.max_position_embeddings:
        raise CapacityError(
            f"--contexts asks for {options.contexts[-1]:,} tokens, but {config.name} has "
            f"{config.max_position_embeddings:,} positions{config.positions_note}; leave the longer ones out"
        )
    return options.contexts


def _tiers(options: BenchOptions, engine: Engine) -> tuple[int, ...]:
    """The numbers of tiers to measure, ascending: at most two without a draft."""
    if engine.draft is not None or engine.settings.lookup or options.tiers[-1] < 3:
        return options.tiers
    print_note("there is no draft model, so two tiers are measured instead of three (--draft D names one)")
    return tuple(sorted({min(count, 2) for count in options.tiers}))
