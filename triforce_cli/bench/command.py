"""`triforce bench`: its options, and everything about them that can be checked before PyTorch is imported."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...tp.errors import TriforceError, UsageError
from ...tp.parallel.place import Place
from ...tp.weights.registry import EMBEDDED, find_pair
from .. import flags
from ..options import Device, Dtype, Request, whole

if TYPE_CHECKING:
    from ..app import Call

EPILOG = """[bold]Examples[/]

  This machine with the embedded pair and a built-in text, for a talk:
  [cyan]triforce bench --contexts 4096,16384,65536 --plot bench.png[/]

  A model and a text of yours, with every run in a file, which [bold]triforce plan --measured[/] can start from:
  [cyan]triforce bench --model DIR --draft DIR --prompt-file book.txt --json bench.json[/]

  Two GPUs, greedy, all tiers:
  [cyan]triforce bench --model qwen3-8b --gpus 2 --contexts 8192,32768 --tiers 1,2,3 --temperature 0[/]

  Without the weights of a model: its steps on this GPU, and what they would bring
  [cyan]triforce bench --shape yarn-llama-2-7b-128k --contexts 32768,131072 --assume-acceptance 0.95[/]
"""

PICTURES = (".png", ".svg", ".pdf")

AUTO_CONTEXTS = (4096, 16384, 65536)

_OF_RUNS = (
    *("prompt", "prompt_file", "model", "new_tokens", "repeat"),
    *("temperature", "top_p", "top_k", "seed", "refresh"),
)
"""Parameters that say nothing of a shape."""


@dataclass(frozen=True)
class Asked:
    """What is to be measured, in the words of the options."""

    contexts: tuple[int, ...] | None
    """Ascending, prompt and answer; `None` is `AUTO_CONTEXTS`, as far as the model goes."""
    tiers: tuple[int, ...]
    """Ascending."""
    repeats: int
    plot: Path | None


def bench(
    context: typer.Context,
    contexts: Annotated[
        str,
        flags.option(
            flags.MEASURING,
            "Lengths, separated by commas: prompt and answer together. auto is "
            f"{', '.join(f'{n:,}' for n in AUTO_CONTEXTS)}, as far as the model goes.",
            metavar="auto|N,N,...",
        ),
    ] = "auto",
    tiers: Annotated[
        str,
        flags.option(
            flags.MEASURING,
            "What to measure, separated by commas. 1: plain decoding; 2: speculation without the small model; "
            "3: with it.",
            metavar="N,N",
        ),
    ] = "1,3",
    new_tokens: Annotated[
        str, flags.option(flags.MEASURING, "Length of each answer, to the full length.", metavar="N")
    ] = "128",
    repeat: flags.RepeatOption = "3",
    shape: Annotated[
        str | None,
        flags.option(
            flags.MEASURING,
            "Instead of a model: the shape of a preset, or of a directory with config.json. Its steps are measured, "
            "with random weights and synthetic keys and values; what depends on acceptance is modelled.",
            metavar="NAME",
        ),
    ] = None,
    assume_acceptance: Annotated[
        str | None,
        flags.option(
            flags.MEASURING,
            "With --shape: the chance that a token drafted on the retrieval cache stands, and that one of the small "
            "model does. Default: 0.9,0.67.",
            metavar="A[,B]",
        ),
    ] = None,
    prompt_file: flags.PromptFileOption = None,
    prompt: flags.PromptOption = None,
    model: flags.ModelOption = EMBEDDED,
    draft: flags.DraftOption = None,
    device: flags.DeviceOption = Device.AUTO,
    dtype: flags.DtypeOption = Dtype.AUTO,
    gpus: flags.GpusOption = "1",
    temperature: flags.TemperatureOption = "0.6",
    top_p: flags.TopPOption = "0.9",
    top_k: flags.TopKOption = "0",
    seed: flags.SeedOption = None,
    budget: flags.BudgetOption = "auto",
    chunk_size: flags.ChunkSizeOption = "auto",
    draft_length: flags.DraftLengthOption = "auto",
    block_length: flags.BlockLengthOption = "auto",
    refresh: flags.RefreshOption = "auto",
    resident: flags.ResidentOption = "auto",
    json_path: Annotated[
        Path | None,
        flags.json_option("Every run as JSON; [bold]-[/] is stdout, which then holds nothing else."),
    ] = None,
    plot: Annotated[
        Path | None,
        flags.option(
            flags.OUTPUT, "A picture for a talk (.png, .svg, .pdf); needs the extra [bold]plot[/].", metavar="FILE"
        ),
    ] = None,
    debug: flags.DebugOption = False,
) -> None:
    """Measures this machine: the time between tokens at several lengths of context, with and without speculation.

    For each length the prompt is read once; then every number of tiers writes an answer, in turn, several times, on
    the same engine, weights and cache. [bold]Ctrl-C[/] stops; what was measured by then is shown and written.
    """
    from ..generate.prompt import read_source
    from ..ranks import leads
    from ..terminal.output import JsonFile, ResultFile
    from ..terminal.streams import tell

    call: Call = context.obj
    measured = numbers("--tiers", tiers, 1)
    if measured[-1] > 3:
        raise UsageError(f"--tiers is {tiers!r}; each is 1, 2 or 3")
    asked = Asked(
        contexts=None if contexts == "auto" else numbers("--contexts", contexts, 2),
        tiers=measured,
        repeats=whole("--repeat", repeat, 1),
        plot=plot,
    )
    request = Request(
        ask=None,
        truncate="error",
        model=model if shape is None else shape,
        draft=draft,
        device=device.value,
        dtype=dtype.value,
        gpus=whole("--gpus", gpus, 1),
        resident=flags.resident(resident),
        max_new_tokens=whole("--new-tokens", new_tokens, 2),
        **flags.sampling(temperature, top_p, top_k, seed),
        ignore_eos=True,
        tiers=measured[-1],
        **flags.lengths(budget, chunk_size, draft_length, block_length),
        refresh=refresh,
        live=False,
    )
    assumed = _assumed(assume_acceptance, shape)
    if shape is None and asked.contexts and asked.contexts[0] <= request.max_new_tokens:
        raise UsageError(
            f"--contexts has {asked.contexts[0]:,}, prompt and answer together, but --new-tokens is "
            f"{request.max_new_tokens:,}; raise the one or lower the other"
        )
    if plot is not None:
        _check_plot(plot)
    if shape is not None:
        _check_shape(request, asked, context)
        with JsonFile.prepare(json_path) as json_file, ResultFile.prepare(plot, "--plot") as plot_file:
            call.signals.hold()
            from .shape import run as run_shape

            run_shape(request, asked, assumed, (json_file, plot_file), call)
        return
    if not leads(request, call):
        return
    with JsonFile.prepare(json_path) as json_file, ResultFile.prepare(plot, "--plot") as plot_file:
        source = read_source(prompt_file, prompt, tell)
        directories = find_pair(model, request.wanted_draft, tell)
        call.signals.hold()  # importing PyTorch may swallow what a signal raises
        from .run import run

        run(request, asked, source, directories, (json_file, plot_file), call)


def _check_shape(request: Request, asked: Asked, context: typer.Context) -> None:
    """Raises:
    UsageError: options were given that a shape has no use for.
    """
    for name in _OF_RUNS:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"{option} and --shape are both given; a shape has random weights and writes no text, only its steps "
                "are timed: leave one out"
            )
    if {2, 3} <= set(asked.tiers):
        raise UsageError("--tiers has 2 and 3, but --shape measures the steps of one of them, beside 1; give one")
    if request.gpus > 1:
        raise UsageError(f"--gpus is {request.gpus}, but --shape measures one device; leave it out")
    place = Place.from_environment()
    if place and place.size > 1:
        raise UsageError("--shape measures one device; start it without torchrun")


def _assumed(value: str | None, shape: str | None) -> tuple[float, ...]:
    """The acceptance to assume of the retrieval cache and of the small model, as far as it is given.

    Raises:
        UsageError: not one or two chances, or nothing that needs them.
    """
    if value is None:
        return ()
    if shape is None:
        raise UsageError("--assume-acceptance is for --shape; a run measures its acceptance")
    try:
        chances = tuple(float(part) for part in value.split(","))
    except ValueError:
        chances = ()
    if len(chances) not in (1, 2) or not all(0 <= chance <= 1 for chance in chances):
        raise UsageError(
            f"--assume-acceptance is {value!r}; it is one or two chances from 0 to 1, separated by a comma"
        )
    return chances


def _check_plot(path: Path) -> None:
    """Raises:
    UsageError: no kind of picture.
    TriforceError: nothing here draws one.
    """
    if path.suffix.lower() not in PICTURES:
        raise UsageError(f"--plot is {str(path)!r}; its name ends with {', '.join(PICTURES)}")
    if find_spec("matplotlib") is None:
        raise TriforceError("--plot needs matplotlib, which is not installed: pip install 'triforce-cli[plot]'")


def numbers(option: str, value: str, least: int) -> tuple[int, ...]:
    """Whole numbers separated by commas, ascending, each once.

    Raises:
        UsageError: anything else, or one below `least`.
    """
    try:
        found = sorted({whole(option, part.strip(), least) for part in value.split(",")})
    except UsageError as error:
        raise UsageError(f"{option} is {value!r}; it is whole numbers from {least}, separated by commas") from error
    return tuple(found)
