"""From options to a loaded engine: configuration and tokenizer of models whose files are present, the engine, and the
work of ranks above 0. Used by several commands."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, cast

from rich.console import Console

from ...offload import Engine
from ...offload.vocabulary import check_pair
from ...tp.devices import device_name
from ...tp.errors import CapacityError
from ...tp.matrices import num_parameters
from ...tp.model.config import ModelConfig
from ...tp.weights.tokenizer import Tokenizer
from ..options import EngineOptions
from ..terminal.streams import BestEffortStream, print_note

ROOM = 4_096
"""The number of additional tokens that a cache has room for, if later runs continue from a run."""


def stderr_console() -> Console:
    """The console for messages to people. If its reader ends, nothing is stopped."""
    return Console(file=cast(IO[str], BestEffortStream(sys.stderr)), highlight=False)


def open_pair(
    directories: tuple[Path, Path | None],
    template_args: Iterable[tuple[str, Any]] | None = None,
    rope_scaling: str | None = None,
) -> tuple[ModelConfig, Tokenizer]:
    """Checks that target and draft fit together, and returns the target's configuration and tokenizer.

    Args:
        directories: those of the target and the draft.
        template_args: variables for the chat template.
        rope_scaling: see `Settings`.

    Raises:
        ModelError: the models do not fit together, or one cannot be read.
        UsageError: the template does not have one of the variables.
    """
    return check_pair(*directories, rope_scaling), Tokenizer.load(directories[0]).with_arguments(template_args)


def load_engine(options: EngineOptions, capacity: int | None, room: int = 0) -> Engine:
    """Loads the engine that `options` ask for. Checks that it has room for `capacity` tokens, if `capacity` is known;
    see `Engine.load`."""
    engine = Engine.load(
        options.model,
        draft=options.draft,
        device=options.device,
        dtype=options.dtype,
        gpus=options.gpus,
        capacity=capacity,
        room=room,
        **options.settings.given,
    )
    report_ranks(engine)
    return engine


def report_ranks(engine: Engine) -> None:
    """Prints, on rank 0, how several GPUs are connected. It is printed before they first communicate, because a run may
    hang there."""
    ranks = engine.target.ranks
    if ranks.size > 1 and ranks.rank == 0 and engine.target.device.type == "cuda":
        from ...tp.gpu_links import connection_in_words

        print_note(f"{ranks.size} GPUs: {connection_in_words(ranks.local_size)}")


def engine_in_words(engine: Engine, model: str) -> str:
    """Describes the model, its dtype and the device. `model` is the model as given by the user."""
    target, ranks = engine.target, engine.target.ranks.size
    where = device_name(target.device)
    where = f"{ranks} ranks, each on {where}" if ranks > 1 else where
    dtype = str(target.dtype).removeprefix("torch.")
    scaling = engine.settings.rope_scaling
    where += f", RoPE scaled by hand ({scaling})" if scaling else ""
    stored = target.config.quantisation
    if stored is not None:
        dtype = f"weights in {stored.name}, computed in {dtype}"
        dtype += " (the checkpoint asks for quantised activations, which is not done)" if stored.activations else ""
    return f"{model}, {num_parameters(target.config) / 1e6:,.1f} M parameters, {dtype} on {where}"


def follow_rank_0(options: EngineOptions, *, goes_on: bool = False, reserves: bool = False) -> None:
    """Runs a rank above 0. It computes the same steps as rank 0, and reads, prints and writes nothing.

    Args:
        goes_on: whether rank 0 starts several runs, each of which continues from the one before, even after a run that
            did not fit.
        reserves: whether rank 0 calls `Engine.reserve_memory`.

    Raises:
        TriforceError: as on rank 0, or another rank has ended.
    """
    engine = load_engine(options, None, ROOM if goes_on else 0)
    if reserves:
        engine.reserve_memory()
    while True:
        try:
            run = engine.follow()
        except CapacityError:
            if not goes_on:
                raise
            continue
        if run is None:
            break
        deque(run, maxlen=0)  # a loop's variable would hold the last event, and what that refers to
        del run  # it holds the cache, whose memory the next run may need
    engine.close()
