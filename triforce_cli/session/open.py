"""From options to a loaded engine: configuration and tokenizer of models whose files are there, the engine, and what
ranks above 0 do; what commands share."""

from __future__ import annotations

import sys
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
"""Tokens that a cache has room for beyond a run that others will go on from."""


def stderr_console() -> Console:
    """What is for people goes there; a reader that goes away stops nothing."""
    return Console(file=cast(IO[str], BestEffortStream(sys.stderr)), highlight=False)


def open_pair(
    directories: tuple[Path, Path | None],
    template_args: Iterable[tuple[str, Any]] | None = None,
    rope_scaling: str | None = None,
) -> tuple[ModelConfig, Tokenizer]:
    """The target's configuration and tokenizer, once target and draft are known to fit together.

    Args:
        directories: the target's and the draft's.
        template_args: variables that its chat template is given.
        rope_scaling: see `Settings`.

    Raises:
        ModelError: they do not, or one cannot be read.
        UsageError: the template has no such variable.
    """
    return check_pair(*directories, rope_scaling), Tokenizer.load(directories[0]).with_arguments(template_args)


def load_engine(options: EngineOptions, capacity: int | None, room: int = 0) -> Engine:
    """The engine that `options` ask for, checked to hold `capacity` tokens, if those are known; see `Engine.load`."""
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
    """How several GPUs reach one another, on rank 0: said before they first do, as a run may hang there."""
    ranks = engine.target.ranks
    if ranks.size > 1 and ranks.rank == 0 and engine.target.device.type == "cuda":
        from ...tp.gpu_links import connection_in_words

        print_note(f"{ranks.size} GPUs: {connection_in_words(ranks.local_size)}")


def engine_in_words(engine: Engine, model: str) -> str:
    """Which model computes in which number format where. `model` is as it was asked for."""
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


def follow_rank_0(options: EngineOptions, *, goes_on: bool = False) -> None:
    """What a rank above 0 does: it computes the same steps, and reads, prints and writes nothing.

    Args: `goes_on` is whether rank 0 starts runs that go on from one another, also after one that did not fit.

    Raises:
        TriforceError: as on rank 0, or another rank has ended.
    """
    engine = load_engine(options, None, ROOM if goes_on else 0)
    while True:
        try:
            run = engine.follow()
        except CapacityError:
            if not goes_on:
                raise
            continue
        if run is None:
            break
        for _ in run:
            pass
        del run  # it holds the cache, whose memory the next run may need
    engine.close()
