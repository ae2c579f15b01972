"""Several ranks of one command: they are started, or follow rank 0, which does the work of the command."""

from __future__ import annotations

import math
import sys

import typer

from ..tp.parallel.launch import Guard, launch
from ..tp.parallel.place import Place
from ..tp.weights.registry import find_pair
from .call import Call
from .options import EngineOptions
from .terminal.stopping import REPEAT_S
from .terminal.streams import print_note


def starts_or_follows(options: EngineOptions, call: Call, *, goes_on: bool = False) -> bool:
    """Runs the command as a rank above 0, where this process is one, and returns `True` once that is done, so that the
    caller returns too. On rank 0, or with one process, it returns `False`, and the command goes on. Signals are for
    rank 0 alone, which ends a run where all ranks are between two rounds, and then the others.

    Args: `goes_on` is whether the command makes several runs in one process, also after one that did not fit.

    Raises:
        typer.Exit: this process has started the ranks, and they have ended.
        TriforceError: they cannot be started, or one failed.
    """
    place = Place.from_environment()
    if place is None and options.gpus > 1:
        target, _ = find_pair(options.model, options.wanted_draft, print_note)  # one download for all ranks
        with call.signals.delayed():  # importing PyTorch may swallow what a signal raises
            from ..tp.model.config import ModelConfig
            from ..tp.parallel.split import check_split

            check_split(ModelConfig.load(target), options.gpus)  # before so many processes are started
            command = [sys.executable, "-P", "-m", "triforce.cli", *call.arguments]
            ready = call.signals.release
            raise typer.Exit(launch(command, options.gpus, ready))
    if place and place.size > 1:
        signals, follows = call.signals, place.rank == place.local_rank > 0
        Guard(math.inf if place.rank else REPEAT_S, dealt_with=lambda: signals.taken, follows=follows)
    if place and place.rank:
        call.signals.leave_to_rank_0()
        from .session.open import follow_rank_0

        follow_rank_0(options, goes_on=goes_on)
        return True
    return False
