"""`triforce plan`: what would live where and how fast it would be, without the hardware, the weights or a run."""

from __future__ import annotations

from dataclasses import replace

import typer

from ...offload.planning.cards import CARDS, DEFAULT_CARD, Card
from ...tp.errors import UsageError
from ...tp.weights.registry import EMBEDDED, PRESETS
from ..call import Call
from ..terminal.output import JsonFile
from .request import PlanRequest

EPILOG = """[bold]Examples[/]

  A 7B model with 128K tokens on two RTX 4090, whose host has 128 GiB:
  [cyan]triforce plan --model yarn-llama-2-7b-128k --gpus 2 --gpu rtx4090 --host-memory 128[/]

  Would one card do, and with which settings?
  [cyan]triforce plan --model yarn-llama-2-13b-128k --gpu rtx4090[/]

  A model of yours, on a card that is not in the table:
  [cyan]triforce plan --model DIR --draft none --gpu-memory 46 --memory-gbps 900 --link-gbps 12[/]

  What a higher acceptance would bring, for a script:
  [cyan]triforce plan --model qwen3-8b --context 40960 --assume-acceptance 0.96 --json - | jq .modelled[/]

  From what this machine was measured to do, for a longer context:
  [cyan]triforce bench --contexts 4096,16384 --json bench.json[/]
  [cyan]triforce plan --measured bench.json --context 131072[/]

Exits 1 if something does not fit, and says what would make it fit.
"""


def plan(request: PlanRequest, call: Call) -> None:
    """Says what would live where and how fast it would be, before anything is bought, downloaded or loaded.

    Bytes follow the rules of a run. Times are [bold]modelled[/], from bytes, bandwidths and an assumed acceptance; with
    --measured from what was measured, for other lengths of context or of drafts than were.
    """
    shape = request.shape
    if shape is not None and request.model != EMBEDDED:
        raise UsageError("--model and --shape are both given; give --model only")
    if shape is not None and shape not in PRESETS:
        raise UsageError(f"--shape is {shape!r}; it is one of the presets: {', '.join(PRESETS)}")
    with JsonFile.prepare(request.json) as json_file:
        from ...offload.planning.measured import Measured
        from .planning import make_plan

        card, measured = _known_card(request.gpu), None
        if request.measured is not None:
            _check_measured(request)
            measured = Measured.read(request.measured)
            card = measured.card(card)
        made = make_plan(replace(request, model=shape or request.model), _changed(card, request), measured)
        json_file.write(made.document())
        if not json_file.on_stdout:
            from .report import show

            show(made)
    if made.shortfalls:
        raise typer.Exit(1)


def _check_measured(request: PlanRequest) -> None:
    """Raises:
    UsageError: `--measured` and what it stands for are both given.
    """
    for option, given in (("--gpu", request.gpu), ("--memory-gbps", request.memory_gbps)):
        if given is not None:
            raise UsageError(f"{option} and --measured are both given; the hardware is what was measured: give one")


def _known_card(word: str | None) -> Card:
    word = word or DEFAULT_CARD
    if word not in CARDS:
        raise UsageError(
            f"--gpu is {word!r}; it is one of {', '.join(CARDS)}; for another card give --gpu-memory, --memory-gbps "
            "and --link-gbps"
        )
    return CARDS[word]


def _changed(card: Card, request: PlanRequest) -> Card:
    """`card` with the figures that were given in place of its own."""
    given = {
        "memory_gib": request.gpu_memory,
        "memory_gb_per_s": request.memory_gbps,
        "link_gb_per_s": request.link_gbps,
    }
    return replace(card, **{name: value for name, value in given.items() if value is not None})
