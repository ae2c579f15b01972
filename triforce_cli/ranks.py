"""Several ranks of one command: starts the ranks, or lets a rank follow rank 0, which does the work of the command."""

from __future__ import annotations

import math
import sys

import typer

from ..tp.parallel.launch import Guard, launch
from ..tp.parallel.place import Place
from ..tp.weights.registry import find_pair
from .call import Call, import_pytorch
from .options import EngineOptions
from .terminal.stopping import REPEAT_S
from .terminal.streams import print_note


def starts_or_follows(options: EngineOptions, call: Call, *, goes_on: bool = False, reserves: bool = False) -> bool:
    """If this process is a rank above 0, runs the command as this rank, and returns `True` afterwards, so that the
    caller returns too. On rank 0, or with one process, returns `False`, and the command continues.

    Signals go only to rank 0. It ends a run when all ranks are between two rounds, and then the other ranks.

    Args:
        goes_on: whether the command makes several runs in one process, even after a run that did not fit.
        reserves: whether the command calls `Engine.reserve_memory`.

    Raises:
        typer.Exit: this process has started the ranks, and they have ended.
        TriforceError: the ranks cannot be started, or a rank failed.
    """
    place = Place.from_environment()
    if place is None and options.gpus > 1:
        target, _ = find_pair(options.model, options.wanted_draft, print_note)  # one download for all ranks
        with call.with_pytorch(release=True):
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
        import_pytorch()
        from .session.open import follow_rank_0

        follow_rank_0(options, goes_on=goes_on, reserves=reserves)
        return True
    return False
